"""Whose a request is."""

from __future__ import annotations

from typing import Any

import orjson

from kvproxy.boundary.turn import Asked
from kvproxy.dialects.endpoints import classify, refine
from kvproxy.dialects.reading import read
from kvproxy.identifiers import ServerName
from kvproxy.proxy.call import Call
from kvproxy.proxy.recogniser import Owner, Recogniser
from kvproxy.sessions.branches import STATIC_BRANCHES, Branches
from kvproxy.sessions.identity import NOBODY, Identity
from kvproxy.sessions.key import ClientId, digest_of
from kvproxy.sessions.lines import Cause
from kvproxy.sessions.newcomers import MOST_UNCONTINUED
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.sessions.session import Session
from kvproxy.telemetry.events import BranchBegan, IdsDisagreed, StaticIdSeen
from tests.support.chats import turns
from tests.support.clock import FakeClock
from tests.support.fakes_core import Sink

MAIN = ServerName("main")
CHAT = "/v1/chat/completions"
NAMED = Identity(ClientId("x-session-id", "chat-1"))
SECRET = b"k" * 32


def call(
    said: str | dict[str, Any],
    identity: Identity = NOBODY,
    *,
    path: str = CHAT,
    tenant: str = "",
    persists: bool = True,
    is_auxiliary: bool = False,
) -> Call:
    document = {"messages": turns(said)} if isinstance(said, str) else said
    endpoint = classify("POST", path)
    reading = read(endpoint.label, document)
    return Call(
        endpoint,
        refine(endpoint, document),
        orjson.dumps(document),
        identity,
        False,
        is_auxiliary,
        persists,
        reading=reading,
        is_recognised=reading.is_recognisable,
        tenant=tenant,
    )


class House:
    def __init__(self) -> None:
        self.sink = Sink()
        self.branches = Branches()
        self.registry = SessionRegistry(FakeClock(), on_forget=self.branches.forget)
        self.recogniser = Recogniser(
            MAIN, self.registry, self.branches, self.sink, max_branches=4, secret=lambda: SECRET
        )

    def owner(self, of: Call, model: str = "m") -> Owner:
        owner = self.recogniser.owner_of(of, model, self.recogniser.look(of, model))
        assert owner is not None
        return owner

    def run(self, of: Call, model: str = "m") -> Session:
        owner = self.owner(of, model)
        self.recogniser.runs_at_home(owner)
        return owner.session

    def causes(self) -> list[tuple[str, Cause]]:
        return [(event.source, event.cause) for event in self.sink.of(BranchBegan)]


def test_a_conversation_without_an_id_is_one_session_from_request_to_request() -> None:
    house = House()
    session = house.run(call("S:s U:a"))
    assert house.run(call("S:s U:a A:b U:c")) is session
    assert (session.namespace, session.client_digest, session.parent) == ("content", "", None)
    assert house.causes() == [("content", Cause.NEW)]


def test_a_request_that_owns_nothing_is_nobodys_and_leaves_no_trace() -> None:
    house = House()
    for nobodys in (call("S:s U:a", is_auxiliary=True), call({})):
        assert house.recogniser.look(nobodys, "m") is None
        assert house.recogniser.owner_of(nobodys, "m", None) is None
    assert (len(house.branches), len(house.registry)) == (0, 0)


def test_an_id_alone_is_a_session_where_the_content_does_not_tell() -> None:
    house = House()
    first = house.run(call({"input_prefix": "a"}, NAMED, path="/infill"))
    other = house.run(call({"input_prefix": "b"}, NAMED, path="/infill"))
    assert first is other
    assert (first.namespace, first.branch) == ("x-session-id", "")
    assert house.recogniser.runs_elsewhere(house.owner(call({}, NAMED, path="/infill"))) is None


