"""Boundaries on the real server: what a snapshot at one is worth after a restart, against a private slot.

The private slot belongs to a server that is never restarted and is asked the same, turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvproxy.boundary.continuations import Ending, NoBoundary, Reason
from kvproxy.boundary.prefix import Boundary, find_boundary
from kvproxy.boundary.rewind import Rewound, rewind
from kvproxy.dialects.as_chat import CHAT
from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.upstream import client
from kvproxy.upstream.replies import Restored, Saved
from scripts import models
from scripts.tiny_models import Kind
from tests.acceptance.conftest import Measured
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FLAGS = ("-c", "16384", "-np", "2", "--cache-ram", "0")
SLOT = SlotId(1)
LEAST_SHARE = 0.98
MOST_COMPUTED = 5
"""Tokens between the checkpoint that llama-server makes before the end of a prompt, and the boundary."""
PHYSICAL_BATCH = 512
"""So much earlier there is another one."""

Json = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read_file", "description": "Read a file", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]

# Shows the reasoning of what came after the last question, and no other; begins the reply with a thought.
REASONING_TEMPLATE = """
{%- set last = namespace(question=none) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.question = m -%}{%- endfor -%}
{%- set shows = namespace(thoughts=false) -%}
{%- if tools -%}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.reasoning_content and shows.thoughts -%}
    {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {%- if m.content -%}{{- m.content -}}{%- endif -%}
  {%- for call in m.tool_calls or [] -%}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
  {%- if m == last.question -%}{%- set shows.thoughts = true -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, and how the one before it had ended."""

    messages: list[Json]
    tools: list[Json] | None
    before: Ending = Ending.TEXT

    def body(self) -> Json:
        more = {"tools": self.tools} if self.tools else {}
        settings = {"max_tokens": 24, "id_slot": SLOT, "cache_prompt": True, "temperature": 0}
        return {"messages": self.messages, **more, **settings}


def words(seed: int, count: int) -> str:
    return " ".join(f"w{(seed * 7919 + index * 31) % 997}" for index in range(count))


def user(content: object) -> Json:
    return {"role": "user", "content": content}


def said(content: str) -> Json:
    return {"role": "assistant", "content": content}


def call_and_result(step: int, **more: object) -> list[Json]:
    call_id = f"call{step:05}"
    arguments = json.dumps({"path": f"src/{step}.py"})
    call = {"id": call_id, "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": call_id, "content": words(20 + step, 40)},
    ]


def opening() -> list[Json]:
    parts = [{"type": "text", "text": "Begin: "}, {"type": "text", "text": words(2, 100)}]
    return [{"role": "system", "content": f"You help. {words(1, 200)}"}, user(parts)]


def rewriting() -> list[Turn]:
    """Every reply comes back as something else."""
    messages, turns = opening(), []
    for number in range(4):
        turns.append(Turn(list(messages), None))
        messages += [said(f"In short, {number}."), user(f"go on {words(10 + number, 30)}")]
    return turns


def tool_loop(**more: object) -> list[Turn]:
    """Four calls written anew, a final answer, and another question; `more` is in every message of a call."""
    messages, turns = opening(), []
    for step in range(4):
        turns.append(Turn(list(messages), TOOLS, Ending.TOOL_CALLS if step else Ending.TEXT))
        messages += call_and_result(step, **more)
    turns.append(Turn(list(messages), TOOLS, Ending.TOOL_CALLS))
    turns.append(Turn([*messages, said("All done."), user(f"and now {words(40, 20)}")], TOOLS))
    return turns


@asynccontextmanager
async def asking(server: LlamaServer) -> AsyncIterator[client.LlamaServer]:
    llama = client.LlamaServer(server.base_url, None, connect_timeout_seconds=2.0)
    try:
        yield llama
    finally:
        await llama.close()


async def ask(server: LlamaServer, turn: Turn) -> tuple[int, int]:
    """Tokens reused and computed."""
    timings = (await server.post_json("/v1/chat/completions", turn.body()))["timings"]
    return timings["cache_n"], timings["prompt_n"]


async def private_reuse(model: Path, flags: Sequence[str], turns: Sequence[Turn]) -> int:
    """What a slot that nobody disturbs reuses at the last turn."""
    async with LlamaServer(model, *FLAGS, *flags) as server:
        reused = [(await ask(server, turn))[0] for turn in turns]
    return reused[-1]


async def boundary_before(llama: client.LlamaServer, turns: Sequence[Turn], served: int) -> Boundary:
    """The boundary of the last turn but one, whose prompt had `served` tokens."""
    asked, ended = turns[-2].body(), turns[-1].before
    boundary = await find_boundary(llama, asked, ended, prompt_tokens=served)
    assert isinstance(boundary, Boundary), boundary
    return boundary


async def survive(llama: client.LlamaServer, server: LlamaServer, tokens: int) -> None:
    """Save, kill, start and restore what should be `tokens` tokens."""
    name = SnapshotName("boundary")
    saved = await llama.start_save(SLOT, name).wait(10)
    assert isinstance(saved, Saved)
    assert saved.tokens == tokens
    await server.restart()
    restored = await llama.start_restore(SLOT, name).wait(10)
    assert isinstance(restored, Restored)
    assert restored.tokens == tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the last turn, after boundary, save, kill, start and restore."""

    boundary: Boundary
    rewound: Rewound
    reused: int
    prompt: int


async def through_a_restart(
    model: Path, flags: Sequence[str], turns: Sequence[Turn], slot_dir: Path
) -> Outcome:
    async with LlamaServer(model, *FLAGS, *flags, slot_dir=slot_dir) as server, asking(server) as llama:
        counts = [await ask(server, turn) for turn in turns[:-1]]
        boundary = await boundary_before(llama, turns, sum(counts[-1]))
        rewound = await rewind(llama, SLOT, boundary, timeout=30)
        assert isinstance(rewound, Rewound)
        await survive(llama, server, len(boundary.ids))
        reused, computed = await ask(server, turns[-1])
        return Outcome(boundary, rewound, reused, reused + computed)


CLIENTS = {
    "rewriting": rewriting(),
    "in the middle of a tool loop": tool_loop()[:4],
    "after a tool loop": tool_loop(),
}


@pytest.mark.parametrize("client_kind", CLIENTS)
@pytest.mark.parametrize("kind", [Kind.MAMBA, Kind.LFM2, Kind.LLAMA])
async def test_after_a_restart_a_boundary_gives_what_a_private_slot_does(
    kind: Kind, client_kind: str, tmp_path: Path, measured: Measured
) -> None:
    turns = CLIENTS[client_kind]
    private = await private_reuse(models.tiny(kind), (), turns)
    outcome = await through_a_restart(models.tiny(kind), (), turns, tmp_path)
    measured(
        f"tiny-{kind}, {client_kind}: {outcome.reused} of {outcome.prompt} reused after a restart,"
        f" {private} in a private slot; {outcome.rewound.computed} computed to go back"
    )
    assert outcome.reused == len(outcome.boundary.ids)
    assert outcome.reused >= LEAST_SHARE * private
    assert outcome.rewound.computed <= MOST_COMPUTED


async def test_a_sliding_window_kept_in_full_goes_on_from_a_boundary(
    tiny_gemma3: Path, tmp_path: Path
) -> None:
    outcome = await through_a_restart(tiny_gemma3, ("--swa-full",), tool_loop(), tmp_path)
    assert outcome.reused == len(outcome.boundary.ids)


async def test_a_plain_snapshot_is_worth_nothing_to_recurrent_state_when_the_reply_is_rewritten(
    tiny_mamba: Path, tmp_path: Path
) -> None:
    turns = rewriting()
    async with LlamaServer(tiny_mamba, *FLAGS, slot_dir=tmp_path) as server, asking(server) as llama:
        served = [sum(await ask(server, turn)) for turn in turns[:-1]]
        await survive(llama, server, served[-1] + 24 - 1)
        reused, _ = await ask(server, turns[-1])
        assert reused == 0


async def test_the_same_question_again_goes_on_from_a_restored_boundary(
    tiny_lfm2: Path, tmp_path: Path
) -> None:
    turns = rewriting()[:2]
    outcome = await through_a_restart(tiny_lfm2, (), [*turns, turns[-1]], tmp_path)
    assert outcome.reused == len(outcome.boundary.ids) == outcome.prompt - 1


async def test_without_checkpoints_the_boundary_is_computed_whole_and_still_worth_it(
    tiny_lfm2: Path, tmp_path: Path
) -> None:
    outcome = await through_a_restart(tiny_lfm2, ("--ctx-checkpoints", "0"), rewriting()[:3], tmp_path)
    assert outcome.rewound.reused == 0
    assert outcome.reused == len(outcome.boundary.ids)


async def test_a_finished_loop_whose_reasoning_is_dropped_is_reused_whole_after_a_restart(
    tiny_lfm2: Path, tmp_path: Path, measured: Measured
) -> None:
    template = tmp_path / "reasoning.jinja"
    template.write_text(REASONING_TEMPLATE)
    flags = ("--chat-template-file", str(template))
    turns = tool_loop(reasoning_content="I had better look into that file.")
    private = await private_reuse(tiny_lfm2, flags, turns)
    outcome = await through_a_restart(tiny_lfm2, flags, turns, tmp_path)
    measured(
        f"tiny-lfm2, reasoning dropped after a loop: {outcome.reused} of {outcome.prompt} reused after a"
        f" restart, {private} in a private slot; {outcome.rewound.computed} computed to go back"
    )
    assert outcome.boundary.kept < len(outcome.boundary.ids)
    assert outcome.reused == len(outcome.boundary.ids)
    assert outcome.reused > private
    running = await through_a_restart(tiny_lfm2, flags, turns[:4], tmp_path)
    assert running.boundary.kept == len(running.boundary.ids) == running.reused
    # What begins the reply and is not kept is longer than the distance of the last checkpoint from the end.
    assert running.rewound.computed <= MOST_COMPUTED + PHYSICAL_BATCH


CHATTED: Json = {
    "messages": [said("Rules."), user(words(3, 30)), *call_and_result(1), said("So."), user("Go on.")],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 4,
}

RESPONSES: Json = {
    "instructions": "You help.",
    "tools": [{"type": "function", **FUNCTION, "strict": False}, {"type": "web_search"}],
    "reasoning": {"effort": "low"},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"role": "user", "content": words(3, 30)},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": '{"path": "a"}'},
        {"type": "function_call", "call_id": "c2", "name": "read_file", "arguments": '{"path":"b"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "aaa"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bbb"}]},
        {"type": "message", "role": "user", "content": "Go on."},
    ],
    "max_output_tokens": 4,
    "id_slot": SLOT,
}

MESSAGES: Json = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a5145;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "read_file", "description": "Read a file", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "messages": [
        user([{"type": "text", "text": words(5, 30)}, {"type": "text", "text": "Begin."}]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "ä", "n": 1.5}},
                {"type": "tool_use", "id": "t2", "name": "read_file", "input": {}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": "out"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "a"}]},
                {"type": "text", "text": "Go on."},
            ]
        ),
    ],
    "max_tokens": 4,
}


def served_tokens(usage: Json) -> int:
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


@pytest.mark.parametrize(
    ("label", "document"), [(CHAT, CHATTED), ("responses", RESPONSES), ("messages", MESSAGES)]
)
@pytest.mark.parametrize("is_tiny", [True, False])
async def test_in_every_dialect_the_boundary_is_what_the_slot_holds(
    label: str, document: Json, is_tiny: bool, tiny_llama: Path, chat_model: Path
) -> None:
    """Full attention reuses all the tokens that are the same, so the reuse shows that all are."""
    model = tiny_llama if is_tiny else chat_model
    async with LlamaServer(model, *FLAGS, "-np", "1") as server, asking(server) as llama:
        answer = await server.post_json(f"/v1/{label}", {**document, "id_slot": 0})
        usage = answer["usage"]
        served = usage["prompt_tokens"] if label == CHAT else served_tokens(usage)
        boundary = await find_boundary(llama, document, Ending.TEXT, label=label, prompt_tokens=served)
        assert isinstance(boundary, Boundary), boundary
        assert len(boundary.ids) == boundary.kept >= served - 2
        rewound = await rewind(llama, SlotId(0), boundary, timeout=30)
        assert rewound == Rewound(computed=1, reused=len(boundary.ids) - 1)


async def test_a_template_that_accepts_no_tool_result_refuses_in_its_words(
    tiny_llama: Path, tmp_path: Path
) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{- raise_exception('no tools here') -}}"
        "{%- endif -%}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    document = {"messages": [user(words(1, 20))]}
    flags = (*FLAGS, "--chat-template-file", str(template))
    async with LlamaServer(tiny_llama, *flags) as server, asking(server) as llama:
        outcome = await find_boundary(llama, document, Ending.TOOL_CALLS)
        assert isinstance(outcome, NoBoundary)
        assert outcome.reason is Reason.REFUSED
        assert "no tools here" in outcome.detail
        assert isinstance(await find_boundary(llama, document, Ending.TEXT), Boundary)
