"""Find the boundary of a conversation: the tokens that every next request shares.

The server renders and tokenises, with the code that serves requests (llama-server: `/apply-template` and
chat/completions parse and render by one function; prompts are tokenised with special tokens added and
parsed). No token is guessed; what cannot be had exactly is no boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.boundary.continuations import Document, Ending, NoBoundary, Reason, continuations
from kvproxy.dialects.as_chat import CHAT, as_chat
from kvproxy.token_ids import shared_length
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Obstacle, Unavailable

LEAST_TOKENS = 16
"""Less is computed faster than a snapshot is read."""
RENDER_SECONDS = 30.0

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """`ids` begin every next prompt. The first `kept` of them are in the slot already, as they begin the
    present prompt too; the others, if any, would have to be computed, by us now or by the next request."""

    ids: Ids
    kept: int

    @property
    def cheap(self) -> Boundary:
        """The part that costs next to nothing to go back to, where idle time is short."""
        return Boundary(self.ids[: self.kept], self.kept)


async def find_boundary(
    client: LlamaServer,
    document: Document,
    ended: Ending,
    *,
    label: str = CHAT,
    prompt_tokens: int | None = None,
    timeout: float = RENDER_SECONDS,
) -> Boundary | NoBoundary:
    """The boundary of the conversation whose last turn was asked by `document` at the endpoint `label`.

    `prompt_tokens` is the length the server told of that turn's prompt. With it the rendering is checked;
    other dialects than chat/completions have no boundary without it. `timeout` is for each question.
    """
    chat = as_chat(label, document)
    if isinstance(chat, NoBoundary):
        return chat
    following = continuations(chat, ended)
    if isinstance(following, NoBoundary):
        return following
    present = await _tokens(client, chat, timeout)
    if isinstance(present, NoBoundary):
        return present
    if (prompt_tokens is None and label != CHAT) or prompt_tokens not in (None, len(present)):
        return NoBoundary(Reason.MISMATCH, f"{len(present)} tokens rendered, {prompt_tokens} served")
    nexts: list[Ids] = []
    for possible in following:
        tokens = await _tokens(client, possible, timeout)
        if isinstance(tokens, NoBoundary):
            return tokens
        nexts.append(tokens)
    return boundary_of(present, nexts, ended)


async def prompt_ids(
    client: LlamaServer, label: str, document: Document, *, timeout: float = RENDER_SECONDS
) -> Ids | NoBoundary:
    """The token ids of a request's prompt."""
    chat = as_chat(label, document)
    return chat if isinstance(chat, NoBoundary) else await _tokens(client, chat, timeout)


def boundary_of(present: Ids, nexts: Sequence[Ids], ended: Ending) -> Boundary | NoBoundary:
    """What all of `nexts` begin with, as long as the `present` prompt can still be asked again."""
    shared = common_prefix(nexts)
    kept = len(common_prefix([present, shared]))
    if ended is Ending.CUT or kept == len(present):
        # The same prompt again must extend the boundary by a token: recurrent state cannot go back by one.
        kept = min(kept, len(present) - 1)
        shared = shared[:kept]
    if len(shared) < LEAST_TOKENS:
        return NoBoundary(Reason.TOO_SHORT, f"{len(shared)} tokens are shared")
    return Boundary(shared, kept)


def common_prefix(sequences: Sequence[Ids]) -> Ids:
    first = sequences[0]
    return first[: min(shared_length(first, other) for other in sequences)]


async def _tokens(client: LlamaServer, document: Document, timeout: float) -> Ids | NoBoundary:
    prompt = await client.apply_template(document, timeout)
    if isinstance(prompt, Unavailable):
        return _unanswered(prompt)
    tokens = await client.tokenize(prompt, timeout, as_prompt=True)
    return _unanswered(tokens) if isinstance(tokens, Unavailable) else tokens


def _unanswered(unavailable: Unavailable) -> NoBoundary:
    # A template that does not accept the messages answers 400 with the template's words.
    is_refused = unavailable.reason is Obstacle.NOT_LLAMA_SERVER
    return NoBoundary(Reason.REFUSED if is_refused else Reason.UNANSWERED, unavailable.message)