def test_side_calls_and_agents_under_one_id_have_sessions_of_their_own() -> None:
    house = House()
    main, title = house.run(call("S:agent U:a", NAMED)), house.run(call("S:titles U:a", NAMED))
    assert main.key != title.key
    assert main.client_digest == title.client_digest == digest_of("chat-1")
    assert house.run(call("S:agent U:a A:b U:c", NAMED)) is main
    assert {one.key for one in house.registry.named("chat-1")} == {main.key, title.key}


def test_ids_of_two_namespaces_two_models_and_two_tenants_never_meet() -> None:
    house = House()
    other = Identity(ClientId("agent-session-id", "chat-1"))
    sessions = [
        house.run(call("S:s U:a", NAMED)),
        house.run(call("S:s U:a", other)),
        house.run(call("S:s U:a")),
        house.run(call("S:s U:a", NAMED), model="another"),
        house.run(call("S:s U:a", NAMED, tenant="t")),
    ]
    assert len({session.key for session in sessions}) == 5


def test_an_agent_knows_which_conversation_it_comes_from() -> None:
    house = House()
    client = ClientId("x-claude-code-session-id", "c")
    main = house.run(call("S:s U:a A:b U:c", Identity(client)))
    fork = house.run(call("S:s U:a A:b U:c A:d U:task", Identity(client, "a1", client)))
    assert fork.key != main.key
    assert fork.parent == main.key
    assert fork.client_digest == main.client_digest


def test_of_two_requests_at_once_the_second_has_a_session_of_its_own() -> None:
    house = House()
    first = house.run(call("S:s U:a"))
    second = house.recogniser.runs_elsewhere(house.owner(call("S:s U:a")))
    assert second is not None
    assert second.key != first.key
    assert second.parent == first.key
    assert house.run(call("S:s U:a A:1 U:b")) is first
    assert house.run(call("S:s U:a A:2 U:c")) is second
    assert house.causes() == [("content", Cause.NEW), ("content", Cause.FORKED)]


def test_until_it_is_known_where_a_request_runs_nothing_changes_for_its_branch() -> None:
    house = House()
    session = house.run(call("S:s U:a A:b U:c"))
    house.owner(call("S:s U:a A:b U:elsewhere A:d U:e"))
    (branch,) = house.branches.all()
    assert len(branch.line) == 4
    assert house.run(call("S:s U:a A:b U:c A:d U:e")) is session


def test_what_must_not_reach_the_disk_does_not_with_its_forks() -> None:
    house = House()
    session = house.run(call("S:s U:a", persists=False))
    fork = house.recogniser.runs_elsewhere(house.owner(call("S:s U:a")))
    assert fork is not None
    assert (session.may_persist, fork.may_persist) == (False, False)
    assert {branch.may_persist for branch in house.branches.all()} == {False}


def test_an_id_that_names_everything_is_told_once() -> None:
    house = House()
    for n in range(STATIC_BRANCHES + 2):
        house.run(call(f"S:s U:{n}", NAMED))
        house.run(call(f"S:s U:{n}"))
    assert len(house.sink.of(StaticIdSeen)) == 1


def test_a_contradiction_between_header_and_body_is_told() -> None:
    house = House()
    house.run(call("S:s U:a", Identity(NAMED.client, is_disputed=True)))
    assert len(house.sink.of(IdsDisagreed)) == 1


def test_single_questions_without_an_id_are_not_worth_saving_until_one_goes_on() -> None:
    house = House()
    sessions = [house.run(call(f"S:s U:{n}")) for n in range(MOST_UNCONTINUED + 2)]
    assert [session.is_passing for session in sessions[-3:]] == [False, True, True]
    assert not house.run(call("S:s U:a", NAMED)).is_passing
    assert house.run(call(f"S:s U:{MOST_UNCONTINUED}")).is_passing, "asked again, and no more"
    assert not house.run(call(f"S:s U:{MOST_UNCONTINUED} A:b U:c")).is_passing
    assert not house.run(call("S:s U:another")).is_passing


