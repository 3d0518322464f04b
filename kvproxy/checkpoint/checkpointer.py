"""A checkpoint, whole: save, verify, publish, mark.

The caller holds a lease on the slot, so nothing runs in it; it may give it back as soon as the file is
written (`write`), the rest is the publisher's. Each attempt saves under a new name; what was published before
stays until the new manifest is on disk. Whatever goes wrong is an outcome.

A checkpoint once begun is seen through: it runs in a task of the house, never in a client's (`save_under`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kvproxy.boundary.rewind import NotRewound
from kvproxy.checkpoint.actions import Attempt, NotStarted
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.policy import CheckpointPolicy, is_worth_saving
from kvproxy.checkpoint.publisher import GIVEN_UP, Checkpoint, Job, Publisher
from kvproxy.checkpoint.room import Room
from kvproxy.checkpoint.shaper import Shape, Shaper
from kvproxy.identifiers import Epoch, SessionKey, SlotId, SnapshotName, short
from kvproxy.slots.leases import Lease
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.state import SlotState
from kvproxy.snapshots.manifest import digest_of_ids
from kvproxy.snapshots.names import new_name
from kvproxy.telemetry.events import CheckpointEnded, CheckpointStarted
from kvproxy.upstream.replies import ActionFailure, Fault, Saved

PLAUSIBLE_SHARE = 0.95
"""A save holds at least the prompt that was just answered; what is missing beyond this is another content."""


class Checkpointer:
    def __init__(
        self, parts: Parts, policy: CheckpointPolicy, shaper: Shaper, *, timeout_seconds: float
    ) -> None:
        self._p = parts
        self._shaper = shaper
        self._policy = policy
        self._timeout_seconds = timeout_seconds
        self._in_flight: dict[SlotId, asyncio.Future[Checkpoint]] = {}
        self._names: set[SnapshotName] = set()
        self.room = Room(parts.files, parts.store, parts.emit)
        self.publisher = Publisher(parts, self.room, self._published)

    async def save(self, slot: SlotId, epoch: Epoch, trigger: Trigger) -> Checkpoint:
        """Checkpoint `slot`, of which the caller holds a lease granted in `epoch`, to the end."""
        return await _end_of(await self.write(slot, epoch, trigger))

    async def write(
        self, slot: SlotId, epoch: Epoch, trigger: Trigger
    ) -> Checkpoint | asyncio.Task[Checkpoint]:
        """The part of a checkpoint that needs the slot. How it ended, or the publication under way."""
        view = self._p.table.view(slot) if epoch == self._p.table.epoch else None
        if view is None or view.occupancy is None or view.state is not SlotState.RESIDENT:
            return Checkpoint(CheckpointOutcome.SUPERSEDED)
        stay = view.occupancy
        if stay.is_dirty and (running := self.publisher.running(stay.session, stay.revision)) is not None:
            return running
        if (skip := self._reason_to_skip(stay, trigger)) is not None:
            return Checkpoint(skip)
        fingerprint = self._p.standing.facts.fingerprint
        if fingerprint is None:
            return Checkpoint(CheckpointOutcome.OFF)
        name = new_name(self._p.store.owner)
        return await self._write(Job(slot, epoch, stay, fingerprint, trigger, name, self._p.clock.now()))

    async def _write(self, job: Job) -> Checkpoint | asyncio.Task[Checkpoint]:
        done: asyncio.Future[Checkpoint] = asyncio.get_running_loop().create_future()
        self._in_flight[job.slot] = done
        self._names.add(job.name)
        result: Checkpoint | asyncio.Task[Checkpoint] = Checkpoint(CheckpointOutcome.SUPERSEDED)
        try:
            result = await self._run(job)
        except Exception:  # a bug, which goes on up; the slot must not stay as it was left for ever
            self._give_up(job)
            raise
        finally:
            if self._in_flight.get(job.slot) is done:  # else a save of a later life of the slot is in flight
                del self._in_flight[job.slot]
            self._hand_on(done, result)
        return result

    def _hand_on(
        self, done: asyncio.Future[Checkpoint], result: Checkpoint | asyncio.Task[Checkpoint]
    ) -> None:
        """Give those who joined what there is now, or the publication's end once it has come."""
        if isinstance(result, Checkpoint):
            done.set_result(result)
        else:
            result.add_done_callback(lambda task: done.set_result(_result_of(task)))

    async def save_under(self, lease: Lease, trigger: Trigger) -> Checkpoint:
        """Checkpoint the slot of `lease` and give it back once the file is written, also when the one who
        asked has left."""
        work = self._write_and_release(lease, trigger)
        writing = self._p.tasks.spawn(work, name=f"checkpoint slot {lease.slot}")
        await asyncio.wait({writing})
        return GIVEN_UP if _has_died(writing) else await _end_of(writing.result())

    async def _write_and_release(
        self, lease: Lease, trigger: Trigger
    ) -> Checkpoint | asyncio.Task[Checkpoint]:
        try:
            return await self.write(lease.slot, lease.epoch, trigger)
        finally:
            lease.release()

    async def joined(self, slot: SlotId) -> Checkpoint | None:
        """The end of a save that is being written from `slot`, instead of another one; None if none is."""
        flying = self._in_flight.get(slot)
        return None if flying is None else await asyncio.shield(flying)

    def names_in_flight(self) -> set[SnapshotName]:
        """Files that are being written, or may be by a save past its deadline, and have no manifest yet."""
        return self._names | self.publisher.opener.names_in_flight()

    def may_save(self, key: SessionKey) -> bool:
        """Whether this session's work is to be kept, on this server."""
        session = self._p.registry.find(key)
        is_wanted = session is None or (session.may_persist and not session.is_passing)
        return is_wanted and self._p.standing.facts.persistence.may_save

    def is_at_risk(self, slot: SlotId) -> bool:
        """Whether work that would be missed is only in `slot`: in no file, and being written to none."""
        stay = self._p.table.view(slot).occupancy
        if stay is None or not stay.is_dirty or not is_worth_saving(stay.tokens, self._policy):
            return False
        session = self._p.registry.find(stay.session)
        is_passing = session is not None and session.is_passing
        return not is_passing and self.publisher.running(stay.session, stay.revision) is None

    def _reason_to_skip(self, occupancy: Occupancy, trigger: Trigger) -> CheckpointOutcome | None:
        if not occupancy.is_dirty:
            return CheckpointOutcome.CLEAN
        if not self._p.standing.facts.persistence.may_save:
            return CheckpointOutcome.OFF
        if not self.may_save(occupancy.session):
            return CheckpointOutcome.UNWANTED
        if not self._p.actions.are_allowed:
            return CheckpointOutcome.BREAKER_OPEN
        if trigger is not Trigger.MANUAL and not is_worth_saving(occupancy.tokens, self._policy):
            return CheckpointOutcome.TOO_SMALL
        return None

    async def _run(self, job: Job) -> Checkpoint | asyncio.Task[Checkpoint]:
        session = short(job.session)
        self._p.emit(CheckpointStarted(self._p.server, job.slot, session, job.trigger))
        self._p.table.start_saving(job.slot, job.epoch)
        shape = await self._shaper.shape(job.slot, job.epoch, job.occupancy, job.trigger)
        if isinstance(shape, NotRewound):
            result: Checkpoint | asyncio.Task[Checkpoint] = await self._lost(job, shape)
        else:
            result = await self._attempt(_shaped(job, shape))
        if isinstance(result, Checkpoint):
            self._ended(job, result)
        return result

    def _published(self, job: Job, result: Checkpoint) -> None:
        self._ended(job, result)

    def _ended(self, job: Job, result: Checkpoint) -> None:
        if result.outcome is not CheckpointOutcome.TIMED_OUT:
            self._names.discard(job.name)
        if result.outcome is CheckpointOutcome.PUBLISHED:
            self.room.found()
        ended = CheckpointEnded(
            self._p.server,
            job.slot,
            short(job.session),
            job.trigger,
            result.outcome,
            result.tokens,
            result.size_bytes,
            self._p.clock.now() - job.began,
            result.detail,
        )
        self._p.emit(ended)

    async def _lost(self, job: Job, failure: NotRewound) -> Checkpoint:
        """What the slot holds is not known, and the server may still be computing in it: a request that was
        pinned there now would meet that. A server that is away keeps nobody waiting."""
        if await self._shaper.until_idle(job.slot, job.epoch, though_away=False):
            self._p.table.save_ended(job.slot, job.epoch)
            self._p.table.lose(job.slot, job.epoch)
        else:
            self._doubt_slot(job)
        return Checkpoint(CheckpointOutcome.FAILED, detail=f"the slot could not be rewound: {failure.detail}")

    def _doubt_slot(self, job: Job) -> None:
        """Believe nothing of the slot until it was seen idle."""
        self._p.table.doubt(job.slot, job.epoch)
        self._p.tasks.spawn(self._until_idle(job), name="see a slot idle")

    def _give_up(self, job: Job) -> None:
        """Nobody knows how far it had come."""
        is_current = job.epoch == self._p.table.epoch
        if is_current and self._p.table.view(job.slot).state is SlotState.SAVING:
            self._doubt_slot(job)
            self._ended(job, GIVEN_UP)

    async def _until_idle(self, job: Job) -> None:
        await self._shaper.until_idle(job.slot, job.epoch)
        self._p.table.fate_known(job.slot, job.epoch)
        self._p.slots_changed()

    async def _attempt(self, job: Job) -> Checkpoint | asyncio.Task[Checkpoint]:
        if (lack := await self.room.lacks(job.fingerprint, job.occupancy.tokens)) is not None:
            self._p.table.save_ended(job.slot, job.epoch)
            return Checkpoint(CheckpointOutcome.NO_ROOM, detail=lack)
        if job.epoch != self._p.table.epoch:
            return Checkpoint(CheckpointOutcome.SUPERSEDED)
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_save(job.slot, job.name),
            job.epoch,
            self._deadline(job),
            lambda _: self._late(job),
        )
        if isinstance(attempt.result, Saved):
            return await self._verify(job, attempt, attempt.result)
        result = await self._failed(job, attempt)
        # What a failed save leaves would keep a full disk full. One that is late is still being written.
        return await self._discard(job, result) if attempt.failed_for_good else result

    def _deadline(self, job: Job) -> float:
        return self._p.actions.deadline(
            self._p.actions.save_rate,
            self._timeout_seconds,
            tokens=job.occupancy.tokens,
            others_run=self._p.is_serving,
        )

    async def _failed(self, job: Job, attempt: Attempt[Saved]) -> Checkpoint:
        result = attempt.result
        if isinstance(result, NotStarted):
            self._p.table.save_ended(job.slot, job.epoch)
            return Checkpoint(_NOT_STARTED[result])
        assert isinstance(result, ActionFailure)
        if attempt.timed_out:
            self._p.table.doubt(job.slot, job.epoch)
        else:
            self._p.table.save_ended(job.slot, job.epoch)
        if result.fault is Fault.UNSUPPORTED:
            self._p.unable(job.epoch, result.message)
        if result.fault is Fault.FAILED and (obstacle := await self._p.obstacle()):
            self._p.actions.judge(attempt, well=None)
            return Checkpoint(CheckpointOutcome.STORE_FAILED, detail=obstacle)
        detail = result.message
        if result.fault is Fault.FAILED and (lack := await self.room.ran_out()):
            detail = f"{result.message}: {lack}"
        # A server that is gone, wants a key, or cannot do it at all says nothing of how well it does it.
        is_silent = result.fault in (Fault.UNREACHABLE, Fault.UNAUTHORIZED, Fault.UNSUPPORTED)
        self._p.actions.judge(attempt, well=None if is_silent else False, reason=result.message)
        return Checkpoint(_OUTCOMES.get(result.fault, CheckpointOutcome.REFUSED), detail=detail)

    async def _verify(
        self, job: Job, attempt: Attempt[Saved], saved: Saved
    ) -> Checkpoint | asyncio.Task[Checkpoint]:
        """An answer that came within the life it was asked in stands, also if the server has died since."""
        if job.epoch != self._p.table.epoch:
            # Who knows which process wrote it, and from whose slot.
            self._p.actions.judge(attempt, well=None)
            return await self._discard(job, Checkpoint(CheckpointOutcome.SUPERSEDED))
        if (doubt := self._doubt(job, saved)) is not None:
            self._p.actions.judge(attempt, well=None)
            self._p.table.save_ended(job.slot, job.epoch)
            if doubt.outcome is CheckpointOutcome.EMPTY:
                self._p.table.drift(job.occupancy, job.epoch)
                self._p.table.lose(job.slot, job.epoch, is_blank=True)
                self._p.emptied(job.slot)
            return await self._discard(job, doubt)
        check = await self._p.files.verify_saved(job.name, saved)
        self._p.table.save_ended(job.slot, job.epoch)
        if not check.is_ok:
            return await self._discard(job, await self._mismatch(attempt, check.reason))
        self._p.actions.learn(saved.tokens, saved.size_bytes)
        if saved.seconds is not None:
            self._p.actions.save_rate.observe(saved.size_bytes, saved.seconds)
        return self.publisher.begin(job, attempt, saved)

    async def _mismatch(self, attempt: Attempt[Saved], reason: str) -> Checkpoint:
        """The file is not what the server says that it wrote."""
        if obstacle := await self._p.obstacle():
            self._p.actions.judge(attempt, well=None)
            return Checkpoint(CheckpointOutcome.STORE_FAILED, detail=obstacle)
        self._p.actions.judge(attempt, well=False, reason=reason)
        lack = await self.room.ran_out()
        return Checkpoint(CheckpointOutcome.IMPLAUSIBLE, detail=f"{reason}: {lack}" if lack else reason)

    def _doubt(self, job: Job, saved: Saved) -> Checkpoint | None:
        """What the server says it saved cannot be this session."""
        if saved.tokens == 0:
            return Checkpoint(CheckpointOutcome.EMPTY, detail="the server saved no tokens")
        expected = job.occupancy.tokens
        if expected is not None and saved.tokens < PLAUSIBLE_SHARE * expected:
            detail = f"the server saved {saved.tokens} tokens where {expected} were expected"
            return Checkpoint(CheckpointOutcome.IMPLAUSIBLE, detail=detail)
        return None

    async def _discard(self, job: Job, result: Checkpoint) -> Checkpoint:
        await self._p.files.delete(job.name)
        return result

    def _late(self, job: Job) -> None:
        """A save past its deadline has ended: whatever it wrote is not to be trusted."""
        self._p.table.fate_known(job.slot, job.epoch)
        self._p.slots_changed()
        self._p.tasks.spawn(self._delete_late(job.name), name="delete late save")

    async def _delete_late(self, name: SnapshotName) -> None:
        await self._p.files.delete(name)
        self._names.discard(name)


