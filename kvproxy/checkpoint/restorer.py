"""A restore, whole: find, check, mark, restore, check again. Never raises for a missing or bad snapshot.

The caller holds a lease on the slot, which nobody lives in any more. A restore that fails leaves the slot
empty: that is the server's way, and a cold prompt is the worst that comes of it.

Before the call a mark is written: a bad file can abort the server, a supervisor starts it again, and
without the mark the next request would restore the same file for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.actions import ERASE_SECONDS, Attempt, NotStarted
from kvproxy.checkpoint.candidates import Chooser
from kvproxy.checkpoint.cutter import Cut, Cutter
from kvproxy.checkpoint.extension import obstacle_to
from kvproxy.checkpoint.finder import Finder, Found
from kvproxy.checkpoint.outcome import Restoration, RestoreOutcome
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.proofs import Proofs, Restore
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId, SnapshotName, short
from kvproxy.slots.slot import Occupancy, Stump
from kvproxy.slots.state import SlotState
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.telemetry.events import RestoreEnded, RestoreStarted
from kvproxy.upstream.replies import ActionFailure, Fault, Restored

DIED = "the server died while restoring it"

MEMORY_IS_FULL = "No available space"
"""llama-server's words when its KV cache is full, and also when it cannot read the file. Only where no other
slot holds anything is it known to be the file."""

MakeWay = Callable[[int], Awaitable[object]]
"""Sees to it, as far as it can, that so many tokens have room in a memory that all slots share."""


@dataclass(frozen=True, slots=True)
class _Job:
    slot: SlotId
    epoch: Epoch
    key: SessionKey
    fingerprint: Fingerprint
    """The snapshot's."""
    present: Fingerprint
    """The server's, which may be another build."""
    generation: Generation
    cut: Cut | None = None
    """What is restored in its place."""

    @property
    def file(self) -> SnapshotName:
        return self.cut.name if self.cut else self.generation.name

    @property
    def tokens(self) -> int:
        return self.cut.tokens if self.cut else self.generation.tokens

    @property
    def size_bytes(self) -> int:
        return self.cut.size_bytes if self.cut else self.generation.size_bytes

    @property
    def alteration(self) -> Alteration | None:
        return Alteration.PREFIX_CUT if self.cut else self.generation.alteration

    @property
    def is_of_another_build(self) -> bool:
        return self.fingerprint.digest != self.present.digest


