"""The account of one exchange: its times, what it was told, what its answer proved. It only watches."""

from __future__ import annotations

from dataclasses import replace

from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason, Verdict
from kvproxy.checkpoint.verdict import verdict_of
from kvproxy.clock import Clock
from kvproxy.dialects.endpoints import Reach
from kvproxy.errors import ReplyError
from kvproxy.identifiers import ServerName, SlotId, short
from kvproxy.proxy.call import Call
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.proxy.tap import Tap
from kvproxy.sessions.session import Session
from kvproxy.telemetry.events import Emit, RequestDone, RequestFailed, RestoreProvedIneffective
from kvproxy.upstream.replies import OUT_OF_ROOM, Completed, Usage

WRITE_STALL = "write_stall"


class Account:
    """`began` is the clock's seconds at which the request had been read."""

    def __init__(self, server: ServerName, call: Call, clock: Clock, emit: Emit, began: float) -> None:
        self._server = server
        self._label = call.endpoint.label
        self._is_nobodys = call.is_anonymous
        self._has_many_answers = call.reach is Reach.EXCLUSIVE
        self._clock = clock
        self._emit = emit
        self._began = began
        self._asked_at = began
        self._sent_at = began
        self._prepare_seconds = 0.0
        self._preparation = Preparation(Outcome.COLD)
        self._session: Session | None = None
        self._slot: SlotId | None = None
        self._stored_tokens: int | None = None
        self._usage: Usage | None = None
        self.tap = Tap(clock)
        self._cut: str | None = None
        self.was_seen_running = False
        """The answer's headers came: the server had taken up the request."""
        self.has_begun_again = False

    # -- on the way ------------------------------------------------------------------------------------------

    def asks(self) -> None:
        """From here on it waits for a slot and its preparation."""
        self._asked_at = self._clock.now()

    def prepared(
        self, preparation: Preparation, session: Session | None, slot: SlotId | None, stored: int | None
    ) -> None:
        """`stored` is how many tokens the slot is believed to hold, None if that is not known."""
        self._preparation, self._session, self._slot, self._stored_tokens = preparation, session, slot, stored
        self._prepare_seconds = self._clock.now() - self._asked_at
        if session is not None:
            session.preparation = preparation

    def emptied(self) -> None:
        """The slot had to be erased after all: the request is sent again, to compute everything."""
        self._preparation, self._stored_tokens = Preparation(Outcome.COLD, Reason.RESTORE_FAILED), None
        if self._session is not None:
            self._session.preparation = self._preparation

    def begins_again(self) -> None:
        """The server ran out of room under it, and its client has seen nothing of that."""
        self.has_begun_again, self.was_seen_running = True, False

    def sent(self) -> None:
        self._sent_at = self._clock.now()

    def cut_off(self, code: str) -> None:
        """It is we who end it here, not its client."""
        self._cut = code

    def headers_came(self) -> None:
        self.was_seen_running = True

    def headers(self) -> dict[str, str]:
        """The headers by which the client is told what was done; none for a request that is nobody's."""
        if self._is_nobodys and self._preparation.outcome is Outcome.COLD:
            return {}
        told = {
            "X-KVProxy-Slot": "-" if self._slot is None else str(self._slot),
            "X-KVProxy-Outcome": self._preparation.outcome.value,
            "X-KVProxy-Restored-Tokens": str(self._preparation.restored_tokens),
            "X-KVProxy-Prepare-Ms": f"{self._prepare_seconds * 1000:.1f}",
        }
        if self._session is not None:
            told["X-KVProxy-Session"] = short(self._session.key)
        if self._preparation.reason is not None:
            told["X-KVProxy-Reason"] = self._preparation.reason.value
        return told

    def had_computed(self, before: Completed) -> None:
        """The prompt had been computed by a request of ours, which the answer cannot know."""
        usage = self.usage
        computed = before.computed + (usage.computed or 0)
        self._usage = replace(usage, computed=computed, reused=before.reused)

    def ran_in(self, slot: SlotId | None) -> None:
        """Where it was seen to run; None if that is not known. In another slot than the one that was made
        ready, the answer tells nothing of what that held."""
        if slot is None or slot != self._slot:
            self._slot, self._stored_tokens = slot, None

    # -- at the end ------------------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """What the answer said of its prompt; to be asked once it has ended."""
        if self._usage is None:
            self._usage = self.tap.usage(self._label)
        return self._usage

    @property
    def is_told(self) -> bool:
        """Whether what has passed so far tells how the answer ended, so that the server is done with it. Of
        one that holds several answers that cannot be said."""
        if self._has_many_answers or self._cut is not None:
            return False
        usage = self.tap.usage(self._label)
        return usage.prompt is not None and usage.finish_reason is not None

    @property
    def was_cut_off(self) -> bool:
        """Whether the server ran out of room under it; to be asked once it has ended."""
        return self.usage.prompt is None and self.tap.ended_with(OUT_OF_ROOM)

    def done(self, response: RelayedResponse) -> Verdict:
        """What the answer proved."""
        verdict, usage, told = self._judge(), self.usage, self._preparation
        if response.ending is Ending.CLIENT_LEFT:
            self.client_left()
        elif response.ending is Ending.UPSTREAM_BROKE:
            self._failed("upstream", response.ending)
        now, first = self._clock.now(), self.tap.first_byte_at
        self._emit(
            RequestDone(
                self._server,
                self._label,
                self._slot,
                None if self._session is None else short(self._session.key),
                told.outcome,
                told.reason,
                verdict,
                response.status,
                told.restored_tokens,
                usage.computed,
                usage.reused,
                usage.generated,
                self._prepare_seconds,
                max(0.0, self._sent_at - self._began - self._prepare_seconds),
                None if first is None else first - self._began,
                now - self._began,
            )
        )
        return verdict

    def refused(self, error: ReplyError) -> None:
        """We answered in the server's place."""
        source = "upstream" if error.is_upstream else "proxy"
        self._failed(source, error.code)

    def client_left(self) -> None:
        """The client's connection is gone: it left, or was cut off."""
        if self._cut is not None:
            self._failed("proxy", self._cut)
        else:
            self._failed("client", Ending.CLIENT_LEFT)

    def _judge(self) -> Verdict:
        verdict = verdict_of(self._preparation.outcome, self._stored_tokens, self.usage)
        if self._session is None or self._slot is None:
            return verdict
        self._session.verdict = verdict
        if verdict is Verdict.INEFFECTIVE and self._preparation.outcome is Outcome.RESTORED:
            restored, reused = self._preparation.restored_tokens, self.usage.reused or 0
            key = short(self._session.key)
            self._emit(RestoreProvedIneffective(self._server, self._slot, key, restored, reused))
        return verdict

    def _failed(self, source: str, code: str) -> None:
        key = None if self._session is None else short(self._session.key)
        self._emit(RequestFailed(self._server, self._label, key, source, code))


def refusal(server: ServerName, label: str, error: ReplyError) -> RequestFailed:
    """The event of a request that was refused before it had an account."""
    return RequestFailed(server, label, None, "upstream" if error.is_upstream else "proxy", error.code)
