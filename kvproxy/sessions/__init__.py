"""Conversations as clients live them: how one is recognised (`key`) and what is known of it (`registry`)."""