class Restorer:
    def __init__(
        self, parts: Parts, chooser: Chooser, *, is_enabled: bool, verify: bool, timeout_seconds: float
    ) -> None:
        self._p = parts
        self._chooser = chooser
        self._finder = Finder(parts, chooser, verify=verify)
        self._is_enabled = is_enabled
        self._timeout_seconds = timeout_seconds
        self.proofs = Proofs(parts)
        self.cutter = Cutter(parts)
        self.about_to_restore: Callable[[SlotId], Awaitable[None]] = _nothing
        """Called before a slot's content changes without the server counting a task."""

    async def restore(
        self,
        slot: SlotId,
        epoch: Epoch,
        key: SessionKey,
        base: Revision,
        asked: Asked | None = None,
        make_way: MakeWay | None = None,
    ) -> Restoration:
        """Bring `key`'s snapshot into `slot`, of which the caller holds a lease granted in `epoch`.

        `base` is the lowest revision that the session's stay may begin with, `asked` the request it is for.
        After MEMORY_FULL it may be tried again once other slots were emptied.
        """
        if not self._is_enabled:
            return Restoration(RestoreOutcome.DISABLED)
        found = await self._finder.find(key)
        if isinstance(found, Restoration):
            if found.outcome in (RestoreOutcome.FINGERPRINT_MISMATCH, RestoreOutcome.STORE_FAILED):
                self._tell(slot, key, found, 0.0)
            return found
        result = await self._bring_back(slot, epoch, key, base, found, asked, make_way)
        while result.outcome is RestoreOutcome.FINGERPRINT_MISMATCH:
            found = await self._finder.find(key)
            if isinstance(found, Restoration):
                break
            result = await self._bring_back(slot, epoch, key, base, found, asked, make_way)
        return result

    async def _bring_back(
        self,
        slot: SlotId,
        epoch: Epoch,
        key: SessionKey,
        base: Revision,
        found: Found,
        asked: Asked | None,
        make_way: MakeWay | None,
    ) -> Restoration:
        # Now, and not once it is there: what was used least recently may have to go for what is being saved.
        self._p.store.touch(key, found.fingerprint)
        if (obstacle := await obstacle_to(self._p, epoch, found.generation, asked)) is not None:
            return Restoration(RestoreOutcome.NOT_EXTENDED, detail=obstacle)
        job = _Job(slot, epoch, key, found.fingerprint, found.present, found.generation)
        if make_way is not None and self._p.table.pool is not None:
            await make_way(job.generation.tokens)
        began = self._p.clock.now()
        self._p.emit(RestoreStarted(self._p.server, slot, short(key)))
        job = replace(job, cut=await self.cutter.cut(job.generation, asked))
        result = await self._run(job, base)
        if result.outcome is not RestoreOutcome.TIMED_OUT:
            await self._discard_cut(job)
        self._tell(slot, key, result, self._p.clock.now() - began)
        return result

    def _tell(self, slot: SlotId, key: SessionKey, result: Restoration, took: float) -> None:
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

    # -- the call ----------------------------------------------------------------------------------------

    async def _run(self, job: _Job, base: Revision) -> Restoration:
        if not self._p.table.start_restoring(job.slot, job.epoch):
            return _ANOTHER
        try:
            return await self._put_back(job, base)
        except Exception:  # a bug, which goes on up; the slot must not stay as it was left for ever
            self._give_up(job)
            raise

    def _give_up(self, job: _Job) -> None:
        is_current = job.epoch == self._p.table.epoch
        if is_current and self._p.table.view(job.slot).state is SlotState.RESTORING:
            self._p.table.not_restored(job.slot, job.epoch, is_blank=False)

    async def _put_back(self, job: _Job, base: Revision) -> Restoration:
        await self.about_to_restore(job.slot)
        if self._p.table.speculates and (obstacle := await self._clear_draft(job)) is not None:
            return obstacle
        if (failure := await self._p.store.mark_restoring(job.generation.name)) is not None:
            # Without the mark a file that kills the server would be restored after every restart.
            await self._p.store.clear_restoring(job.generation.name)
            self._p.table.not_restored(job.slot, job.epoch, is_blank=False)
            return Restoration(RestoreOutcome.STORE_FAILED, detail=failure.reason)
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_restore(job.slot, job.file),
            job.epoch,
            self._deadline(job),
            lambda fate: self._late(job, fate),
        )
        result = await self._conclude(job, attempt, base)
        if not attempt.timed_out:
            await self._p.store.clear_restoring(job.generation.name)
        return result

    async def _discard_cut(self, job: _Job) -> None:
        if job.cut is not None:
            await self.cutter.discard(job.cut)

    async def _clear_draft(self, job: _Job) -> Restoration | None:
        """Erase first where a draft model runs ahead: its memory is not in the file, and would stay that of
        another text."""
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_erase(job.slot),
            job.epoch,
            ERASE_SECONDS,
            lambda _: self._is_over(job),
        )
        self._p.actions.judge(attempt, well=None)
        if attempt.succeeded:
            return None
        if attempt.timed_out:
            self._p.table.doubt(job.slot, job.epoch)
        else:
            self._p.table.not_restored(job.slot, job.epoch, is_blank=False)
        return Restoration(RestoreOutcome.FAILED, detail="the slot could not be erased before the restore")

    def _deadline(self, job: _Job) -> float:
        return self._p.actions.deadline(
            self._p.actions.restore_rate,
            self._timeout_seconds,
            tokens=job.tokens,
            size_bytes=job.size_bytes,
            others_run=self._p.is_serving,
        )

    async def _conclude(self, job: _Job, attempt: Attempt[Restored], base: Revision) -> Restoration:
        result = attempt.result
        if isinstance(result, NotStarted):
            self._p.table.not_restored(job.slot, job.epoch, is_blank=False)
            return _NOT_STARTED[result]
        if isinstance(result, ActionFailure):
            return await self._failed(job, attempt, result)
        if result.tokens != job.tokens:
            return await self._implausible(job, attempt, result)
        self._p.actions.judge(attempt, well=True)
        return self._restored(job, result, base)

    def _restored(self, job: _Job, result: Restored, base: Revision) -> Restoration:
        if result.seconds is not None:
            self._p.actions.restore_rate.observe(result.size_bytes, result.seconds)
        revision = max(base, job.generation.revision)
        is_boundary = job.generation.form == "boundary"
        occupancy = Occupancy(
            job.key,
            revision,
            revision,
            tokens=result.tokens,
            is_boundary=is_boundary,
            stump=self._stump_of(job.generation),
        )
        if not self._p.table.restored(job.slot, job.epoch, occupancy):
            return _ANOTHER
        name = job.generation.name
        self.proofs.expect(
            job.slot, Restore(job.epoch, job.key, job.fingerprint, job.present, name, job.alteration)
        )
        return Restoration(RestoreOutcome.RESTORED, result.tokens, result.size_bytes)

    def _stump_of(self, generation: Generation) -> Stump | None:
        """A server that does not keep windows in full goes itself back to nothing before their end."""
        facts = self._p.standing.facts
        if facts.kind is not MemoryKind.SLIDING_WINDOW or facts.window.is_whole is False:
            return None
        return Stump(generation.tokens, generation.ids_digest)

    async def _failed(self, job: _Job, attempt: Attempt[Restored], failure: ActionFailure) -> Restoration:
        if attempt.timed_out:
            self._p.table.doubt(job.slot, job.epoch)
            self._p.actions.judge(attempt, well=False, reason=failure.message)
            return Restoration(RestoreOutcome.TIMED_OUT, detail=failure.message)
        self._p.table.not_restored(job.slot, job.epoch, is_blank=failure.fault is Fault.REFUSED)
        if failure.fault is Fault.REFUSED:
            # A file the server does not like says nothing about whether restoring works.
            self._p.actions.judge(attempt, well=None)
            return await self._refused(job, failure.message)
        if failure.fault is Fault.UNREACHABLE:
            if _died(failure):
                await self._invalidate(job, DIED)
            self._p.actions.judge(attempt, well=None)
            return Restoration(RestoreOutcome.UNREACHABLE, detail=failure.message)
        if failure.fault is Fault.UNSUPPORTED:
            self._p.unable(job.epoch, failure.message)
            self._p.actions.judge(attempt, well=None)
            return Restoration(RestoreOutcome.OFF, detail=failure.message)
        wants_key = failure.fault is Fault.UNAUTHORIZED
        self._p.actions.judge(attempt, well=None if wants_key else False, reason=failure.message)
        outcome = RestoreOutcome.REFUSED if wants_key else RestoreOutcome.FAILED
        return Restoration(outcome, detail=failure.message)

    async def _refused(self, job: _Job, words: str) -> Restoration:
        """The server looked at the file and said no; whose fault that is, a look of ours helps to tell."""
        check = await self._p.files.verify_stored(job.generation)
        if check.is_out_of_sight:
            return Restoration(RestoreOutcome.STORE_FAILED, detail=check.reason)
        if check.is_ok and (division := await self._other_division(job)) is not None:
            self._finder.pass_over(job.epoch, job.generation.name)
            return Restoration(RestoreOutcome.FINGERPRINT_MISMATCH, detail=division)
        if check.is_ok and MEMORY_IS_FULL in words and not self._is_alone(job):
            return Restoration(RestoreOutcome.MEMORY_FULL, detail=words)
        if check.is_ok and job.is_of_another_build:
            # Its own build may well take it: it is the file format that has changed.
            self._chooser.refused(job.fingerprint, job.present)
        else:
            await self._blame(job, check, f"the server refused it: {words}")
        return Restoration(RestoreOutcome.REFUSED, detail=words)

    async def _other_division(self, job: _Job) -> str | None:
        """How the server had its memory divided when it saved the file, if it was not as it is now: it takes
        the file again once it is started as it was."""
        facts = self._p.standing.facts
        if facts.shares_memory is None or facts.slots < 2:  # one slot, one memory
            return None
        streams = await self._p.files.streams_of(job.generation.name)
        if not streams or streams == (1 if facts.shares_memory else facts.slots):
            return None
        saved, now = ("with", "without") if streams == 1 else ("without", "with")
        return f"differs in --kv-unified: the server was started {saved} it then, and {now} it now"

    def _is_alone(self, job: _Job) -> bool:
        """Whether no other slot takes up room."""
        return all(view.is_blank for view in self._p.table.views() if view.id != job.slot)

    async def _implausible(self, job: _Job, attempt: Attempt[Restored], result: Restored) -> Restoration:
        detail = f"the server restored {result.tokens} tokens of {job.tokens}"
        self._p.table.not_restored(job.slot, job.epoch, is_blank=result.tokens == 0)
        await self._blame(job, await self._p.files.verify_stored(job.generation), detail)
        self._p.actions.judge(attempt, well=None)
        return Restoration(RestoreOutcome.IMPLAUSIBLE, detail=detail)

    async def _blame(self, job: _Job, check: FileCheck, reason: str) -> None:
        """What was restored is not right. `check` is a look at its file since; with `restore.verify` off
        there was none before. If it shows nothing, the cut is to blame, or else the snapshot."""
        if not check.is_ok:
            if not check.is_out_of_sight:
                await self._invalidate(job, check.reason)
        elif job.cut is not None:
            self._p.alterations.missed(Alteration.PREFIX_CUT, job.present)
        else:
            await self._invalidate(job, reason)

    async def _invalidate(self, job: _Job, reason: str) -> None:
        await self._p.store.invalidate(job.key, job.fingerprint, job.generation.name, reason)

    def _is_over(self, job: _Job) -> None:
        """An action past its deadline has ended: the slot holds who knows what, but nothing runs on it."""
        self._p.table.fate_known(job.slot, job.epoch)
        self._p.slots_changed()

    def _late(self, job: _Job, fate: Restored | ActionFailure) -> None:
        self._is_over(job)
        self._p.tasks.spawn(self._close(job, fate), name="late restore")

    async def _close(self, job: _Job, fate: Restored | ActionFailure) -> None:
        if _died(fate):
            await self._invalidate(job, DIED)
        await self._p.store.clear_restoring(job.generation.name)
        await self._discard_cut(job)


_ANOTHER = Restoration(RestoreOutcome.UNREACHABLE, detail="the server is another one by now")

_NOT_STARTED = {
    NotStarted.BUSY: Restoration(RestoreOutcome.BUSY),
    NotStarted.BREAKER_OPEN: Restoration(RestoreOutcome.BREAKER_OPEN),
    NotStarted.SUPERSEDED: _ANOTHER,
}


async def _nothing(slot: SlotId) -> None:
    """Nobody has to know."""


def _died(result: Restored | ActionFailure) -> bool:
    """The server was there when the restore was sent, and gone before it answered.

    An answer that says it cannot (503: another process is loading) is one: that server has not acted.
    """
    if not isinstance(result, ActionFailure) or result.fault is not Fault.UNREACHABLE:
        return False
    return result.was_sent and not result.status