def _shaped(job: Job, shape: Shape) -> Job:
    """The job as it is once the slot has the form it is saved in."""
    if shape.boundary is None:
        return job
    ids = shape.boundary.ids
    occupancy = replace(job.occupancy, tokens=len(ids), is_boundary=True)
    return replace(job, occupancy=occupancy, ids_digest=digest_of_ids(ids))


async def _end_of(result: Checkpoint | asyncio.Task[Checkpoint]) -> Checkpoint:
    if isinstance(result, Checkpoint):
        return result
    await asyncio.wait({result})
    return _result_of(result)


def _result_of(task: asyncio.Task[Checkpoint]) -> Checkpoint:
    return GIVEN_UP if _has_died(task) else task.result()


def _has_died(task: asyncio.Task[Any]) -> bool:
    """Whose tasks they are has told what of."""
    return task.cancelled() or task.exception() is not None


_NOT_STARTED = {
    NotStarted.BUSY: CheckpointOutcome.BUSY,
    NotStarted.BREAKER_OPEN: CheckpointOutcome.BREAKER_OPEN,
    NotStarted.SUPERSEDED: CheckpointOutcome.SUPERSEDED,
}

_OUTCOMES = {
    Fault.TIMED_OUT: CheckpointOutcome.TIMED_OUT,
    Fault.UNREACHABLE: CheckpointOutcome.UNREACHABLE,
    Fault.UNSUPPORTED: CheckpointOutcome.OFF,
    Fault.FAILED: CheckpointOutcome.FAILED,
}
