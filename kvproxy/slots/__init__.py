"""Who may use which of a server's numbered KV places, and what each holds.

`state` is the table of a slot's life, `slot` the record, `placement` the pure choice, `table` the only
writer, `leases` the waiting line. Nothing here does I/O; nothing here awaits inside a decision.
"""
