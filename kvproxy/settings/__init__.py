"""The settings: `model` is their shape and bounds, `unbuilt` what is refused until it exists, `load` reads
file, environment and flags. Inner objects receive their own section, never the tree."""
