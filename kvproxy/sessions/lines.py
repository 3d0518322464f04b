"""The line of a conversation: what its newest request said, entry by entry, as a chain of digests. Pure.

Each link is made of all entries up to its own, so two lines that agree in one link agree in all before it,
and what two requests share is found without looking at a word. The chain is keyed with a secret of this
installation: what is kept on disk tells nobody whether some text was ever asked.

How a request relates to a line that is known:

 (1) it says all that the line says, and perhaps more: the conversation goes on, or is asked the same again;
 (2) it is a beginning of the line: an answer is generated anew;
 (3) both part after at least one reply: a turn was edited;
 (4) they part before the first reply: another conversation, however alike the two open. A different first
     question is not an edit;
 (5) they do not even begin alike, but where the line ends the request says the same: either first question
     and last two inputs, where replies came back in other words or the head changes with the time of day; or
     the last reply with what is around it, where the client sends its last few turns only.

A raw prompt has no turns, so (3) and (4) cannot be told apart: one that shares half of a line is taken for an
edit of it. Wrong guesses cost time only, and right themselves: see `Branches`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate

from kvproxy.dialects.reading import BLOCK_BYTES, MOST_ENTRIES, Reading
from kvproxy.frozen import frozen

LINK_BYTES = 8
REPLY = "assistant"
TURN_ENTRIES = 3
"""An input, the reply to it, and the next input."""
TELLING_BYTES = 64
"""A turn of fewer may well be said in another conversation too."""


@frozen
class Line:
    """`chain` has a link per entry, `ends` the bytes said up to and with each (4-byte integers of this
    machine). The first `head` entries are the head, the first `before_reply` come before any reply."""

    chain: bytes
    ends: bytes
    head: int
    before_reply: int
    has_tools: bool
    traces: tuple[bytes, ...] = ()
    """Digests by which the end of the line is found in a request that does not begin like it."""
    rest: bytes = b""
    """A digest of what a raw prompt has after its last whole block, which are `rest_bytes` bytes."""
    rest_bytes: int = 0

    def __len__(self) -> int:
        return len(self.chain) // LINK_BYTES

    def link(self, count: int) -> bytes:
        """The link of the first `count` entries, which are at least one."""
        return self.chain[(count - 1) * LINK_BYTES : count * LINK_BYTES]

    def bytes_of(self, count: int) -> int:
        """How much the first `count` entries say."""
        return memoryview(self.ends).cast("I")[count - 1] if count else 0

    @property
    def opening(self) -> bytes:
        """The link of all before the first reply: the same in every request of a conversation."""
        return self.link(self.before_reply)

    @property
    def first(self) -> bytes:
        """The link of the head and what comes first after it."""
        return self.link(self.head + 1)

    def shared(self, other: Line) -> int:
        """How many entries both begin with."""
        mine, theirs = len(self), len(other)
        low, high = 0, mine if mine < theirs else theirs
        if high and self.link(high) == other.link(high):  # as it is for what goes on
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.link(middle) == other.link(middle):
                low = middle
            else:
                high = middle - 1
        return low


class Kind(StrEnum):
    """How a request relates to what is known; the better ones first."""

    CONTINUED = "continued"
    EDITED = "edited"
    REWRITTEN = "rewritten"


class Cause(StrEnum):
    """Why a branch began."""

    NEW = "new"
    """Nothing known is like it."""
    FORKED = "forked"
    """Its conversation was being served: two requests at once."""
    SPLIT = "split"
    """A conversation went on that had been taken for an earlier version of another."""


@frozen
class Relation:
    """`shared` is how many entries both begin with."""

    kind: Kind
    shared: int


class Asked:
    """The line of a request, and what is told of it by nothing but its text."""

    def __init__(self, secret: bytes, reading: Reading) -> None:
        self._secret = secret
        self._reading = reading
        self._is_raw = reading.prompt is not None
        self.line = self._line()

    def relation(self, known: Line) -> Relation | None:
        """By how both begin; None for another conversation, as far as that tells."""
        shared = known.shared(self.line)
        kind = self._raw_kind(known, shared) if self._is_raw else self._kind(known, shared)
        return None if kind is None else Relation(kind, shared)

    def _kind(self, known: Line, shared: int) -> Kind | None:
        if shared <= self.line.head:
            return None
        if shared == len(known):
            return Kind.CONTINUED
        is_edit = shared == len(self.line) or shared > known.before_reply
        return Kind.EDITED if is_edit else None

    def traces(self) -> Iterator[bytes]:
        """The traces of which this could be the continuation, those of the latest end first. Reads all of
        the request: to be asked when nothing is known that begins alike."""
        ends = range(self._count, self._reading.head, -1)
        for trace_of in (self._of_turn, self._of_inputs):
            for end in ends:
                if (trace := trace_of(end)) is not None:
                    yield trace

    def _raw_kind(self, known: Line, shared: int) -> Kind | None:
        if shared == len(known) and self._goes_on(known):
            return Kind.CONTINUED
        return Kind.EDITED if shared and 2 * shared >= len(known) else None

    def _goes_on(self, known: Line) -> bool:
        """Whether the raw prompt has, after the blocks of `known`, the rest of it."""
        prompt, start = self._reading.prompt or b"", len(known) * BLOCK_BYTES
        rest = prompt[start : start + known.rest_bytes]
        return self._rest(known.chain[-LINK_BYTES:], rest) == known.rest

    @property
    def _count(self) -> int:
        """The entries up to the last input: the beginning of a reply that is to be gone on with will not come
        back as it is."""
        count, roles = len(self._reading.roles), self._reading.roles
        while count > self._reading.head + 1 and roles[count - 1] == REPLY:
            count -= 1
        return count

    def _line(self) -> Line:
        reading = self._reading
        count = self._count
        hasher = blake2b(key=self._secret, digest_size=LINK_BYTES)
        links = []
        for digest in reading.digests[:count]:
            hasher.update(digest)
            links.append(hasher.digest())
        roles = reading.roles
        before_reply = roles.index(REPLY) if REPLY in roles[:count] else count
        rest = (reading.prompt or b"")[count * BLOCK_BYTES :] if count < MOST_ENTRIES else b""
        return Line(
            b"".join(links),
            array("I", accumulate(reading.sizes[:count])).tobytes(),
            reading.head,
            before_reply,
            reading.has_tools,
            tuple(trace for trace in (self._of_turn(count), self._of_inputs(count)) if trace is not None),
            self._rest(links[-1], rest) if self._is_raw and links else b"",
            len(rest),
        )

    def _of_turn(self, end: int) -> bytes | None:
        """The trace of the turn that ends before entry `end`: an input, the reply and the next input."""
        start = end - TURN_ENTRIES
        if self._is_raw or start < self._reading.head:
            return None
        is_turn = [role == REPLY for role in self._reading.roles[start:end]] == [False, True, False]
        if not is_turn or sum(self._reading.sizes[start:end]) < TELLING_BYTES:
            return None
        return self._digest(b"".join(self._reading.digests[start:end]))

    def _of_inputs(self, end: int) -> bytes | None:
        """The trace of the first input, the one before entry `end` and the input before that."""
        roles, digests, first = self._reading.roles, self._reading.digests, self._reading.head
        last = end - 1
        if self._is_raw or last <= first or roles[last] == REPLY:
            return None
        before = next((n for n in range(last - 1, first - 1, -1) if roles[n] != REPLY), None)
        return None if before is None else self._digest(digests[first] + digests[before] + digests[last])

    def _rest(self, link: bytes, rest: bytes) -> bytes:
        return self._digest(link + rest)

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._secret, digest_size=LINK_BYTES).digest()
