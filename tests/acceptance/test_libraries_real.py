"""The official libraries as they come, on every endpoint they have: what they are told, and what is reused.

They are not told of kvproxy but by their address and one header. Tokens are as the library's own types say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.support.load import words

pytestmark = pytest.mark.real

TWO_SLOTS = ("-c", "32768", "-np", "2", "--cache-ram", "0")
LONG = ("-c", "65536", "-np", "1", "--cache-ram", "0", "-b", "128", "-ub", "128")
DOCUMENT = 300
"""Words of which the first question speaks; about 2,000 tokens."""
FEW = 80
"""Tokens that a later turn may have to compute: its question, and the end of the prompt."""
LONG_DOCUMENT = 1200
MOST_TRIES = 20


@dataclass(frozen=True, slots=True)
class Reply:
    """`prompt` and `reused` are tokens, `reused` a part of `prompt`. `turns` go into the history."""

    outcome: str
    turns: list[Any]
    prompt: int
    reused: int

    @property
    def computed(self) -> int:
        return self.prompt - self.reused


Ask = Callable[[Any, list[Any]], Awaitable[Reply]]
"""The history with its new question, sent to one endpoint by a library."""


def openai_library(stage: Stage, session: str, **more: Any) -> openai.AsyncOpenAI:
    headers = {"X-Session-Id": session}
    return openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", default_headers=headers, **more)


def anthropic_library(stage: Stage, session: str, **more: Any) -> anthropic.AsyncAnthropic:
    headers = {"X-Session-Id": session}
    return anthropic.AsyncAnthropic(base_url=stage.url, api_key="none", default_headers=headers, **more)


def outcome_of(headers: Any) -> str:
    return str(headers["X-KVProxy-Outcome"])


def said(text: str) -> list[Any]:
    assert text
    return [{"role": "assistant", "content": text}]


def of_openai(headers: Any, turns: list[Any], usage: Any) -> Reply:
    """Chat and completions say `prompt_tokens`, responses `input_tokens`."""
    prompt = getattr(usage, "prompt_tokens", None) or usage.input_tokens
    details = getattr(usage, "prompt_tokens_details", None) or getattr(usage, "input_tokens_details", None)
    return Reply(outcome_of(headers), turns, prompt, (details.cached_tokens or 0) if details else 0)


def of_anthropic(headers: Any, text: str, usage: Any) -> Reply:
    """Its `input_tokens` are those that were computed."""
    reused = usage.cache_read_input_tokens or 0
    return Reply(outcome_of(headers), said(text), usage.input_tokens + reused, reused)


async def chat(api: openai.AsyncOpenAI, history: list[Any]) -> Reply:
    raw = await api.chat.completions.with_raw_response.create(model="any", messages=history, max_tokens=8)
    answer = raw.parse()
    return of_openai(raw.headers, said(answer.choices[0].message.content or ""), answer.usage)


async def chat_streamed(api: openai.AsyncOpenAI, history: list[Any]) -> Reply:
    raw = await api.chat.completions.with_raw_response.create(
        model="any", messages=history, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in raw.parse()]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return of_openai(raw.headers, said(text), chunks[-1].usage)


def prompt_of(history: list[Any]) -> str:
    return "".join(f"{one['role']}: {one['content']}\n" for one in history)


async def completions(api: openai.AsyncOpenAI, history: list[Any]) -> Reply:
    raw = await api.completions.with_raw_response.create(model="any", prompt=prompt_of(history), max_tokens=8)
    answer = raw.parse()
    return of_openai(raw.headers, said(answer.choices[0].text), answer.usage)


async def completions_streamed(api: openai.AsyncOpenAI, history: list[Any]) -> Reply:
    raw = await api.completions.with_raw_response.create(
        model="any",
        prompt=prompt_of(history),
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in raw.parse()]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    return of_openai(raw.headers, said(text), chunks[-1].usage)


async def responses(api: openai.AsyncOpenAI, history: list[Any]) -> Reply:
    raw = await api.responses.with_raw_response.create(model="any", input=history, max_output_tokens=8)
    answer = raw.parse()
    assert answer.output_text
    return of_openai(raw.headers, answer.output, answer.usage)


async def responses_streamed(api: openai.AsyncOpenAI, history: list[Any]) -> Reply:
    raw = await api.responses.with_raw_response.create(
        model="any", input=history, max_output_tokens=8, stream=True
    )
    events = [event async for event in raw.parse()]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.completed"
    answer = events[-1].response
    assert text == answer.output_text != ""
    return of_openai(raw.headers, answer.output, answer.usage)


async def messages(api: anthropic.AsyncAnthropic, history: list[Any]) -> Reply:
    raw = await api.messages.with_raw_response.create(model="any", messages=history, max_tokens=8)
    answer = await raw.parse()
    text = "".join(block.text for block in answer.content if block.type == "text")
    return of_anthropic(raw.headers, text, answer.usage)


async def messages_streamed(api: anthropic.AsyncAnthropic, history: list[Any]) -> Reply:
    async with api.messages.stream(model="any", messages=history, max_tokens=8) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        answer = await stream.get_final_message()
    return of_anthropic(stream.response.headers, text, answer.usage)


OF_OPENAI = (chat, chat_streamed, completions, completions_streamed, responses, responses_streamed)
OF_ANTHROPIC = (messages, messages_streamed)


def library_of(ask: Ask) -> Callable[..., Any]:
    return anthropic_library if ask in OF_ANTHROPIC else openai_library


@pytest.mark.parametrize("ask", [*OF_OPENAI, *OF_ANTHROPIC], ids=lambda ask: ask.__name__)
async def test_a_conversation_of_a_library_outlives_its_slot_and_its_server(
    set_stage: SetStage, measured: Measured, ask: Ask
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    history: list[Any] = []
    replies: list[Reply] = []

    async def turn(api: Any) -> None:
        text = words((ask.__name__, len(history)), DOCUMENT if not history else 5)
        history.append({"role": "user", "content": text})
        replies.append(await ask(api, history))
        history.extend(replies[-1].turns)

    async with library_of(ask)(stage, "one", max_retries=0) as api:
        await turn(api)
        await turn(api)
        await stage.kvproxy.flush()
        await stage.llama.restart()
        await turn(api)
        await turn(api)
    assert [reply.outcome for reply in replies] == ["cold", "resident", "restored", "resident"]
    assert max(reply.computed for reply in replies[1:]) <= FEW
    done = await stage.kvproxy.until_events("kv.request.done", 4)
    assert [event["status"] for event in done] == [200] * 4
    assert [event["reused"] for event in done] == [reply.reused for reply in replies]
    measured(
        f"{ask.__name__} by its library: computed {[reply.computed for reply in replies]} "
        f"of {[reply.prompt for reply in replies]}, the server killed before the third"
    )


@pytest.mark.parametrize(
    "ask", [chat, responses_streamed, messages, messages_streamed], ids=lambda ask: ask.__name__
)
async def test_a_library_that_tries_again_finds_the_server_that_came_back(
    set_stage: SetStage, ask: Ask
) -> None:
    """Its first tries get our 503, and it waits for as long as that says."""
    stage = await set_stage(*TWO_SLOTS)
    history: list[Any] = [{"role": "user", "content": words("back", DOCUMENT)}]
    async with library_of(ask)(stage, "one", max_retries=MOST_TRIES) as api:
        first = await ask(api, history)
        await stage.kvproxy.flush()
        await stage.llama.kill()
        history += [*first.turns, {"role": "user", "content": "go on"}]
        asking = asyncio.ensure_future(ask(api, history))
        failed = await stage.kvproxy.until_events("kv.request.failed", 2, seconds=20)
        await stage.llama.start()
        again = await asking
    assert {event["code"] for event in failed} == {"KV_BACKEND_UNAVAILABLE"}
    assert again.outcome == "restored"
    assert again.computed <= FEW


@pytest.mark.parametrize("ask", [chat, responses, messages], ids=lambda ask: ask.__name__)
async def test_a_library_that_gave_up_waiting_goes_on_where_it_was(
    set_stage: SetStage, measured: Measured, ask: Ask
) -> None:
    """Its time is too short for the prompt, so it asks the same again and again. Each try has to begin where
    the one before was cut off: else none would ever be answered."""
    stage = await set_stage(*LONG)
    async with library_of(ask)(stage, "other", max_retries=0) as api:
        began = time.perf_counter()
        cold = await ask(api, [{"role": "user", "content": words("other", LONG_DOCUMENT)}])
        needed = time.perf_counter() - began
    patience = needed / 3
    async with library_of(ask)(stage, "one", max_retries=MOST_TRIES, timeout=patience) as api:
        reply = await ask(api, [{"role": "user", "content": words("one", LONG_DOCUMENT)}])
    tries = len(await stage.kvproxy.until_events("kv.request.failed", 1)) + 1
    assert tries > 1
    assert reply.reused > 0.2 * reply.prompt
    measured(
        f"{ask.__name__}: {needed:.1f} s of prompt for a client that waits {patience:.1f} s: answered at try "
        f"{tries}, which computed {reply.computed} of {reply.prompt} (cold {cold.computed})"
    )


async def test_the_anthropic_library_understands_our_errors(set_stage: SetStage) -> None:
    stage = await set_stage(*TWO_SLOTS)
    await stage.llama.kill()
    async with anthropic_library(stage, "one", max_retries=0) as api:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await messages(api, [{"role": "user", "content": "hi"}])
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "1"
    assert caught.value.body["error"]["code"] == "KV_BACKEND_UNAVAILABLE"  # type: ignore[index]
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_the_anthropic_library_counts_tokens_and_disturbs_nobody(set_stage: SetStage) -> None:
    stage = await set_stage(*TWO_SLOTS)
    history: list[Any] = [{"role": "user", "content": words("one", DOCUMENT)}]
    async with anthropic_library(stage, "one", max_retries=0) as api:
        first = await messages(api, history)
        history += [*first.turns, {"role": "user", "content": "go on"}]
        counted = await api.messages.count_tokens(model="any", messages=history)
        second = await messages(api, history)
    assert counted.input_tokens == second.prompt
    assert second.outcome == "resident"
    assert second.computed <= FEW
