"""Conversations over `/v1/messages`, which names no slot: foreseen, protected, adopted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvproxy.telemetry.events import RequestDone
from tests.support.proxy import House, house
from tests.support.talk import FILLER, Answer, Talk

PATH = "/v1/messages"


@dataclass(slots=True)
class Letters:
    """A conversation in the words of the Messages API."""

    name: str
    words: int = 30
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": f"CANARY-{self.name} {FILLER * self.words}"})

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": "any", "max_tokens": 12, "messages": list(self.messages), **more}

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-Id": self.name}

    def heard(self, text: str) -> None:
        assert text.startswith(f"CANARY-{self.name}"[: len(text)]), text
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": FILLER}]


@dataclass(frozen=True, slots=True)
class Told:
    """How one turn went: its answer, and what the log says of it."""

    answer: Answer
    done: RequestDone

    @property
    def told(self) -> tuple[str | None, str | None]:
        return self.answer.told

    @property
    def reuses(self) -> bool:
        usage = self.answer.body["usage"]
        return bool(usage["cache_read_input_tokens"] > 4 * usage["input_tokens"])


async def turn(here: House, letters: Letters, headers: dict[str, str] | None = None, **more: Any) -> Told:
    before = len(here.proxy.done)
    answer = await here.proxy.post(PATH, letters.body(**more), **letters.headers, **(headers or {}))
    assert answer.status == 200, answer.raw
    letters.heard(answer.body["content"][0]["text"])
    await here.proxy.at_rest()
    (done,) = here.proxy.done[before:]
    return Told(answer, done)


def slot_of(here: House, name: str) -> int | None:
    """Where the conversation is believed to live."""
    known = here.proxy.runtime.registry.named(name)
    view = here.proxy.runtime.table.slot_of(known[0].key) if known else None
    return None if view is None else view.id


def words_in(here: House, slot: int) -> bytes:
    """What the server's slot really says."""
    return here.fake.slots[slot].words


