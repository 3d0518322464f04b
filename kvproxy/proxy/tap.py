"""What an answer said of its prompt, read from the bytes that passed, without touching them.

While the answer runs only references to chunks are kept: its first and its last few kilobytes. They are
looked at once, at the end (`dialects.usage`).
"""

from __future__ import annotations

from collections import deque

from kvproxy.clock import Clock
from kvproxy.dialects.usage import usage_in
from kvproxy.upstream.replies import Usage

HEAD_BYTES = 16 << 10
TAIL_BYTES = 64 << 10


class Tap:
    """Sees each chunk of one answer. `first_byte_at` is in the clock's seconds, None before any byte."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._head: list[bytes] = []
        self._head_size = 0
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._is_readable = True
        self.first_byte_at: float | None = None

    def begin(self, content_encoding: str | None) -> None:
        self._is_readable = not content_encoding or content_encoding.strip().lower() == "identity"

    def feed(self, chunk: bytes) -> None:
        if self.first_byte_at is None:
            self.first_byte_at = self._clock.now()
        if not self._is_readable:
            return
        size = len(chunk)
        if self._head_size < HEAD_BYTES:
            self._head.append(chunk)
            self._head_size += size
        self._tail.append(chunk)
        self._tail_size += size
        while self._tail_size >= TAIL_BYTES and self._tail_size - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft())

    def ended_with(self, words: bytes) -> bool:
        """Whether `words` stand in the last of what passed."""
        return words in b"".join(self._tail)

    def usage(self, label: str) -> Usage:
        """`label` is the endpoint's. Counts are None where the answer did not tell, or not legibly."""
        is_cut = self._tail_size >= TAIL_BYTES
        head = _text(self._head) if is_cut or label == "messages" else ""
        return usage_in(label, head, _text(self._tail))


def _text(chunks: list[bytes] | deque[bytes]) -> str:
    return b"".join(chunks).decode("utf-8", "replace")
