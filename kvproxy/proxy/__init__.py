"""The client face: one `exchange` is a request from arrival to release; `relay` moves the bytes."""
