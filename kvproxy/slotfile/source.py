"""A file under examination: bounded reads at given places, and an account of how much was read."""

from __future__ import annotations

import io
import os
import struct
import sys
from array import array

MOST_READS = 65_536
"""A server's largest file needs about 6,000: three blocks of 512 layers, two tensors each, and the cells."""
MOST_BYTES = 512 << 20
"""Cells of three blocks at the most tokens we read, with room to try each in two ways."""
_WORD_BYTES = 4


class Unlike(Exception):
    """The bytes are not what is looked for at this place. Never leaves this package."""


class Source:
    """Little-endian numbers of an open regular file. Blocks.

    Every method raises `Unlike` rather than touch a byte behind the end as it was when the file was opened,
    and once the account is spent: a hostile file may make us try, but not for long.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._descriptor = file.fileno()
        self.size = os.fstat(self._descriptor).st_size
        self._reads_left = MOST_READS
        self._bytes_left = MOST_BYTES

    @property
    def is_spent(self) -> bool:
        return self._reads_left <= 0 or self._bytes_left <= 0

    def after(self, at: int, count: int) -> int:
        """The place `count` bytes further on, which are skipped unread."""
        if at + count > self.size:
            raise Unlike
        return at + count

    def read(self, at: int, count: int) -> bytes:
        self.after(at, count)
        self._reads_left -= 1
        self._bytes_left -= count
        if self.is_spent:
            raise Unlike
        data = os.pread(self._descriptor, count, at)
        if len(data) < count:  # somebody shortened the file under our eyes
            raise Unlike
        return data

    def unpack(self, layout: str, at: int) -> tuple[int, ...]:
        return struct.unpack(layout, self.read(at, struct.calcsize(layout)))

    def integers(self, at: int, count: int) -> array[int]:
        """`count` signed 32-bit numbers."""
        numbers = array("i")
        numbers.frombytes(self.read(at, count * _WORD_BYTES))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers
