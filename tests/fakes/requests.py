"""Request bodies to work for the engine: pure. A body the original refuses raises BadRequest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.fakes.engine import Completion
from tests.fakes.state import AUTO
from tests.fakes.tokens import render_chat, tokenize

Json = dict[str, Any]


class BadRequest(Exception):
    """Answered with 400 and this message."""


def parse_json(body: bytes) -> Json:
    try:
        data = json.loads(body)
    except ValueError as problem:
        raise BadRequest(f"[json.exception.parse_error.101] parse error: {problem}") from problem
    if not isinstance(data, dict):
        raise BadRequest("[json.exception.type_error.304] cannot use at() with this type")
    return data


def require(data: Json, key: str) -> Any:
    if key not in data:
        raise BadRequest(f"[json.exception.out_of_range.403] key '{key}' not found")
    return data[key]


def completions(data: Json, prompts: list[list[int]], *, pinnable: bool, slots: int) -> list[Completion]:
    n = data.get("n", 1) or 1
    if n > slots:
        raise BadRequest("n_cmpl cannot be greater than the number of slots, please increase -np")
    return [
        Completion(
            prompt=prompt,
            pin=pin_of(data) if pinnable else AUTO,
            n_predict=_n_predict(data),
            cache_prompt=data.get("cache_prompt") is not False,
            ignore_eos=data.get("ignore_eos") is True,
            streams=data.get("stream") is True,
            index=index,
            siblings=n - 1,
        )
        for index, prompt in enumerate(prompts)
    ]


def pin_of(data: Json) -> int:
    """Numbers pin, whole or not; a string, null or nothing is silently no pin."""
    pin = data.get("id_slot")
    return int(pin) if isinstance(pin, int | float) else AUTO


def _n_predict(data: Json) -> int:
    for key in ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"):
        if isinstance(data.get(key), int):
            return int(data[key])
    return AUTO


def plain_prompts(data: Json) -> list[list[int]]:
    prompt = require(data, "prompt")
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if all(isinstance(part, int) for part in prompt):
        return [prompt]
    return [tokenize(part) if isinstance(part, str) else part for part in prompt]


def chat_text(data: Json) -> str:
    if "messages" not in data:
        raise BadRequest("'messages' is required")
    return render_chat(data["messages"], data.get("tools"))


def anthropic_text(data: Json) -> str:
    head = [{"role": "system", "content": data["system"]}] if data.get("system") else []
    return render_chat([*head, *require(data, "messages")], data.get("tools"))


def responses_text(data: Json) -> str:
    given = require(data, "input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    head = [{"role": "system", "content": data["instructions"]}] if data.get("instructions") else []
    return render_chat([*head, *messages], data.get("tools"))


def infill_prompts(data: Json) -> list[list[int]]:
    parts = (require(data, "input_prefix"), require(data, "input_suffix"), data.get("prompt", ""))
    return [tokenize("".join(parts))]


def rendered(render: Callable[[Json], str]) -> Callable[[Json], list[list[int]]]:
    return lambda data: [tokenize(render(data))]


def valid_filename(name: Any) -> bool:
    if not isinstance(name, str) or not 0 < len(name) <= 255:
        return False
    forbidden = set('/\\:*?"<>|\ufffd\ufeff\uff0e\u2215\u2216')
    if any(c in forbidden or ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F for c in name):
        return False
    return not (name[0] == " " or name[-1] in " ." or ".." in name)
