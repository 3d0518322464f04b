"""Lives of the server: killed, restarted, asleep, loading, absent, and servers that cannot be persisted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome
from kvproxy.identifiers import SnapshotName
from kvproxy.snapshots.store import StoreFailure
from kvproxy.telemetry.events import CheckpointEnded, ServerReady, ServerUnavailable, VolatileSlotsSeen
from kvproxy.upstream.watch import FRESH_SECONDS
from scripts.ports import free_port
from tests.fakes.actions import Saved
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.proxy import House, KvProxy, house, make_settings
from tests.support.talk import Talk


async def saved(here: House, *talks: Talk) -> None:
    """Each has had a turn, is on disk, and still lives in its slot."""
    for talk in talks:
        await here.proxy.turn(talk)
    await here.proxy.admin("POST", "flush")
    await here.proxy.at_rest()


async def test_the_very_next_request_after_a_kill_is_restored_with_all_it_had(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await saved(here, a)
        for _ in range(5):
            held = len(here.fake.slots[0].tokens)
            await here.fake.restart()
            back = await here.proxy.turn(a)
            assert (back.told, back.reused) == (("restored", None), held)
            await here.proxy.admin("POST", "flush")
        assert (await here.proxy.status())["stats"]["server_restarts"] == 5


async def test_two_conversations_believed_resident_continue_at_once_after_a_kill(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talks = [Talk("alpha"), Talk("beta")]
        await saved(here, *talks)
        for _ in range(10):
            held = {talk.canary: len(slot.tokens) for talk, slot in by_talk(here, talks)}
            await here.fake.restart()
            answers = await asyncio.gather(*(here.proxy.turn(talk) for talk in talks))
            assert [answer.told for answer in answers] == [("restored", None)] * 2
            assert [answer.reused for answer in answers] == [held[talk.canary] for talk in talks]
            await here.proxy.admin("POST", "flush")


def by_talk(here: House, talks: list[Talk]) -> list[tuple[Talk, Any]]:
    """Each conversation with the slot of the fake in which it lives."""
    word = {slot.words.decode().strip(): slot for slot in here.fake.slots}
    return [(talk, word[talk.canary]) for talk in talks]


async def test_a_restore_that_was_on_its_way_when_the_server_died_does_not_reach_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path, slots=2) as here:
        a, b, c = Talk("alpha"), Talk("beta"), Talk("gamma")
        await saved(here, a, b)
        await here.proxy.turn(c)  # in the slot of alpha, which comes back to that of beta
        store = here.proxy.runtime.store
        mark = store.mark_restoring

        async def die_and_come_back(name: SnapshotName) -> StoreFailure | None:
            monkeypatch.undo()
            failure = await mark(name)
            here.fake.faults.prefill_rate = 100
            await here.fake.restart()
            await here.proxy.until(lambda: here.fake.slots[1].is_processing)  # its canary
            return failure

        monkeypatch.setattr(store, "mark_restoring", die_and_come_back)
        back = await here.proxy.turn(a)

        assert (back.status, here.fake.violations) == (200, [])
        assert back.told == ("restored", None)


async def test_a_server_that_comes_back_later_is_waited_for_with_503_and_then_restores(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await saved(here, a)
        await here.fake.kill()
        gone = await here.proxy.turn(a)
        assert (gone.status, gone.code) == (503, "KV_BACKEND_UNAVAILABLE")
        assert int(gone.headers["Retry-After"]) >= 1
        assert (await here.proxy.admin("GET", "readyz")).status == 503
        await here.fake.start()
        assert (await here.proxy.turn(a)).told == ("restored", None)
        assert (await here.proxy.admin("GET", "readyz")).status == 200


async def test_a_stream_cut_by_a_kill_is_seen_broken_and_the_retry_is_served_from_the_last_save(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        a = Talk("alpha", predict=200)
        await saved(here, Talk("alpha", predict=4))
        async with here.proxy.stream(a) as stream:
            await stream.first()
            await here.fake.restart()
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.rest()
        here.fake.faults.token_delay = 0
        assert (await here.proxy.turn(Talk("alpha", predict=4))).told == ("restored", None)


async def test_a_save_of_a_life_that_ended_before_it_was_published_counts_for_nothing(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)

        async def die(_: Saved) -> None:
            here.fake.on_save = None
            await here.fake.kill()

        here.fake.on_save = die
        await here.proxy.admin("POST", "flush")
        await here.fake.start()
        (ended,) = here.proxy.heard(CheckpointEnded)
        assert ended.outcome is CheckpointOutcome.UNREACHABLE
        assert here.manifests() == []
        assert (await here.proxy.turn(a)).told == ("cold", "server-restarted")


async def test_requests_that_wait_or_run_while_slots_become_fewer_are_served_on_those_left(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=3, token_delay=0.005, mix_on_busy=True) as here:
        talks = [Talk(f"t{n}", predict=8) for n in range(5)]
        await saved(here, *talks[:3])
        here.fake.faults.token_delay = 0.02
        running = [asyncio.create_task(attempt(here, talk)) for talk in talks]
        await here.proxy.until(lambda: len(here.processing) == 3)
        await here.fake.restart(slots=1)
        here.fake.faults.token_delay = 0
        await asyncio.gather(*running)
        for talk in talks:
            assert (await here.proxy.turn(talk)).status == 200
        assert here.proxy.runtime.table.views()[0].id == 0
        assert len(here.proxy.slot_states) == 1


async def test_a_request_that_was_being_prepared_while_slots_became_fewer_is_not_sent_to_its_old_slot(
    tmp_path: Path,
) -> None:
    """The server would take the slot's id modulo its number of slots, and run it under somebody's answer."""
    async with house(tmp_path, slots=2) as here:
        a, b = Talk("alpha"), Talk("beta")
        await saved(here, a)
        await here.fake.restart()
        assert (await here.proxy.turn(b)).slot == "0"
        preparer = here.proxy.runtime.preparer
        prepare = preparer.prepare

        async def prepare_and_lose(lease: Any, session: Any, asked: Any) -> Any:
            preparer.prepare = prepare  # type: ignore[method-assign]
            prepared = await prepare(lease, session, asked)
            assert lease.slot == 1
            await here.fake.restart(slots=1)
            here.forget_calls()
            return prepared

        preparer.prepare = prepare_and_lose  # type: ignore[method-assign]
        answer = await here.proxy.turn(a)
        assert (answer.status, answer.slot) == (200, "0")
        sent = [call.body for call in here.fake.calls if call.path == "/v1/chat/completions"]
        assert [b'"id_slot":0' in body for body in sent] == [True]


async def test_a_request_for_which_all_slots_were_being_saved_as_they_became_fewer_is_served(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=3) as here:
        talks = [Talk(f"t{n}") for n in range(3)]
        for talk in talks:
            await here.proxy.turn(talk)
        preparer, table = here.proxy.runtime.preparer, here.proxy.runtime.table
        secure, epoch = preparer.secure, table.epoch

        async def secure_and_lose(lease: Any, slot: Any) -> Any:
            preparer.secure = secure  # type: ignore[method-assign]
            secured = await secure(lease, slot)
            await here.fake.restart(slots=1)
            await here.proxy.until(lambda: table.epoch > epoch)
            return secured

        preparer.secure = secure_and_lose  # type: ignore[method-assign]
        letter = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        answer = await here.proxy.post("/v1/messages", letter, **{"X-Session-Id": "letters"})
        assert answer.status == 200


async def attempt(here: House, talk: Talk) -> int:
    """A turn that may be broken off: what a client saw, 0 for a cut connection."""
    try:
        return (await here.proxy.turn(talk)).status
    except OSError:
        return 0


async def test_a_sleeping_server_is_not_woken_by_us_and_its_conversations_come_back(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await saved(here, a)
        here.fake.sleep()
        here.forget_calls()
        await here.proxy.until(lambda: state_of(here) == "sleeping")
        await asyncio.sleep(0.3)
        asked = {call.path for call in here.fake.calls}
        assert asked <= {"/props", "/health", "/v1/models"}
        assert (await here.proxy.admin("GET", "readyz")).status == 200
        assert (await here.proxy.turn(a)).told == ("restored", None)
        await here.proxy.until(lambda: state_of(here) == "healthy")
        assert (await here.proxy.turn(a)).told == ("resident", None)


def state_of(here: House) -> str:
    return here.proxy.runtime.standing.facts.state.value


async def test_a_sleep_between_our_last_question_and_the_next_request_is_noticed(tmp_path: Path) -> None:
    """That it was awake a moment ago, when nobody needed it, says nothing."""
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await saved(here, a)
        await asyncio.sleep(FRESH_SECONDS)
        await here.proxy.runtime.watch.refresh()
        here.fake.sleep()
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_server_that_sleeps_again_before_it_was_asked_has_lost_what_it_woke_for(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await saved(here, a)
        here.fake.sleep()
        await here.proxy.runtime.watch.refresh()
        await here.proxy.turn(a)
        here.fake.sleep()
        await here.proxy.runtime.watch.refresh()
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_sleeper_is_not_woken_by_a_checkpoint(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        await asyncio.sleep(FRESH_SECONDS)
        here.fake.sleep()
        here.forget_calls()
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        assert here.deeds == []
        assert state_of(here) == "sleeping"


async def test_a_sleep_that_our_own_save_ends_is_a_new_life_and_no_clearing_of_slots(tmp_path: Path) -> None:
    """It fell asleep and was woken within the second after its last answer, between two questions."""
    async with house(tmp_path, slots=2) as here:
        a, b = Talk("alpha"), Talk("beta")
        await saved(here, a, b)
        await here.proxy.turn(a)
        here.fake.sleep()
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        assert here.proxy.heard(VolatileSlotsSeen) == []
        assert [(await here.proxy.turn(talk)).told for talk in (b, a)] == [("restored", None)] * 2


async def test_a_server_that_was_asleep_from_the_start_is_used_once_it_wakes(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.stop()
        here.fake.sleep()
        await here.proxy.start()
        await here.proxy.ready()
        a, b = Talk("alpha"), Talk("beta")
        assert (await here.proxy.turn(a)).status == 200
        await here.proxy.until(lambda: state_of(here) == "healthy")
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_loading_server_answers_for_itself_and_readyz_says_why(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await saved(here, a)
        here.fake.faults.loading = True
        await here.fake.restart()
        answer = await here.proxy.turn(a)
        assert (answer.status, answer.code) == (503, None)
        assert answer.body["error"]["message"] == "Loading model"
        ready = await here.proxy.admin("GET", "readyz")
        assert (ready.status, ready.body["status"]) == (503, "loading")
        assert "Loading model" in ready.body["reason"]
        here.fake.faults.loading = False
        await here.proxy.until(lambda: state_of(here) == "healthy")
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_without_a_server_we_serve_say_so_and_take_it_up_when_it_comes(tmp_path: Path) -> None:
    port = free_port()
    async with lonely(tmp_path, port) as proxy:
        await proxy.until(lambda: proxy.heard(ServerUnavailable))
        absent = await proxy.turn(Talk("alpha"))
        assert (absent.status, absent.code) == (503, "KV_BACKEND_UNAVAILABLE")
        assert int(absent.headers["Retry-After"]) >= 1
        words = f"llama-server at http://127.0.0.1:{port} cannot be reached: connection refused"
        assert absent.body["error"]["message"] == words
        (told,) = proxy.heard(ServerUnavailable)
        assert told.reason.startswith(words)
        assert (await proxy.admin("GET", "healthz")).status == 200
        ready = await proxy.admin("GET", "readyz")
        assert (ready.status, ready.body["status"]) == (503, "unreachable")
        assert ready.body["reason"]
        async with FakeLlamaServer(port=port, slots=1, slot_dir=tmp_path):
            await proxy.ready()
            assert (await proxy.turn(Talk("alpha"))).status == 200
            assert (await proxy.admin("GET", "readyz")).status == 200


@asynccontextmanager
async def lonely(tmp_path: Path, port: int) -> AsyncIterator[KvProxy]:
    """A kvproxy in front of a port where nobody listens."""
    async with KvProxy(make_settings(f"http://127.0.0.1:{port}", tmp_path / "state")) as proxy:
        yield proxy


async def test_a_server_whose_key_we_do_not_know_still_infers_and_the_status_says_what_is_missing(
    tmp_path: Path,
) -> None:
    async with FakeLlamaServer(slots=2, slot_dir=tmp_path, api_key="secret") as fake:
        async with lonely(tmp_path, fake.port) as proxy:
            await proxy.until(lambda: proxy.runtime.standing.facts.state.value == "degraded")
            for name in ("alpha", "beta", "alpha"):
                talk = Talk(name)
                answer = await proxy.post(
                    "/v1/chat/completions", talk.body(), Authorization="Bearer secret", **talk.headers
                )
                assert answer.status == 200
                assert talk.is_mine(answer.text)
            (server,) = (await proxy.status())["servers"]
            assert "api_key" in server["reason"]
            assert server["breaker"] == "closed"
            assert (await proxy.turn(Talk("alpha"))).status == 401
        assert fake.violations == []


async def test_a_key_of_ours_is_sent_in_place_of_the_clients(tmp_path: Path) -> None:
    async with house(tmp_path, api_key="secret", upstream={"api_key": "secret"}) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.turn(Talk("beta"))
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_server_without_a_save_path_works_and_the_status_names_the_flag(tmp_path: Path) -> None:
    async with house(tmp_path, persists=False, shared=False) as here:
        a, b = Talk("alpha"), Talk("beta")
        for talk in (a, b, a, b):
            assert (await here.proxy.turn(talk)).status == 200
        (server,) = (await here.proxy.status())["servers"]
        assert (server["state"], server["persistence"]["mode"]) == ("degraded", "off")
        assert "--slot-save-path" in server["persistence"]["reason"]
        assert server["breaker"] == "closed"
        assert (await here.proxy.admin("GET", "readyz")).status == 200
        assert here.deeds == []


async def test_a_volatile_server_that_cannot_save_is_recognised_by_its_second_conversation_and_left_alone(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=4, volatile=True, persists=False, shared=False) as here:
        talks = [Talk("alpha"), Talk("beta"), Talk("gamma")]
        await here.proxy.turn(talks[0])
        await here.proxy.turn(talks[1])
        await here.proxy.until(lambda: here.proxy.runtime.standing.facts.is_volatile)
        (server,) = (await here.proxy.status())["servers"]
        assert server["volatile_slots"]
        assert "-np" in server["persistence"]["reason"]
        assert len(here.proxy.heard(VolatileSlotsSeen)) == 1
        here.forget_calls()
        for _ in range(2):
            answers = await asyncio.gather(*(here.proxy.turn(talk) for talk in talks))
            assert {answer.told for answer in answers} == {("cold", "persistence-off")}
        assert here.deeds == []
        sent = [call.body for call in here.fake.calls if call.path == "/v1/chat/completions"]
        assert not any(b"id_slot" in body for body in sent)


async def test_a_server_that_is_volatile_no_more_after_a_restart_keeps_conversations_in_their_slots(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=4, volatile=True) as here:
        assert here.proxy.runtime.standing.facts.is_volatile
        await here.fake.restart(volatile=False)
        a = Talk("alpha")
        assert (await here.proxy.turn(a)).slot is not None
        await here.proxy.turn(Talk("beta"))
        assert (await here.proxy.turn(a)).told == ("resident", None)


async def test_every_life_is_told_once(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        for _ in range(3):
            await here.fake.restart()
            await here.proxy.turn(Talk("alpha"))
        restarts = [event.restarted for event in here.proxy.heard(ServerReady)]
        assert restarts == [False, True, True, True]
