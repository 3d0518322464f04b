from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from aiohttp import web
from multidict import CIMultiDict

from kvproxy.admin.app import INVALIDATED, AdminFace, AdminParts
from kvproxy.checkpoint.rounds import Rounds
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.identifiers import SlotId
from kvproxy.sessions.key import digest_of
from kvproxy.slots.leases import Purpose, Want
from kvproxy.snapshots.keeping import Keeper
from kvproxy.snapshots.names import new_name
from kvproxy.telemetry.metrics import Metrics
from kvproxy.telemetry.tally import Tally
from kvproxy.upstream.facts import ServerState
from kvproxy.upstream.replies import ActionFailure, Erased, Fault
from tests.support.fakes_core import (
    FINGERPRINT,
    MAIN,
    OWNER,
    A,
    B,
    World,
    generation_of,
    manifest_of,
    settle,
    stay,
)

S0 = SlotId(0)
BOUNDS = SimpleNamespace(max_total_bytes=10**9, max_snapshots=100, max_age_days=None)


class Room(World):
    """An operator's face on a world."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.is_draining = False
        self.keeper = Keeper(
            cast(Any, self.store), cast(Any, self.files), BOUNDS, self.clock, self.sink, lambda: set()
        )
        parts = AdminParts(
            server=MAIN,
            url="http://127.0.0.1:8080",
            standing=self.standing,
            table=self.table,
            desk=self.desk,
            registry=self.registry,
            store=cast(Any, self.store),
            files=cast(Any, self.files),
            actions=self.actions,
            rounds=Rounds(
                self.table,
                self.desk,
                self.checkpointer,
                self.policy,
                self.actions.save_seconds,
                self.clock,
                self.confirm,
            ),
            preparer=self.preparer,
            keeper=self.keeper,
            tally=Tally(),
            metrics=Metrics([MAIN], ["chat/completions"]),
            tasks=self.tasks,
            clock=self.clock,
            token=None,
            shows_metrics=True,
            metrics_are_public=False,
            is_draining=lambda: self.is_draining,
            lack=lambda: self.checkpointer.room.lack,
        )
        self.face = AdminFace(replace(parts, **changes))

    async def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        remote: str | None = "127.0.0.1",
        query: str = "",
        **headers: str,
    ) -> web.Response:
        request = SimpleNamespace(
            method=method,
            remote=remote,
            headers=CIMultiDict(headers),
            query=dict(pair.split("=") for pair in query.split("&") if pair),
        )
        answer = await self.face.handle(cast(Any, request), path)
        await settle()
        assert isinstance(answer, web.Response)
        return answer

    async def json(self, path: str, **asked: Any) -> Any:
        answer = await self.ask(path, **asked)
        assert answer.status == 200
        assert isinstance(answer.body, bytes)
        return orjson.loads(answer.body)

    async def refused(self, path: str, **asked: Any) -> ReplyError:
        with pytest.raises(ReplyError) as caught:
            await self.ask(path, **asked)
        return caught.value


class TestHealth:
    async def test_it_is_healthy_as_long_as_it_answers(self) -> None:
        room = Room(token="secret")
        assert await room.json("/kvproxy/healthz", remote="192.0.2.1") == {"status": "ok"}

    async def test_it_is_ready_when_slots_may_be_leased(self) -> None:
        room = Room()
        assert await room.json("/kvproxy/readyz") == {"status": "healthy", "reason": ""}

    async def test_it_is_not_ready_and_says_why_without_a_server(self) -> None:
        room = Room()
        room.standing.set(state=ServerState.LOADING, reason="Loading model")
        answer = await room.ask("/kvproxy/readyz")
        assert answer.status == 503
        assert answer.body == b'{"status":"loading","reason":"Loading model"}'

    async def test_it_is_not_ready_while_it_shuts_down(self) -> None:
        room = Room()
        room.is_draining = True
        assert (await room.ask("/kvproxy/readyz")).status == 503


class TestWhoMay:
    @pytest.mark.parametrize("remote", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
    async def test_without_a_token_this_machine_may_ask(self, remote: str) -> None:
        assert (await Room().ask("/kvproxy/status", remote=remote)).status == 200

    @pytest.mark.parametrize("remote", ["192.0.2.1", "::ffff:192.0.2.1", "", "unix", None])
    async def test_without_a_token_nobody_else_may(self, remote: str | None) -> None:
        refusal = await Room().refused("/kvproxy/status", remote=remote)
        assert (refusal.status, refusal.code) == (403, ErrorCode.UNAUTHORIZED)
        assert "ask from there, or set admin.token" in refusal.message

    @pytest.mark.parametrize(
        "said",
        [
            {"X-Forwarded-For": "192.0.2.1"},
            {"X-Forwarded-For": "127.0.0.1, 192.0.2.1"},
            {"X-Forwarded-For": "unknown"},
            {"X-Real-IP": "192.0.2.1"},
            {"Forwarded": "for=192.0.2.1"},
        ],
    )
    async def test_without_a_token_a_proxy_on_this_machine_lets_nobody_in(self, said: dict[str, str]) -> None:
        refusal = await Room().refused("/kvproxy/status", remote="127.0.0.1", **said)
        assert (refusal.status, refusal.code) == (403, ErrorCode.UNAUTHORIZED)

    async def test_without_a_token_this_machine_may_ask_through_a_proxy_on_it(self) -> None:
        said = {"X-Forwarded-For": "127.0.0.1, ::1", "X-Real-IP": "127.0.0.1"}
        assert (await Room().ask("/kvproxy/status", remote="::1", **said)).status == 200

    async def test_with_a_token_who_has_it_may_ask_from_anywhere(self) -> None:
        room = Room(token="geheim-ä")
        allowed = await room.ask(
            "/kvproxy/status",
            remote="192.0.2.1",
            Authorization="Bearer geheim-ä".encode().decode("utf-8", "surrogateescape"),
        )
        assert allowed.status == 200

    @pytest.mark.parametrize("given", ["", "Bearer wrong", "Bearer ", "secret", "Bearer secret "])
    async def test_with_a_token_nobody_else_may_not_even_this_machine(self, given: str) -> None:
        refusal = await Room(token="secret").refused("/kvproxy/status", Authorization=given)
        assert refusal.status == 401
        assert "send admin.token" in refusal.message

    async def test_metrics_are_the_operators_unless_they_are_public(self) -> None:
        assert (await Room().refused("/metrics", remote="192.0.2.1")).status == 403
        assert (await Room(metrics_are_public=True).ask("/metrics", remote="192.0.2.1")).status == 200

    async def test_metrics_may_be_off(self) -> None:
        refusal = await Room(shows_metrics=False, metrics_are_public=True).refused("/metrics")
        assert (refusal.status, refusal.code) == (404, ErrorCode.ROUTE_NOT_FOUND)
        assert "metrics.enabled" in refusal.message


class TestLooking:
    async def test_the_status_tells_of_server_slots_sessions_and_snapshots(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.keep(manifest_of(A, generation_of(size_bytes=70)))
        room.clock.advance(2)

        shown = await room.json("/kvproxy/status")

        assert (shown["uptime_seconds"], shown["draining"], shown["sessions"]) == (2.0, False, 1)
        assert shown["snapshots"] == {"known": 1, "valid": 1, "invalid": 0, "bytes": 70}
        (server,) = shown["servers"]
        assert (server["state"], len(server["slots"]), server["epoch"]) == ("healthy", 2, 1)
        assert shown["stats"]["requests"] == 0

    async def test_slots_sessions_and_snapshots_can_be_listed(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.keep(manifest_of(B))

        assert [s["occupant"] for s in (await room.json("/kvproxy/slots"))["slots"]] == ["a" * 12, None]
        assert [s["key"] for s in (await room.json("/kvproxy/sessions"))["sessions"]] == [A]
        assert [s["session"] for s in (await room.json("/kvproxy/snapshots"))["snapshots"]] == ["b" * 12]

    async def test_a_session_is_shown_by_its_clients_name_for_it(self) -> None:
        room = Room()
        room.registry.touch(A, digest_of("chat/1"), "model")
        shown = await room.json("/kvproxy/sessions/chat%2F1")
        assert [session["key"] for session in shown["sessions"]] == [A]

    async def test_a_session_that_is_not_known_is_not_found(self) -> None:
        refusal = await Room().refused("/kvproxy/sessions/nobody")
        assert (refusal.status, refusal.code) == (404, ErrorCode.SNAPSHOT_NOT_FOUND)
        assert "`kvproxy sessions` lists" in refusal.message

    async def test_the_metrics_show_the_state_of_now(self) -> None:
        room = Room()
        room.house(0, stay(A))
        answer = await room.ask("/metrics")
        assert isinstance(answer.body, bytes)
        assert b'kvproxy_dirty_slots{server="main"} 1.0' in answer.body

    @pytest.mark.parametrize(
        ("method", "path", "mend"),
        [
            ("GET", "/kvproxy", "docs/commands.md"),
            ("GET", "/kvproxy/nothing", "docs/commands.md"),
            ("POST", "/kvproxy/status", "ask with GET"),
            ("GET", "/kvproxy/flush", "ask with POST"),
            ("POST", f"/kvproxy/sessions/{A}", "ask with GET or DELETE"),
            ("GET", f"/kvproxy/sessions/{A}/save", "ask with POST"),
            ("POST", f"/kvproxy/sessions/{A}/dance", "docs/commands.md"),
            ("DELETE", f"/kvproxy/sessions/{A}/save", "ask with POST"),
            ("POST", f"/kvproxy/sessions/{A}/save/more", "docs/commands.md"),
        ],
    )
    async def test_what_does_not_exist_is_not_found(self, method: str, path: str, mend: str) -> None:
        room = Room()
        room.session(A)
        refusal = await room.refused(path, method=method)
        assert (refusal.status, refusal.code) == (404, ErrorCode.ROUTE_NOT_FOUND)
        assert mend in refusal.message


class TestActing:
    async def test_a_session_is_saved_on_demand(self) -> None:
        room = Room()
        room.house(0, stay(A, tokens=1))

        answer = await room.json(f"/kvproxy/sessions/{A}/save", method="POST")

        assert [save["outcome"] for save in answer["saves"]] == ["published"]
        assert room.store.find(A, FINGERPRINT) is not None

    async def test_a_save_that_fails_is_answered_with_the_reason(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.server.answer("save", ActionFailure(Fault.FAILED, "HTTP 500", 500))

        refusal = await room.refused(f"/kvproxy/sessions/{A}/save", method="POST")

        assert (refusal.status, refusal.code) == (502, ErrorCode.SAVE_FAILED)
        assert "HTTP 500" in refusal.message

    async def test_a_flush_saves_everything_that_is_dirty(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.house(1, stay(B))
        assert await room.json("/kvproxy/flush", method="POST") == {"saved": 2, "failed": 0}

    async def test_what_an_operator_invalidates_is_never_restored(self) -> None:
        room = Room()
        room.session(A)
        room.keep(manifest_of(A, previous=generation_of()))

        assert await room.json(f"/kvproxy/sessions/{A}/invalidate", method="POST") == {"invalidated": 2}

        manifest = room.store.find(A, FINGERPRINT)
        assert manifest is not None
        assert [one.invalid_reason for one in manifest.generations] == [INVALIDATED] * 2

    async def test_a_purged_session_is_gone_with_its_files_and_its_slot_is_nobodys(self) -> None:
        room = Room()
        room.house(0, stay(A))
        kept = room.keep(manifest_of(A))

        answer = await room.json(f"/kvproxy/sessions/{A}", method="DELETE")

        assert answer == {"purged": 1, "deleted": [kept.current.name]}
        assert room.files.deleted == [kept.current.name]
        assert (room.registry.find(A), room.store.all(), room.occupant(0)) == (None, (), None)
        assert room.desk.out == 0

    async def test_a_purge_is_seen_through_when_the_operator_hangs_up(self) -> None:
        room = Room()
        room.house(0, stay(A))
        kept = room.keep(manifest_of(A))
        gate: asyncio.Future[Erased] = asyncio.get_running_loop().create_future()
        room.server.answer("erase", gate)
        asking = asyncio.ensure_future(room.ask(f"/kvproxy/sessions/{A}", method="DELETE"))
        await settle()

        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert room.table.view(S0).is_leased, "the server is about to empty it"
        gate.set_result(Erased(1000))
        await settle()

        assert (room.files.deleted, room.registry.find(A), room.desk.out) == ([kept.current.name], None, 0)

    async def test_a_session_that_is_being_served_is_not_purged(self) -> None:
        room = Room()
        room.house(0, stay(A))
        kept = room.keep(manifest_of(A))
        await room.desk.acquire(Want(Purpose.PINNED, A))

        refusal = await room.refused(f"/kvproxy/sessions/{A}", method="DELETE")

        assert (refusal.status, refusal.code, refusal.retry_after_seconds) == (409, ErrorCode.SLOT_BUSY, 1)
        assert room.store.all() == (kept,)

    async def test_a_collection_deletes_what_nobody_names(self) -> None:
        room = Room()
        orphan = new_name(OWNER)
        room.files.left_behind = [orphan]

        dry = await room.json("/kvproxy/gc", method="POST", query="dry_run=1")
        assert (dry["deleted"], room.files.deleted) == ([orphan], [])
        assert (await room.json("/kvproxy/gc", method="POST"))["deleted"] == [orphan]
        assert room.files.deleted == [orphan]
