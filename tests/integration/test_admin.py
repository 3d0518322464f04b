"""The operator's face: what it shows, what it does, and to whom it answers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from yarl import URL

from kvproxy.admin.app import _is_loopback
from kvproxy.cli.daemon_client import session_path
from kvproxy.telemetry.events import CheckpointEnded, SnapshotInvalidated
from tests.fakes.faults import Failure
from tests.support.proxy import House, house
from tests.support.raw import connection
from tests.support.talk import Talk

FAMILIES = """
requests_total request_failures_total prepare_seconds overhead_seconds time_to_first_byte_seconds
restores_total restore_seconds restored_bytes_total restored_tokens_total ineffective_restores_total
checkpoints_total checkpoint_seconds checkpoint_bytes_total prompt_tokens_total slot_switches_total slots
dirty_slots sessions snapshots snapshot_bytes breaker_state upstream_up upstream_restarts_total queue_depth
lease_wait_seconds build_info
"""


async def test_the_status_shows_the_server_its_slots_and_what_was_done(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        a = Talk("alpha")
        first = await here.proxy.turn(a)
        await here.proxy.turn(a)
        status = await here.proxy.status()
        (server,) = status["servers"]
        assert (server["name"], server["state"], server["epoch"]) == ("main", "healthy", 1)
        assert (server["persistence"]["mode"], server["breaker"]) == ("plain", "closed")
        assert server["url"] == here.fake.base_url
        assert re.fullmatch("[0-9a-f]{12}", server["fingerprint"])
        slot = server["slots"][int(first.slot or 0)]
        assert slot["occupant"] == first.headers["X-KVProxy-Session"]
        assert (slot["state"], slot["dirty"]) == ("resident", True)
        assert slot["tokens"] == len(here.fake.slots[slot["id"]].tokens)
        assert (slot["revision"], slot["checkpointed_revision"]) == (2, 0)
        stats = status["stats"]
        assert (stats["requests"], stats["cold"], stats["resident"], stats["restored"]) == (2, 1, 1, 0)
        assert stats["prompt_tokens_reused"] > 0
        assert status["uptime_seconds"] >= 0


async def test_sessions_are_found_by_the_clients_id_and_by_their_short_key(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        key = (await here.proxy.turn(a)).headers["X-KVProxy-Session"]
        await here.proxy.turn(Talk("beta"))
        await here.proxy.at_rest()
        everybody = (await here.proxy.admin("GET", "sessions")).body["sessions"]
        assert {session["state"] for session in everybody} == {"active_dirty", "saved"}
        for name in ("alpha", key):
            (found,) = (await here.proxy.admin("GET", f"sessions/{name}")).body["sessions"]
            assert found["session"] == key
            assert found["state"] == "saved"
            assert found["last"]["outcome"] == "cold"
        unknown = await here.proxy.admin("GET", "sessions/nobody")
        assert (unknown.status, unknown.code) == (404, "KV_SNAPSHOT_NOT_FOUND")
        assert b"alpha" not in (await here.proxy.admin("GET", "sessions")).raw


async def test_the_snapshots_are_listed_as_they_lie_on_the_disk(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        (snapshot,) = (await here.proxy.admin("GET", "snapshots")).body["snapshots"]
        (generation,) = snapshot["generations"]
        (path,) = here.files
        assert (generation["name"], generation["bytes"]) == (path.name, path.stat().st_size)
        assert generation["valid"]
        assert len(generation["sha256"]) == 64
        totals = (await here.proxy.status())["snapshots"]
        assert (totals["known"], totals["valid"], totals["bytes"]) == (1, 1, path.stat().st_size)


async def test_a_session_is_found_by_an_id_of_any_bytes(tmp_path: Path) -> None:
    async with house(tmp_path) as here, connection(here.proxy.port) as client:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}).encode()
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Session-Id: caf\xe9/1\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert b" 200 " in await asyncio.wait_for(client.head(), 10)
        path = session_path(b"caf\xe9/1".decode("utf-8", "surrogateescape"))
        async with here.proxy.client.get(URL(path, encoded=True)) as answer:
            assert answer.status == 200
            assert len((await answer.json())["sessions"]) == 1


async def test_a_save_on_demand_publishes_and_says_what(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        (save,) = (await here.proxy.admin("POST", "sessions/alpha/save")).body["saves"]
        assert (save["outcome"], save["tokens"]) == ("published", len(here.fake.slots[0].tokens))
        (again,) = (await here.proxy.admin("POST", "sessions/alpha/save")).body["saves"]
        assert again["outcome"] == "clean"
        assert here.deeds == [("save", 0)]


async def test_a_save_on_demand_joins_the_one_in_flight(tmp_path: Path) -> None:
    async with house(tmp_path, save_seconds=0.2) as here:
        await here.proxy.turn(Talk("alpha"))
        one = asyncio.create_task(here.proxy.admin("POST", "sessions/alpha/save"))
        await here.proxy.until(lambda: here.proxy.slot_states == ["saving"])
        two = await here.proxy.admin("POST", "sessions/alpha/save")
        assert two.body == (await one).body
        assert here.deeds == [("save", 0)]
        assert len(here.proxy.heard(CheckpointEnded)) == 1


async def test_a_save_on_demand_waits_for_the_request_that_runs(tmp_path: Path) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        a = Talk("alpha", predict=40)
        await here.proxy.turn(Talk("alpha", predict=2))
        async with here.proxy.stream(a) as stream:
            await stream.first()
            save = asyncio.create_task(here.proxy.admin("POST", "sessions/alpha/save"))
            await stream.rest()
        (result,) = (await save).body["saves"]
        assert result["outcome"] == "published"
        assert result["tokens"] == len(here.fake.slots[0].tokens)


@pytest.mark.parametrize("path", ["sessions/alpha/save", "flush"])
@pytest.mark.parametrize("is_new", [True, False])
async def test_a_save_on_demand_waits_for_a_request_that_found_nothing_unsaved(
    tmp_path: Path, path: str, is_new: bool
) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        if not is_new:
            await here.proxy.turn(Talk("alpha", predict=2))
            await here.proxy.admin("POST", "flush")
        async with here.proxy.stream(Talk("alpha", predict=40)) as stream:
            await stream.first()
            save = asyncio.create_task(here.proxy.admin("POST", path))
            await stream.rest()
        assert (await save).status == 200
        assert here.proxy.heard(CheckpointEnded)[-1].tokens == len(here.fake.slots[0].tokens)
        assert not (await here.proxy.status())["servers"][0]["slots"][0]["dirty"]


async def test_a_save_on_demand_that_fails_says_so(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        here.fake.faults.fail("save", Failure.ERROR, times=1)
        failed = await here.proxy.admin("POST", "sessions/alpha/save")
        assert (failed.status, failed.code) == (502, "KV_SAVE_FAILED")


async def test_a_flush_saves_all_that_is_dirty_also_what_is_being_served(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        await here.proxy.turn(Talk("alpha", predict=2))
        await here.proxy.turn(Talk("beta", predict=2))
        async with here.proxy.stream(Talk("beta", predict=40)) as stream:
            await stream.first()
            flush = asyncio.create_task(here.proxy.admin("POST", "flush"))
            await stream.rest()
        assert (await flush).body == {"saved": 2, "failed": 0}
        assert len(here.files) == 2


async def test_an_invalidated_snapshot_is_not_restored(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.turn(Talk("beta"))
        assert (await here.proxy.admin("POST", "sessions/alpha/invalidate")).body == {"invalidated": 1}
        assert len(here.proxy.heard(SnapshotInvalidated)) == 1
        (session,) = (await here.proxy.admin("GET", "sessions/alpha")).body["sessions"]
        assert session["state"] == "invalid"
        assert (await here.proxy.turn(a)).told == ("cold", "snapshot-invalid")


async def test_a_purged_conversation_leaves_nothing_behind(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        purged = await here.proxy.admin("DELETE", "sessions/alpha")
        assert purged.body["purged"] == 1
        assert here.files == []
        assert here.manifests() == []
        assert here.proxy.slot_states == ["idle"]
        assert (await here.proxy.turn(a)).told == ("cold", "new-session")


async def test_a_conversation_that_is_being_served_is_not_purged(tmp_path: Path) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        await here.proxy.turn(Talk("alpha", predict=2))
        async with here.proxy.stream(Talk("alpha", predict=40)) as stream:
            await stream.first()
            refused = await here.proxy.admin("DELETE", "sessions/alpha")
            assert (refused.status, refused.code) == (409, "KV_SLOT_BUSY")
            await stream.rest()


async def test_with_a_token_the_face_answers_only_who_has_it(tmp_path: Path) -> None:
    async with house(tmp_path, admin={"token": "open sesame"}) as here:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}):
            for path in ("/kvproxy/status", "/kvproxy/sessions", "/metrics"):
                refused = await here.proxy.get(path, **headers)
                assert (refused.status, refused.code) == (401, "KV_UNAUTHORIZED")
        allowed = {"Authorization": "Bearer open sesame"}
        assert (await here.proxy.get("/kvproxy/status", **allowed)).status == 200
        assert (await here.proxy.get("/metrics", **allowed)).status == 200
        for path in ("healthz", "readyz"):
            assert (await here.proxy.admin("GET", path)).status == 200


async def test_without_a_token_only_this_machine_may_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as here:
        assert (await here.proxy.admin("GET", "status")).status == 200
        monkeypatch.setattr("kvproxy.admin.app._is_loopback", lambda remote: False)
        for path in ("/kvproxy/status", "/metrics"):
            refused = await here.proxy.get(path)
            assert (refused.status, refused.code) == (403, "KV_UNAUTHORIZED")
        for path in ("healthz", "readyz"):
            assert (await here.proxy.admin("GET", path)).status == 200
        assert (await here.proxy.turn(Talk("alpha"))).status == 200


@pytest.mark.parametrize(
    ("remote", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("2001:db8::1", False),
        (None, False),
        ("a name", False),
    ],
)
def test_this_machine_is_known_by_its_address(remote: str | None, is_ours: bool) -> None:
    assert _is_loopback(remote) is is_ours


async def test_public_metrics_answer_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(tmp_path, metrics={"public": True}) as here:
        monkeypatch.setattr("kvproxy.admin.app._is_loopback", lambda remote: False)
        assert (await here.proxy.get("/metrics")).status == 200


async def test_metrics_that_are_off_are_not_there(tmp_path: Path) -> None:
    async with house(tmp_path, metrics={"enabled": False}) as here:
        assert (await here.proxy.get("/metrics")).status == 404


async def test_every_metric_exists_before_anything_happened(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        answer = await here.proxy.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.raw.decode()
        for family in FAMILIES.split():
            assert f"\nkvproxy_{family}" in text, family


async def test_the_metrics_count_what_happened(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        for talk in (a, a, Talk("beta"), a):
            await here.proxy.turn(talk)
        await here.fake.restart()
        await here.proxy.turn(a)
        assert await values(
            here,
            'requests_total{endpoint="chat/completions",outcome="cold",server="main"}',
            'requests_total{endpoint="chat/completions",outcome="resident",server="main"}',
            'requests_total{endpoint="chat/completions",outcome="restored",server="main"}',
            'restores_total{outcome="restored",server="main"}',
            'checkpoints_total{outcome="published",server="main",trigger="switch"}',
            'slot_switches_total{server="main"}',
            'upstream_restarts_total{server="main"}',
            'upstream_up{server="main"}',
            "sessions",
        ) == [2, 1, 2, 2, 2, 2, 1, 1, 2]


async def values(here: House, *names: str) -> list[float]:
    text = (await here.proxy.get("/metrics")).raw.decode()
    rows = dict(row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
    return [float(rows[f"kvproxy_{name}"]) for name in names]


async def test_unknown_routes_of_ours_are_404_and_never_reach_the_server(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        here.forget_calls()
        for method, path in (("GET", "nothing"), ("POST", "status"), ("GET", ""), ("DELETE", "flush")):
            assert (await here.proxy.admin(method, path)).status == 404
        assert {call.path for call in here.fake.calls} <= {"/health", "/props"}


async def test_a_web_page_may_not_act_on_kvproxy(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            url = f"{here.proxy.base_url}/kvproxy/flush"
            async with here.proxy.client.post(url, headers=headers) as answer:
                assert answer.status == 403
        assert (await here.proxy.admin("POST", "flush")).status == 200


@pytest.mark.parametrize(
    "path", ["/kvproxy/healthz", "/kvproxy/status", "/kvproxy/nothing", "/metrics", "/slots/0", "/v1/models"]
)
async def test_no_answer_tells_what_kvproxy_is_made_of(tmp_path: Path, path: str) -> None:
    async with house(tmp_path) as here:
        for method in ("GET", "POST"):
            async with here.proxy.client.request(method, path) as answer:
                assert answer.headers["Server"] in ("kvproxy", "llama.cpp")
