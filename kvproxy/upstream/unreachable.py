"""Why no connection was made, in the words of the system and not of an HTTP library."""

from __future__ import annotations

import os
import ssl

import aiohttp


def why(error: Exception) -> str:
    """`connection refused`, `name or service not known`; the error's own words where it has no number.

    Takes the errors of aiohttp too, which wrap the system's.
    """
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(cause, TimeoutError) and not getattr(cause, "errno", None):
        return "the connection took too long"
    if isinstance(cause, aiohttp.ClientResponseError):
        return "what it answers is no HTTP"  # the library quotes the bytes, over several lines
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed: {getattr(cause, 'verify_message', '') or cause.strerror or cause}"
    if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
        return _lowered(os.strerror(cause.errno))
    words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return _lowered(" ".join(words.split())) or type(error).__name__


def _lowered(words: str) -> str:
    return words[:1].lower() + words[1:]
