"""Host and port to listen on, the address of an upstream and the keys of both, as an operator writes them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """`host` carries no brackets; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: object) -> Address:
    """`HOST:PORT` or `[V6]:PORT`. Raises ValueError with the reason."""
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("should be HOST:PORT, like 127.0.0.1:8090")
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError("should be HOST:PORT, like 127.0.0.1:8090 or [::1]:8090")
    if int(port) > _MAX_PORT:
        raise ValueError(f"the port should be at most {_MAX_PORT}")
    return Address(_bare_host(host), int(port))


def _bare_host(host: str) -> str:
    if host.startswith("[") and host.endswith("]") and ":" in host:
        return host[1:-1]
    if ":" in host:
        raise ValueError("an IPv6 address needs brackets, like [::1]:8090")
    if not host or any(c in host for c in " \t/@[]"):
        raise ValueError("should be HOST:PORT, like 127.0.0.1:8090")
    return host


def check_url(url: str) -> str:
    """An upstream's origin without a trailing slash. Raises ValueError with the reason."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"is no URL: {error}") from None
    reason = _fault_of(parts)
    if port == 0:
        reason = reason or "the port should not be 0"
    if reason or any(c.isspace() for c in url):
        raise ValueError(reason or "should hold no white space")
    return f"{parts.scheme}://{parts.netloc}"


def _fault_of(parts: SplitResult) -> str:
    if parts.scheme not in ("http", "https"):
        return "should start with http:// or https://"
    if not parts.hostname:
        return "names no host"
    if "@" in parts.netloc:
        return "should hold no user or password; set api_key instead"
    if parts.path not in ("", "/"):
        return "should have no path"
    if parts.query or parts.fragment:
        return "should have no query and no fragment"
    return "" if _may_be_looked_up(parts.hostname) else "names a host that cannot exist"


def _may_be_looked_up(host: str) -> bool:
    """Whether every part of the name has a length that names may have; the resolver raises on others."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def check_key(key: str) -> str:
    """A key that can be sent as a bearer token. Raises ValueError with the reason, which tells nothing of the
    key."""
    if not key.isascii() and any(0xD800 <= ord(c) <= 0xDFFF for c in key):
        raise ValueError("is not UTF-8 text")
    if key != key.strip():
        raise ValueError("should not begin or end with white space or a line break")
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in key):
        raise ValueError("should hold no line break and no control character")
    return key
