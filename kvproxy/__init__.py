"""Transparent KV-aware reverse proxy for llama.cpp's llama-server."""

__version__ = "0.1.0"
