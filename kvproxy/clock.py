"""Time as something one is given, so that a test can hold it still."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`now` is monotonic seconds (for intervals), `wall` Unix seconds (for what is written down)."""

    def now(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks: the functions themselves, since each request asks some twenty times."""

    now = staticmethod(time.monotonic)  # noqa: TID251 - the one place that may
    wall = staticmethod(time.time)  # noqa: TID251 - the one place that may
