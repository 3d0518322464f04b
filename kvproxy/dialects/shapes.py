"""Where a request's body holds what becomes its prompt, by the endpoint's label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Names of fields. One of `messages` and `prompt` is set: a conversation has turns, a raw prompt is text.

    `options` change how the template renders the whole prompt. Of `limits`, all of which bound the answer,
    the first one present counts.
    """

    messages: str | None = None
    system: str | None = None
    tools: str | None = None
    prompt: str | None = None
    options: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


_CHAT_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")

SHAPES: Mapping[str, Shape] = {
    "chat/completions": Shape(
        messages="messages",
        tools="tools",
        options=("chat_template_kwargs", "reasoning_effort"),
        limits=_CHAT_LIMITS,
    ),
    "responses": Shape(
        messages="input",
        system="instructions",
        tools="tools",
        options=("chat_template_kwargs", "reasoning"),
        limits=("max_output_tokens", *_CHAT_LIMITS),
    ),
    "messages": Shape(
        messages="messages",
        system="system",
        tools="tools",
        options=("chat_template_kwargs", "thinking"),
        limits=("max_tokens", "n_predict"),
    ),
    "completions": Shape(prompt="prompt", limits=("max_tokens", "n_predict")),
    "completion": Shape(prompt="prompt", limits=("n_predict", "max_tokens")),
    "infill": Shape(limits=("n_predict",)),
}
"""The bodies that are understood. Other endpoints compute no continuation of anything."""

NO_SHAPE = Shape()
