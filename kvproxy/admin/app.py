"""The operator's routes: look at everything, save, flush, invalidate, purge, collect."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from urllib.parse import unquote

import orjson
from aiohttp import web

from kvproxy import __version__
from kvproxy.admin.views import Json, server_view, session_view, slot_view, snapshot_view, state_view
from kvproxy.checkpoint.actions import SlotActions
from kvproxy.checkpoint.outcome import Trigger
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.checkpoint.rounds import Rounds
from kvproxy.clock import Clock
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.identifiers import ServerName, SessionKey, SnapshotName
from kvproxy.proxy.envelope import SERVER
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, LeaseDesk
from kvproxy.slots.table import SlotTable
from kvproxy.snapshots.files import SnapshotFiles
from kvproxy.snapshots.keeping import Keeper
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.metrics import CONTENT_TYPE, Gauges, Metrics, ServerGauges
from kvproxy.telemetry.tally import Tally
from kvproxy.upstream.facts import Standing

SAVE_SECONDS = 60.0
"""How long a save on demand waits for its session's request to end."""

INVALIDATED = "invalidated by an operator"


@dataclass(frozen=True, slots=True)
class AdminParts:
    server: ServerName
    url: str
    standing: Standing
    table: SlotTable
    desk: LeaseDesk
    registry: SessionRegistry
    store: SnapshotStore
    files: SnapshotFiles
    actions: SlotActions
    rounds: Rounds
    preparer: Preparer
    keeper: Keeper
    tally: Tally
    metrics: Metrics
    tasks: TaskSet
    clock: Clock
    token: str | None
    shows_metrics: bool
    metrics_are_public: bool
    is_draining: Callable[[], bool]
    lack: Callable[[], str]
    """Why nothing is saved, for want of room on the disk; empty if that is not so."""


