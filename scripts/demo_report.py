"""What the demo shows: a line for each step, a summary, and whether anything was computed twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scripts.demo_talk import Answer

ENOUGH = 0.95
"""Share of the conversation's last prompt that has to come back."""

TITLE_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Step:
    """`known` is how many tokens of the prompt had been computed before, 0 for a first question."""

    number: int
    title: str
    known: int
    proxied: Answer
    direct: Answer
    is_after_restart: bool = False


def head() -> str:
    groups = f"{'':{TITLE_WIDTH}} | {'through kvproxy':^39} | {'directly':^28} |"
    tokens = f"{'computed':>8} {'reused':>7} {'first word':>11}"
    columns = f"{'step':{TITLE_WIDTH}} | {'outcome':<10} {tokens} | {tokens} | first word comes"
    return f"{groups}\n{columns}\n{'-' * len(columns)}"


def line(step: Step) -> str:
    title = f"{step.number:2} {step.title}"
    proxied, direct = _numbers(step.proxied), _numbers(step.direct)
    return f"{title:{TITLE_WIDTH}} | {step.proxied.outcome:<10} {proxied} | {direct} | {ratio(step)}"


def _numbers(answer: Answer) -> str:
    return f"{answer.computed:8} {answer.reused:7} {answer.first_word_seconds:9.2f} s"


def ratio(step: Step) -> str:
    """How much sooner or later than directly the first word came."""
    direct, proxied = step.direct.first_word_seconds, step.proxied.first_word_seconds
    if proxied <= direct:
        return f"{direct / max(proxied, 1e-9):5.1f} x sooner"
    return f"{proxied / max(direct, 1e-9):5.1f} x later"


def summary(steps: Iterable[Step]) -> str:
    """Totals of all steps, and the mean of those that followed a restart of llama-server (at least one)."""
    done = list(steps)
    computed = sum(step.proxied.computed for step in done)
    instead = sum(step.direct.computed for step in done)
    late = [step for step in done if step.is_after_restart]
    ours = sum(step.proxied.first_word_seconds for step in late) / len(late)
    theirs = sum(step.direct.first_word_seconds for step in late) / len(late)
    return (
        f"{computed:,} tokens computed instead of {instead:,}; "
        f"time to first token after a restart {ours:.2f} s instead of {theirs:.2f} s"
    )


def fault(step: Step) -> str | None:
    """What is wrong with how kvproxy served a step; None if nothing is."""
    answer = step.proxied
    if answer.status != 200:
        return f"step {step.number} was answered with status {answer.status}"
    if answer.reused >= ENOUGH * step.known:
        return None
    because = f", reason {answer.reason}" if answer.reason else ""
    return (
        f"step {step.number} reused {answer.reused} tokens of the {step.known} that were computed before "
        f"(outcome {answer.outcome or 'unknown'}{because})"
    )
