"""Save, restore and erase: what they do to slots and files, and what they answer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes import snapshot
from tests.fakes.faults import Failure, Faults
from tests.fakes.replies import error
from tests.fakes.state import Slot

Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """Told to the save hook after the file is written and before the answer is sent."""

    id_slot: int
    filename: str
    path: Path
    tokens: tuple[int, ...]


@dataclass(slots=True)
class SlotActions:
    slot_dir: Path
    geometry: snapshot.Geometry
    faults: Faults
    abort: Callable[[], None]
    has_room: Callable[[Slot, int], bool]
    on_save: Callable[[], Callable[[Saved], Awaitable[None] | None] | None]

    async def save(self, slot: Slot, id_slot: int, filename: str, failure: Failure | None) -> Reply:
        await asyncio.sleep(self.faults.save_seconds)
        tokens, path = tuple(slot.tokens), self.slot_dir / filename
        data = snapshot.encode(tokens, self.geometry)
        if not await self._write(path, data, failure):
            return _reply(500, error(500, "Unable to save slot"))
        hook = self.on_save()
        outcome = hook(Saved(slot.id, filename, path, tokens)) if hook else None
        if inspect.isawaitable(outcome):
            await outcome
        return _reply(
            200,
            {
                "id_slot": id_slot + self.faults.id_slot_delta,
                "filename": filename,
                "n_saved": len(tokens) + self.faults.n_saved_delta,
                "n_written": len(data),
                "timings": {"save_ms": 1000 * self.faults.save_seconds},
            },
        )

    async def _write(self, path: Path, data: bytes, failure: Failure | None) -> bool:
        """In place, over whatever was there: a failure leaves a stump under the final name."""
        if failure is Failure.FULL_DISK:
            data = data[: len(data) // 2]
        if failure is Failure.SHORT_FILE:
            data = data[: max(len(data) - self.faults.short_by, 0)]
        try:
            await asyncio.to_thread(path.write_bytes, data)
        except OSError:
            return False  # answered as 500, like the original
        return failure is not Failure.FULL_DISK

    async def restore(self, slot: Slot, id_slot: int, filename: str, failure: Failure | None) -> Reply:
        await asyncio.sleep(self.faults.restore_seconds)
        loaded = await asyncio.to_thread(self._load, self.slot_dir / filename)
        if loaded is snapshot.Refusal.ABORT:
            self.abort()
            await asyncio.sleep(0)
        if not isinstance(loaded, snapshot.Loaded) or not self.has_room(slot, len(loaded.tokens)):
            slot.hold([])
            reason = "No available space in KV cache or invalid slot save file"
            return _reply(400, error(400, f"Unable to restore slot: {reason}"))
        if len(loaded.tokens) > slot.n_ctx:
            slot.hold([])
            reason = "Restored prompt does not fit in the slot context"
            return _reply(400, error(400, f"Unable to restore slot: {reason}"))
        slot.hold(loaded.tokens, restored=True)
        return _reply(
            200,
            {
                "id_slot": id_slot + self.faults.id_slot_delta,
                "filename": filename,
                "n_restored": len(loaded.tokens) + self.faults.n_restored_delta,
                "n_read": loaded.n_read,
                "timings": {"restore_ms": 1000 * self.faults.restore_seconds},
            },
        )

    def _load(self, path: Path) -> snapshot.Loaded | snapshot.Refusal:
        try:
            data = path.read_bytes()
        except OSError:
            return snapshot.Refusal.INVALID
        return snapshot.decode(data, self.geometry)

    async def erase(self, slot: Slot, id_slot: int, filename: str, failure: Failure | None) -> Reply:
        n_erased = len(slot.tokens)
        slot.hold([])
        return _reply(200, {"id_slot": id_slot + self.faults.id_slot_delta, "n_erased": n_erased})


def _reply(status: int, body: dict[str, Any]) -> Reply:
    return {"status": status, "body": body}