class AdminFace:
    def __init__(self, parts: AdminParts) -> None:
        self._p = parts
        self._started = parts.clock.now()

    async def handle(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """`path` is `/metrics` or begins with `/kvproxy`. Raises ReplyError."""
        if path == "/metrics":
            return self._metrics(request)
        # A client's id may be any bytes, and is known as they were read from its header.
        words = [unquote(word, errors="surrogateescape") for word in path.split("/")[2:] if word]
        if words == ["healthz"]:
            return _json({"status": "ok"})
        if words == ["readyz"]:
            return self._readyz()
        self._require_operator(request)
        match (request.method, words):
            case ("GET" | "HEAD", ["status"]):
                return _json(self.status())
            case ("GET" | "HEAD", ["slots"]):
                return _json({"slots": self._slots()})
            case ("GET" | "HEAD", ["sessions"]):
                return _json({"sessions": [self._session(s) for s in self._p.registry.all()]})
            case ("GET" | "HEAD", ["snapshots"]):
                present = self._p.standing.facts.fingerprint
                return _json({"snapshots": [snapshot_view(m, present) for m in self._p.store.all()]})
            case ("POST", ["flush"]):
                return _json(
                    asdict(await self._p.rounds.flush(Trigger.MANUAL, SAVE_SECONDS, wait_for_requests=True))
                )
            case ("POST", ["gc"]):
                return await self._collect(dry_run=request.query.get("dry_run", "0") not in ("", "0"))
            case (_, ["sessions", name, *deed]):
                return await self._on_session(request.method, name, deed)
            case _:
                raise _no_route(f"{request.method} {path}", _METHODS.get("/".join(words)))

    # -- looking -------------------------------------------------------------------------------------------

    def status(self) -> Json:
        totals = self._p.store.totals()
        return {
            "version": __version__,
            "uptime_seconds": round(self._p.clock.now() - self._started, 3),
            "draining": self._p.is_draining(),
            "servers": [self._server()],
            "sessions": len(self._p.registry),
            "snapshots": {
                "known": totals.known,
                "valid": totals.valid,
                "invalid": totals.invalid,
                "bytes": totals.size_bytes,
            },
            "stats": self._p.tally.as_dict(),
        }

    def _server(self) -> Json:
        p = self._p
        return server_view(
            p.server,
            p.url,
            p.table.epoch,
            p.standing.facts,
            p.actions.breaker_state,
            self._slots(),
            p.desk.waiting,
            p.lack(),
        )

    def _slots(self) -> list[Json]:
        now = self._p.clock.now()
        return [slot_view(view, now) for view in self._p.table.views()]

    def _session(self, session: Session) -> Json:
        return session_view(
            session,
            self._p.table.slot_of(session.key),
            self._p.store.find_any(session.key),
            self._p.standing.facts.fingerprint,
        )

    def _readyz(self) -> web.Response:
        facts = self._p.standing.facts
        state, reason = state_view(facts, self._p.lack())
        if self._p.is_draining():
            return _json({"status": "draining", "reason": "kvproxy is shutting down"}, status=503)
        status = 200 if facts.state.has_slots else 503
        return _json({"status": state, "reason": reason}, status=status)

    def _metrics(self, request: web.BaseRequest) -> web.Response:
        if not self._p.shows_metrics:
            raise _not_found("metrics are off (metrics.enabled)")
        if not self._p.metrics_are_public:
            self._require_operator(request)
        headers = {"Content-Type": CONTENT_TYPE, "Server": SERVER}
        return web.Response(body=self._p.metrics.render(self._gauges()), headers=headers)

    def _gauges(self) -> Gauges:
        p, views, totals = self._p, self._p.table.views(), self._p.store.totals()
        server = ServerGauges(
            p.server,
            p.standing.facts.state.has_slots,
            p.actions.breaker_state,
            Counter(view.state for view in views),
            sum(view.is_dirty for view in views),
            p.desk.waiting,
            bool(p.lack()),
        )
        return Gauges((server,), len(p.registry), totals.valid, totals.invalid, totals.size_bytes)

    # -- acting --------------------------------------------------------------------------------------------

    async def _on_session(self, method: str, name: str, deed: list[str]) -> web.Response:
        sessions = self._p.registry.named(name)
        if not sessions:
            message = f"no session {name!r} is known: `kvproxy sessions` lists those that are"
            raise _not_found(message, ErrorCode.SNAPSHOT_NOT_FOUND)
        match (method, deed):
            case ("GET" | "HEAD", []):
                return _json({"sessions": [self._session(session) for session in sessions]})
            case ("POST", ["save"]):
                return await self._save(sessions)
            case ("POST", ["invalidate"]):
                return await self._invalidate(sessions)
            case ("DELETE", []):
                return await self._purge(sessions)
            case _:
                called = "/".join(deed)
                what = f"{method} for a session called {called!r}"
                raise _no_route(what, _SESSION_METHODS.get(called))

    async def _save(self, sessions: tuple[Session, ...]) -> web.Response:
        results = [await self._p.rounds.save_session(s.key, SAVE_SECONDS) for s in sessions]
        for result in results:
            if result.outcome.is_failure:
                detail = result.detail or result.outcome
                raise ReplyError(ErrorCode.SAVE_FAILED, f"the save failed: {detail}", status=502)
        return _json({"saves": [asdict(result) for result in results]})

    async def _collect(self, *, dry_run: bool) -> web.Response:
        keeper = self._p.keeper
        names = [*await keeper.collect(dry_run=dry_run), *await keeper.sweep(dry_run=dry_run)]
        return _json({"deleted": names, "dry_run": dry_run})

    async def _invalidate(self, sessions: tuple[Session, ...]) -> web.Response:
        marked = 0
        for session in sessions:
            await self._p.rounds.until_published(session.key)
        for manifest in (m for s in sessions for m in self._p.store.find_any(s.key)):
            for one in manifest.generations:
                await self._p.store.invalidate(manifest.key, manifest.fingerprint, one.name, INVALIDATED)
                marked += 1
        return _json({"invalidated": marked})

    async def _purge(self, sessions: tuple[Session, ...]) -> web.Response:
        """Forget the sessions with their files. One that serves now is refused: its answer would bring
        back what was purged."""
        deleted: list[str] = []
        for session in sessions:
            work = self._forget(session.key, self._evict(session.key))
            # An erase under way must keep its slot, also when the operator hangs up.
            deleted += await asyncio.shield(self._p.tasks.spawn(work, name="purge a session"))
        return _json({"purged": len(sessions), "deleted": deleted})

    async def _forget(self, key: SessionKey, lease: Lease | None) -> tuple[SnapshotName, ...]:
        """Forget a session whose stay has ended; the names of its files."""
        try:
            if lease is not None:
                await self._p.preparer.erase(lease)
            await self._p.rounds.until_published(key)
            removed = await self._p.store.delete(key)
            await self._p.keeper.delete(removed.names)
        finally:
            if lease is not None:
                lease.release()
        self._p.registry.forget(key)
        return removed.names

    def _evict(self, key: SessionKey) -> Lease | None:
        """End the session's stay unsaved; a lease on its slot, None if it has none."""
        view = self._p.table.slot_of(key)
        if view is None:
            return None
        lease = self._p.desk.try_checkpoint(view.id)
        if lease is None:
            message = f"the session is being served in slot {view.id}: try again when it is idle"
            raise ReplyError(ErrorCode.SLOT_BUSY, message, status=409, retry_after_seconds=1)
        self._p.table.lose(view.id, lease.epoch)
        return lease

    # -- who may ---------------------------------------------------------------------------------------------

    def _require_operator(self, request: web.BaseRequest) -> None:
        """Raises ReplyError (401, 403) for anyone else."""
        if request.method not in ("GET", "HEAD") and _is_from_a_page(request):
            message = "a web page may not act on kvproxy: use its commands, or a client that sends no Origin"
            raise ReplyError(ErrorCode.UNAUTHORIZED, message, status=403)
        if self._p.token is None:
            if not _is_from_this_machine(request):
                message = "without admin.token only this machine may ask: ask from there, or set admin.token"
                raise ReplyError(ErrorCode.UNAUTHORIZED, message, status=403)
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._p.token}".encode()):
            message = "the admin token is missing or wrong: send admin.token as `Authorization: Bearer`"
            raise ReplyError(ErrorCode.UNAUTHORIZED, message, status=401)


