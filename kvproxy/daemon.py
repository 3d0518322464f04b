"""A running kvproxy as a process: start order, signals, drain, stop order, exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from kvproxy.doctor.sizes import count
from kvproxy.errors import KvproxyError
from kvproxy.proxy.server import create_runner, require_c_parser
from kvproxy.settings.address import Address
from kvproxy.settings.model import Settings
from kvproxy.telemetry.bus import EventBus
from kvproxy.telemetry.events import Event, ServerReady
from kvproxy.telemetry.logs import Logging, log_event
from kvproxy.verdict import verdict_line
from kvproxy.wiring import Runtime

DONE = 0
FAILED = 1
AT_ONCE = 130
"""The exit code of a second signal, as a shell reports an interrupt."""

VERDICT_WAIT_SECONDS = 10.0

log = logging.getLogger("kvproxy")


class ListenError(KvproxyError):
    """The address cannot be listened on."""


def run(settings: Settings) -> int:
    """Serve until a signal; the exit code."""
    require_c_parser()
    logging_ = Logging(settings.logging.level, settings.logging.format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings))
    finally:
        logging_.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve(settings: Settings) -> int:
    bus = EventBus()
    bus.subscribe(log_event)
    runtime = Runtime(settings, bus=bus)
    ready = _heard(bus, ServerReady)
    signals = _Signals()
    runner = create_runner(runtime.face.handle)
    try:
        await runtime.start()
        await _listen(runner, settings)
        runtime.tasks.spawn(tell_verdict(runtime, ready), name="verdict")
        await signals.first.wait()
        return await _stop(runtime, signals)
    finally:
        runtime.is_ending = True
        await runner.cleanup()
        await runtime.stop()


async def _listen(runner: web.ServerRunner, settings: Settings) -> None:
    await runner.setup()
    address = settings.server.listen
    try:
        await web.TCPSite(runner, address.host, address.port).start()
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}: {error.strerror or error}; choose another server.listen"
        ) from None
    bound = Address(address.host, runner.addresses[0][1])  # port 0 lets the system choose
    log.info("listening on http://%s, in front of %s", bound, settings.upstreams[0].url)


async def _stop(runtime: Runtime, signals: _Signals) -> int:
    """Drain within the budget; a second signal ends it at once."""
    budget = runtime.settings.server.drain_seconds
    under_way = count(runtime.face.running, "request")
    log.info("shutting down: %s under way, %g s at most", under_way, budget)
    drain = runtime.tasks.spawn(runtime.drain(budget), name="drain")
    hurry = runtime.tasks.spawn(signals.second.wait(), name="second signal")
    await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        log.warning("second signal: stopped without saving what was dirty")
        return AT_ONCE
    flushed = drain.result()
    saved = count(flushed.saved, "conversation")
    log.info("saved %s, %d could not be saved", saved, flushed.failed)
    return DONE if not flushed.failed else FAILED


def _heard(bus: EventBus, kind: type[Event]) -> asyncio.Event:
    """Set once an event of `kind` went by."""
    heard = asyncio.Event()
    bus.subscribe(lambda event: heard.set(), kind)
    return heard


async def tell_verdict(runtime: Runtime, ready: asyncio.Event) -> None:
    """One line about what this server allows, once it has told, or that it does not tell. That there is none
    yet was told by the watch at once."""
    with suppress(TimeoutError):
        async with asyncio.timeout(VERDICT_WAIT_SECONDS):
            await ready.wait()
    if not runtime.standing.facts.state.has_slots:
        await ready.wait()
    level, line = verdict_line(runtime, await runtime.files.check_usable())
    log.log(level, "%s", line)


class _Signals:
    """SIGTERM, SIGINT and SIGHUP: the first drains, the second ends."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        if sys.platform != "win32":
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.add_signal_handler(number, self._got)

    def _got(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
