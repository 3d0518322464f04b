"""Whether a request is a side call: pure. The order in which it is found out:

 (1) what the client says of it (`signals`);
 (2) its content: what carries a known conversation on is a turn of it, whatever it looks like. So are an
     agent's prewarming and a web page's pre-encoding, and a compaction finds its history in the slot;
 (3) its shape (`structure`);
 (4) its wording (`fingerprints`).

That chooses a slot, and nothing else: a wrong guess costs time. What (1) marks as a side call is looked at
by (2) too, unless our own header said so. Where that is missing (2) settles it before anything is looked for:
most requests carry a conversation on, and whether one does is known by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvproxy.auxiliary.fingerprints import Library
from kvproxy.auxiliary.signals import PURPOSE, Signal, signal_of
from kvproxy.auxiliary.structure import Habit, shape_of
from kvproxy.dialects.reading import Reading
from kvproxy.dialects.shapes import SHAPES


@dataclass(frozen=True, slots=True)
class Sorting:
    """`is_on`: whether anything but our own header counts."""

    is_on: bool
    task_headers: tuple[str, ...]
    library: Library

    def why_auxiliary(
        self,
        headers: Mapping[str, str],
        reading: Reading | None,
        habit: Habit,
        *,
        continues: bool,
    ) -> str | None:
        """What marks the request as a side call; None for a turn. `reading` is None for a body that cannot
        be understood. `continues`: it carries a conversation on that is known."""
        if continues and PURPOSE not in headers:
            return None
        signal = signal_of(headers, self.task_headers)
        if signal is not None and signal.is_final:
            return signal.reason if signal.is_auxiliary else None
        if not self.is_on or (reading is not None and reading.label not in SHAPES):
            return None
        reason = self._suspicion(signal, reading, habit)
        return None if continues else reason

    def _suspicion(self, signal: Signal | None, reading: Reading | None, habit: Habit) -> str | None:
        if signal is not None:
            return signal.reason if signal.is_auxiliary else None
        if reading is None:
            return None
        if (shape := shape_of(reading, habit)) is not None:
            return shape
        fingerprint = self.library.find(reading)
        return None if fingerprint is None else fingerprint.client
