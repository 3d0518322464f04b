"""Requests in the shapes in which known clients send them: each finds its own conversation and no other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvproxy.sessions.newcomers import MOST_UNCONTINUED
from kvproxy.telemetry.events import CheckpointStarted, StaticIdSeen
from tests.support.proxy import House, KvProxy, house
from tests.support.talk import Answer

CHAT = "/v1/chat/completions"
AGENT = "You are an agent in a terminal. " * 50
TITLES = "You are a title generator. You output ONLY a thread title. Nothing else."
TASK = "### Task:\nGenerate a concise, 3-5 word title with an emoji.\n### Output:\nJSON\n<chat_history>\n"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("bash", "task")]

Turn = dict[str, Any]


def system(text: str) -> Turn:
    return {"role": "system", "content": text}


def user(text: object) -> Turn:
    return {"role": "user", "content": text}


def reply(text: str) -> Turn:
    return {"role": "assistant", "content": text}


async def ask(proxy: KvProxy, *turns: Turn, headers: dict[str, str] | None = None, **more: Any) -> Answer:
    body = {"messages": list(turns), "max_tokens": 8, **more}
    answer = await proxy.post(CHAT, body, **(headers or {}))
    assert answer.status == 200
    return answer


def session_of(answer: Answer) -> str:
    return answer.headers["X-KVProxy-Session"]


def reused(answer: Answer) -> int:
    return int(answer.body["timings"]["cache_n"])


# OpenCode: the title call first and beside turn one, under the same id; sub-agents under their own


async def test_opencodes_title_call_beside_turn_one_takes_nothing_from_it(tmp_path: Path) -> None:
    ids = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}
    async with house(tmp_path, slots=2) as here:
        title, first = await asyncio.gather(
            ask(here.proxy, system(TITLES), user("Generate a title:\n"), user("hi"), headers=ids),
            ask(here.proxy, system(AGENT), user("hi"), headers=ids, tools=TOOLS),
        )
        second = await ask(
            here.proxy, system(AGENT), user("hi"), reply(first.text), user("go on"), headers=ids, tools=TOOLS
        )
        assert title.outcome == "auxiliary"
        assert session_of(first) == session_of(second)
        assert second.told == ("resident", None)
        assert reused(second) > len(AGENT)


async def test_opencodes_sub_agent_has_a_session_that_knows_its_parent(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        main = await ask(here.proxy, system(AGENT), user("hi"), headers={"x-session-id": "p"}, tools=TOOLS)
        child = {"x-session-id": "c", "x-parent-session-id": "p"}
        agent = await ask(here.proxy, system(AGENT), user("look"), headers=child, tools=TOOLS[:1])
        listed = (await here.proxy.admin("GET", "sessions/c")).body["sessions"]
        assert [one["parent"] for one in listed] == [session_of(main)]
        assert session_of(agent) != session_of(main)
        again = await ask(
            here.proxy,
            *(system(AGENT), user("hi"), reply(main.text), user("more")),
            headers={"x-session-id": "p"},
            tools=TOOLS,
        )
        assert again.told == ("resident", None)


# Codex: ids of thread and tree; items that come and go


def codex(thread: str, **more: str) -> dict[str, str]:
    return {"thread-id": thread, "session-id": "tree", "originator": "codex_exec", **more}


async def respond(proxy: KvProxy, *items: Turn, headers: dict[str, str]) -> Answer:
    body = {"instructions": AGENT, "input": list(items), "tools": [], "max_output_tokens": 8, "store": False}
    answer = await proxy.post("/v1/responses", {**body, "prompt_cache_key": "tree"}, **headers)
    assert answer.status == 200
    return answer


def item(role: str, text: str, **more: Any) -> Turn:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


async def test_codexs_root_and_child_thread_are_two_and_its_items_may_change_their_dress(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2) as here:
        root = await respond(here.proxy, item("user", "hi"), headers=codex("t1"))
        child = await respond(
            here.proxy,
            item("user", "review"),
            headers=codex("t2", **{"x-codex-parent-thread-id": "t1", "x-openai-subagent": "review"}),
        )
        later = await respond(
            here.proxy,
            item("user", "hi", id="msg_1", status="completed"),
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            item("assistant", "hello", id="msg_2", status="completed"),
            item("user", "go on"),
            headers=codex("t1"),
        )
        assert session_of(root) == session_of(later) != session_of(child)
        assert later.told[0] == "resident"


# Open WebUI: chat and tasks under one chat id


async def test_open_webuis_task_calls_leave_the_chat_alone(tmp_path: Path) -> None:
    ids = {"X-OpenWebUI-Chat-Id": "chat"}
    said = [user("What is a fjord? " * 30)]
    async with house(tmp_path, slots=2) as here:
        for _ in range(3):
            answer = await ask(here.proxy, *said, headers=ids)
            said += [reply(answer.text), user("And another?")]
            task = await ask(here.proxy, user(TASK + json.dumps(said)), headers=ids)
            assert task.outcome == "auxiliary"
            assert task.slot != answer.slot
            assert answer.told[0] == ("resident" if len(said) > 3 else "cold")
        last = await ask(here.proxy, *said, headers=ids)
        assert last.told == ("resident", None)
        assert reused(last) > 500
        assert here.deeds == []


# Without any id: Cline, Aider, LibreChat, and whoever uses an SDK


@pytest.mark.parametrize("slots", [1, 2])
async def test_chats_without_an_id_come_back_after_both_restarted(tmp_path: Path, slots: int) -> None:
    async with house(tmp_path, slots=slots) as here:
        chats = [[system(AGENT), user(f"Question {n}: why?")] for n in range(3)]
        sessions: list[set[str]] = [set(), set(), set()]
        for turn in range(3):
            for n, said in enumerate(chats):
                answer = await ask(here.proxy, *said)
                sessions[n].add(session_of(answer))
                assert turn == 0 or answer.told[0] in ("resident", "restored")
                said += [reply(answer.text), user(f"More {turn}")]
            await here.proxy.drain()
            await here.proxy.restart()
            await here.fake.restart()
            await here.proxy.ready()
        assert [len(own) for own in sessions] == [1, 1, 1]
        assert len(set.union(*sessions)) == 3


async def test_a_chat_whose_file_of_conversations_was_lost_is_found_by_its_name(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        said = [system(AGENT), user("hi")]
        first = await ask(here.proxy, *said)
        await here.proxy.drain()
        await here.proxy.stop()
        (here.state_dir / "conversations.json").write_bytes(b"{")
        await here.proxy.start()
        await here.fake.restart()
        await here.proxy.ready()
        again = await ask(here.proxy, *said, reply(first.text), user("go on"))
        assert session_of(again) == session_of(first)
        assert again.told[0] == "restored"


async def test_an_edit_a_regeneration_and_a_going_back_stay_in_the_chat(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        said = [system(AGENT), user("one")]
        first = await ask(here.proxy, *said)
        said += [reply(first.text), user("two")]
        answers = [
            await ask(here.proxy, *said),
            await ask(here.proxy, *said),
            await ask(here.proxy, *said[:-1], user("two, edited")),
            await ask(here.proxy, *said[:2]),
        ]
        assert {session_of(one) for one in answers} == {session_of(first)}
        assert {one.told[0] for one in answers} == {"resident"}


async def test_a_retry_of_a_request_whose_client_is_gone_takes_over_its_prefill(tmp_path: Path) -> None:
    """As SDKs do after a timeout: the same bytes again, with a mark that tells which try it is."""
    async with house(tmp_path, token_delay=0.02) as here:
        body = {"messages": [system(AGENT), user("hi")], "max_tokens": 200, "stream": True}
        async with here.proxy.client.post(CHAT, json=body) as response:
            await response.content.readany()
            session = response.headers["X-KVProxy-Session"]
            response.close()
        again = await ask(here.proxy, system(AGENT), user("hi"), headers={"x-stainless-retry-count": "1"})
        assert session_of(again) == session
        assert reused(again) > len(AGENT)


async def test_of_two_equal_requests_at_once_each_goes_on_in_its_own_session(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.02) as here:
        said = [system(AGENT), user("hi")]
        one, other = await asyncio.gather(ask(here.proxy, *said), ask(here.proxy, *said))
        assert session_of(one) != session_of(other)
        first = await ask(here.proxy, *said, reply("a"), user("b"))
        second = await ask(here.proxy, *said, reply("c"), user("d"))
        assert {session_of(first), session_of(second)} == {session_of(one), session_of(other)}
        assert {first.told[0], second.told[0]} == {"resident"}


async def test_with_one_slot_equal_requests_take_turns_in_one_session(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        said = [system(AGENT), user("hi")]
        answers = await asyncio.gather(*(ask(here.proxy, *said) for _ in range(3)))
        assert len({session_of(one) for one in answers}) == 1
        assert sorted(one.told[0] or "" for one in answers) == ["cold", "resident", "resident"]


async def test_a_raw_prompt_that_grows_is_a_conversation(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        prompt = AGENT + "<|user|>hi<|assistant|>"
        answers = []
        for turn in range(3):
            body = {"prompt": prompt, "n_predict": 4}
            answers.append(await here.proxy.post("/completion", body))
            prompt += f"{answers[-1].body['content']}<|user|>more {turn}<|assistant|>"
        assert len({session_of(one) for one in answers}) == 1
        assert [one.told[0] for one in answers] == ["cold", "resident", "resident"]


# One id for everything


async def test_a_header_that_is_the_same_for_all_costs_nobody_the_conversation(tmp_path: Path) -> None:
    static = {"X-Session-Id": "everything"}
    async with house(tmp_path, slots=2) as here:
        chats = [[system(AGENT), user(f"Question {n}?")] for n in range(6)]
        for turn in range(3):
            for said in chats:
                answer = await ask(here.proxy, *said, headers=static)
                assert turn == 0 or answer.told[0] in ("resident", "restored")
                said += [reply(answer.text), user("go on")]
        assert len(here.proxy.heard(StaticIdSeen)) == 1
        assert len((await here.proxy.admin("GET", "sessions/everything")).body["sessions"]) == 6
        purged = (await here.proxy.admin("DELETE", "sessions/everything")).body
        assert purged["purged"] == 6
        assert here.files == []


# Single questions


async def test_a_long_row_of_single_questions_is_not_saved_for_ever(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        document = "The text that all questions are about. " * 60
        answers = [await ask(here.proxy, user(f"{document} Question {n}?")) for n in range(40)]
        assert len(here.proxy.heard(CheckpointStarted)) == MOST_UNCONTINUED
        assert min(reused(answer) for answer in answers[1:]) > len(document)
        first, said = answers[-2], [user(f"{document} Question 38?")]
        went_on = await ask(here.proxy, *said, reply(first.text), user("go on"))
        assert session_of(went_on) == session_of(first)
        await ask(here.proxy, user(f"{document} Question 99?"))
        assert len(here.proxy.heard(CheckpointStarted)) == MOST_UNCONTINUED + 1


# Where it is turned off


async def test_without_the_setting_a_request_without_an_id_is_nobodys(tmp_path: Path) -> None:
    async with house(tmp_path, sessions={"implicit": False}) as here:
        answer = await ask(here.proxy, system(AGENT), user("hi"))
        assert "X-KVProxy-Session" not in answer.headers
        assert sessions_of(here) == 0


async def test_where_nothing_can_be_saved_a_request_without_an_id_is_left_to_the_servers_own_memory(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, persists=False) as here:
        answer = await ask(here.proxy, system(AGENT), user("hi"))
        assert "X-KVProxy-Session" not in answer.headers
        (sent,) = [call for call in here.fake.calls if call.path == CHAT]
        assert b"id_slot" not in sent.body
        assert sessions_of(here) == 0


def sessions_of(here: House) -> int:
    return len(here.proxy.runtime.registry)


# Bodies that no client of ours should send: what is wrong with them is the server's to say


ODD_BODIES: dict[str, dict[str, Any]] = {
    "a part whose type is a list": {"messages": [user([{"type": ["text"], "text": "hi"}])]},
    "a role that is an object": {"messages": [{"role": {"a": 1}, "content": "hi"}]},
    "an item whose type is an object": {"messages": [{"type": {"a": 1}, "role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES)
async def test_a_body_of_odd_values_reaches_the_server(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with house(tmp_path) as here:
        sent = {**body, "input": body["messages"], "max_tokens": 1}
        await here.proxy.post(path, sent, **{"X-Session-Id": "a"})
        assert [call.path for call in here.fake.calls].count(path) == 1
        await here.proxy.at_rest()
