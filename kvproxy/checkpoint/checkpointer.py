"""A checkpoint, whole: save, verify, publish, mark.

The caller holds a lease on the slot, so nothing runs in it. Each attempt saves under a new name; what was
published before stays until the new manifest is on disk. Whatever goes wrong is an outcome.

A checkpoint once begun is seen through: it runs in a task of the house, never in a client's (`save_under`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvproxy.checkpoint.actions import Attempt, NotStarted
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.policy import CheckpointPolicy, is_worth_saving
from kvproxy.identifiers import Epoch, SlotId, SnapshotName, short
from kvproxy.slots.leases import Lease
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.state import SlotState
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation
from kvproxy.snapshots.names import new_name
from kvproxy.snapshots.store import Publication, Published
from kvproxy.telemetry.events import CheckpointEnded, CheckpointStarted
from kvproxy.upstream.replies import ActionFailure, Fault, Saved

PLAUSIBLE_SHARE = 0.95
"""A save holds at least the prompt that was just answered; what is missing beyond this is another content."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How one went. `tokens` and `size_bytes` are what was published."""

    outcome: CheckpointOutcome
    tokens: int = 0
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    """What is saved, as it was believed when the save began."""

    slot: SlotId
    epoch: Epoch
    occupancy: Occupancy
    fingerprint: Fingerprint
    trigger: Trigger
    name: SnapshotName


