"""What a server is asked when a life of it begins: what it allows, which model it runs, and its canary.

Nobody is served meanwhile, so it must not take long, and it must disturb nothing: the canary is computed in
a slot that holds nothing, while nothing runs, and that slot is erased again. Where that cannot be had, a life
that was met before is known by its marker; one that was not gets a name of its own (`stand_in`), so that
what is saved under it is restored under it, and nowhere else.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvproxy.errors import ErrorCode
from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.snapshots.canaries import NAME_DIGITS, Canaries, life_name, stand_in
from kvproxy.snapshots.canary import Canary
from kvproxy.snapshots.fingerprint import CANARY_FIELD, Fingerprint, fingerprint_of
from kvproxy.snapshots.memory_kind import MemoryKind, kind_from
from kvproxy.telemetry.events import Emit, Warned
from kvproxy.upstream.adapters import ask_adapters
from kvproxy.upstream.canary import ask_canary
from kvproxy.upstream.client import Action, LlamaServer
from kvproxy.upstream.facts import (
    KEY_ADVICE,
    SAVE_PATH_ADVICE,
    WINDOW_ADVICE,
    Facts,
    Persistence,
    PersistenceMode,
)
from kvproxy.upstream.gguf import ModelTraits, read_model_traits
from kvproxy.upstream.replies import ActionFailure, Erased, Fault, Obstacle, Props, SlotInfo, Unavailable
from kvproxy.upstream.reuse_probe import Reuse, probe_reuse

ANSWER_SECONDS = 5.0
"""What is learned of a life is believed to its end, so a server that is only slow gets its time."""

CANARY_SECONDS = 4.0
CANARY_BODY_BYTES = 512
"""At least as much as asks for a canary."""
ERASE_SECONDS = 1.0

HEADER_BYTES = 256 << 20
"""No model file is larger than its tensors by more than this; one that is, is another model's."""

UNKNOWN_ADAPTERS = "unknown"


@dataclass(frozen=True, slots=True)
class Leftover:
    """What the canary may have left in a slot: a request that was dropped, or an erase under way."""

    slot: SlotId
    erase: Action[Erased] | None = None


@dataclass(frozen=True, slots=True)
class Acquaintance:
    persistence: Persistence
    fingerprint: Fingerprint
    kind: MemoryKind
    canary: str
    """As in the fingerprint."""
    slots: tuple[SlotInfo, ...] | Unavailable = ()
    leftover: Leftover | None = None


@dataclass(frozen=True, slots=True)
class _Told:
    """What a server that is awake says without computing anything."""

    persistence: Persistence
    meta: Mapping[str, Any]
    adapters: str
    slots: tuple[SlotInfo, ...] | Unavailable


@dataclass(frozen=True, slots=True)
class _Computed:
    canary: Canary | None
    slots: tuple[SlotInfo, ...] | Unavailable
    leftover: Leftover | None = None


class Scratch(Protocol):
    """Files for a moment in the server's save directory."""

    def new_name(self) -> SnapshotName: ...

    async def delete(self, name: SnapshotName) -> object: ...


