from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason, Verdict
from kvproxy.dialects.endpoints import Reach, classify
from kvproxy.errors import CapacityError, ErrorCode, UpstreamError
from kvproxy.identifiers import Revision, SlotId
from kvproxy.proxy.account import WRITE_STALL, Account, refusal
from kvproxy.proxy.call import Call
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.sessions.identity import NOBODY, Identity
from kvproxy.sessions.key import ClientId
from kvproxy.sessions.session import Session
from kvproxy.telemetry.events import RequestDone, RequestFailed, RestoreProvedIneffective
from kvproxy.upstream.replies import Completed
from tests.support.clock import FakeClock
from tests.support.fakes_core import MAIN, A, Sink

S1 = SlotId(1)
RESTORED = Preparation(Outcome.RESTORED, restored_tokens=1000)


def answer(computed: int, reused: int) -> bytes:
    return (
        b'{"choices":[{"finish_reason":"stop"}],"timings":'
        b'{"cache_n":%d,"prompt_n":%d,"predicted_n":7}}' % (reused, computed)
    )


class Room:
    def __init__(
        self, *, is_nobodys: bool = False, path: str = "/v1/chat/completions", reach: Reach | None = None
    ) -> None:
        self.clock = FakeClock()
        self.sink = Sink()
        self.session = Session(A, "digest", "model", 0.0, Revision(0))
        endpoint = classify("POST", path)
        identity = NOBODY if is_nobodys else Identity(ClientId("x-session-id", "one"))
        call = Call(endpoint, reach or endpoint.reach, b"{}", identity, False, False, True)
        self.account = Account(MAIN, call, self.clock, self.sink, self.clock.now())

    def ended(self, *, ending: Ending = Ending.COMPLETE, status: int = 200) -> RequestDone:
        response = RelayedResponse(status=status, reason="", headers=CIMultiDict())
        response.ending = ending
        self.account.done(response)
        (done,) = self.sink.of(RequestDone)
        return done

    def prepared(self, preparation: Preparation = RESTORED, stored: int | None = 1000) -> None:
        self.account.prepared(preparation, self.session, S1, stored)


class TestHeaders:
    def test_a_client_is_told_its_session_its_slot_and_what_was_done(self) -> None:
        room = Room()
        room.account.asks()
        room.clock.advance(0.25)
        room.prepared(Preparation(Outcome.COLD, Reason.EVICTED))

        assert room.account.headers() == {
            "X-KVProxy-Slot": "1",
            "X-KVProxy-Outcome": "cold",
            "X-KVProxy-Restored-Tokens": "0",
            "X-KVProxy-Prepare-Ms": "250.0",
            "X-KVProxy-Session": "a" * 12,
            "X-KVProxy-Reason": "evicted",
        }

    def test_a_restore_says_how_much_it_brought_back_and_needs_no_reason(self) -> None:
        room = Room()
        room.prepared()
        told = room.account.headers()
        assert (told["X-KVProxy-Outcome"], told["X-KVProxy-Restored-Tokens"]) == ("restored", "1000")
        assert "X-KVProxy-Reason" not in told

    def test_a_request_that_is_nobodys_is_told_nothing(self) -> None:
        room = Room(is_nobodys=True)
        room.account.prepared(Preparation(Outcome.COLD), None, None, None)
        assert room.account.headers() == {}

    def test_a_bypass_is_told_that_it_is_one(self) -> None:
        room = Room(is_nobodys=True)
        room.account.prepared(Preparation(Outcome.BYPASS), None, None, None)
        told = room.account.headers()
        assert (told["X-KVProxy-Outcome"], told["X-KVProxy-Slot"]) == ("bypass", "-")
        assert "X-KVProxy-Session" not in told

    def test_a_session_remembers_what_its_last_request_was_told(self) -> None:
        room = Room()
        room.prepared()
        assert room.session.preparation == RESTORED


