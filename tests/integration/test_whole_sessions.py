"""Sessions of known clients from end to end, in the shapes in which these send them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.fakes.runs import TAG, Run
from tests.support.proxy import House, house
from tests.support.talk import Answer

MESSAGES, CHAT = "/v1/messages?beta=true", "/v1/chat/completions"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and the run in which the server computed it."""

    answer: Answer
    run: Run

    @property
    def session(self) -> str | None:
        return self.answer.headers.get("X-KVProxy-Session")

    def goes_on_from(self, earlier: Asked) -> bool:
        """Whether all was reused that both prompts begin with, less a few tokens."""
        return self.run.kept > len(earlier.run.prompt) - 20


async def ask(here: House, path: str, body: Body, **headers: str) -> Asked:
    tag = uuid4().hex
    answer = await here.proxy.post(path, body, **{TAG: tag}, **headers)
    assert answer.status == 200, answer.raw
    (run,) = [run for run in here.fake.runs if run.tag == tag]
    return Asked(answer, run)


def text(said: str, *, is_marked: bool = False) -> Body:
    mark = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
    return {"type": "text", "text": said, **mark}


# Claude Code


@dataclass(slots=True)
class ClaudeCode:
    """One agent. The mark of the cache moves to the newest message; a system message follows the first."""

    stamp: str
    system: str
    tools: tuple[str, ...]
    said: list[tuple[str, str]] = field(default_factory=list)
    agent: str = ""

    def body(self, last: str) -> Body:
        turns = [*self.said, ("user", last)]
        messages = [
            {"role": role, "content": [text(said, is_marked=n == len(turns) - 1)]}
            for n, (role, said) in enumerate(turns)
        ]
        messages.insert(1, {"role": "system", "content": "Available agent types: " + "Explore, Plan, " * 20})
        stamp = f"x-anthropic-billing-header: cc_version=2.1.197.{self.stamp}; cc_entrypoint=sdk-cli;"
        return {
            "model": "local",
            "max_tokens": 24,
            "system": [text(stamp), text(self.system, is_marked=True)],
            "tools": [{"name": name, "description": "", "input_schema": {}} for name in self.tools],
            "messages": messages,
        }

    @property
    def headers(self) -> dict[str, str]:
        more = {"X-Claude-Code-Agent-Id": self.agent} if self.agent else {}
        return {"X-Claude-Code-Session-Id": "66c9f377-5ac9-9826-08c4", **more}

    async def turn(self, here: House, last: str) -> Asked:
        asked = await ask(here, MESSAGES, self.body(last), **self.headers)
        self.said += [("user", last), ("assistant", asked.answer.body["content"][0]["text"])]
        return asked


def claude_title(first: str) -> Body:
    title = {"type": "object", "properties": {"title": {"type": "string"}}}
    told = "Generate a concise, sentence-case title (3-7 words) for this session."
    return {
        "model": "local",
        "max_tokens": 12,
        "system": [text("x-anthropic-billing-header: cc_version=2.1.197.bc5;"), text(told)],
        "tools": [],
        "output_config": {"format": {"type": "json_schema", "schema": title}},
        "messages": [{"role": "user", "content": [text(first)]}],
    }


@pytest.mark.parametrize("slots", [1, 2])
async def test_claude_codes_main_agent_its_sub_agent_titles_and_a_compaction_under_one_id(
    tmp_path: Path, slots: int
) -> None:
    main = ClaudeCode("bc5", "You are Claude Code. " * 60, ("Bash", "Agent"))
    helper = ClaudeCode("96b", "You search files. " * 50, ("Read",), agent="ad1ab9654112aa9ec")
    async with house(tmp_path, slots=slots) as here:
        title, first = await asyncio.gather(
            ask(here, MESSAGES, claude_title("fix it"), **main.headers), main.turn(here, "fix it")
        )
        explored = [await helper.turn(here, "where is it?"), await helper.turn(here, "and where else?")]
        second = await main.turn(here, "the tool said: in a.py")
        again = await ask(here, MESSAGES, claude_title("fix it, in a.py"), **main.headers)
        third = await main.turn(here, "go on")
        summary = await main.turn(
            here,
            "Your task is to create a detailed summary of the conversation so far. Do not use any tools.",
        )
        after = ClaudeCode("bc5", main.system, main.tools)
        compacted = await after.turn(here, "This session is being continued. Summary: we fixed a.py.")
        last = await after.turn(here, "now test it")

    assert [title.answer.outcome, again.answer.outcome] == ["auxiliary", "auxiliary"]
    assert {one.session for one in (first, second, third, summary)} == {first.session}
    assert {one.session for one in explored} == {explored[0].session}
    assert compacted.session == last.session
    assert len({first.session, explored[0].session, compacted.session}) == 3
    turns = [first, second, third, summary]
    assert all(later.goes_on_from(earlier) for earlier, later in pairwise(turns))
    assert explored[1].goes_on_from(explored[0])
    assert last.goes_on_from(compacted)