def test_a_purged_session_begins_anew() -> None:
    house = House()
    session = house.run(call("S:s U:a", NAMED))
    house.registry.forget(session.key)
    assert len(house.branches) == 0
    again = house.run(call("S:s U:a A:b U:c", NAMED))
    assert again is not session
    assert again.requests == 0


def test_a_session_keeps_what_finding_its_boundary_needs() -> None:
    house = House()
    plain = call("S:s U:a", NAMED)
    assert house.run(plain).asked is None
    kept = Call(**{name: getattr(plain, name) for name in Call.__slots__} | {"document": {"messages": []}})
    assert house.run(kept).asked == Asked("chat/completions", {"messages": []})


# Claude Code, as it was recorded: all under one session id


MARK = {"cache_control": {"type": "ephemeral"}}
REMINDER = {"type": "text", "text": "<system-reminder>Today is another day.</system-reminder>"}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("Agent", "Bash", "Read")]


def claude(
    *messages: dict[str, Any],
    system: str = "You are an agent.",
    tools: Any = TOOLS,
    agent: str = "",
    cch: str = "0",
) -> Call:
    """A request with a stamp that differs each time and a mark on the last block of the last user message."""
    stamp = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{cch}; cch={cch};"}
    *before, last = messages
    marked = {**last, "content": [*last["content"][:-1], {**last["content"][-1], **MARK}]}
    client = ClientId("x-claude-code-session-id", "66c9f377")
    return call(
        {
            "system": [stamp, {"type": "text", "text": system, **MARK}],
            "messages": [*before, marked],
            "tools": tools,
            "stream": True,
        },
        Identity(client, agent, client if agent else None),
        path="/v1/messages",
    )


def says(role: str, *blocks: Any) -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in blocks],
    }


MIDWAY = {"role": "system", "content": "Available agents: general-purpose."}
USE = {"type": "tool_use", "id": "toolu_1", "name": "Agent", "input": {"prompt": "look around"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]}
FIRST = says("user", REMINDER, "please look")
TURN_TWO = (FIRST, MIDWAY, says("assistant", USE), says("user", RESULT))


def test_claude_codes_conversation_its_agent_its_title_and_its_summary_are_told_apart() -> None:
    house = House()
    title = house.run(claude(says("user", "please look"), system="Write a title.", tools=[], cch="1"))
    main = house.run(claude(FIRST, cch="2"))
    agent = house.run(claude(says("user", REMINDER, "look around"), tools=TOOLS[:2], agent="a1", cch="3"))
    assert len({title.key, main.key, agent.key}) == 3
    assert agent.parent in (main.key, title.key)
    assert house.run(claude(*TURN_TWO, cch="4")) is main
    again = says("user", REMINDER, "look around"), says("assistant", "I look."), says("user", "further")
    assert house.run(claude(*again, tools=TOOLS[:2], agent="a1", cch="5")) is agent

    later = (*TURN_TWO, says("assistant", "It is done."), says("user", "thanks"))
    assert house.run(claude(*later, cch="6")) is main
    summary = (*later[:-1], says("user", "thanks", "Your task is to create a detailed summary."))
    assert house.run(claude(*summary, cch="7")) is main
    fresh = house.run(claude(says("user", REMINDER, "This session is continued from another one."), cch="8"))
    assert fresh.key not in (main.key, title.key, agent.key)
    assert house.run(claude(*later, says("assistant", "Welcome."), says("user", "more"), cch="9")) is main
    assert not house.sink.of(StaticIdSeen)


def test_a_fork_of_claude_code_knows_the_conversation_whose_words_it_has() -> None:
    house = House()
    house.run(claude(says("user", "please look"), system="Write a title.", tools=[]))
    main = house.run(claude(*TURN_TWO))
    fork = house.run(claude(*TURN_TWO, says("assistant", "so"), says("user", "task"), agent="f1"))
    assert fork.key != main.key
    assert fork.parent == main.key
