"""The examination: one question after the other, each only where the ones before allow it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvproxy.doctor import findings, traits, verdicts
from kvproxy.doctor.check import Check, Report, Result, blocks, degraded, skipped
from kvproxy.doctor.directories import check_state_dir
from kvproxy.doctor.probe import LEAST_CONTEXT, Probe, Probed, empty_slots, window_to_probe
from kvproxy.settings.model import Settings
from kvproxy.snapshots.files import ServerOwnedFiles, SharedDirectory, SnapshotFiles
from kvproxy.snapshots.memory_kind import MemoryKind, kind_from, kind_of_setting
from kvproxy.upstream.acquaintance import traits_of
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Props, SlotInfo, Unavailable

QUESTION_SECONDS = 10.0
"""A server that computes a prompt answers `GET /slots` only between two batches."""

TOO_NARROW = f"not made, nothing is proven: it needs a context of {LEAST_CONTEXT} tokens"
TOO_FULL = (
    "not made, nothing is proven: no slot is idle and empty, and the probe would destroy a conversation; "
    "run the doctor on a freshly started server"
)


async def examine(settings: Settings, *, wants_probe: bool) -> Report:
    """Look at the first upstream and our own directories. Never wakes a server that sleeps."""
    upstream = settings.upstreams[0]
    client = LlamaServer(
        upstream.url, upstream.api_key, connect_timeout_seconds=upstream.connect_timeout_seconds
    )
    try:
        return await _Examination(settings, client).run(wants_probe=wants_probe)
    finally:
        await client.close()


class _Examination:
    def __init__(self, settings: Settings, client: LlamaServer) -> None:
        self._settings = settings
        self._client = client
        self._directory = settings.upstreams[0].snapshot_dir
        self._files: SnapshotFiles = (
            ServerOwnedFiles() if self._directory is None else SharedDirectory(self._directory)
        )
        self._checks: list[Check] = []
        self._kind = MemoryKind.UNKNOWN
        self._window: int | None = None

    async def run(self, *, wants_probe: bool) -> Report:
        answer = await self._client.props(QUESTION_SECONDS)
        self._checks += verdicts.judge_props(self._settings.upstreams[0].url, answer)
        slots = None
        if isinstance(answer, Props):
            meta = await self._client.model_meta(QUESTION_SECONDS)
            slots = await self._look_at_slots(answer, meta.get("n_ctx_train"))
            self._checks.append(await self._look_at_memory(answer, meta))
        self._checks.append(await asyncio.to_thread(check_state_dir, self._settings.state_dir))
        probed = await self._probe(answer, slots, wants_probe=wants_probe)
        await self._judge(answer, probed)
        return Report(tuple(self._checks), is_proven=findings.is_proven(self._checks))

    async def _look_at_slots(self, props: Props, n_ctx_train: object) -> tuple[SlotInfo, ...] | None:
        self._checks.append(traits.judge_sleep(props))
        if props.is_sleeping:
            self._checks += (skipped(verdicts.SLOTS_API, "not looked at"), verdicts.judge_numbers(props))
            return None
        slots = await self._client.slots(QUESTION_SECONDS)
        self._checks.append(verdicts.judge_slots_api(slots))
        self._checks.append(verdicts.judge_save_path(await self._client.actions_supported(QUESTION_SECONDS)))
        self._checks.append(verdicts.judge_numbers(props, n_ctx_train))
        if isinstance(slots, Unavailable):
            return None
        self._checks.append(traits.judge_draft(slots))
        return slots

    async def _look_at_memory(self, props: Props, meta: Mapping[str, Any]) -> Check:
        traits = await traits_of(props, meta)
        setting = kind_of_setting(self._settings.upstreams[0].memory_kind)
        self._kind = kind_from(None, traits.kind if traits else None, setting)
        self._window = traits.sliding_window if traits else None
        return verdicts.judge_memory(self._kind)

    async def _probe(
        self, props: Props | Unavailable, slots: tuple[SlotInfo, ...] | None, *, wants_probe: bool
    ) -> Probed | None:
        if not wants_probe:
            self._checks.append(skipped(findings.PROBE, "not asked for (--no-probe)"))
        elif slots is None or isinstance(props, Unavailable) or not self._can_act():
            self._checks.append(skipped(findings.PROBE, "not made: see above"))
        elif props.n_ctx is not None and props.n_ctx < LEAST_CONTEXT:
            self._checks.append(degraded(findings.PROBE, TOO_NARROW))
        elif not (empty := empty_slots(slots)):
            self._checks.append(degraded(findings.PROBE, TOO_FULL))
        else:
            # The last ones: the first slots are the likeliest to be wanted while we look.
            neighbour = next(iter(empty[:-1]), None)
            window = window_to_probe(self._window if self._edits else None, props.n_ctx)
            return await Probe(self._client, self._files, empty[-1], neighbour, window).run()
        return None

    @property
    def _edits(self) -> bool:
        return self._settings.restore.window_edit == "auto"

    def _can_act(self) -> bool:
        return not blocks(self._checks) and all(
            check.result is Result.OK for check in self._checks if check.name == verdicts.SAVE_PATH
        )

    async def _judge(self, props: Props | Unavailable, probed: Probed | None) -> None:
        if probed is not None:
            self._checks += findings.judge_probe(probed)
            if not probed.trouble:
                self._checks += (traits.judge_memory(probed), traits.judge_mode(probed))
        if not isinstance(props, Unavailable):
            self._judge_alterations(probed)
        if (leftover := findings.judge_leftover(probed) if probed else None) is not None:
            self._checks.append(leftover)
        self._checks.append(
            findings.judge_snapshot_dir(
                self._directory,
                await self._files.check_usable(),
                findings.file_of(probed) if probed else None,
            )
        )
        if probed is not None and isinstance(props, Props):
            await self._judge_room(props, probed)

    def _judge_alterations(self, probed: Probed | None) -> None:
        shown = probed.extended.kind if probed is not None and probed.extended is not None else None
        known = verdicts.Alterable(
            kind_from(shown, self._kind, None), self._window, self._files.is_visible, self._edits
        )
        self._checks += (verdicts.judge_window_edit(known), verdicts.judge_prefix_cut(known))

    async def _judge_room(self, props: Props, probed: Probed) -> None:
        self._checks.append(findings.judge_idle_slots(probed, props.total_slots))
        quota = self._settings.retention.max_total_bytes
        file = findings.file_of(probed)
        # The room in a directory that is not the server's says nothing.
        free = await self._files.free_bytes() if file is not None and file.is_ok else None
        size = findings.judge_size(probed, props, quota, free)
        if size is not None:
            self._checks.append(size)
        if (stall := traits.judge_stall(probed, props)) is not None:
            self._checks.append(stall)