def _is_from_a_page(request: web.BaseRequest) -> bool:
    """A browser says so; and any page may send simple requests to this machine."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    return "Origin" in request.headers or site not in ("none", "same-origin")


def _is_from_this_machine(request: web.BaseRequest) -> bool:
    """Behind a proxy on this machine everybody has its address; such proxies say whose request it is."""
    said = [hop for value in request.headers.getall("X-Forwarded-For", []) for hop in value.split(",")]
    hops = (request.remote, *(hop.strip() for hop in said), *request.headers.getall("X-Real-IP", []))
    return "Forwarded" not in request.headers and all(map(_is_loopback, hops))


def _is_loopback(remote: str | None) -> bool:
    try:
        address = ip_address(remote or "")
    except ValueError:
        return False
    # On a dual-stack socket an IPv4 client comes as ::ffff:127.0.0.1, which is no loopback to Python.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _json(value: object, *, status: int = 200) -> web.Response:
    headers = {"Content-Type": "application/json", "Server": SERVER}
    return web.Response(status=status, body=orjson.dumps(value), headers=headers)


_METHODS = dict.fromkeys(("status", "slots", "sessions", "snapshots"), "GET") | dict.fromkeys(
    ("flush", "gc"), "POST"
)
_SESSION_METHODS = {"": "GET or DELETE", "save": "POST", "invalidate": "POST"}
"""How each route is asked for, to tell whoever asks otherwise."""


def _no_route(what: str, known: str | None) -> ReplyError:
    mend = "docs/commands.md lists the routes" if known is None else f"ask with {known}"
    return _not_found(f"kvproxy has no {what}: {mend}")


def _not_found(message: str, code: ErrorCode = ErrorCode.ROUTE_NOT_FOUND) -> ReplyError:
    return ReplyError(code, message, status=404)
