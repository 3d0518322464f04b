"""Clients that name a slot themselves, or use several: isolated, and what they overwrite is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxy import House, house
from tests.support.talk import Answer, Talk

VSCODE: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n    ",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": [{"text": "import math\n", "filename": "other.py"}],
    "prompt": "ret",
    "n_predict": 12,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
"""As llama.vscode asks; llama.vim differs in nothing that matters here."""

WARM_UP = {**VSCODE, "n_predict": 0, "prompt": "", "samplers": []}


async def infill(here: House, body: dict[str, Any] = VSCODE, **headers: str) -> Answer:
    answer = await here.proxy.post("/infill", body, **headers)
    assert answer.status == 200, answer.raw
    await here.proxy.at_rest()
    return answer


def pins(here: House, path: str) -> list[Any]:
    """The slots that requests to `path` reached the server with: of duplicate fields the last one counts."""
    return [json.loads(call.body).get("id_slot") for call in here.fake.calls if call.path == path]


async def lives_in(here: House, slot: int) -> Talk:
    """A conversation in that slot."""
    talks = [Talk("alpha"), Talk("beta")]
    for talk in talks:
        if (await here.proxy.turn(talk)).slot == str(slot):
            await here.proxy.at_rest()
            return talk
    raise AssertionError


@pytest.mark.parametrize("body", [VSCODE, WARM_UP], ids=["completion", "warm-up"])
async def test_an_editor_that_names_slot_0_does_not_get_it_from_the_conversation_there(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    async with house(tmp_path, slots=3) as here:
        talk = await lives_in(here, 0)
        here.forget_calls()
        await infill(here, body)
        assert pins(here, "/infill") == [1]
        assert here.deeds == []
        assert (await here.proxy.turn(talk)).told == ("resident", None)


async def test_what_an_editor_asks_for_passes_byte_for_byte_but_for_the_slot(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        await infill(here)
        (call,) = [call for call in here.fake.calls if call.path == "/infill"]
        sent = json.dumps(VSCODE).encode()
        assert call.body.startswith(sent[:-1])
        assert call.body[len(sent) - 1 :] in (b',"id_slot":0}', b',"id_slot":1}')


async def test_an_editor_finds_its_own_slot_again(tmp_path: Path) -> None:
    async with house(tmp_path, slots=3) as here:
        answers = [await infill(here) for _ in range(3)]
        assert len(set(pins(here, "/infill"))) == 1
        assert all(answer.computed == 1 for answer in answers[1:])


async def test_on_the_only_slot_the_conversation_is_saved_first_and_comes_back(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk = await lives_in(here, 0)
        await infill(here)
        assert [deed for deed, _ in here.deeds] == ["save", "erase"]
        back = await here.proxy.turn(talk)
        assert back.told == ("restored", None)
        assert back.reused > back.computed


async def test_an_editor_under_a_conversations_id_is_not_the_conversation(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        await here.proxy.turn(talk)
        await infill(here, **talk.headers)
        assert (await here.proxy.turn(talk)).told == ("resident", None)


async def test_a_conversation_that_names_a_slot_keeps_its_own(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        slots = [(await here.proxy.turn(talk, id_slot=named)).slot for named in (0, 1, 7, -1)]
        assert len(set(slots)) == 1


LIKE_NO_CLIENTS = {
    "behind white space": (b'{"id_slot":0,"prompt":"' + b"x" * 2000 + b'"' + b" " * 5000 + b"}", b""),
    "before a nul": (b'{"id_slot":0,"prompt":"' + b"x" * 2000 + b'"}', b'\0{"a":1}'),
    "without telling": (b'{"id_slot":0,"prompt":"x"' + b" " * 5000 + b"}", b"\0"),
    "in the dark": (b'{"id_slot":0,"prompt":' + b"[" * 1100 + b"]" * 1100 + b" " * 5000 + b"}", b"\0}"),
}
"""Bodies of which the server reads the first part alone."""


@pytest.mark.parametrize(("read", "unread"), LIKE_NO_CLIENTS.values(), ids=LIKE_NO_CLIENTS)
async def test_nobody_gets_the_slot_of_a_conversation_by_the_form_of_a_body(
    tmp_path: Path, read: bytes, unread: bytes
) -> None:
    async with house(tmp_path, slots=3) as here:
        await lives_in(here, 0)
        here.forget_calls()
        async with here.proxy.client.post("/completion", data=read + unread) as answer:
            await answer.read()
        await here.proxy.at_rest()
        (call,) = [call for call in here.fake.calls if call.path == "/completion"]
        assert call.body.endswith(unread)
        named = re.findall(rb'"id_slot":(-?\d+)', call.body[: len(call.body) - len(unread)])
        assert named[-1] != b"0"


async def test_a_request_that_wants_nothing_reused_takes_nothing_from_its_conversation(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        slot = (await here.proxy.turn(talk)).slot
        body = {**talk.body(), "cache_prompt": False}
        fresh = await here.proxy.post("/v1/chat/completions", body, **talk.headers)
        assert (fresh.outcome, fresh.reused) == ("auxiliary", 0)
        assert fresh.slot != slot
        assert (await here.proxy.turn(talk)).told == ("resident", None)


MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "answers": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
    "prompts": ("/completion", {"prompt": ["one two", "three four"], "n_predict": 2, "id_slot": 0}),
    "openai prompts": ("/v1/completions", {"prompt": ["one two", "three four"], "max_tokens": 2}),
}


@pytest.mark.parametrize(("path", "body"), MANY.values(), ids=MANY)
async def test_what_uses_several_slots_waits_for_all_and_is_believed_to_have_used_them(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with house(tmp_path, slots=2) as here:
        talks = [Talk("alpha"), Talk("beta")]
        for talk in talks:
            await here.proxy.turn(talk)
        assert (await here.proxy.post(path, body)).status == 200
        await here.proxy.at_rest()
        assert sorted(deed for deed, _ in here.deeds) == ["save", "save"]
        held = {view.id: view.occupant for view in here.proxy.runtime.table.views()}
        for slot, occupant in held.items():
            # Either it was not touched, and says what its conversation says, or nobody is believed there.
            assert occupant is None or here.fake.slots[slot].words.startswith(b"CANARY")
        back = [await here.proxy.turn(talk) for talk in talks]
        assert all(answer.reused > answer.computed for answer in back)


async def test_slot_actions_of_clients_are_refused_and_looking_is_not(tmp_path: Path) -> None:
    """SillyTavern saves and restores slots itself."""
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        await here.proxy.turn(talk)
        for action in ("save", "restore", "erase"):
            refused = await here.proxy.post(f"/slots/0?action={action}", {"filename": "mine.bin"})
            assert (refused.status, refused.code) == (403, "KV_ROUTE_FORBIDDEN")
        assert (await here.proxy.get("/slots")).status == 200
        assert here.deeds == []
        assert (await here.proxy.turn(talk)).told == ("resident", None)


async def test_a_slot_that_is_named_where_kvproxy_cannot_read_it_is_not_taken(tmp_path: Path) -> None:
    """Python's parser, and the server's, take what ours does not: NaN."""
    async with house(tmp_path, slots=2, mix_on_busy=True, token_delay=0.01) as here:
        talk = Talk("alpha", predict=60)
        async with here.proxy.stream(talk) as stream:
            await stream.first()
            assert stream.slot is not None
            body = {"prompt": "hello", "n_predict": 2, "id_slot": int(stream.slot), "top_p": float("nan")}
            answer = await here.proxy.post("/completion", json.dumps(body).encode())
            assert answer.status == 200
            talk.heard(await stream.rest())
