"""Parts whose making takes more than a call: from settings, or ahead of what they use."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.clock import Clock
from kvproxy.dialects.patience import Patience
from kvproxy.identifiers import ServerName, SnapshotName
from kvproxy.proxy.call import Terms
from kvproxy.proxy.recogniser import Recogniser
from kvproxy.proxy.sending import Sender, WriteStall
from kvproxy.proxy.vigil import Watchers
from kvproxy.sessions.branches import Branches
from kvproxy.sessions.identity import Sources
from kvproxy.sessions.memory import BranchMemory
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.settings.model import CheckpointSettings, ServerSettings, SessionSettings, Settings
from kvproxy.slots.leases import LeaseDesk
from kvproxy.snapshots.files import ServerOwnedFiles, SharedDirectory, SnapshotFiles
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit
from kvproxy.upstream.sentinel import Sentinel
from kvproxy.upstream.transport import Transport
from kvproxy.upstream.watch import Watch


@dataclass(frozen=True, slots=True)
class Scratch:
    """Files for a moment, from a store and a directory that are built later than what uses them."""

    name: Callable[[], SnapshotName]
    unlink: Callable[[SnapshotName], Awaitable[bool]]

    def new_name(self) -> SnapshotName:
        return self.name()

    async def delete(self, name: SnapshotName) -> bool:
        return await self.unlink(name)


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
