"""The operator's face: health, status, metrics, and the few things one may ask of a running daemon."""
