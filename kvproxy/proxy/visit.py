"""One request on its way through the house: what came in, what it asks, the account kept of it, and the
vigil kept for its client."""

from __future__ import annotations

from aiohttp import web

from kvproxy.checkpoint.outcome import Outcome, Preparation
from kvproxy.frozen import frozen
from kvproxy.proxy.account import Account
from kvproxy.proxy.call import Call
from kvproxy.proxy.vigil import Vigil


@frozen
class Visit:
    request: web.BaseRequest
    call: Call
    account: Account
    vigil: Vigil

    def shown(self, preparation: Preparation) -> Preparation:
        """What a request that owns nothing is told: that it is one, not how cold it is."""
        if self.call.is_bypass:
            return Preparation(Outcome.BYPASS)
        return Preparation(Outcome.AUXILIARY) if self.call.is_auxiliary else preparation
