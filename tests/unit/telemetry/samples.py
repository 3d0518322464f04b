"""One event of each kind, and its variants where the log speaks of them differently."""

from __future__ import annotations

from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, Reason, RestoreOutcome, Trigger, Verdict
from kvproxy.identifiers import Epoch, ServerName, SlotId
from kvproxy.sessions.lines import Cause
from kvproxy.telemetry import events as e

MAIN = ServerName("main")
SLOT = SlotId(1)
SESSION = "0123456789ab"


def ready(*, restarted: bool = False) -> e.ServerReady:
    return e.ServerReady(MAIN, Epoch(2), 4, "b11434", "plain", restarted)


def acquired(waited_seconds: float = 0.0) -> e.SlotAcquired:
    return e.SlotAcquired(MAIN, SLOT, SESSION, "serve", waited_seconds)


def checkpoint(outcome: CheckpointOutcome = CheckpointOutcome.PUBLISHED) -> e.CheckpointEnded:
    return e.CheckpointEnded(MAIN, SLOT, SESSION, Trigger.IDLE, outcome, 1538, 170_000_000, 0.2502)


def restore(outcome: RestoreOutcome = RestoreOutcome.RESTORED) -> e.RestoreEnded:
    return e.RestoreEnded(MAIN, SLOT, SESSION, outcome, 1538, 170_000_000, 0.25)


def request(outcome: Outcome = Outcome.RESTORED, *, told: bool = True) -> e.RequestDone:
    return e.RequestDone(
        server=MAIN,
        endpoint="chat/completions",
        slot=SLOT,
        session=SESSION,
        outcome=outcome,
        reason=None if told else Reason.NEW_SESSION,
        verdict=Verdict.CONFIRMED,
        status=200,
        restored_tokens=1538,
        computed_tokens=12 if told else None,
        reused_tokens=1538 if told else None,
        generated_tokens=7 if told else None,
        prepare_seconds=0.3,
        overhead_seconds=0.0004,
        ttfb_seconds=0.5 if told else None,
        duration_seconds=1.5,
    )


def failed(source: str) -> e.RequestFailed:
    return e.RequestFailed(MAIN, "chat/completions", SESSION, source, "KV_BACKEND_UNAVAILABLE")


def every() -> tuple[e.Event, ...]:
    return (
        ready(),
        ready(restarted=True),
        e.ServerUnavailable(MAIN, "unreachable", "connection refused"),
        e.SharedMemorySeen(MAIN, 4096),
        e.VolatileSlotsSeen(MAIN, "start it with --cache-ram 0"),
        acquired(),
        e.SlotReleased(MAIN, SLOT, SESSION, "serve"),
        e.SessionSwitched(MAIN, SLOT, "ba9876543210", SESSION),
        e.SessionCold(MAIN, SLOT, SESSION, Reason.NO_SNAPSHOT),
        *(e.BranchBegan(MAIN, SESSION, "id", cause, "ba9876543210") for cause in Cause),
        e.StaticIdSeen(MAIN, SESSION),
        e.IdsDisagreed(MAIN),
        e.CheckpointStarted(MAIN, SLOT, SESSION, Trigger.SWITCH),
        *(checkpoint(outcome) for outcome in CheckpointOutcome),
        e.RestoreStarted(MAIN, SLOT, SESSION),
        *(restore(outcome) for outcome in RestoreOutcome),
        e.RestoreProvedIneffective(MAIN, SLOT, SESSION, 1538, 3),
        e.SnapshotInvalidated(SESSION, "is 1 byte short"),
        e.SnapshotsChanged(13, 1, 2_384_203_912),
        e.PersistenceTripped(MAIN, 3, 60.0, "save refused"),
        e.PersistenceRecovered(MAIN),
        e.AuxiliarySeen(MAIN, "chat/completions", "OpenCode, Kilo (title)"),
        e.RequestHeld(MAIN, "chat/completions", SESSION, 10.0),
        request(),
        request(told=False),
        *(failed(source) for source in ("client", "upstream", "proxy")),
        e.TaskDied("sentinel main", ZeroDivisionError("oops")),
        e.Warned("the quota holds two full slots only", "KV_METADATA_IO"),
    )
