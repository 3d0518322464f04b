"""What conversations that name an id are like, remembered for as many as matter at a time."""

from __future__ import annotations

from collections import OrderedDict

from kvproxy.auxiliary.structure import UNKNOWN, Habit
from kvproxy.dialects.reading import Reading
from kvproxy.sessions.key import ClientId

MAX_HABITS = 10_000


class Habits:
    """Bounded; the least recently seen are forgotten first. Ids are kept as digests."""

    def __init__(self, *, max_habits: int = MAX_HABITS) -> None:
        self._max_habits = max_habits
        self._known: OrderedDict[tuple[str, str], Habit] = OrderedDict()

    def of(self, client: ClientId | None) -> Habit:
        return UNKNOWN if client is None else self._known.get(_name(client), UNKNOWN)

    def turn(self, client: ClientId | None, reading: Reading | None) -> None:
        """A turn of the conversation came by."""
        if client is None or reading is None:
            return
        name = _name(client)
        before = self._known.get(name)
        if before is None or (reading.has_tools and not before.has_tools):
            self._known[name] = Habit(reading.has_tools)
            if len(self._known) > self._max_habits:
                self._known.popitem(last=False)
        self._known.move_to_end(name)

    def __len__(self) -> int:
        return len(self._known)


def _name(client: ClientId) -> tuple[str, str]:
    return client.namespace, client.digest