class TestDone:
    def test_an_answer_is_told_with_what_it_reused_and_what_was_believed(self) -> None:
        room = Room()
        room.prepared()
        room.account.tap.feed(answer(12, 1000))

        done = room.ended()

        assert (done.endpoint, done.slot, done.session, done.status) == ("chat/completions", 1, "a" * 12, 200)
        assert (done.computed_tokens, done.reused_tokens, done.generated_tokens) == (12, 1000, 7)
        assert (done.outcome, done.verdict, room.session.verdict) == (
            Outcome.RESTORED,
            Verdict.CONFIRMED,
            Verdict.CONFIRMED,
        )
        assert room.sink.of(RequestFailed) == []

    def test_times_are_told_apart(self) -> None:
        room = Room()
        room.clock.advance(1)
        room.account.asks()
        room.clock.advance(2)
        room.prepared()
        room.clock.advance(0.5)
        room.account.sent()
        room.clock.advance(4)
        room.account.tap.feed(answer(1, 1000))
        room.clock.advance(8)

        done = room.ended()

        assert (done.prepare_seconds, done.overhead_seconds) == (2.0, 1.5)
        assert (done.ttfb_seconds, done.duration_seconds) == (7.5, 15.5)

    def test_an_answer_that_tells_nothing_proves_nothing(self) -> None:
        room = Room()
        room.prepared()

        done = room.ended()

        assert (done.verdict, done.computed_tokens, done.ttfb_seconds) == (Verdict.UNKNOWN, None, None)

    def test_a_restore_of_which_nothing_was_reused_is_told_as_ineffective(self) -> None:
        room = Room()
        room.prepared()
        room.account.tap.feed(answer(1012, 0))

        assert room.ended().verdict is Verdict.INEFFECTIVE
        assert room.sink.of(RestoreProvedIneffective) == [
            RestoreProvedIneffective(MAIN, S1, "a" * 12, 1000, 0)
        ]

    def test_a_resident_slot_of_which_nothing_was_reused_is_no_ineffective_restore(self) -> None:
        room = Room()
        room.prepared(Preparation(Outcome.RESIDENT))
        room.account.tap.feed(answer(1012, 0))

        assert room.ended().verdict is Verdict.INEFFECTIVE
        assert room.sink.of(RestoreProvedIneffective) == []

    @pytest.mark.parametrize(
        ("ending", "source"), [(Ending.CLIENT_LEFT, "client"), (Ending.UPSTREAM_BROKE, "upstream")]
    )
    def test_an_answer_that_was_broken_off_is_done_and_failed(self, ending: Ending, source: str) -> None:
        room = Room()
        room.prepared()
        room.ended(ending=ending)
        (failed,) = room.sink.of(RequestFailed)
        assert (failed.source, failed.code, failed.session) == (source, ending.value, "a" * 12)

    def test_the_counts_of_an_answer_are_read_once(self) -> None:
        room = Room()
        room.account.tap.feed(answer(12, 1000))
        first = room.account.usage
        room.account.tap.feed(answer(1, 1))
        assert room.account.usage is first


class TestRefused:
    def test_what_we_answer_ourselves_is_ours_or_the_servers_to_blame(self) -> None:
        room = Room()
        room.account.refused(CapacityError(ErrorCode.QUEUE_FULL, "full"))
        room.account.refused(UpstreamError("gone"))
        assert [(one.source, one.code) for one in room.sink.of(RequestFailed)] == [
            ("proxy", "KV_QUEUE_FULL"),
            ("upstream", "KV_BACKEND_UNAVAILABLE"),
        ]

    def test_a_client_that_left_before_the_answer_is_told_of(self) -> None:
        room = Room()
        room.account.client_left()
        assert room.sink.events == [RequestFailed(MAIN, "chat/completions", None, "client", "client_left")]

    def test_a_client_that_we_cut_off_did_not_leave(self) -> None:
        room = Room()
        room.account.cut_off(WRITE_STALL)
        room.account.client_left()
        assert room.sink.events == [RequestFailed(MAIN, "chat/completions", None, "proxy", "write_stall")]

    def test_one_refused_before_it_had_an_account_is_told_the_same_way(self) -> None:
        error = CapacityError(ErrorCode.DRAINING, "shutting down")
        assert refusal(MAIN, "messages", error) == RequestFailed(
            MAIN, "messages", None, "proxy", "KV_DRAINING"
        )


