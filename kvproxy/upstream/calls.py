"""The HTTP under what kvproxy itself asks of llama-server.

Every call has a connection of its own, closed after the answer. Management is rare, the server closes idle
connections after 5 s, and a call on one that is just being closed could not be told from a lost action.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import orjson

from kvproxy.upstream import replies

MAX_REPLY_BYTES = 16 << 20
"""`/props` carries the chat template and `/slots` may carry prompts; more than this is not llama-server."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: object
    """The decoded JSON; None if it was none."""
    text: str
    """The beginning of a body that was not JSON."""

    @property
    def message(self) -> str:
        return replies.parse_error(self.body) or self.text or f"HTTP {self.status}"


class Calls:
    """To the server at `base_url`. Needs a running loop from the first call on."""

    def __init__(self, base_url: str, api_key: str | None, *, connect_timeout_seconds: float) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connect_seconds = connect_timeout_seconds
        self._session: aiohttp.ClientSession | None = None
        self._under_way: set[asyncio.Future[None]] = set()

    async def make(self, method: str, target: str, cap: float, body: bytes | None = None) -> Reply:
        """Raises aiohttp.ClientError, OSError, and TimeoutError after `cap` seconds."""
        over = asyncio.get_running_loop().create_future()
        self._under_way.add(over)
        try:
            return await self._exchange(method, target, cap, body)
        finally:
            self._under_way.discard(over)
            over.set_result(None)

    async def settled(self, timeout: float) -> bool:
        """Wait until every call now under way is over; False if one is not within `timeout` seconds."""
        if not self._under_way:
            return True
        _, pending = await asyncio.wait(set(self._under_way), timeout=timeout)
        return not pending

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _exchange(self, method: str, target: str, cap: float, body: bytes | None) -> Reply:
        # No redirects: the key would go where the answer points.
        async with self._opened().request(
            method,
            self.base_url + target,
            data=body,
            headers=self._headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=cap, sock_connect=self._connect_seconds),
        ) as response:
            return _decoded(response.status, await _read(response))

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, cut off at `MAX_REPLY_BYTES`."""
    parts: list[bytes] = []
    size = 0
    while size < MAX_REPLY_BYTES and (part := await response.content.readany()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _decoded(status: int, raw: bytes) -> Reply:
    try:
        return Reply(status, orjson.loads(raw), "")
    except orjson.JSONDecodeError:
        head = raw[: replies.ERROR_MESSAGE_CHARS].decode("utf-8", "replace")
        is_page = head.lstrip().startswith("<")  # markup for a browser names no cause in its first words
        return Reply(status, None, "" if is_page else replies.one_line(head))
