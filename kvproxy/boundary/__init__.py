"""The longest prefix that every next request of a conversation shares, and bringing a slot back to it."""