async def test_a_conversation_keeps_its_slot(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        letters = Letters("alpha")
        first = await turn(here, letters)
        assert first.told == ("cold", "new-session")
        second = await turn(here, letters)
        assert second.told == ("resident", None)
        assert second.reuses
        assert second.done.verdict == "confirmed"
        assert second.done.slot == slot_of(here, "alpha")
        assert here.deeds == []


async def test_a_conversation_survives_a_switch(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        letters, other = Letters("alpha"), Talk("beta")
        await turn(here, letters)
        await here.proxy.turn(other)
        back = await turn(here, letters)
        assert back.told == ("restored", None)
        assert back.reuses
        assert back.done.verdict == "confirmed"
        assert [deed for deed, _ in here.deeds] == ["save", "erase", "save", "restore"]


async def test_a_conversation_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        letters = Letters("alpha")
        await turn(here, letters)
        await here.proxy.admin("POST", "flush")
        await here.fake.restart()
        await here.proxy.ready()
        back = await turn(here, letters)
        assert back.told == ("restored", None)
        assert back.reuses


async def test_the_slot_that_the_server_took_instead_is_the_conversations_then(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        letters, other = Letters("alpha"), Talk("beta")
        await turn(here, letters)
        own = slot_of(here, "alpha")
        assert own is not None
        await here.proxy.turn(other)
        here.fake.faults.unpinned_slot = 1 - own
        missed = await turn(here, letters)
        assert missed.told == ("resident", None)
        assert (missed.done.slot, missed.done.verdict) == (1 - own, "unknown")
        assert slot_of(here, "alpha") == 1 - own
        assert slot_of(here, "beta") is None
        here.fake.faults.unpinned_slot = None
        again = await turn(here, letters)
        assert again.told == ("resident", None)
        assert again.reuses
        back = await here.proxy.turn(other)
        assert back.told == ("restored", None)
        assert back.reused > back.computed


async def test_a_missed_restore_is_not_blamed_on_the_snapshot(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        letters, others = Letters("alpha"), [Talk("beta"), Talk("gamma"), Talk("delta")]
        await turn(here, letters)
        for _ in range(4):
            await here.proxy.admin("POST", "flush")  # of two that are saved the older one leaves
            for other in others:
                await here.proxy.turn(other)
            await here.proxy.at_rest()  # one that is being saved is not the one to be taken
            view = here.proxy.runtime.table.views()
            oldest = min(view, key=lambda one: one.last_used).id
            here.fake.faults.unpinned_slot = 1 - oldest
            missed = await turn(here, letters)
            assert missed.told == ("restored", None)
            assert missed.done.verdict == "unknown"
            here.fake.faults.unpinned_slot = None
        assert (await here.proxy.status())["stats"]["ineffective_restores"] == 0
        assert (await here.proxy.status())["snapshots"]["invalid"] == 0


async def test_who_could_lose_a_slot_by_it_is_saved_before(tmp_path: Path) -> None:
    async with house(tmp_path, slots=3) as here:
        others = [Talk("beta"), Talk("gamma")]
        for other in others:
            await here.proxy.turn(other)
        await turn(here, Letters("alpha"))
        assert sorted(deed for deed, _ in here.deeds) == ["save", "save"]
        assert [(await here.proxy.turn(other)).told for other in others] == [("resident", None)] * 2


async def test_who_ended_while_it_was_made_ready_is_saved_before_it_is_sent(tmp_path: Path) -> None:
    options = {"sessions": {"exact_messages": True}, "prefill_rate": 4000, "batch": 100}
    async with house(tmp_path, slots=2, token_delay=0.01, **options) as here:
        other = Talk("beta")
        async with here.proxy.stream(other) as stream:
            await stream.first()
            asked = here.proxy.post(PATH, Letters("alpha", words=100).body(), X_Session_Id="alpha")
            answer, _ = await asyncio.gather(asked, stream.rest())
        assert answer.status == 200
        calls = [call.action or call.path for call in here.fake.calls]
        assert "save" in calls[: calls.index(PATH)]


async def test_who_ended_as_the_slots_were_looked_at_is_saved_before_it_is_sent(tmp_path: Path) -> None:
    """The look is answered when the server has time for it, and meanwhile others end."""
    async with house(tmp_path, slots=2, token_delay=0.01) as here:
        letters, other = Letters("alpha"), Talk("beta", predict=20)
        probe = here.proxy.runtime.probe
        before_flight = probe.before_flight

        async def look_slowly(*args: Any, **more: Any) -> Any:
            probe.before_flight = before_flight  # type: ignore[method-assign]
            flight = await before_flight(*args, **more)
            await running
            await here.proxy.until(lambda: not here.proxy.runtime.table.views()[0].is_leased)
            return flight

        async with here.proxy.stream(other) as stream:
            await stream.first()
            assert here.processing == [0]
            running = asyncio.ensure_future(stream.rest())
            here.fake.faults.unpinned_slot = 0
            probe.before_flight = look_slowly  # type: ignore[method-assign]
            answer = await here.proxy.post(PATH, letters.body(), **letters.headers)
        other.heard(await running)
        await here.proxy.at_rest()
        assert (answer.status, slot_of(here, "alpha")) == (200, 0)
        assert (await here.proxy.turn(other)).told == ("restored", None)


async def test_a_server_that_is_another_one_once_the_slots_were_looked_at_is_looked_at_anew(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2) as here:
        letters = Letters("alpha")
        probe, table = here.proxy.runtime.probe, here.proxy.runtime.table
        before_flight, epoch = probe.before_flight, table.epoch

        async def look_and_lose(*args: Any, **more: Any) -> Any:
            probe.before_flight = before_flight  # type: ignore[method-assign]
            flight = await before_flight(*args, **more)
            await here.fake.restart()
            await here.proxy.until(lambda: table.epoch > epoch)
            return flight

        probe.before_flight = look_and_lose  # type: ignore[method-assign]
        assert (await turn(here, letters)).told == ("cold", "new-session")
        assert slot_of(here, "alpha") is not None
        assert (await turn(here, letters)).told == ("resident", None)


async def test_work_over_messages_is_saved_as_any_other(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, checkpoint={"on_turn": True}) as here:
        await turn(here, Letters("alpha"))
        assert [deed for deed, _ in here.deeds] == ["save"]
        (slot,) = [s for s in (await here.proxy.status())["servers"][0]["slots"] if s["occupant"]]
        assert not slot["dirty"]


async def test_a_refused_request_leaves_its_conversation_where_it_is(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, n_ctx=2500) as here:
        letters = Letters("alpha")
        await turn(here, letters)
        long = [*letters.messages[:-1], {"role": "user", "content": FILLER * 100}]
        answer = await here.proxy.post(PATH, letters.body() | {"messages": long}, **letters.headers)
        assert answer.status == 400
        await here.proxy.at_rest()
        assert (await turn(here, letters)).told == ("resident", None)


async def test_two_requests_of_a_conversation_at_once_get_two_slots(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.02) as here:
        letters = Letters("alpha")
        running = asyncio.create_task(here.proxy.post(PATH, letters.body(), **letters.headers))
        await here.proxy.until(lambda: slot_of(here, "alpha") is not None)
        beside = await here.proxy.post(PATH, Letters("alpha").body(), **letters.headers)
        assert beside.told == ("cold", "session-busy")
        letters.heard((await running).body["content"][0]["text"])
        await here.proxy.at_rest()
        assert (await turn(here, letters)).told == ("resident", None)


async def test_a_client_that_gave_up_finds_its_prefill_again(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.02) as here:
        letters = Letters("alpha")
        body = letters.body(stream=True, max_tokens=500)
        async with here.proxy.client.post(PATH, json=body, headers=letters.headers) as response:
            await response.content.readany()
            await here.proxy.until(lambda: slot_of(here, "alpha") is not None)
            response.close()
        await here.proxy.at_rest()
        back = await turn(here, letters)
        assert back.told == ("resident", None)
        assert back.reuses


@pytest.mark.parametrize("volatile", [False, True])
async def test_many_conversations_over_both_apis_share_two_slots(tmp_path: Path, volatile: bool) -> None:
    options = {"mix_on_busy": True, "token_delay": 0.003, "save_seconds": 0.005, "restore_seconds": 0.01}
    async with house(tmp_path, slots=2, volatile=volatile, **options) as here:
        letters, talks = [Letters("alpha"), Letters("beta")], [Talk("gamma"), Talk("delta")]

        async def write(one: Letters) -> None:
            for _ in range(6):
                answer = await here.proxy.post(PATH, one.body(), **one.headers)
                assert answer.status == 200, answer.raw
                one.heard(answer.body["content"][0]["text"])

        async def speak(one: Talk) -> None:
            for _ in range(12):
                assert (await here.proxy.turn(one)).status == 200

        await asyncio.gather(*(write(one) for one in letters), *(speak(one) for one in talks))
        await here.proxy.at_rest()
        for one in letters:
            if (slot := slot_of(here, one.name)) is not None:
                assert words_in(here, slot).startswith(f"CANARY-{one.name}".encode())


async def test_exact_steering_leaves_the_server_no_choice(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, sessions={"exact_messages": True}) as here:
        letters = Letters("alpha")
        for expected in ("cold", "resident", "resident"):
            here.forget_calls()
            went = await turn(here, letters)
            assert went.told[0] == expected
            (prefill,) = [call for call in here.fake.calls if call.path == "/completion"]
            asked = json.loads(prefill.body)
            assert (asked["n_predict"], asked["id_slot"]) == (0, slot_of(here, "alpha"))
            assert went.answer.body["usage"]["input_tokens"] == 1
            assert went.done.slot == slot_of(here, "alpha")
        # What it took is told as if the answer had done it.
        assert (went.done.reused_tokens or 0) > (went.done.computed_tokens or 0) > 1


async def test_exact_steering_leaves_it_none_where_the_memory_is_known_to_roll_back(tmp_path: Path) -> None:
    """What was asked is remembered for slots that cannot; here it is needed all the same."""
    full, exact = {"memory_kind": "full"}, {"exact_messages": True}
    async with house(tmp_path, slots=2, upstream=full, sessions=exact) as here:
        letters = Letters("alpha")
        for expected in ("cold", "resident"):
            went = await turn(here, letters)
            assert went.told[0] == expected
            assert went.answer.body["usage"]["input_tokens"] == 1


@pytest.mark.parametrize("reason", ["not to be kept", "full disk"])
async def test_who_cannot_be_saved_is_not_lost_to_a_newcomer_that_opens_alike(
    tmp_path: Path, reason: str
) -> None:
    """As a sub-agent does: the server would put it where its parent is, though another slot is empty."""
    rules = {"type": "text", "text": FILLER * 60}
    async with house(tmp_path, slots=2) as here:
        main, agent = Letters("alpha"), Letters("beta")
        if reason == "full disk":
            here.fake.faults.fail("save", "error")
        persist = {"X-KVProxy-Persist": "no"} if reason == "not to be kept" else {}
        await turn(here, main, headers=persist, system=[rules])
        home = slot_of(here, "alpha")
        for expected in ("cold", "resident"):
            went = await turn(here, agent, system=[rules])
            assert went.told[0] == expected
            assert (slot_of(here, "alpha"), slot_of(here, "beta")) == (home, 1 - (home or 0))
        back = await turn(here, main, headers=persist, system=[rules])
        assert back.told == ("resident", None)
        assert back.reuses
        assert back.done.verdict == "confirmed"


async def test_a_server_that_clears_idle_slots_keeps_it_too(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, volatile=True) as here:
        letters, other = Letters("alpha"), Talk("beta")
        for round_ in range(3):
            went = await turn(here, letters)
            if round_:
                assert went.told == ("restored", None)
                assert went.reuses
            await here.proxy.turn(other)


async def test_a_server_that_was_seen_to_obey_is_pinned(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, messages_pin=True) as here:
        letters = Letters("alpha")
        for expected in ("cold", "resident"):
            here.forget_calls()
            went = await turn(here, letters)
            assert went.told[0] == expected
            (asked,) = [call for call in here.fake.calls if call.path == PATH]
            assert json.loads(asked.body)["id_slot"] == int(went.answer.slot or -1)
        assert went.reuses


async def test_a_server_that_was_not_gets_the_body_as_it_came(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        letters = Letters("alpha")
        sent = letters.body()
        await turn(here, letters)
        (asked,) = [call for call in here.fake.calls if call.path == PATH]
        assert json.loads(asked.body) == sent


def claude_title(letters: Letters) -> dict[str, Any]:
    """As Claude Code asks for one, under the same id."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    return {
        "model": "any",
        "max_tokens": 12,
        "system": [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.197.bc5; cc_entrypoint=cli;",
            },
            {"type": "text", "text": "Generate a concise, sentence-case title (3-7 words) for this session."},
        ],
        "tools": [],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "messages": [letters.messages[0]],
    }


@pytest.mark.parametrize(("slots", "outcome"), [(2, "resident"), (1, "restored")])
async def test_a_title_call_under_the_same_id_costs_the_conversation_nothing(
    tmp_path: Path, slots: int, outcome: str
) -> None:
    async with house(tmp_path, slots=slots) as here:
        letters = Letters("alpha")
        for number in range(3):
            went = await turn(here, letters)
            assert went.told[0] == (outcome if number else "cold")
            assert went.reuses or not number
            title = await here.proxy.post(PATH, claude_title(letters), **letters.headers)
            assert (title.status, title.outcome) == (200, "auxiliary")
            await here.proxy.at_rest()
        assert len(here.manifests()) == 1


async def test_agents_under_one_id_are_conversations_of_their_own(tmp_path: Path) -> None:
    """Claude Code's sub-agents: other tools, another system prompt, their own header."""
    async with house(tmp_path, slots=2) as here:
        ids = {"X-Claude-Code-Session-Id": "one"}
        main, agent = Letters("main"), Letters("agent")
        sessions: dict[str, set[str | None]] = {"main": set(), "agent": set()}
        for _ in range(3):
            for one, more in ((main, {}), (agent, {"X-Claude-Code-Agent-Id": "a1"})):
                answer = await here.proxy.post(PATH, one.body(), **ids, **more)
                one.heard(answer.body["content"][0]["text"])
                sessions[one.name].add(answer.headers.get("X-KVProxy-Session"))
        assert [len(keys) for keys in sessions.values()] == [1, 1]
        assert sessions["main"] != sessions["agent"]
        await here.proxy.at_rest()
        assert [done.outcome for done in here.proxy.done][2:] == ["resident"] * 4
