"""Parts whose making takes more than a call: from settings, or ahead of what they use."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.clock import Clock
from kvproxy.dialects.patience import Patience
from kvproxy.identifiers import Owner, ServerName, SnapshotName
from kvproxy.proxy.call import Terms
from kvproxy.proxy.recogniser import Recogniser
from kvproxy.proxy.sending import Sender, WriteStall
from kvproxy.proxy.vigil import Watchers
from kvproxy.sessions.branches import Branches
from kvproxy.sessions.identity import Sources
from kvproxy.sessions.memory import BranchMemory
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.settings.model import (
    CheckpointSettings,
    ServerSettings,
    SessionSettings,
    Settings,
    UpstreamSettings,
)
from kvproxy.slots.leases import LeaseDesk
from kvproxy.snapshots.alterations import Alteration, Alterations
from kvproxy.snapshots.canaries import Canaries
from kvproxy.snapshots.files import ServerOwnedFiles, SharedDirectory, SnapshotFiles
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.memory_kind import kind_of_setting
from kvproxy.snapshots.names import new_name
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit
from kvproxy.upstream.acquaintance import Introduction
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import Standing
from kvproxy.upstream.sentinel import Sentinel
from kvproxy.upstream.transport import Transport
from kvproxy.upstream.watch import Watch


@dataclass(frozen=True, slots=True)
class Scratch:
    """Files for a moment, from a store and a directory that are built later than what uses them."""

    owner: Callable[[], Owner]
    files: Callable[[], SnapshotFiles]

    @property
    def is_visible(self) -> bool:
        return self.files().is_visible

    def new_name(self) -> SnapshotName:
        return new_name(self.owner())

    async def delete(self, name: SnapshotName) -> bool:
        return await self.files().delete(name)

    async def streams_of(self, name: SnapshotName) -> int | None:
        return await self.files().streams_of(name)


def introduction_of(
    settings: UpstreamSettings,
    client: LlamaServer,
    canaries: Canaries,
    emit: Emit,
    scratch: Scratch,
    standing: Standing,
    *,
    opens_windows: Callable[[Fingerprint], bool],
) -> Introduction:
    return Introduction(
        client,
        canaries,
        emit,
        runtime_key=settings.runtime_key,
        setting=kind_of_setting(settings.memory_kind),
        scratch=scratch,
        obstacle=lambda: standing.obstacle,
        opens_windows=opens_windows,
    )


def sentinel_of(url: str, api_key: str | None, watch: Watch, clock: Clock) -> Sentinel:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return Sentinel(
        parts.hostname or "",
        parts.port or (443 if is_tls else 80),
        ssl.create_default_context() if is_tls else None,
        api_key=api_key,
        on_break=watch.suspect,
        on_connect=watch.nudge,
        clock=clock,
    )


def alterations_of(settings: Settings) -> Alterations:
    """What may be done to snapshot files at the first server: nothing where we do not see them."""
    if settings.upstreams[0].snapshot_dir is None:
        return Alterations(frozenset())
    edits = {Alteration.WINDOW_EDIT} if settings.restore.window_edit == "auto" else set()
    return Alterations(frozenset({Alteration.PREFIX_CUT, *edits}))


def policy_of(settings: CheckpointSettings) -> CheckpointPolicy:
    """From the settings of the same names."""
    return CheckpointPolicy(**settings.model_dump(include={one.name for one in fields(CheckpointPolicy)}))


def files_of(snapshot_dir: Path | None) -> SnapshotFiles:
    return ServerOwnedFiles() if snapshot_dir is None else SharedDirectory(snapshot_dir)


def sender_of(
    settings: ServerSettings, api_key: str | None, transport: Transport, watch: Watch, desk: LeaseDesk
) -> Sender:
    """`api_key` is what the upstream wants."""
    stall = WriteStall(settings.write_stall_seconds, desk)
    return Sender(transport, watch, stall, api_key, settings.response_headers, settings.max_body_bytes)


def watchers_of(settings: Settings, server: ServerName, tasks: TaskSet, emit: Emit) -> Watchers:
    patience = Patience(settings.keep_alive.after_seconds, settings.keep_alive.every_seconds)
    return Watchers(server, patience, tasks, emit, settings.server.response_headers)


def recogniser_of(
    settings: SessionSettings,
    server: ServerName,
    registry: SessionRegistry,
    branches: Branches,
    memory: BranchMemory,
    emit: Emit,
) -> Recogniser:
    """The secret is asked for late: it is read when kvproxy starts."""
    bound = settings.max_branches_per_session
    return Recogniser(server, registry, branches, emit, max_branches=bound, secret=lambda: memory.secret)


def terms_of(settings: Settings) -> Terms:
    """How requests are taken in."""
    sessions = settings.sessions
    return Terms(
        Sources(sessions.headers, sessions.body_fields),
        sessions.implicit,
        bool(settings.security.api_keys),
        settings.server.max_body_bytes,
        sessions.still_billing_stamp,
    )
