from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from kvproxy.admin.views import server_view, session_view, slot_view, snapshot_view
from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason
from kvproxy.identifiers import SlotId
from kvproxy.upstream.breaker import BreakerState
from kvproxy.upstream.facts import Facts, Persistence, PersistenceMode, ServerState
from tests.support.fakes_core import FINGERPRINT, MAIN, PROPS, A, B, World, generation_of, manifest_of, stay

S0 = SlotId(0)


def test_a_slot_shows_who_lives_in_it_and_since_when_it_rests() -> None:
    w = World()
    w.house(0, stay(A, revision=3, saved=2))
    w.clock.advance(1.5)

    assert slot_view(w.table.view(S0), w.clock.now()) == {
        "id": 0,
        "state": "resident",
        "occupant": "a" * 12,
        "dirty": True,
        "leased": False,
        "revision": 3,
        "checkpointed_revision": 2,
        "tokens": 1000,
        "idle_seconds": 1.5,
    }


def test_an_empty_slot_shows_nobody() -> None:
    shown = slot_view(World().table.view(S0), 1000.0)
    assert (shown["occupant"], shown["dirty"], shown["tokens"]) == (None, False, None)


def test_a_server_shows_its_state_its_epoch_and_what_it_runs() -> None:
    w = World()
    shown = server_view(MAIN, "http://127.0.0.1:8080", 4, w.standing.facts, BreakerState.CLOSED, [], 2)

    assert shown == {
        "name": "main",
        "url": "http://127.0.0.1:8080",
        "state": "healthy",
        "reason": "",
        "epoch": 4,
        "build": "b11434",
        "model": "/models/one.gguf",
        "fingerprint": FINGERPRINT.digest[:12],
        "persistence": {"mode": "plain", "reason": ""},
        "canary": None,
        "memory": {
            "kind": "unknown",
            "may_roll_back": False,
            "needs_boundary": False,
            "window_opened": None,
        },
        "volatile_slots": False,
        "shared_tokens": None,
        "breaker": "closed",
        "waiting": 2,
        "slots": [],
    }


@pytest.mark.parametrize(
    ("slots", "shares", "tokens"), [(4, True, 4096), (4, False, None), (4, None, None), (1, True, None)]
)
def test_slots_that_share_one_memory_show_how_much_that_is(
    slots: int, shares: bool | None, tokens: int | None
) -> None:
    facts = Facts(props=replace(PROPS, total_slots=slots), shares_memory=shares)
    shown = server_view(MAIN, "", 0, facts, BreakerState.CLOSED, [], 0)
    assert shown["shared_tokens"] == tokens


@pytest.mark.parametrize(
    ("state", "reason", "shown"),
    [
        (ServerState.HEALTHY, "", ("degraded", "full")),
        (ServerState.SLEEPING, "", ("sleeping", "")),
        (ServerState.DEGRADED, "its own", ("degraded", "its own")),
    ],
)
def test_a_full_disk_takes_from_a_server_that_is_well_and_is_told_with_its_persistence(
    state: ServerState, reason: str, shown: tuple[str, str]
) -> None:
    facts = Facts(state=state, reason=reason, persistence=Persistence(PersistenceMode.PLAIN))
    view = server_view(MAIN, "", 0, facts, BreakerState.CLOSED, [], 0, "full")
    assert (view["state"], view["reason"]) == shown
    assert view["persistence"] == {"mode": "plain", "reason": "full"}


def test_a_server_that_was_not_asked_yet_can_be_shown() -> None:
    shown = server_view(MAIN, "", 0, Facts(), BreakerState.CLOSED, [], 0)
    assert (shown["state"], shown["build"], shown["fingerprint"]) == ("unreachable", "", None)


def test_a_session_shows_where_it_lives_what_it_was_told_last_and_what_is_stored() -> None:
    w = World()
    w.house(0, stay(A))
    session = w.session(A, preparation=Preparation(Outcome.COLD, Reason.EVICTED), requests=3)

    shown = session_view(session, w.table.slot_of(A), (manifest_of(A),))

    assert (shown["session"], shown["key"], shown["slot"], shown["requests"]) == ("a" * 12, A, 0, 3)
    assert shown["state"] == "active_dirty"
    assert shown["last"] == {
        "outcome": "cold",
        "reason": "evicted",
        "restored_tokens": 0,
        "verdict": "unknown",
    }
    assert len(shown["snapshots"]) == 1


def test_a_session_that_was_not_served_yet_has_no_last_outcome() -> None:
    assert session_view(World().session(A), None, ())["last"] is None


def test_a_session_shows_by_what_it_is_known_and_where_it_comes_from() -> None:
    w = World()
    known = w.session(A)
    known.namespace, known.branch, known.parent = "content", "0123", B
    shown, unseen = session_view(known, None, ()), session_view(w.session(B), None, ())
    fields = ("namespace", "branch", "parent")
    assert [shown[field] for field in fields] == ["content", "0123", "b" * 12]
    assert [unseen[field] for field in fields] == [None, None, None]


def test_a_session_is_saved_as_long_as_one_generation_is_valid() -> None:
    session, bad = World().session(A), generation_of(invalid_reason="bad")
    both = manifest_of(A, bad, generation_of())

    states = [session_view(session, None, (m,))["state"] for m in (both, manifest_of(A, bad))]

    assert states == ["saved", "invalid"]


def test_a_snapshot_shows_its_generations_newest_first() -> None:
    current, previous = generation_of(invalid_reason="bad"), generation_of()
    shown = snapshot_view(manifest_of(A, current, previous))

    assert (shown["session"], shown["server"]) == ("a" * 12, "main")
    assert [one["name"] for one in shown["generations"]] == [current.name, previous.name]
    assert [(one["valid"], one["invalid_reason"]) for one in shown["generations"]] == [
        (False, "bad"),
        (True, None),
    ]


def test_all_of_it_is_plain_json() -> None:
    w = World()
    w.house(0, stay(A))
    views = [
        slot_view(w.table.view(S0), 0.0),
        server_view(MAIN, "", 1, w.standing.facts, BreakerState.OPEN, [], 0),
        session_view(w.session(A), w.table.slot_of(A), (manifest_of(A),)),
    ]
    assert orjson.loads(orjson.dumps(views)) == views
