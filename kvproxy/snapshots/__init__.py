"""Snapshots: a KV file written by the server plus our manifest, which alone makes it exist.

`manifest` and `fingerprint` are the words, `retention` the choice of what goes, `store` the state
directory, `directory` the server's save path where we can see it.
"""
