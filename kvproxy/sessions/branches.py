"""The conversations we know by what was said in them, and which of them a request belongs to.

They live in *scopes*: one for each id that clients name, of one tenant and model, and one for all requests
that name none. Within a scope the content decides (see `lines`), so an id that is shared by sub-agents, side
calls or a whole installation names several branches, each with a slot and a snapshot of its own.

Of all branches the one wins that shares the most with the request. Two guesses are put right later:
 - A turn that was edited replaces the line. Should the old one go on all the same, there were two
   conversations: the old line gets a branch of its own, if it says more by itself than what both share.
 - Of requests with equal text that run at once each gets a branch; the first that goes on keeps the eldest.

A branch is named after its opening, so that one that was forgotten, here or with the whole file, comes back
under the same name, and finds its snapshot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvproxy.frozen import frozen
from kvproxy.identifiers import SessionKey
from kvproxy.sessions.lines import Asked, Cause, Kind, Line, Relation

MAX_ENTRIES = 400_000
"""Of all lines together, some 15 MB; those unseen for longest are forgotten first."""
MAX_BRANCHES = 10_000
"""As many as there are sessions; about 1 kB each besides their lines."""
MAX_LOOKED_AT = 64
"""Branches that a request is compared with; those of an id are bounded by a setting."""
STATIC_BRANCHES = 4
"""Conversations with one head and different first questions, from which on an id is taken for that of an
installation. An agent's conversation has one or two, when it was compacted."""

KeyOf = Callable[[str], SessionKey]
"""The session's key by the branch's name."""


@frozen
class Where:
    """A scope by its digest, and that of the scope its conversations come from, if the client told.

    `bound` is how many branches are kept of it, None for the scope of requests without an id.
    """

    scope: bytes
    parent: bytes | None = None
    bound: int | None = None


@dataclass(slots=True, eq=False)
class Branch:
    """`past` is the line that an edit replaced, as long as it may still go on."""

    scope: bytes
    name: str
    key: SessionKey
    line: Line
    born: int
    parent: SessionKey | None = None
    past: Line | None = None
    may_persist: bool = True


@frozen
class _Candidate:
    branch: Branch
    relation: Relation
    is_past: bool = False

    @property
    def rank(self) -> tuple[int, bool, int]:
        """What goes on from all of a line shares the reply to it too, which the line does not tell. Of equals
        that go on the eldest wins, of equals that were edited the youngest."""
        if self.relation.kind is Kind.CONTINUED:
            return self.relation.shared + 1, True, -self.branch.born
        return self.relation.shared, False, self.branch.born


@frozen
class Look:
    """A request held against all that is known: good until the next await."""

    where: Where
    asked: Asked
    best: _Candidate | None

    @property
    def is_known(self) -> bool:
        """Whether it belongs to a branch that there is."""
        return self.best is not None


@frozen
class Match:
    """A request and the branch it belongs to. `cause` is set if the branch began with it."""

    where: Where
    asked: Asked
    branch: Branch
    relation: Relation | None = None
    cause: Cause | None = None


_Lists = dict[bytes, dict[Branch, None]]
"""Of each list the branch whose line changed last comes last."""


@dataclass(slots=True)
class _Scope:
    branches: OrderedDict[str, Branch] = field(default_factory=OrderedDict)
    by_first: _Lists = field(default_factory=dict)
    by_trace: _Lists = field(default_factory=dict)
    is_static: bool = False