# Without any id


def chat(*said: str, system: str = "") -> list[Body]:
    head = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return [*head, *({"role": roles[n % 2], "content": one} for n, one in enumerate(said))]


async def test_clines_tasks_are_two_and_outlive_midnight(tmp_path: Path) -> None:
    """Its system prompt tells the date, and each input is followed by what the editor shows just then."""

    def task(date: str, *said: str) -> Body:
        messages = chat(*said, system=f"You are Cline. Today is {date}. " + "TOOL USE " * 80)
        for n, message in enumerate(messages[1:]):
            if n % 2 == 0:
                shown = text(f"<environment_details>\n# Current Time\n{n}:00\n</environment_details>")
                message["content"] = [text(f"<task>{message['content']}</task>"), shown]
        return {"messages": messages, "max_tokens": 12}

    async with house(tmp_path, slots=2) as here:
        one = await ask(here, CHAT, task("Monday", "write a parser for dates, please, in pure Python"))
        other = await ask(here, CHAT, task("Monday", "find out why the tests are so slow on this machine"))
        said = ("write a parser for dates, please, in pure Python", one.answer.text, "and for times")
        later = await ask(here, CHAT, task("Monday", *said))
        reply = later.answer.text
        tomorrow = await ask(here, CHAT, task("Tuesday", *said, reply, "and for time zones"))
        day_after = await ask(here, CHAT, task("Tuesday", *said, reply, "and for time zones", "ok", "thanks"))
    assert one.session != other.session
    assert {asked.session for asked in (later, tomorrow, day_after)} == {one.session}
    assert later.goes_on_from(one)
    assert day_after.goes_on_from(tomorrow)


async def test_aiders_chat_goes_on_though_the_files_before_its_history_change(tmp_path: Path) -> None:
    """Its map and files come before all that was said, each with a reply that nobody gave."""

    def coder(file: str, *said: str) -> Body:
        head = ("Repository map:\n" + "a.py b.py " * 60, "Ok, I won't try and edit those files.")
        files = (f"I have *added these files to the chat*:\n{file}", "Ok, I will edit only those.")
        return {"messages": chat(*head, *files, *said, system="Act as an expert developer. " * 20)}

    async with house(tmp_path, slots=2) as here:
        first = await ask(here, CHAT, {**coder("x = 1", "add a test"), "max_tokens": 12})
        said = ("add a test", first.answer.text, "and another")
        ping = await ask(here, CHAT, {**coder("x = 1", *said), "max_tokens": 1})
        second = await ask(here, CHAT, {**coder("x = 1", *said), "max_tokens": 12})
        told = {
            "messages": chat("# USER\nadd a test", system="*Briefly* summarize this partial conversation")
        }
        summary = await ask(here, CHAT, {**told, "max_tokens": 12})
        edited = await ask(here, CHAT, {**coder("x = 2", *said), "max_tokens": 12})
        more = (*said, edited.answer.text, "thanks")
        last = await ask(here, CHAT, {**coder("x = 2", *more), "max_tokens": 12})
    assert summary.answer.outcome == "auxiliary"
    assert {asked.session for asked in (ping, second, edited, last)} == {first.session}
    assert [asked.answer.outcome for asked in (second, edited, last)] == ["resident"] * 3
    assert second.goes_on_from(ping)
    assert edited.run.kept > 1000  # what comes before the file
    assert last.goes_on_from(edited)


@pytest.mark.parametrize(("slots", "outcome"), [(1, "restored"), (2, "resident")])
async def test_librechats_title_of_an_own_wording_costs_its_chat_nothing(
    tmp_path: Path, slots: int, outcome: str
) -> None:
    """Beside the first turn, with the id of the user, who is no conversation."""
    told = "Provide a concise, 5-word-or-less title for the conversation.\n\nConversation:\nUser: fjords"
    question = "Tell me all about fjords. " * 30

    def talk(*said: str) -> Body:
        return {"user": "64f0", "messages": chat(*said), "max_tokens": 12}

    async with house(tmp_path, slots=slots, token_delay=0.005) as here:

        async def title_beside() -> Asked:
            await here.proxy.until(lambda: bool(here.processing))
            return await ask(here, CHAT, talk(told))

        first, title = await asyncio.gather(ask(here, CHAT, talk(question)), title_beside())
        later = await ask(here, CHAT, talk(question, first.answer.text, "and where are they?"))
    assert later.session == first.session != title.session
    assert later.answer.outcome == outcome
    assert later.goes_on_from(first)