class Introduction:
    """`setting` is the operator's word on the memory kind; `obstacle` says why we cannot keep anything."""

    def __init__(
        self,
        client: LlamaServer,
        canaries: Canaries,
        emit: Emit,
        *,
        runtime_key: str | None,
        setting: MemoryKind | None,
        scratch: Scratch,
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        self._client = client
        self._canaries = canaries
        self._emit = emit
        self._runtime_key = runtime_key
        self._setting = setting
        self._scratch = scratch
        self._obstacle = obstacle

    async def meet(self, props: Props, known: Facts) -> Acquaintance:
        """`known` are the facts of the life before, which may be the same process."""
        if props.is_sleeping:
            return await self._meet_asleep(props, known)
        told = await self._ask(props)
        life = _life_of(props)
        name = self._remembered(life, told.adapters)
        if name is not None:
            return await self._conclude(props, told, name, _Computed(None, told.slots))
        computed = await self._compute(props, told)
        if computed.canary is None:
            name = stand_in(life or secrets.token_hex(NAME_DIGITS // 2))
        else:
            name = await self._keep(computed.canary, life, told.adapters)
        return await self._conclude(props, told, name, computed)

    async def identify(self, known: Fingerprint, props: Props, canary: Canary) -> Fingerprint:
        """`known` of the server of `props`, once its canary could be had. What was saved before joins it."""
        name = await self._keep(canary, _life_of(props), known.get("adapters"))
        return Fingerprint.from_dict(known.as_dict() | {CANARY_FIELD: name})

    async def _keep(self, canary: Canary, life: str | None, adapters: str) -> str:
        name = self._canaries.name(canary)
        complaint = await self._canaries.remember(canary, life, adapters)
        if complaint is not None:
            told = f"{complaint}; snapshots of this server may stay unused after a restart of kvproxy"
            self._emit(Warned(told, ErrorCode.METADATA_IO))
        return name

    # -- asleep --------------------------------------------------------------------------------------------

    async def _meet_asleep(self, props: Props, known: Facts) -> Acquaintance:
        """What is known of the same process stands; another one is asked when it wakes."""
        is_same = known.props is not None and known.props.identity == props.identity
        if is_same and known.fingerprint is not None:
            return Acquaintance(known.persistence, known.fingerprint, known.kind, known.canary)
        known_as = _life_of(props)
        life = self._canaries.life(known_as) if known_as is not None else None
        name = life.canary if life else stand_in(secrets.token_hex(NAME_DIGITS // 2))
        persistence = Persistence(PersistenceMode.UNKNOWN, "the server sleeps")
        meta = await self._client.model_meta(ANSWER_SECONDS)
        adapters = life.adapters if life else UNKNOWN_ADAPTERS
        return await self._conclude(props, _Told(persistence, meta, adapters, ()), name, _Computed(None, ()))

    # -- awake ---------------------------------------------------------------------------------------------

    async def _ask(self, props: Props) -> _Told:
        persistence = await self.find_persistence()
        meta = await self._client.model_meta(ANSWER_SECONDS)
        adapters = await ask_adapters(self._client)
        if isinstance(adapters, Unavailable) and adapters.reason is Obstacle.UNREACHABLE:
            # Not to know them costs every snapshot of this life: one lost question is put again.
            adapters = await ask_adapters(self._client)
        slots = await self._client.slots()
        told = UNKNOWN_ADAPTERS if isinstance(adapters, Unavailable) else adapters
        return _Told(persistence, meta, told, slots)

    async def find_persistence(self) -> Persistence:
        """What the server allows, and we can use."""
        if obstacle := self._obstacle():
            return Persistence(PersistenceMode.OFF, obstacle)
        failure = await self._client.actions_supported(ANSWER_SECONDS)
        if failure is None:
            return Persistence(PersistenceMode.PLAIN)
        if failure.fault in (Fault.UNREACHABLE, Fault.TIMED_OUT):
            # It did not say no. The next look asks again.
            return Persistence(PersistenceMode.UNKNOWN, failure.message)
        return Persistence(PersistenceMode.OFF, _advice(failure))

    def _remembered(self, life: str | None, adapters: str) -> str | None:
        known = self._canaries.life(life) if life is not None else None
        return known.canary if known is not None and known.adapters == adapters else None

    async def _compute(self, props: Props, told: _Told) -> _Computed:
        slot = slot_for_canary(told.slots) if told.persistence.is_on else None
        if slot is None:
            return _Computed(None, told.slots)
        answer = await ask_canary(self._client, slot, CANARY_SECONDS)
        if isinstance(answer, Unavailable):
            return _Computed(None, await self._client.slots(), Leftover(slot))
        leftover = await self._erase(slot)
        # The answer may be another process's, which took the first one's place in between.
        again = await self._client.props(ANSWER_SECONDS)
        is_same = isinstance(again, Props) and again.identity == props.identity
        return _Computed(answer if is_same else None, await self._client.slots(), leftover)

    async def _erase(self, slot: SlotId) -> Leftover | None:
        erase = self._client.start_erase(slot)
        ended = await erase.wait(ERASE_SECONDS)
        is_late = isinstance(ended, ActionFailure) and ended.fault is Fault.TIMED_OUT
        return Leftover(slot, erase) if is_late else None

    # -- what comes of it ----------------------------------------------------------------------------------

    async def _conclude(self, props: Props, told: _Told, name: str, computed: _Computed) -> Acquaintance:
        traits = await traits_of(props, told.meta)
        fingerprint = fingerprint_of(
            props,
            told.meta,
            self._runtime_key,
            adapters=told.adapters,
            model_file=_file_of(traits),
            canary=name,
        )
        kind = kind_from(None, traits.kind if traits else None, self._setting)
        persistence = told.persistence
        if kind is MemoryKind.SLIDING_WINDOW and persistence.is_on and computed.leftover is None:
            persistence = await self._prove_window(persistence, computed.slots)
        return Acquaintance(persistence, fingerprint, kind, name, computed.slots, computed.leftover)

    async def _prove_window(
        self, persistence: Persistence, slots: tuple[SlotInfo, ...] | Unavailable
    ) -> Persistence:
        """Whether a restored window is reused; where no slot is empty the answers will have to tell."""
        slot = slot_for_canary(slots)
        if slot is None:
            return persistence
        name = self._scratch.new_name()
        reuse = await probe_reuse(self._client, slot, name)
        await self._scratch.delete(name)
        return Persistence(PersistenceMode.OFF, WINDOW_ADVICE) if reuse is Reuse.NOTHING else persistence


async def traits_of(props: Props, meta: Mapping[str, Any]) -> ModelTraits | None:
    """Of the model file, where we see it by the server's own path for it."""
    if not props.model_path:
        return None
    traits = await asyncio.to_thread(read_model_traits, Path(props.model_path))
    return traits if traits is not None and is_served(traits, meta) else None


def _life_of(props: Props) -> str | None:
    """None for a build whose marker does not tell one process from another."""
    if not props.has_marker:
        return None
    return life_name(props.marker, props.model_path, props.model_ftype, props.build)


def slot_for_canary(slots: tuple[SlotInfo, ...] | Unavailable) -> SlotId | None:
    """One that holds nothing, while nothing runs. The last one: the first are the likeliest to be wanted."""
    if isinstance(slots, Unavailable) or any(info.is_processing for info in slots):
        return None
    return next((info.id for info in reversed(slots) if not info.n_prompt_tokens), None)


def is_served(traits: ModelTraits, meta: Mapping[str, Any]) -> bool:
    """Whether the file can be the model that the server tells of: a path may mean another file to us."""
    width, tensors = meta.get("n_embd"), meta.get("size")
    if isinstance(width, int) and traits.embedding_length not in (None, width):
        return False
    size = traits.identity.size_bytes
    return not isinstance(tensors, int) or tensors <= size <= tensors + HEADER_BYTES


def _file_of(traits: ModelTraits | None) -> str:
    """Without its time, which a copy does not keep."""
    return "" if traits is None else f"{traits.identity.size_bytes}:{traits.identity.head_sha256[:16]}"


def _advice(failure: ActionFailure) -> str:
    if failure.fault is Fault.UNSUPPORTED:
        return f"{failure.message}: {SAVE_PATH_ADVICE}" if failure.message else SAVE_PATH_ADVICE
    return KEY_ADVICE if failure.fault is Fault.UNAUTHORIZED else failure.message