class Branches:
    """What is remembered of all together is bounded by the number of branches and of their lines' entries."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_branches: int = MAX_BRANCHES) -> None:
        self._max_entries = max_entries
        self._max_branches = max_branches
        self._scopes: dict[bytes, _Scope] = {}
        self._recent: OrderedDict[Branch, None] = OrderedDict()
        self._entries = 0
        self._births = 0
        self.changes = 0
        """Counts what would have to be written down."""

    # -- asking ------------------------------------------------------------------------------------------

    def look(self, where: Where, asked: Asked) -> Look:
        """What of all that is known `asked` belongs to."""
        return Look(where, asked, self._best(where.scope, asked))

    def match(self, look: Look, key_of: KeyOf) -> Match:
        """The branch that a request belongs to, made if there is none. Known ones stay as they are until
        `take` or `fork` say where the request runs."""
        where, asked, best = look.where, look.asked, look.best
        if best is None:
            branch = self._begin(where, asked, key_of, self._parent_of(where, asked))
            return Match(where, asked, branch, None, Cause.NEW)
        if best.is_past:
            self._let_go_of_past(best.branch)
            branch = self._begin(where, asked, key_of, best.branch.key)
            return Match(where, asked, branch, best.relation, Cause.SPLIT)
        self._touch(best.branch)
        return Match(where, asked, best.branch, best.relation)

    def take(self, match: Match) -> None:
        """The request runs as the branch's own: from now on its line is the branch's."""
        branch, line = match.branch, match.asked.line
        if branch not in self._recent or branch.line == line:
            return
        kept = branch.line
        shared = kept.shared(line)
        self._unlist(branch)
        if shared < len(kept):
            branch.past = kept
        branch.line = line
        self._list(branch)
        self._forget_beyond(branch)

    def fork(self, match: Match, key_of: KeyOf) -> Branch:
        """The branch's own slot is busy with another request: this one runs elsewhere, as its own branch."""
        return self._begin(match.where, match.asked, key_of, match.branch.key)

    def found_static(self, branch: Branch) -> bool:
        """Whether `branch` is the one by which its id proves to name more than a conversation; once."""
        scope = self._scopes.get(branch.scope)
        if scope is None or scope.is_static:
            return False
        head = _head(branch.line)
        firsts = {one.line.first for one in scope.branches.values() if _head(one.line) == head}
        scope.is_static = len(firsts) >= STATIC_BRANCHES
        return scope.is_static

    def __len__(self) -> int:
        return len(self._recent)

    # -- keeping -----------------------------------------------------------------------------------------

    def all(self) -> tuple[Branch, ...]:
        """The one seen last comes last."""
        return tuple(self._recent)

    def adopt(self, branches: Iterable[Branch]) -> None:
        """Take up what an earlier life knew, in the order of `all`."""
        for branch in branches:
            self._births = max(self._births, branch.born)
            scope = self._scopes.setdefault(branch.scope, _Scope())
            if branch.name not in scope.branches:
                self._enter(scope, branch)

    def forget(self, key: SessionKey) -> None:
        """Know nothing of a session that was purged."""
        for branch in [one for one in self._recent if one.key == key]:
            self._drop(branch)

    # -- inside --------------------------------------------------------------------------------------------

    def _best(self, scope_id: bytes, asked: Asked) -> _Candidate | None:
        scope = self._scopes.get(scope_id)
        if scope is None:
            return None
        best = None
        for one in self._beginning_alike(scope, asked):
            if best is None or one.rank > best.rank:
                best = one
        return best if best is not None else self._ending_alike(scope, asked)

    def _beginning_alike(self, scope: _Scope, asked: Asked) -> Iterator[_Candidate]:
        for branch in islice(reversed(scope.by_first.get(asked.line.first, {})), MAX_LOOKED_AT):
            relation = asked.relation(branch.line)
            if relation is not None:
                yield _Candidate(branch, relation)
            past = self._revived(branch, asked, relation)
            if past is not None:
                yield _Candidate(branch, past, is_past=True)

    def _ending_alike(self, scope: _Scope, asked: Asked) -> _Candidate | None:
        if not scope.by_trace:
            return None
        found = (branch for trace in asked.traces() for branch in reversed(scope.by_trace.get(trace, {})))
        # A side call that looks back at the whole conversation has no use for its tools.
        same = (branch for branch in found if branch.line.has_tools == asked.line.has_tools)
        branch = next(same, None)
        return None if branch is None else _Candidate(branch, Relation(Kind.REWRITTEN, 0))

    def _revived(self, branch: Branch, asked: Asked, present: Relation | None) -> Relation | None:
        """How the request goes on from the line that was replaced, if it does and that is worth a branch."""
        past = branch.past
        relation = None if past is None else asked.relation(past)
        if past is None or relation is None or relation.shared <= (present.shared if present else 0):
            return None
        common = past.bytes_of(past.shared(branch.line))
        return relation if past.bytes_of(relation.shared) > 2 * common else None

    def _parent_of(self, where: Where, asked: Asked) -> SessionKey | None:
        scope = None if where.parent is None else self._scopes.get(where.parent)
        if scope is None or not scope.branches:
            return None
        # Of those that share nothing the one seen last: `max` takes the first of equals.
        latest_first = reversed(scope.branches.values())
        return max(latest_first, key=lambda branch: branch.line.shared(asked.line)).key

    def _begin(self, where: Where, asked: Asked, key_of: KeyOf, parent: SessionKey | None) -> Branch:
        scope = self._scopes.setdefault(where.scope, _Scope())
        name = next(name for name in _names(asked.line) if name not in scope.branches)
        self._births += 1
        branch = Branch(where.scope, name, key_of(name), asked.line, self._births, parent)
        self._enter(scope, branch)
        if where.bound is not None and len(scope.branches) > where.bound:
            self._drop(next(iter(scope.branches.values())))
        self._forget_beyond(branch)
        return branch

    def _enter(self, scope: _Scope, branch: Branch) -> None:
        scope.branches[branch.name] = branch
        self._recent[branch] = None
        self._list(branch)

    def _touch(self, branch: Branch) -> None:
        self._recent.move_to_end(branch)
        self._scopes[branch.scope].branches.move_to_end(branch.name)

    def _list(self, branch: Branch) -> None:
        scope = self._scopes[branch.scope]
        scope.by_first.setdefault(branch.line.first, {})[branch] = None
        for trace in branch.line.traces:
            scope.by_trace.setdefault(trace, {})[branch] = None
        self._entries += _entries(branch)
        self.changes += 1

    def _unlist(self, branch: Branch) -> None:
        scope = self._scopes[branch.scope]
        _remove(scope.by_first, branch.line.first, branch)
        for trace in branch.line.traces:
            _remove(scope.by_trace, trace, branch)
        self._entries -= _entries(branch)
        self.changes += 1

    def _let_go_of_past(self, branch: Branch) -> None:
        self._entries -= len(branch.past) if branch.past else 0
        branch.past = None

    def _drop(self, branch: Branch) -> None:
        self._unlist(branch)
        del self._recent[branch]
        scope = self._scopes[branch.scope]
        del scope.branches[branch.name]
        if not scope.branches:
            del self._scopes[branch.scope]

    def _forget_beyond(self, newest: Branch) -> None:
        while self._entries > self._max_entries or len(self._recent) > self._max_branches:
            oldest = next(iter(self._recent))
            if oldest is newest:
                return
            self._drop(oldest)


def _names(line: Line) -> Iterator[str]:
    """After the opening; where that is taken, after all that was said; then by number."""
    opening = line.opening.hex()
    yield opening
    whole = f"{opening}-{line.link(len(line)).hex()}"
    yield whole
    number = 2
    while True:
        yield f"{whole}-{number}"
        number += 1


def _head(line: Line) -> bytes:
    return line.link(line.head) if line.head else b""


def _entries(branch: Branch) -> int:
    return len(branch.line) + (len(branch.past) if branch.past else 0)


def _remove(lists: _Lists, at: bytes, branch: Branch) -> None:
    listed = lists.get(at, {})
    listed.pop(branch, None)
    if not listed:
        lists.pop(at, None)
