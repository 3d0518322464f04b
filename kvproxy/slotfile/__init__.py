"""The files that llama-server writes of a slot.

`head` is their first bytes, `source` bounded reading, `blocks` the parts that the memory modules write,
`layout` the whole. Whatever is not exactly as expected is left alone.
"""
