"""`kvproxy doctor`: can conversations survive on this server, and if not, what to change.

`check` holds the values, `verdicts` and `findings` turn what was seen into them, `probe` and `directories`
look, `examine` puts them in order.
"""
