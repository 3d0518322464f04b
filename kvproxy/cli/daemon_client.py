"""How a command asks the running daemon."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from kvproxy.cli.settings_arguments import settings_from
from kvproxy.errors import ErrorCode, KvproxyError, SettingsError
from kvproxy.proxy.envelope import ERROR_HEADER
from kvproxy.settings.address import Address, check_key, check_url
from kvproxy.settings.model import MASK

Json = dict[str, Any]

LOOK_SECONDS = 10.0
ACT_SECONDS = 180.0
"""A save waits for its session's request to end and then moves bytes; a flush does so for every slot."""

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class DaemonError(KvproxyError):
    """The daemon could not be asked, or said no, with its own code; the message names the mend."""

    def __init__(self, message: str, code: str = ErrorCode.DAEMON_UNAVAILABLE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class DaemonClient:
    """The daemon at `url`. Every method raises DaemonError."""

    url: str
    token: str | None = None

    def get(self, path: str) -> Json:
        return self._ask("GET", path, LOOK_SECONDS)

    def post(self, path: str) -> Json:
        return self._ask("POST", path, ACT_SECONDS)

    def delete(self, path: str) -> Json:
        return self._ask("DELETE", path, ACT_SECONDS)

    def _ask(self, method: str, path: str, timeout: float) -> Json:
        try:
            response, raw = self._exchange(method, path, timeout)
        except TimeoutError:
            raise DaemonError(f"{self.url} gave no answer within {timeout:g} s; look at its log") from None
        except (OSError, http.client.HTTPException) as error:
            raise DaemonError(
                f"no kvproxy answers at {self.url} ({_told(error)}); start it with `kvproxy serve`, "
                "or say with --url where it is"
            ) from None
        body = _decoded(raw)
        if response.status != http.HTTPStatus.OK:
            raise _complaint(self.url, response, body)
        if not isinstance(body, dict):
            raise _not_kvproxy(self.url)
        return body

    def _exchange(self, method: str, path: str, timeout: float) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}".encode()}
        connection = self._connection(timeout)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        # Not urllib: it would obey proxy variables, and follow a redirect with the token.
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.netloc, timeout=timeout, context=context)
        return http.client.HTTPConnection(parts.netloc, timeout=timeout)


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the running kvproxy (default: where settings say)")
    parser.add_argument(
        "--token", metavar="TOKEN", help="its admin.token; others see flags, so prefer KVPROXY_ADMIN__TOKEN"
    )
    parser.add_argument(
        "-c", "--config", metavar="FILE", type=Path, help="the settings file it was started with"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as it came")
    parser.set_defaults(overrides=[])


def add_session_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", help="the client's session id, or the 12-digit key")


def client_from(args: argparse.Namespace) -> DaemonClient:
    """From flags, environment and settings file. Raises SettingsError."""
    settings = settings_from(args)
    token = _checked_token(args.token) if args.token else settings.admin.token
    if args.url is None:
        return DaemonClient(_url_of(settings.admin.listen or settings.server.listen), token)
    try:
        return DaemonClient(check_url(args.url), token)
    except ValueError as error:
        raise SettingsError(f"--url: {args.url}: {error}") from None


def _checked_token(token: str) -> str:
    try:
        return check_key(token)
    except ValueError as error:
        raise SettingsError(f"--token: {MASK}: {error}") from None


def session_path(session: str, deed: str = "") -> str:
    path = f"/kvproxy/sessions/{quote(session, safe='', errors='surrogateescape')}"
    return f"{path}/{deed}" if deed else path


def as_json(answer: Json) -> str:
    return json.dumps(answer, indent=1, ensure_ascii=False)


def _url_of(listen: Address) -> str:
    return f"http://{Address(_ANY_ADDRESS.get(listen.host, listen.host), listen.port)}"


def _decoded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        # What is no JSON is not kvproxy's; the caller says so.
        return None


def _complaint(url: str, response: http.client.HTTPResponse, body: object) -> DaemonError:
    code = response.getheader(ERROR_HEADER)
    if code is None or not isinstance(body, dict):
        return _not_kvproxy(url)
    message = str(body["error"]["message"])
    # The daemon's words are for whoever writes headers; here there are flags.
    is_token = response.status == http.HTTPStatus.UNAUTHORIZED
    mend = "; set KVPROXY_ADMIN__TOKEN or give --token" if is_token else ""
    return DaemonError(message + mend, code)


def _not_kvproxy(url: str) -> DaemonError:
    return DaemonError(f"what answers at {url} is not kvproxy; say with --url where it is")


def _told(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
