"""Side calls under a conversation's id, in the shapes in which real clients send them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxy import House, house
from tests.support.talk import FILLER, Answer, Talk

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


def opencode_title(talk: Talk) -> dict[str, Any]:
    """Sent first of all, in parallel with the first turn."""
    system = "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>\n..."
    ask = {"role": "user", "content": "Generate a title for this conversation:\n"}
    said = {"role": "user", "content": f'"{talk.messages[0]["content"]}"'}
    messages = [{"role": "system", "content": system}, ask, said]
    return {"model": "local", "max_tokens": 12, "messages": messages}


def open_webui(talk: Talk) -> dict[str, Any]:
    text = (
        "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
        f"### Output:\nJSON\n### Chat History:\n<chat_history>\n{talk.messages[0]['content']}\n"
    )
    return {"model": "local", "stream": False, "messages": [{"role": "user", "content": text}]}


def zed_title(talk: Talk) -> dict[str, Any]:
    ask = {"role": "user", "content": "Generate a concise 3-7 word title for this conversation"}
    return {"messages": [*talk.messages, ask], "max_tokens": 12}


def unknown_client(talk: Talk) -> dict[str, Any]:
    """No wording that anybody knows: but the conversation has tools, and this has none."""
    messages = [{"role": "user", "content": f"Name this: {talk.messages[0]['content']}"}]
    return {"messages": messages, "max_tokens": 12}


SHAPES = {one.__name__: one for one in (opencode_title, open_webui, unknown_client)}


async def side_call(here: House, talk: Talk, body: dict[str, Any], **headers: str) -> Answer:
    answer = await here.proxy.post(CHAT, body, **talk.headers, **headers)
    assert answer.status == 200, answer.raw
    await here.proxy.at_rest()
    return answer


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_a_side_call_leaves_its_conversation_in_its_slot(tmp_path: Path, shape: Any) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        for _ in range(3):
            went = await here.proxy.turn(talk, tools=TOOLS)
            assert went.outcome in ("cold", "resident")
            side = await side_call(here, talk, shape(talk))
            assert side.outcome == "auxiliary"
            assert side.slot != went.slot
        assert here.deeds == []
        back = await here.proxy.turn(talk, tools=TOOLS)
        assert back.told == ("resident", None)
        assert back.reused > back.computed


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_on_the_only_slot_it_is_saved_first_and_restored_when_it_goes_on(
    tmp_path: Path, shape: Any
) -> None:
    async with house(tmp_path) as here:
        talk = Talk("alpha")
        await here.proxy.turn(talk, tools=TOOLS)
        await side_call(here, talk, shape(talk))
        await side_call(here, talk, shape(talk))
        assert [deed for deed, _ in here.deeds] == ["save", "erase"]  # nothing is restored for a side call
        back = await here.proxy.turn(talk, tools=TOOLS)
        assert back.told == ("restored", None)
        assert back.reused > back.computed
        # and nothing of a side call is ever saved
        assert len(here.manifests()) == 1


async def test_a_title_that_is_asked_for_before_the_first_turn_owns_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        talk = Talk("alpha")
        title, first = await asyncio.gather(
            here.proxy.post(CHAT, opencode_title(talk), **talk.headers),
            here.proxy.post(CHAT, talk.body(tools=TOOLS), **talk.headers),
        )
        talk.heard(first.text)
        assert (title.outcome, first.told) == ("auxiliary", ("cold", "new-session"))
        await here.proxy.at_rest()
        assert (await here.proxy.turn(talk, tools=TOOLS)).told == ("resident", None)


async def test_side_calls_share_a_slot_and_leave_the_blank_ones_to_conversations(tmp_path: Path) -> None:
    async with house(tmp_path, slots=3) as here:
        talk = Talk("alpha")
        await here.proxy.turn(talk, tools=TOOLS)
        slots = {(await side_call(here, talk, opencode_title(talk))).slot for _ in range(3)}
        assert len(slots) == 1
        assert (await here.proxy.turn(Talk("beta"))).slot not in slots
        assert here.deeds == []


async def test_slots_that_are_set_apart_are_no_conversations(tmp_path: Path) -> None:
    async with house(tmp_path, slots=3, upstream={"auxiliary_slots": 1}) as here:
        talks = [Talk("alpha"), Talk("beta"), Talk("gamma")]
        homes = {(await here.proxy.turn(talk, tools=TOOLS)).slot for talk in talks}
        assert homes == {"0", "1"}
        sides = {(await side_call(here, talk, opencode_title(talk))).slot for talk in talks}
        assert sides == {"2"}


async def test_a_header_of_the_operator_names_the_task(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, auxiliary={"headers": ["x-what-for"]}) as here:
        talk = Talk("alpha")
        await here.proxy.turn(talk)
        tags = {"messages": [{"role": "user", "content": "Some tags, please"}], "max_tokens": 12}
        side = await side_call(here, talk, tags, X_What_For="tags_generation")
        assert side.outcome == "auxiliary"
        turn = await here.proxy.post(CHAT, talk.body(), **talk.headers, **{"X-What-For": ""})
        assert turn.told == ("resident", None)


async def test_wordings_of_the_operators_own_count_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("- {client: my agent, where: system, starts: You name threads}\n")
    async with house(tmp_path, slots=2, auxiliary={"fingerprints": str(file)}) as here:
        talk = Talk("alpha")
        system = {"role": "system", "content": "You name threads, in three words."}
        side = await side_call(here, talk, {"messages": [system, *talk.messages], "max_tokens": 12})
        assert side.outcome == "auxiliary"


async def test_what_is_called_a_turn_is_one_whatever_it_says(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        turn = await side_call(here, talk, opencode_title(talk), X_KVProxy_Purpose="main")
        assert turn.told == ("cold", "new-session")


async def test_without_the_rule_a_title_takes_its_conversations_place(tmp_path: Path) -> None:
    """What the rule is for."""
    async with house(tmp_path, slots=2, auxiliary={"recognise": False}) as here:
        talk = Talk("alpha", words=60)
        await here.proxy.turn(talk, tools=TOOLS)
        side = await side_call(here, talk, open_webui(talk))
        assert side.outcome != "auxiliary"


async def test_a_body_is_never_changed_by_what_it_is_taken_for(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        here.forget_calls()
        body = (
            b'{"max_tokens": 1e1,"messages":[{"role":"user","content":"### Task:\\nx\\n### Output:\\ny"}] }'
        )
        await here.proxy.post(CHAT, body, **talk.headers)
        (call,) = [call for call in here.fake.calls if call.path == CHAT]
        assert call.body.startswith(body[:-2])
        assert FILLER not in call.body.decode()


async def test_what_looks_like_a_side_call_and_carries_its_conversation_on_is_a_turn(tmp_path: Path) -> None:
    """A suggestion after a turn, or the summary before a compaction: all that was said, and a request."""
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        for _ in range(2):
            slot = (await here.proxy.turn(talk)).slot
        side = await side_call(here, talk, zed_title(talk), X_Claude_Code_Request_Class="auxiliary")
        assert (side.told, side.slot) == (("resident", None), slot)
        assert side.reused > side.computed
        back = await here.proxy.turn(talk)
        assert back.told == ("resident", None)
        assert back.reused > back.computed


async def test_our_own_header_sends_even_that_elsewhere(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        slot = (await here.proxy.turn(talk)).slot
        side = await side_call(here, talk, zed_title(talk), X_KVProxy_Purpose="auxiliary")
        assert side.outcome == "auxiliary"
        assert side.slot != slot


async def test_a_side_call_without_an_id_finds_a_slot_that_nobody_lives_in(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talk = Talk("alpha")
        slot = (await here.proxy.turn(talk)).slot
        side = await here.proxy.post(CHAT, opencode_title(Talk("other")))
        assert side.outcome == "auxiliary"
        assert side.slot != slot
        assert here.deeds == []
