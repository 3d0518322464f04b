"""Saving and restoring as transactions: `policy` says when, `checkpointer` and `restorer` do it."""
