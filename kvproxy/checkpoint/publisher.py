"""The second half of a checkpoint, off everyone's path: make the file durable, publish its manifest.

Once the server has written the file and it was found plausible, its slot may be used again: what follows
(an fsync of gigabytes can take seconds) needs no slot and holds no conversation. Until it is done nothing
new exists: a crash leaves the snapshot of before. Publications of one session keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvproxy.checkpoint.actions import Attempt
from kvproxy.checkpoint.extension import learn_kind
from kvproxy.checkpoint.opener import Opener, Written
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.room import Room
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId, SnapshotName
from kvproxy.slots.slot import Occupancy
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation
from kvproxy.snapshots.store import Publication, Published
from kvproxy.upstream.replies import Saved


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How one went. `tokens` and `size_bytes` are what was published."""

    outcome: CheckpointOutcome
    tokens: int = 0
    size_bytes: int = 0
    detail: str = ""


GIVEN_UP = Checkpoint(CheckpointOutcome.STORE_FAILED, detail="it was given up")
"""What nobody foresaw ended it, or the end of kvproxy."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is saved, as it was believed when the save began (`began`: monotonic seconds)."""

    slot: SlotId
    epoch: Epoch
    occupancy: Occupancy
    fingerprint: Fingerprint
    trigger: Trigger
    name: SnapshotName
    began: float
    ids_digest: str | None = None
    """Of the token ids in the slot, where they are known before the save."""

    @property
    def session(self) -> SessionKey:
        return self.occupancy.session


@dataclass(frozen=True, slots=True)
class _Running:
    revision: Revision
    task: asyncio.Task[Checkpoint]


class Publisher:
    """`on_end` hears how each publication ended; `room` is asked why one that failed did."""

    def __init__(self, parts: Parts, room: Room, on_end: Callable[[Job, Checkpoint], None]) -> None:
        self._p = parts
        self._room = room
        self._on_end = on_end
        self._running: dict[SessionKey, _Running] = {}
        self.opener = Opener(parts)
        self.published: Callable[[], None] = lambda: None
        """Called after each publication: retention looks whether something must go."""

    def begin(self, job: Job, attempt: Attempt[Saved], saved: Saved) -> asyncio.Task[Checkpoint]:
        before = self._running.get(job.session)
        work = self._in_order(before.task if before else None, job, attempt, saved)
        task = self._p.tasks.spawn(work, name="publish a snapshot")
        running = self._running[job.session] = _Running(job.occupancy.revision, task)
        task.add_done_callback(lambda _: self._ended(job.session, running))
        return task

    def running(self, session: SessionKey, revision: Revision) -> asyncio.Task[Checkpoint] | None:
        """The publication of this revision or a later one, if it is under way."""
        running = self._running.get(session)
        return running.task if running is not None and running.revision >= revision else None

    async def settled(self, session: SessionKey) -> None:
        """Wait until nothing of `session` is being published."""
        while (running := self._running.get(session)) is not None:
            await asyncio.wait({running.task})

    async def all_settled(self) -> None:
        while self._running:
            await asyncio.wait({running.task for running in self._running.values()})

    def _ended(self, session: SessionKey, running: _Running) -> None:
        if self._running.get(session) is running:
            del self._running[session]

    async def _in_order(
        self, before: asyncio.Task[Checkpoint] | None, job: Job, attempt: Attempt[Saved], saved: Saved
    ) -> Checkpoint:
        if before is not None:
            await asyncio.wait({before})
        result = GIVEN_UP
        try:
            result = await self._publish(job, attempt, saved)
        finally:
            self._on_end(job, result)
        return result

    async def _publish(self, job: Job, attempt: Attempt[Saved], saved: Saved) -> Checkpoint:
        written = await self.opener.open(job.name, saved.size_bytes, job.fingerprint)
        try:
            return await self._publish_file(job, written, attempt, saved)
        finally:
            self.opener.landed(written)

    async def _publish_file(
        self, job: Job, written: Written, attempt: Attempt[Saved], saved: Saved
    ) -> Checkpoint:
        check = await self._p.files.make_durable(written.name)
        await learn_kind(self._p, job.epoch, job.name)
        if job.ids_digest is None and self._p.standing.facts.kind.is_append_only:
            job = replace(job, ids_digest=await self._p.files.ids_digest(job.name))
        if not check.is_ok:
            return await self._failed(written, attempt, check.reason)
        await self._see_whether_shared(job)
        result = await self._p.store.publish(self._publication(job, written, saved, check))
        if not isinstance(result, Published):
            return await self._failed(written, attempt, result.reason)
        self._p.actions.judge(attempt, well=True)
        self._p.table.checkpointed(job.slot, job.epoch, job.session, job.occupancy.revision)
        if (session := self._p.registry.find(job.session)) is not None:
            session.revision = max(session.revision, job.occupancy.revision)
        self._p.tasks.spawn(self._afterwards(job, written, check, result), name="digest")
        return Checkpoint(CheckpointOutcome.PUBLISHED, saved.tokens, saved.size_bytes)

    async def _see_whether_shared(self, job: Job) -> None:
        """The first file of a life tells whether the slots share one memory, where nothing has told it."""
        facts = self._p.standing.facts
        if facts.shares_memory is None and facts.slots > 1:
            streams = await self._p.files.streams_of(job.name)
            if streams is not None:
                self._p.shares(job.epoch, streams == 1)

    async def _failed(self, written: Written, attempt: Attempt[Saved], reason: str) -> Checkpoint:
        obstacle = await self._p.obstacle()
        self._p.actions.judge(attempt, well=None if obstacle else False, reason=reason)
        lack = "" if obstacle else await self._room.ran_out()
        for name in written.names:
            await self._p.files.delete(name)
        return Checkpoint(CheckpointOutcome.STORE_FAILED, detail=f"{reason}: {lack}" if lack else reason)

    def _publication(self, job: Job, written: Written, saved: Saved, check: FileCheck) -> Publication:
        session = self._p.registry.find(job.session)
        generation = Generation(
            name=written.name,
            tokens=saved.tokens,
            size_bytes=saved.size_bytes,
            revision=job.occupancy.revision,
            saved_at=self._p.clock.wall(),
            slot=job.slot,
            form="boundary" if job.occupancy.is_boundary else "plain",
            ids_digest=job.ids_digest,
            origin=written.origin,
            identity=check.identity,
        )
        return Publication(
            key=job.session,
            server=self._p.server,
            model=session.model if session else self._p.standing.facts.model,
            client_digest=session.client_digest if session else "",
            fingerprint=job.fingerprint,
            generation=generation,
        )

    async def _afterwards(self, job: Job, written: Written, check: FileCheck, published: Published) -> None:
        """Drop the files that were superseded, and hash the new one."""
        for name in (*published.superseded, *written.names[1:]):
            await self._p.files.delete(name)
        self.published()
        digest = await self._p.files.digest(written.name, check.identity)
        if digest is not None:
            await self._p.store.amend(job.session, job.fingerprint, written.name, sha256=digest)
