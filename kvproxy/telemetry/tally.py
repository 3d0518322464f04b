"""The few totals that the status page shows: a listener that only counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, RestoreOutcome
from kvproxy.telemetry.events import (
    CheckpointEnded,
    Event,
    RequestDone,
    RestoreEnded,
    RestoreProvedIneffective,
    ServerReady,
)


@dataclass(slots=True)
class Totals:
    """Since kvproxy started."""

    requests: int = 0
    resident: int = 0
    restored: int = 0
    seeded: int = 0
    cold: int = 0
    auxiliary: int = 0
    bypass: int = 0
    restores: int = 0
    ineffective_restores: int = 0
    restore_failures: int = 0
    saves: int = 0
    save_failures: int = 0
    saves_without_room: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    server_restarts: int = 0


_COUNTED = {
    Outcome.RESIDENT: "resident",
    Outcome.RESTORED: "restored",
    Outcome.SEEDED: "seeded",
    Outcome.COLD: "cold",
    Outcome.AUXILIARY: "auxiliary",
    Outcome.BYPASS: "bypass",
}


class Tally:
    hears: Final = (RequestDone, RestoreEnded, RestoreProvedIneffective, CheckpointEnded, ServerReady)
    """The events that count."""

    def __init__(self) -> None:
        self._totals = Totals()

    def as_dict(self) -> dict[str, int]:
        return asdict(self._totals)

    def hear(self, event: Event) -> None:
        totals = self._totals
        match event:
            case RequestDone():
                self._request(event)
            case RestoreEnded():
                totals.restores += event.outcome is RestoreOutcome.RESTORED
                totals.restore_failures += event.outcome.is_failure
            case RestoreProvedIneffective():
                totals.ineffective_restores += 1
            case CheckpointEnded():
                totals.saves += event.outcome is CheckpointOutcome.PUBLISHED
                totals.save_failures += event.outcome.is_failure
                totals.saves_without_room += event.outcome is CheckpointOutcome.NO_ROOM
            case ServerReady():
                totals.server_restarts += event.restarted
            case _:
                pass

    def _request(self, event: RequestDone) -> None:
        totals = self._totals
        totals.requests += 1
        if (name := _COUNTED.get(event.outcome)) is not None:
            setattr(totals, name, getattr(totals, name) + 1)
        totals.prompt_tokens_computed += event.computed_tokens or 0
        totals.prompt_tokens_reused += event.reused_tokens or 0
