"""Which branch a request belongs to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvproxy.dialects.reading import Reading
from kvproxy.identifiers import SessionKey
from kvproxy.sessions.branches import STATIC_BRANCHES, Branch, Branches, Match, Where
from kvproxy.sessions.lines import Cause
from tests.support.chats import asked, chat, raw

ANYBODY = Where(b"anybody")
CHAT = Where(b"chat", bound=4)
LONG = "x" * 200


@dataclass
class Known:
    """Branches, and requests that run to their end."""

    branches: Branches = field(default_factory=Branches)

    def match(self, request: Reading | str, where: Where = ANYBODY) -> Match:
        return self.branches.match(
            self.branches.look(where, asked(request)), lambda name: key_of(where, name)
        )

    def run(self, request: Reading | str, where: Where = ANYBODY) -> Branch:
        match = self.match(request, where)
        self.branches.take(match)
        return match.branch

    def fork(self, match: Match) -> Branch:
        return self.branches.fork(match, lambda name: key_of(match.where, name))


def key_of(where: Where, name: str) -> SessionKey:
    return SessionKey(f"{where.scope.decode()}/{name}")


def test_a_conversation_goes_on_in_its_branch() -> None:
    known = Known()
    begun = known.match("S:s U:a")
    assert begun.cause is Cause.NEW
    assert known.run("S:s U:a A:b U:c") is known.run("S:s U:a A:b U:c A:d U:e") is begun.branch
    assert known.match("S:s U:a A:b U:c A:d U:e").cause is None


def test_two_chats_that_open_alike_part_at_their_first_difference() -> None:
    known = Known()
    one, other = known.run("S:s U:a"), known.run("S:s U:b")
    assert one is not other
    assert known.run("S:s U:a A:1 U:c") is one
    assert known.run("S:s U:b A:1 U:c") is other


@pytest.mark.parametrize(
    "again", ["S:s U:a A:b U:edited", "S:s U:a A:b U:c", "S:s U:a", "S:s U:a A:b U:c A:d U:e"]
)
def test_an_edited_or_regenerated_turn_stays_in_its_conversation(again: str) -> None:
    known = Known()
    branch = known.run("S:s U:a A:b U:c A:d U:e")
    assert known.run(again) is branch
    assert known.run(f"{again} A:x U:y") is branch


def test_the_longest_continuation_wins() -> None:
    known = Known()
    short = known.run("S:s U:a")
    long = known.fork(known.match("S:s U:a A:b U:c"))
    assert known.run("S:s U:a A:b U:c A:d U:e") is long
    assert known.run("S:s U:a A:other U:c") is short


def test_equal_first_requests_at_once_get_a_branch_each_and_the_first_to_go_on_keeps_the_eldest() -> None:
    known = Known()
    first = known.run("S:s U:a")
    second = known.fork(known.match("S:s U:a"))
    assert second is not first
    assert second.parent == first.key
    assert known.run("S:s U:a A:1 U:b") is first
    assert known.run("S:s U:a A:2 U:c") is second
    assert known.run("S:s U:a A:1 U:b A:3 U:d") is first
    assert known.run("S:s U:a A:2 U:c A:4 U:e") is second


def test_a_request_beside_one_of_its_branch_goes_on_apart() -> None:
    known = Known()
    branch = known.run("S:s U:a A:b U:c")
    aside = known.fork(known.match("S:s U:a A:b U:c A:d U:suggest"))
    assert known.run("S:s U:a A:b U:c A:d U:e") is branch
    assert known.run("S:s U:a A:b U:c A:d U:suggest A:f U:g") is aside


def test_an_old_line_that_goes_on_after_an_edit_was_a_conversation_of_its_own() -> None:
    known = Known()
    branch = known.run(f"S:s U:a A:b U:{LONG} A:{LONG} U:c")
    assert known.run("S:s U:a A:b U:edited") is branch
    back = known.match(f"S:s U:a A:b U:{LONG} A:{LONG} U:c A:d U:e")
    assert back.cause is Cause.SPLIT
    assert back.branch.parent == branch.key
    assert known.run("S:s U:a A:b U:edited A:x U:y") is branch
    assert known.run(f"S:s U:a A:b U:{LONG} A:{LONG} U:c A:d U:e A:f U:g") is back.branch


def test_an_old_line_that_says_little_by_itself_does_not_leave_what_it_shares() -> None:
    known = Known()
    branch = known.run(f"S:{LONG} U:a A:b U:c")
    assert known.run(f"S:{LONG} U:a A:b U:edited") is branch
    assert known.run(f"S:{LONG} U:a A:b U:c A:d U:e") is branch


def test_a_chat_whose_beginning_changes_with_each_turn_stays_one() -> None:
    known = Known()
    branch = known.run("S:10:00 U:a A:b U:c")
    assert known.run("S:10:01 U:a A:b U:c A:d U:e") is branch
    assert known.run("S:10:02 U:a A:b U:c A:d U:e A:f U:g") is branch


def test_a_chat_of_which_only_the_last_turns_are_sent_stays_one() -> None:
    known = Known()
    branch = known.run(f"S:s U:1 A:{LONG}1 U:2 A:{LONG}2 U:3")
    for n in range(3, 9):
        window = " ".join(f"U:{i} A:{LONG}{i}" for i in range(n - 1, n + 1))
        assert known.run(f"S:s {window} U:{n + 1}") is branch


def test_a_side_call_that_drops_the_tools_does_not_pass_for_the_chat_with_another_beginning() -> None:
    known, tools = Known(), [{"type": "function", "function": {"name": "ls"}}]
    branch = known.run(chat("S:s U:a A:b U:c", tools=tools))
    assert known.run(chat("S:s U:a A:b U:c A:d U:title?")) is not branch
    assert known.run(chat("S:s U:a A:b U:c A:d U:e", tools=tools)) is branch


def test_an_id_that_several_use_has_a_branch_for_each() -> None:
    known = Known()
    main, title = known.run("S:agent U:a", CHAT), known.run("S:titles U:a", CHAT)
    assert main is not title
    assert known.run("S:agent U:a A:b U:c", CHAT) is main
    assert known.run("S:agent U:a") not in (main, title)


def test_of_an_id_no_more_branches_are_kept_than_the_bound_and_the_least_recent_goes() -> None:
    known = Known()
    first, *others = [known.run(f"S:s U:{n}", CHAT) for n in range(4)]
    known.run("S:s U:0 A:b U:c", CHAT)
    known.run("S:s U:new", CHAT)
    assert known.run("S:s U:0 A:b U:c A:d U:e", CHAT) is first
    assert known.match("S:s U:1", CHAT).branch is not others[0]
    assert len(known.branches) == 4


def test_a_forgotten_branch_comes_back_under_its_name() -> None:
    before, after = Known(), Known()
    named = before.run("S:s U:a", CHAT).name
    before.run("S:s U:a A:b U:c", CHAT)
    returned = after.run("S:s U:a A:b U:c A:d U:e", CHAT)
    assert (returned.name, returned.key) == (named, key_of(CHAT, named))


def test_names_never_meet() -> None:
    known = Known()
    first = known.match("S:s U:a")
    forks = [known.fork(first) for _ in range(5)]
    assert len({first.branch.name, *(fork.name for fork in forks)}) == 6


def test_all_that_is_remembered_is_bounded() -> None:
    known = Known(Branches(max_entries=100))
    for n in range(200):
        known.run(f"S:s U:{n} A:b U:c A:d U:e")
    assert len(known.branches) == 16
    assert known.match("S:s U:199 A:b U:c A:d U:e A:f U:g").cause is None
    assert known.match("S:s U:0 A:b U:c A:d U:e A:f U:g").cause is Cause.NEW


def test_no_more_branches_are_remembered_than_there_are_sessions() -> None:
    known = Known(Branches(max_branches=10))
    for n in range(50):
        known.run(f"S:s U:{n}")
    assert len(known.branches) == 10
    assert known.match("S:s U:49 A:b U:c").cause is None
    assert known.match("S:s U:39 A:b U:c").cause is Cause.NEW


def test_edits_and_splits_leave_no_trace_in_the_count() -> None:
    known = Known(Branches(max_entries=60))
    for n in range(100):
        known.run(f"S:s U:a A:b U:{LONG}{n} A:{LONG} U:c")
        known.run(f"S:s U:a A:b U:{n}")
        known.run(f"S:s U:a A:b U:{LONG}{n} A:{LONG} U:c A:d U:e")
    kept = sum(
        len(one.line) + len(one.past.chain) // 8 if one.past else len(one.line)
        for one in known.branches.all()
    )
    assert kept <= 60 + 8


def test_an_id_of_an_installation_is_told_once() -> None:
    known = Known()
    found = [
        known.branches.found_static(known.run(f"S:s U:{n}", Where(b"static", bound=16)))
        for n in range(STATIC_BRANCHES + 3)
    ]
    assert found.count(True) == 1
    assert found.index(True) == STATIC_BRANCHES - 1


def test_agents_with_heads_of_their_own_do_not_make_an_id_static() -> None:
    known = Known()
    where = Where(b"agents", bound=16)
    assert not any(known.branches.found_static(known.run(f"S:{n} U:task{n}", where)) for n in range(8))


def test_a_child_comes_from_the_branch_it_shares_most_with() -> None:
    known = Known()
    known.run("S:titles U:a", CHAT)
    main = known.run("S:agent U:a A:b U:c", CHAT)
    known.run("S:titles U:b", CHAT)
    fork = known.match("S:agent U:a A:b U:c A:d U:task", Where(b"agent-1", parent=b"chat"))
    assert fork.branch.parent == main.key
    stranger = known.match("S:other U:task", Where(b"agent-2", parent=b"chat"))
    assert stranger.branch.parent is not None
    assert known.match("S:other U:task", Where(b"agent-3", parent=b"nobody")).branch.parent is None


def test_what_was_purged_begins_anew() -> None:
    known = Known()
    branch = known.run("S:s U:a")
    known.branches.forget(branch.key)
    assert known.match("S:s U:a A:b U:c").cause is Cause.NEW
    known.branches.forget(SessionKey("unknown"))


def test_what_an_earlier_life_knew_is_taken_up() -> None:
    before, after = Known(), Known()
    first = before.run("S:s U:a A:b U:c")
    before.run("S:s U:b")
    after.branches.adopt(before.branches.all())
    assert after.match("S:s U:a A:b U:c A:d U:e").branch is first
    assert after.run("S:s U:fresh").born > first.born


def test_a_raw_prompt_that_goes_on_keeps_its_branch() -> None:
    known = Known()
    one, other = known.run(raw("a" * 3000)), known.run(raw("b" * 3000))
    assert one is not other
    assert known.run(raw("a" * 3000 + "more" * 500)) is one
    assert known.run(raw("b" * 3000 + "more" * 500)) is other


@pytest.mark.parametrize("seed", range(20))
def test_in_any_mixture_no_two_conversations_are_one_and_each_stays_itself(seed: int) -> None:
    """Conversations with one system prompt and different first questions, under one id and under none, going
    on, edited, regenerated, forked and forgotten in any order."""
    chooser = random.Random(seed)
    known = Known()
    said: dict[int, list[str]] = {n: ["S:s", f"U:first{n}"] for n in range(8)}
    owners: dict[SessionKey, int] = {}
    for step in range(300):
        n = chooser.randrange(8)
        deed = chooser.random()
        if deed < 0.15 and len(said[n]) > 3:
            said[n] = [*said[n][:-1], f"U:edit{step}"]
        elif deed < 0.7 and said[n][-1].startswith("U:"):
            said[n] += [f"A:{step}", f"U:{chooser.randrange(3)}"]
        match = known.match(" ".join(said[n]), CHAT if n % 2 else ANYBODY)
        if deed > 0.9:
            branch = known.fork(match)
        else:
            known.branches.take(match)
            branch = match.branch
        assert owners.setdefault(branch.key, n) == n, "two conversations in one branch"
        assert known.match(" ".join(said[n]), CHAT if n % 2 else ANYBODY).branch is branch or deed > 0.9


def test_looking_through_many_branches_of_one_opening_is_bounded() -> None:
    known = Known()
    for n in range(500):
        known.fork(known.match(chat("S:s U:a", reasoning_effort=str(n % 2))))
    assert len(known.branches) <= 502
