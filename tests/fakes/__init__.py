"""A llama-server that fits in a test: it holds real tokens in its slots and can be told to misbehave."""