class Checkpointer:
    def __init__(self, parts: Parts, policy: CheckpointPolicy, *, timeout_seconds: float) -> None:
        self._p = parts
        self._policy = policy
        self._timeout_seconds = timeout_seconds
        self._in_flight: dict[SlotId, asyncio.Future[Checkpoint]] = {}
        self._names: set[SnapshotName] = set()
        self.published: Callable[[], None] = lambda: None
        """Called after each publication: retention looks whether something must go."""

    async def save(self, slot: SlotId, epoch: Epoch, trigger: Trigger) -> Checkpoint:
        """Checkpoint `slot`, of which the caller holds a lease granted in `epoch`."""
        view = self._p.table.view(slot) if epoch == self._p.table.epoch else None
        if view is None or view.occupancy is None or view.state is not SlotState.RESIDENT:
            return Checkpoint(CheckpointOutcome.SUPERSEDED)
        if (skip := self._reason_to_skip(view.occupancy, trigger)) is not None:
            return Checkpoint(skip)
        fingerprint = self._p.standing.facts.fingerprint
        if fingerprint is None:
            return Checkpoint(CheckpointOutcome.OFF)
        job = _Job(slot, epoch, view.occupancy, fingerprint, trigger, new_name(self._p.store.owner))
        done: asyncio.Future[Checkpoint] = asyncio.get_running_loop().create_future()
        self._in_flight[slot] = done
        self._names.add(job.name)
        result = Checkpoint(CheckpointOutcome.SUPERSEDED)
        try:
            result = await self._run(job)
            if result.outcome is not CheckpointOutcome.TIMED_OUT:
                self._names.discard(job.name)
        finally:
            if self._in_flight.get(slot) is done:  # else a save of a later life of the slot is in flight
                del self._in_flight[slot]
            done.set_result(result)
        return result

    async def save_under(self, lease: Lease, trigger: Trigger) -> Checkpoint:
        """Checkpoint the slot of `lease` and give it back, also when the one who asked has left."""
        work = self._save_and_release(lease, trigger)
        return await asyncio.shield(self._p.tasks.spawn(work, name=f"checkpoint slot {lease.slot}"))

    async def _save_and_release(self, lease: Lease, trigger: Trigger) -> Checkpoint:
        try:
            return await self.save(lease.slot, lease.epoch, trigger)
        finally:
            lease.release()

    async def joined(self, slot: SlotId) -> Checkpoint | None:
        """Wait for a save of `slot` that is in flight instead of making another; None if there is none."""
        flying = self._in_flight.get(slot)
        return None if flying is None else await asyncio.shield(flying)

    def names_in_flight(self) -> set[SnapshotName]:
        """Files that are being written, or may be by a save past its deadline, and have no manifest yet."""
        return set(self._names)

    def _reason_to_skip(self, occupancy: Occupancy, trigger: Trigger) -> CheckpointOutcome | None:
        session = self._p.registry.find(occupancy.session)
        if not occupancy.is_dirty:
            return CheckpointOutcome.CLEAN
        if not self._p.standing.facts.persistence.is_on or (session is not None and not session.may_persist):
            return CheckpointOutcome.OFF
        if not self._p.actions.are_allowed:
            return CheckpointOutcome.BREAKER_OPEN
        if trigger is not Trigger.MANUAL and not is_worth_saving(occupancy.tokens, self._policy):
            return CheckpointOutcome.TOO_SMALL
        return None

    async def _run(self, job: _Job) -> Checkpoint:
        session = short(job.occupancy.session)
        self._p.emit(CheckpointStarted(self._p.server, job.slot, session, job.trigger))
        began = self._p.clock.now()
        self._p.table.start_saving(job.slot, job.epoch)
        result = await self._attempt(job)
        took = self._p.clock.now() - began
        ended = CheckpointEnded(
            self._p.server,
            job.slot,
            session,
            job.trigger,
            result.outcome,
            result.tokens,
            result.size_bytes,
            took,
            result.detail,
        )
        self._p.emit(ended)
        return result

    async def _attempt(self, job: _Job) -> Checkpoint:
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_save(job.slot, job.name),
            self._deadline(job),
            lambda _: self._late(job),
        )
        if isinstance(attempt.result, Saved):
            return await self._verify(job, attempt, attempt.result)
        result = self._failed(job, attempt)
        # What a failed save leaves would keep a full disk full. One that is late is still being written.
        return await self._discard(job, result) if attempt.failed_for_good else result

    def _deadline(self, job: _Job) -> float:
        return self._p.actions.deadline(
            self._p.actions.save_rate,
            self._timeout_seconds,
            tokens=job.occupancy.tokens,
            others_run=self._p.is_serving,
        )

    def _failed(self, job: _Job, attempt: Attempt[Saved]) -> Checkpoint:
        result = attempt.result
        if isinstance(result, NotStarted):
            self._p.table.save_ended(job.slot, job.epoch, None)
            outcome = CheckpointOutcome.BUSY if result is NotStarted.BUSY else CheckpointOutcome.BREAKER_OPEN
            return Checkpoint(outcome)
        assert isinstance(result, ActionFailure)
        if attempt.timed_out:
            self._p.table.doubt(job.slot, job.epoch)
        else:
            self._p.table.save_ended(job.slot, job.epoch, None)
        # A server that is gone, or that wants a key, says nothing about whether saving works.
        is_silent = result.fault in (Fault.UNREACHABLE, Fault.UNAUTHORIZED)
        self._p.actions.judge(attempt, well=None if is_silent else False, reason=result.message)
        return Checkpoint(_OUTCOMES.get(result.fault, CheckpointOutcome.REFUSED), detail=result.message)

    async def _verify(self, job: _Job, attempt: Attempt[Saved], saved: Saved) -> Checkpoint:
        if job.epoch != self._p.table.epoch:
            self._p.actions.judge(attempt, well=None)
            return await self._discard(job, Checkpoint(CheckpointOutcome.SUPERSEDED))
        if (doubt := self._doubt(job, saved)) is not None:
            self._p.actions.judge(attempt, well=None)
            self._p.table.save_ended(job.slot, job.epoch, None)
            if doubt.outcome is CheckpointOutcome.EMPTY:
                self._p.table.lose(job.slot, job.epoch, is_blank=True)
                self._p.emptied()
            return await self._discard(job, doubt)
        check = await self._p.files.verify_saved(job.name, saved)
        if not check.is_ok:
            self._p.actions.judge(attempt, well=False, reason=check.reason)
            self._p.table.save_ended(job.slot, job.epoch, None)
            return await self._discard(job, Checkpoint(CheckpointOutcome.IMPLAUSIBLE, detail=check.reason))
        self._p.actions.learn(saved.tokens, saved.size_bytes)
        if saved.seconds is not None:
            self._p.actions.save_rate.observe(saved.size_bytes, saved.seconds)
        return await self._publish(job, attempt, saved, check)

    def _doubt(self, job: _Job, saved: Saved) -> Checkpoint | None:
        """What the server says it saved cannot be this session."""
        if saved.tokens == 0:
            return Checkpoint(CheckpointOutcome.EMPTY, detail="the server saved no tokens")
        expected = job.occupancy.tokens
        if expected is not None and saved.tokens < PLAUSIBLE_SHARE * expected:
            detail = f"the server saved {saved.tokens} tokens where {expected} were expected"
            return Checkpoint(CheckpointOutcome.IMPLAUSIBLE, detail=detail)
        return None

    async def _publish(
        self, job: _Job, attempt: Attempt[Saved], saved: Saved, check: FileCheck
    ) -> Checkpoint:
        result = await self._p.store.publish(self._publication(job, saved, check))
        well = isinstance(result, Published)
        self._p.actions.judge(
            attempt, well=well, reason="" if isinstance(result, Published) else result.reason
        )
        revision = job.occupancy.revision
        self._p.table.save_ended(job.slot, job.epoch, revision if well else None)
        if not isinstance(result, Published):
            return await self._discard(job, Checkpoint(CheckpointOutcome.STORE_FAILED, detail=result.reason))
        if (session := self._p.registry.find(job.occupancy.session)) is not None:
            session.revision = max(session.revision, revision)
        self._p.tasks.spawn(self._afterwards(job, check, result), name="digest")
        return Checkpoint(CheckpointOutcome.PUBLISHED, saved.tokens, saved.size_bytes)

    def _publication(self, job: _Job, saved: Saved, check: FileCheck) -> Publication:
        session = self._p.registry.find(job.occupancy.session)
        generation = Generation(
            name=job.name,
            tokens=saved.tokens,
            size_bytes=saved.size_bytes,
            revision=job.occupancy.revision,
            saved_at=self._p.clock.wall(),
            slot=job.slot,
            identity=check.identity,
        )
        return Publication(
            key=job.occupancy.session,
            server=self._p.server,
            model=session.model if session else self._p.standing.facts.model,
            client_digest=session.client_digest if session else "",
            fingerprint=job.fingerprint,
            generation=generation,
        )

    async def _afterwards(self, job: _Job, check: FileCheck, published: Published) -> None:
        """Off everyone's path: drop the files that were superseded, and hash the new one."""
        for name in published.superseded:
            await self._p.files.delete(name)
        self.published()
        digest = await self._p.files.digest(job.name, check.identity)
        if digest is not None:
            await self._p.store.amend(job.occupancy.session, job.fingerprint, job.name, sha256=digest)

    async def _discard(self, job: _Job, result: Checkpoint) -> Checkpoint:
        await self._p.files.delete(job.name)
        return result

    def _late(self, job: _Job) -> None:
        """A save past its deadline has ended: whatever it wrote is not to be trusted."""
        self._p.table.fate_known(job.slot, job.epoch)
        self._p.slots_changed()
        self._p.tasks.spawn(self._delete_late(job.name), name="delete late save")

    async def _delete_late(self, name: SnapshotName) -> None:
        await self._p.files.delete(name)
        self._names.discard(name)


_OUTCOMES = {
    Fault.TIMED_OUT: CheckpointOutcome.TIMED_OUT,
    Fault.UNREACHABLE: CheckpointOutcome.UNREACHABLE,
}
