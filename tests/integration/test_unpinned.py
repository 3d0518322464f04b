"""Requests that name no slot of ours beside those that do: never two in one slot."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvproxy.telemetry.events import SlotAcquired, SlotReleased
from kvproxy.upstream.transport import Transport
from tests.support.proxy import House, house
from tests.support.talk import Answer, Talk

CANARY = re.compile(rb"CANARY-\w+")


def prompt(name: str) -> str:
    return f"CANARY-{name} one two three four five"


def chat(name: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt(name)}], "max_tokens": 20, **more}


async def bypass(here: House, name: str) -> Answer:
    return await here.proxy.post(
        "/v1/chat/completions", chat(name), **{"X-Session-Id": name, "X-KVProxy-Bypass": "1"}
    )


async def auxiliary(here: House, name: str) -> Answer:
    headers = {"X-Session-Id": name, "X-KVProxy-Purpose": "auxiliary"}
    return await here.proxy.post("/v1/chat/completions", chat(name), **headers)


async def anonymous(here: House, name: str) -> Answer:
    return await here.proxy.post("/v1/chat/completions", chat(name))


async def messages(here: House, name: str) -> Answer:
    return await here.proxy.post("/v1/messages", chat(name), **{"X-Session-Id": name})


async def embeddings(here: House, name: str) -> Answer:
    return await here.proxy.post("/v1/embeddings", {"input": [prompt(name), prompt(name)]})


async def several_answers(here: House, name: str) -> Answer:
    return await here.proxy.post("/v1/chat/completions", chat(name, n=2), **{"X-Session-Id": name})


async def several_prompts(here: House, name: str) -> Answer:
    return await here.proxy.post("/completion", {"prompt": [prompt(name)] * 2, "n_predict": 20})


async def unreadable(here: House, name: str) -> Answer:
    """Python's parser, and the server's, take what ours does not: NaN."""
    body = json.dumps(chat(name, top_p=float("nan"))).encode()
    return await here.proxy.post("/v1/chat/completions", body, **{"X-Session-Id": name})


async def own_slot(here: House, name: str) -> Answer:
    return await here.proxy.post("/v1/chat/completions", chat(name, id_slot=0))


async def own_slot_of_session(here: House, name: str) -> Answer:
    return await here.proxy.post("/v1/chat/completions", chat(name, id_slot=1), **{"X-Session-Id": name})


async def without_cache(here: House, name: str) -> Answer:
    body = chat(name, cache_prompt=False)
    return await here.proxy.post("/v1/chat/completions", body, **{"X-Session-Id": name})


Ask = Callable[[House, str], Awaitable[Answer]]
KINDS: dict[str, Ask] = {
    ask.__name__: ask
    for ask in (
        bypass,
        auxiliary,
        anonymous,
        messages,
        embeddings,
        several_answers,
        several_prompts,
        unreadable,
        own_slot,
        own_slot_of_session,
        without_cache,
    )
}


def holds_only(raw: bytes, name: str) -> bool:
    """Whether every whole canary in an answer is its own (a cut one is at least the beginning of it)."""
    own = f"CANARY-{name}".encode()
    return all(own.startswith(word) for word in CANARY.findall(raw))


@pytest.mark.parametrize("ask", KINDS.values(), ids=KINDS)
async def test_a_request_of_any_kind_beside_pinned_ones_is_answered_right(tmp_path: Path, ask: Ask) -> None:
    async with house(tmp_path, slots=2, embeddings=True, mix_on_busy=True, token_delay=0.001) as here:
        talks = [Talk("alpha"), Talk("beta")]

        async def live(talk: Talk) -> None:
            for _ in range(3):
                assert (await here.proxy.turn(talk)).status == 200

        async def others() -> None:
            for number in range(3):
                answer = await ask(here, f"other{number}")
                assert answer.status == 200, answer.raw
                assert holds_only(answer.raw, f"other{number}")

        await asyncio.gather(*(live(talk) for talk in talks), others())
        assert here.fake.violations == []


async def test_two_hundred_rounds_of_everything_at_once_never_mix_two_conversations(tmp_path: Path) -> None:
    async with house(tmp_path, slots=3, embeddings=True, mix_on_busy=True, token_delay=0.0002) as here:
        dice = random.Random(7)
        kinds = list(KINDS.values())
        rounds = iter(range(200))

        async def pinned(number: int) -> None:
            talk = Talk(f"p{number}", predict=12)
            for _ in rounds:
                async with here.proxy.stream(talk, max_tokens=12) as stream:
                    text = await stream.rest()
                talk.heard(text)
                if len(talk.messages) > 12:
                    talk = Talk(f"p{number}", predict=12)

        async def unpinned(number: int) -> None:
            for step in rounds:
                name = f"u{number}x{step}"
                answer = await dice.choice(kinds)(here, name)
                assert answer.status == 200, answer.raw
                assert holds_only(answer.raw, name)

        await asyncio.gather(*(pinned(n) for n in range(4)), *(unpinned(n) for n in range(2)))
        assert here.fake.violations == []


async def test_an_unpinned_request_waits_for_one_that_is_on_its_way_to_a_slot_the_server_sees_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Transport.send

    async def late(self: Transport, method: str, target: str, headers: Any, body: Any) -> Any:
        if b'"id_slot"' in body:
            await asyncio.sleep(0.2)
        return await send(self, method, target, headers, body)

    monkeypatch.setattr(Transport, "send", late)
    async with house(tmp_path, slots=2, mix_on_busy=True, token_delay=0.02) as here:
        pinned = asyncio.create_task(here.proxy.turn(Talk("alpha", predict=4)))
        await here.proxy.until(lambda: "serving" in here.proxy.slot_states)
        assert here.completions() == 0
        here.fake.faults.unpinned_slot = here.proxy.slot_states.index("serving")
        other = await messages(here, "other")
        assert holds_only(other.raw, "other")
        assert (await pinned).status == 200


async def test_an_unpinned_request_waits_until_a_pinned_one_was_seen_to_run(tmp_path: Path) -> None:
    """An answer that is not streamed shows nothing before its end, so the slots are looked at."""
    async with house(tmp_path, slots=2, mix_on_busy=True, token_delay=0.01) as here:
        talk = Talk("alpha", predict=100)
        pinned = asyncio.create_task(here.proxy.turn(talk))
        await here.proxy.until(lambda: here.completions() == 1)
        other = await messages(here, "other")
        assert holds_only(other.raw, "other")
        assert not pinned.done()
        assert (await pinned).status == 200


async def test_an_unpinned_request_takes_the_place_of_nobody_unsaved(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talks = [Talk("alpha"), Talk("beta")]
        for talk in talks:
            await here.proxy.turn(talk)
        here.fake.faults.unpinned_slot = 0
        await here.proxy.post("/v1/messages", chat("other"), X_KVProxy_Bypass="1")
        await here.proxy.at_rest()
        assert sorted(deed for deed, _ in here.deeds) == ["save", "save"]
        answers = [await here.proxy.turn(talk) for talk in talks]
        assert {answer.outcome for answer in answers} == {"resident", "restored"}
        assert all(answer.reused > answer.computed for answer in answers)


async def test_a_bypassed_request_is_told_so_and_saves_and_restores_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        here.forget_calls()
        answer = await bypass(here, "alpha")
        assert answer.told == ("bypass", None)
        assert here.deeds == []
        assert (await here.proxy.turn(a)).told == ("resident", None)


async def test_an_auxiliary_request_leaves_its_session_where_it_is(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        a = Talk("alpha")
        slot = (await here.proxy.turn(a)).slot
        answer = await auxiliary(here, "alpha")
        assert answer.outcome == "auxiliary"
        assert answer.slot != slot
        back = await here.proxy.turn(a)
        assert (back.told, back.slot) == (("resident", None), slot)


async def test_a_slot_action_that_is_let_through_makes_us_forget_what_the_slot_held(tmp_path: Path) -> None:
    async with house(tmp_path, security={"allow_management": True}) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        erased = await here.proxy.post("/slots/0?action=erase", {})
        assert (erased.status, erased.body["id_slot"]) == (200, 0)
        await here.proxy.at_rest()
        back = await here.proxy.turn(a)
        assert back.outcome != "resident"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/rerank", "/what/ever"]
)
async def test_what_was_taken_for_a_request_is_told_to_be_given_back(tmp_path: Path, path: str) -> None:
    async with house(tmp_path, slots=2) as here:
        body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "documents": ["a", "b"]}
        await here.proxy.post(path, {**body, "query": "a", "max_tokens": 4})
        await here.proxy.at_rest()
        taken, given = (here.proxy.heard(kind) for kind in (SlotAcquired, SlotReleased))
        assert [event.purpose for event in taken] == [event.purpose for event in given] != []


FORM = b"".join(
    b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n%b\r\n' % text for text in (b"a", b"b")
)
HIDING: dict[str, tuple[bytes, dict[str, str]]] = {
    "a form": (FORM + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}),
    "a depth": (b'{"prompt":"a","n_cmpl":2,"x":' + b"[" * 1100 + b"]" * 1100 + b"}", {}),
    "an encoding that is none": (b'{"prompt":"a","n_cmpl":2}', {"Content-Encoding": "x"}),
}


@pytest.mark.parametrize(("body", "headers"), HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("path", ["/completion", "/v1/embeddings"])
async def test_what_may_hide_several_prompts_has_all_slots_to_its_end(
    tmp_path: Path, path: str, body: bytes, headers: dict[str, str]
) -> None:
    async with house(tmp_path, slots=2) as here:
        await here.proxy.post(path, body, **headers)
        await here.proxy.post(path, b"{", **{"Content-Encoding": "gzip"})
        await here.proxy.at_rest()
        assert [event.purpose for event in here.proxy.heard(SlotAcquired)] == ["exclusive", "floating"]
