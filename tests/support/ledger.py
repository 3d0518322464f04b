"""Two accounts of a walk: whose content a slot held as a request began there, and what it cost to compute.

What a request is told is held against the fake's own log (`tests.fakes.runs`), and its cost against a slot of
the conversation's own, in which nobody else ever runs and which no restart empties. What costs more than
there has a cause that can be named, and is counted under it:

 - `restart`: the server or kvproxy began anew, and the newest that had been saved was older;
 - `branch`: the conversation has several branches, as two of its requests ran at once or an edit was taken
   back, and this one's is not the one that said the latest;
 - `overtaken`: as another of its requests ended, the server put an unpinned one in that place at once;
 - `broken off`: nobody told which branch a request was that its client left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.fakes.actions import Saved
from tests.fakes.runs import Run
from tests.fakes.tokens import common_prefix
from tests.support.clients import names_in

TOLERANCE = 4
"""Tokens. The last of an answer is in no slot, and the last of a prompt is always computed."""


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of a request. `began` is why its branch did, None if it was known."""

    session: str | None
    outcome: str
    began: str | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """What a run left, and in which life of kvproxy it ended."""

    run: Run
    proxy: int


@dataclass(slots=True)
class Ledger:
    """`proxy` numbers the lives of kvproxy."""

    proxy: int = 0
    computed: int = 0
    private: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    files: list[tuple[int, ...]] = field(default_factory=list)
    _published: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """by session, how many tokens its snapshots hold, the newest last"""
    _overtaken: set[Run] = field(default_factory=set)
    _owners: dict[str, str] = field(default_factory=dict)
    _states: dict[str, list[_State]] = field(default_factory=lambda: defaultdict(list))
    _latest: dict[str, _State] = field(default_factory=dict)
    """by conversation, what a slot of its own would hold"""

    def saved(self, saved: Saved) -> None:
        """A file was written; it need not become a snapshot."""
        self.files.append(saved.tokens)

    def published(self, session: str, tokens: int) -> None:
        self._published[session].append(tokens)

    def blamed(self, session: str) -> None:
        """The server died as it restored the newest snapshot, which is not tried again."""
        del self._published[session][-1:]

    def overtook(self, ended: Run) -> None:
        """The server put a request of its choice where `ended` had just ended, before anybody could hear of
        that and save it."""
        self._overtaken.add(ended)

    def side_call(self, name: str, told: Told) -> str | None:
        """Why it went wrong with a side call; None if it did not."""
        if told.outcome != "auxiliary" or told.session in self._owners:
            return f"the side call {name} was told {told}"
        return None

    def turn(self, name: str, run: Run, told: Told) -> str | None:
        """The same for a turn of the conversation `name`."""
        if told.session is None:
            return "a turn of a conversation is nobody's"
        if told.began == "new" and name in self._owners.values() and told.session not in self._owners:
            return f"{name} was taken for a new conversation"
        owner = self._owners.setdefault(told.session, name)
        if owner != name:
            return f"a session of {owner} was given to {name}"
        if told.outcome in ("resident", "restored") and names_in(run.held) != {name}:
            return f"{told.outcome}, and the slot held the words of {names_in(run.held)}"
        if told.outcome == "restored" and tuple(run.held) not in self.files:
            return "restored, and the slot held what is in no file"
        expected = self._expected(told.session, run)
        if run.kept < expected - TOLERANCE:
            return f"{run.kept} tokens reused of {expected} that the session {told.session} had"
        return self._account(name, run, told, expected)

    def broken_off(self, name: str, run: Run, session: str | None) -> None:
        """Nobody heard the answer. What was computed is there all the same, and no claim was made."""
        alone = min(run.computed, len(run.prompt) - self._alone(name, run.prompt))
        self.computed += run.computed
        self.private += alone
        self.explained["broken off"] += run.computed - alone
        self._remember(name, run, session)

    def objection_to_files(self) -> str | None:
        """Why one of the files that were written is wrong; None if each holds one conversation, or what
        kvproxy tried out."""
        for tokens in self.files:
            names = names_in(list(tokens))
            if len(names) > 1 or not names <= set(self._latest):
                return f"a file holds the words of {names}"
        return None

    def objection_to_sum(self, runs: Iterable[Run], side_calls: set[str]) -> str | None:
        """Why all that was computed is more than what is accounted for; None if it is not."""
        runs = [run for run in runs if run.tag]
        beside = sum(len(run.prompt) for run in runs if run.tag in side_calls)
        total, limit = sum(run.computed for run in runs), self.private + self.explained.total() + beside
        if total <= limit + TOLERANCE * len(runs):
            return None
        return f"{total} tokens computed; {self.private} alone, {beside} beside, {self.explained}"

    def _expected(self, session: str, run: Run) -> int:
        """How many tokens the session is to have at hand: what it left last, or the newest that is saved."""
        states = self._states[session]
        for state in reversed(states):
            is_there = state is states[-1] and self._is_there(state, run)
            if is_there or len(state.run.left) in self._published[session]:
                return _reusable(state.run.left, run.prompt)
        return 0

    def _is_there(self, state: _State, run: Run) -> bool:
        is_same_life = (state.run.life, state.proxy) == (run.life, self.proxy)
        return is_same_life and state.run not in self._overtaken

    def _alone(self, name: str, prompt: list[int]) -> int:
        """How much a slot of its own would reuse."""
        latest = self._latest.get(name)
        return 0 if latest is None else _reusable(latest.run.left, prompt)

    def _account(self, name: str, run: Run, told: Told, expected: int) -> str | None:
        own = self._alone(name, run.prompt)
        self.computed += run.computed
        self.private += len(run.prompt) - own
        if run.kept < own - TOLERANCE:
            cause = self._cause(name, run, told)
            if cause is None:
                return f"{run.kept} tokens reused of {own} that a slot of its own would hold"
            self.explained[cause] += own - run.kept
        self._remember(name, run, told.session)
        return None

    def _cause(self, name: str, run: Run, told: Told) -> str | None:
        if told.began in ("forked", "split"):
            return "branch"
        latest = self._latest[name]
        if latest.run in self._overtaken:
            return "overtaken"
        if not self._is_there(latest, run):
            return "restart"
        return "branch" if sum(owner == name for owner in self._owners.values()) > 1 else None

    def _remember(self, name: str, run: Run, session: str | None) -> None:
        self._latest[name] = _State(run, self.proxy)
        if session is not None:
            self._owners.setdefault(session, name)
            self._states[session].append(self._latest[name])


def _reusable(stored: list[int], prompt: list[int]) -> int:
    return min(common_prefix(stored, prompt), len(prompt) - 1)