def test_a_request_was_taken_up_once_the_answers_headers_came() -> None:
    room = Room()
    assert not room.account.was_seen_running
    room.account.headers_came()
    assert room.account.was_seen_running


@pytest.mark.parametrize(
    ("said", "was_cut_off"),
    [
        (b'{"error":{"code":500,"message":"Context size has been exceeded."}}', True),
        (b'data: {"choices":[]}\n\ndata: {"error":{"message":"Context size has been exceeded."}}\n\n', True),
        (b'{"error":{"code":500,"message":"Compute error."}}', False),
        (b'{"choices":[{"text":"Context size has been exceeded"}],' + answer(1, 2)[1:], False),
    ],
    ids=["whole", "stream", "another error", "a model's own words"],
)
def test_a_server_that_ran_out_of_room_says_so(said: bytes, was_cut_off: bool) -> None:
    room = Room()
    room.account.tap.feed(said)
    assert room.account.was_cut_off is was_cut_off


RESPONSE = (
    b'{"response":{"status":"%b","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8}}}}'
)


class TestTold:
    @pytest.mark.parametrize(
        ("path", "said", "is_told"),
        [
            ("/v1/chat/completions", answer(1, 2), True),
            ("/v1/chat/completions", b'{"choices":[{"finish_reason":"stop"}]}', False),
            ("/v1/chat/completions", answer(1, 2).replace(b'"stop"', b"null"), False),
            ("/v1/responses", RESPONSE % b"completed", True),
            ("/v1/responses", RESPONSE % b"in_progress", False),
            ("/v1/messages", b'{"usage":{"input_tokens":9,"cache_read_input_tokens":8}}', False),
            ("/v1/embeddings", b'{"usage":{"prompt_tokens":9}}', False),
        ],
    )
    def test_an_answer_is_told_once_it_says_what_it_cost_and_how_it_ended(
        self, path: str, said: bytes, is_told: bool
    ) -> None:
        room = Room(path=path)
        room.account.tap.feed(said)
        assert room.account.is_told is is_told

    def test_of_several_answers_the_first_to_end_is_not_the_last(self) -> None:
        room = Room(reach=Reach.EXCLUSIVE)
        room.account.tap.feed(answer(1, 2))
        assert not room.account.is_told

    def test_a_client_that_we_cut_off_was_not_told(self) -> None:
        room = Room()
        room.account.tap.feed(answer(1, 2))
        room.account.cut_off(WRITE_STALL)
        assert not room.account.is_told


class TestWhereItRan:
    """Of a request whose slot the server chose."""

    def test_in_the_slot_that_was_made_ready_its_answer_proves_what_that_held(self) -> None:
        room = Room()
        room.prepared()
        room.account.tap.feed(answer(computed=10, reused=1000))
        room.account.ran_in(S1)
        assert (room.ended().verdict, room.sink.of(RequestDone)[0].slot) == (Verdict.CONFIRMED, S1)

    @pytest.mark.parametrize("slot", [SlotId(0), None])
    def test_elsewhere_it_proves_nothing(self, slot: SlotId | None) -> None:
        room = Room()
        room.prepared()
        room.account.tap.feed(answer(computed=1010, reused=0))
        room.account.ran_in(slot)
        done = room.ended()
        assert (done.verdict, done.slot) == (Verdict.UNKNOWN, slot)
        assert room.sink.of(RestoreProvedIneffective) == []

    def test_what_was_computed_ahead_of_it_counts_as_its_own(self) -> None:
        room = Room()
        room.prepared()
        room.account.tap.feed(answer(computed=1, reused=1009))
        room.account.had_computed(Completed(10, 1000))
        room.account.ran_in(S1)
        done = room.ended()
        assert (done.computed_tokens, done.reused_tokens, done.generated_tokens) == (11, 1000, 7)
