"""Tells side calls from turns before a request is given a slot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kvproxy.auxiliary.fingerprints import Library
from kvproxy.auxiliary.habits import Habits
from kvproxy.auxiliary.library import load
from kvproxy.auxiliary.sorting import Sorting
from kvproxy.auxiliary.structure import UNKNOWN
from kvproxy.identifiers import ServerName
from kvproxy.proxy.visit import Visit
from kvproxy.telemetry.events import AuxiliarySeen, Emit


class Rules(Protocol):
    """As in the settings of this name."""

    @property
    def recognise(self) -> bool: ...
    @property
    def headers(self) -> tuple[str, ...]: ...
    @property
    def fingerprints(self) -> Path | None: ...


class Sorter:
    """Of one server. Wordings are known once they were loaded."""

    def __init__(self, server: ServerName, rules: Rules, emit: Emit) -> None:
        self._server = server
        self._rules = rules
        self._emit = emit
        self._habits = Habits()
        self._sorting = self._with(Library())

    async def load(self) -> None:
        """Read the wordings. Raises SettingsError for a file of the operator's that cannot be used."""
        self._sorting = self._with(Library(await asyncio.to_thread(load, self._rules.fingerprints)))

    def _with(self, library: Library) -> Sorting:
        return Sorting(self._rules.recognise, self._rules.headers, library)

    def sorted(self, visit: Visit, *, continues: bool) -> Visit:
        """`visit`, as that of a side call if it is one. `continues`: it carries a known conversation on."""
        call = visit.call
        if call.is_auxiliary or call.is_bypass:
            return visit
        mark = self._sorting.why_auxiliary(
            visit.request.headers,
            call.reading,
            UNKNOWN if continues else self._habits.of(call.client),
            continues=continues,
        )
        if mark is None:
            self._habits.turn(call.client, call.reading)
            return visit
        self._emit(AuxiliarySeen(self._server, call.endpoint.label, mark))
        return replace(visit, call=call.auxiliary())
