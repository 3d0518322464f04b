"""The files that llama-server writes of a slot: read, opened, cut.

`head` is their first bytes, `source` bounded reading, `blocks` the parts that the memory modules write,
`layout` the whole. `window` makes a copy whose sliding window the server goes on from, `prefix` one of the
first tokens; `copying` moves the bytes. Whatever is not exactly as expected is left alone.
"""
