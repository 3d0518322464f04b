from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request

from kvproxy.clock import SystemClock
from kvproxy.dialects.endpoints import Reach
from kvproxy.identifiers import ServerName
from kvproxy.proxy import sending as module
from kvproxy.proxy.account import Account
from kvproxy.proxy.call import Call
from kvproxy.proxy.relay import Ending
from kvproxy.proxy.sending import Sender
from kvproxy.proxy.vigil import Vigil
from kvproxy.proxy.visit import Visit
from kvproxy.telemetry.events import Event, RequestFailed


class Upstream:
    """A transport whose answers are never looked at."""

    async def send(self, *_: object) -> object:
        return object()


async def test_a_client_cut_off_for_not_reading_is_told_with_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stalled(*_: object, on_stall: Any, **__: object) -> object:
        on_stall()
        return SimpleNamespace(ending=Ending.CLIENT_LEFT)

    monkeypatch.setattr(module, "relay", stalled)
    events: list[Event] = []
    endpoint = SimpleNamespace(label="chat/completions")
    call = cast(Call, SimpleNamespace(endpoint=endpoint, is_anonymous=True, reach=Reach.PINNED))
    request = make_mocked_request("POST", "/")
    vigil = Vigil(cast(Any, None), request, call)
    account = Account(ServerName("main"), call, SystemClock(), events.append, 0.0)
    sender = Sender(cast(Any, Upstream()), cast(Any, None), cast(Any, None), None, False, 1)

    await sender.send(Visit(request, call, account, vigil), b"")
    account.client_left()

    assert events == [RequestFailed(ServerName("main"), "chat/completions", None, "proxy", "write_stall")]
