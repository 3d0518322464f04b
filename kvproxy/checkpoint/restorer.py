"""A restore, whole: find, check, mark, restore, check again. Never raises for a missing or bad snapshot.

The caller holds a lease on the slot, which nobody lives in any more. A restore that fails leaves the slot
empty: that is the server's way, and a cold prompt is the worst that comes of it.

Before the call a mark is written: a bad file can abort the server, a supervisor starts it again, and
without the mark the next request would restore the same file for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.actions import Attempt, NotStarted
from kvproxy.checkpoint.outcome import RestoreOutcome
from kvproxy.checkpoint.parts import Parts
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId, short
from kvproxy.slots.slot import Occupancy
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation, generation_to_restore
from kvproxy.telemetry.events import RestoreEnded, RestoreStarted
from kvproxy.upstream.replies import ActionFailure, Fault, Restored

DIED = "the server died while restoring it"

NO_ROOM = "No available space"
"""llama-server's words when its KV cache is full, and also when it cannot read the file. Only where no other
slot holds anything is it known to be the file."""


@dataclass(frozen=True, slots=True)
class Restoration:
    """How a restore ended; `tokens` is what is in the slot now because of it."""

    outcome: RestoreOutcome
    tokens: int = 0
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    slot: SlotId
    epoch: Epoch
    key: SessionKey
    fingerprint: Fingerprint
    generation: Generation


class Restorer:
    def __init__(self, parts: Parts, *, is_enabled: bool, verify: bool, timeout_seconds: float) -> None:
        self._p = parts
        self._is_enabled = is_enabled
        self._verify = verify
        self._timeout_seconds = timeout_seconds

    async def restore(self, slot: SlotId, epoch: Epoch, key: SessionKey, base: Revision) -> Restoration:
        """Bring `key`'s snapshot into `slot`, of which the caller holds a lease granted in `epoch`.

        `base` is the lowest revision that the session's stay may begin with. After NO_ROOM it may be tried
        again once other slots were emptied.
        """
        found = await self._find(key)
        if isinstance(found, Restoration):
            return found
        fingerprint, generation = found
        job = _Job(slot, epoch, key, fingerprint, generation)
        began = self._p.clock.now()
        self._p.emit(RestoreStarted(self._p.server, slot, short(key)))
        result = await self._run(job, base)
        took = self._p.clock.now() - began
        self._p.emit(
            RestoreEnded(
                self._p.server,
                slot,
                short(key),
                result.outcome,
                result.tokens,
                result.size_bytes,
                took,
                result.detail,
            )
        )
        return result

    # -- before ------------------------------------------------------------------------------------------

    async def _find(self, key: SessionKey) -> tuple[Fingerprint, Generation] | Restoration:
        """The generation to restore, or why there is none. No file is read for a session never saved."""
        facts = self._p.standing.facts
        if not self._is_enabled or not facts.persistence.is_on or facts.fingerprint is None:
            return Restoration(RestoreOutcome.OFF, detail=facts.persistence.reason)
        manifest = self._p.store.find(key, facts.fingerprint)
        if manifest is None:
            return self._missing(key, facts.fingerprint)
        while (generation := generation_to_restore(manifest)) is not None:
            if facts.n_ctx is not None and generation.tokens > facts.n_ctx:
                detail = f"{generation.tokens} tokens do not fit {facts.n_ctx}"
                return Restoration(RestoreOutcome.DOES_NOT_FIT, detail=detail)
            reason = await self._fault_in(key, facts.fingerprint, generation)
            if reason is None:
                return facts.fingerprint, generation
            await self._p.store.invalidate(key, facts.fingerprint, generation.name, reason)
            manifest = self._p.store.find(key, facts.fingerprint)
            if manifest is None:
                break
        return Restoration(RestoreOutcome.SNAPSHOT_INVALID)

    def _missing(self, key: SessionKey, fingerprint: Fingerprint) -> Restoration:
        others = self._p.store.find_any(key)
        if not others:
            return Restoration(RestoreOutcome.NO_SNAPSHOT)
        differing = ", ".join(fingerprint.diff(others[0].fingerprint))
        return Restoration(RestoreOutcome.FINGERPRINT_MISMATCH, detail=f"differs in {differing}")

    async def _fault_in(
        self, key: SessionKey, fingerprint: Fingerprint, generation: Generation
    ) -> str | None:
        if not self._verify:
            return None
        check = await self._p.files.verify_stored(generation)
        if not check.is_ok:
            return check.reason
        if check.identity is not None and check.identity != generation.identity:
            # It was moved or touched and had to be read whole; not again the next time.
            await self._p.store.amend(key, fingerprint, generation.name, identity=check.identity)
        return None

    # -- the call ----------------------------------------------------------------------------------------

    async def _run(self, job: _Job, base: Revision) -> Restoration:
        if not self._p.table.start_restoring(job.slot, job.epoch):
            return Restoration(RestoreOutcome.UNREACHABLE, detail="the server is another one by now")
        if (failure := await self._p.store.mark_restoring(job.generation.name)) is not None:
            # Without the mark a file that kills the server would be restored after every restart.
            await self._p.store.clear_restoring(job.generation.name)
            self._p.table.not_restored(job.slot, job.epoch, is_blank=False)
            return Restoration(RestoreOutcome.STORE_FAILED, detail=failure.reason)
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_restore(job.slot, job.generation.name),
            self._deadline(job),
            lambda fate: self._late(job, fate),
        )
        result = await self._conclude(job, attempt, base)
        if not attempt.timed_out:
            await self._p.store.clear_restoring(job.generation.name)
        return result

    def _deadline(self, job: _Job) -> float:
        return self._p.actions.deadline(
            self._p.actions.restore_rate,
            self._timeout_seconds,
            tokens=job.generation.tokens,
            size_bytes=job.generation.size_bytes,
            others_run=self._p.is_serving,
        )

    async def _conclude(self, job: _Job, attempt: Attempt[Restored], base: Revision) -> Restoration:
        result = attempt.result
        if isinstance(result, NotStarted):
            self._p.table.not_restored(job.slot, job.epoch, is_blank=False)
            return Restoration(
                RestoreOutcome.BUSY if result is NotStarted.BUSY else RestoreOutcome.BREAKER_OPEN
            )
        if isinstance(result, ActionFailure):
            return await self._failed(job, attempt, result)
        if result.tokens != job.generation.tokens:
            return await self._implausible(job, attempt, result)
        self._p.actions.judge(attempt, well=True)
        return self._restored(job, result, base)

    def _restored(self, job: _Job, result: Restored, base: Revision) -> Restoration:
        if result.seconds is not None:
            self._p.actions.restore_rate.observe(result.size_bytes, result.seconds)
        revision = max(base, job.generation.revision)
        occupancy = Occupancy(job.key, revision, revision, tokens=result.tokens)
        if not self._p.table.restored(job.slot, job.epoch, occupancy):
            return Restoration(RestoreOutcome.UNREACHABLE, detail="the server is another one by now")
        fingerprint = job.fingerprint
        self._p.store.touch(job.key, fingerprint)
        return Restoration(RestoreOutcome.RESTORED, result.tokens, result.size_bytes)

    async def _failed(self, job: _Job, attempt: Attempt[Restored], failure: ActionFailure) -> Restoration:
        if attempt.timed_out:
            self._p.table.doubt(job.slot, job.epoch)
            self._p.actions.judge(attempt, well=False, reason=failure.message)
            return Restoration(RestoreOutcome.TIMED_OUT, detail=failure.message)
        self._p.table.not_restored(job.slot, job.epoch, is_blank=failure.fault is Fault.REFUSED)
        is_refusal = failure.fault is Fault.REFUSED
        if failure.fault is Fault.UNREACHABLE:
            if _died(failure):
                await self._invalidate(job, DIED)
            self._p.actions.judge(attempt, well=None)
            return Restoration(RestoreOutcome.UNREACHABLE, detail=failure.message)
        if is_refusal and NO_ROOM in failure.message and not self._is_alone(job):
            self._p.actions.judge(attempt, well=None)
            return Restoration(RestoreOutcome.NO_ROOM, detail=failure.message)
        if is_refusal:
            await self._invalidate(job, f"the server refused it: {failure.message}")
        # A file the server does not like says nothing about whether restoring works.
        self._p.actions.judge(attempt, well=None if is_refusal else False, reason=failure.message)
        return Restoration(RestoreOutcome.REFUSED, detail=failure.message)

    def _is_alone(self, job: _Job) -> bool:
        """Whether no other slot takes up room."""
        return all(view.is_blank for view in self._p.table.views() if view.id != job.slot)

    async def _implausible(self, job: _Job, attempt: Attempt[Restored], result: Restored) -> Restoration:
        detail = f"the server restored {result.tokens} tokens of {job.generation.tokens}"
        self._p.table.not_restored(job.slot, job.epoch, is_blank=result.tokens == 0)
        await self._invalidate(job, detail)
        self._p.actions.judge(attempt, well=None)
        return Restoration(RestoreOutcome.IMPLAUSIBLE, detail=detail)

    async def _invalidate(self, job: _Job, reason: str) -> None:
        await self._p.store.invalidate(job.key, job.fingerprint, job.generation.name, reason)

    def _late(self, job: _Job, fate: Restored | ActionFailure) -> None:
        """A restore past its deadline has ended: the slot holds who knows what, but nothing runs on it."""
        self._p.table.fate_known(job.slot, job.epoch)
        self._p.slots_changed()
        self._p.tasks.spawn(self._close(job, fate), name="late restore")

    async def _close(self, job: _Job, fate: Restored | ActionFailure) -> None:
        if _died(fate):
            await self._invalidate(job, DIED)
        await self._p.store.clear_restoring(job.generation.name)


def _died(result: Restored | ActionFailure) -> bool:
    """The server was there when the restore was sent, and gone before it answered.

    An answer that says it cannot (503: another process is loading) is one: that server has not acted.
    """
    if not isinstance(result, ActionFailure) or result.fault is not Fault.UNREACHABLE:
        return False
    return result.was_sent and not result.status
