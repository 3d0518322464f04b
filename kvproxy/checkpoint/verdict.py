"""What an answer proves of the belief the request was sent with: pure."""

from __future__ import annotations

from kvproxy.checkpoint.outcome import Outcome, Verdict
from kvproxy.upstream.replies import Usage

CONFIRMED_SHARE = 0.5
"""Of what the stored tokens and the prompt could share. A client that rewrites its last turn stays above
it, one that compacted or edited early falls below."""


CHANCE_TOKENS = 3
"""What any two prompts share: the token that begins a text, and the first of the chat template."""


def verdict_of(outcome: Outcome, stored_tokens: int | None, usage: Usage) -> Verdict:
    """`stored_tokens` is what the slot was believed to hold; None where that was not known."""
    prompt, reused = usage.prompt, usage.reused
    if outcome not in (Outcome.RESIDENT, Outcome.RESTORED) or not stored_tokens or prompt is None:
        return Verdict.UNKNOWN
    if reused is None or prompt <= 0:
        return Verdict.UNKNOWN
    if reused <= CHANCE_TOKENS:
        return Verdict.INEFFECTIVE
    shared = min(stored_tokens, prompt)
    return Verdict.CONFIRMED if reused >= CONFIRMED_SHARE * shared else Verdict.DIVERGED
