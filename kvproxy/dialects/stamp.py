"""Claude Code's stamp, and the one rewrite of a prompt that kvproxy can be told to make: pure.

Its first system text is `x-anthropic-billing-header: cc_version=2.1.197.bc5; cc_entrypoint=cli; cch=00000;`.
The end of the version depends on the first message, and in older releases `cch` changes with each request:
at the very beginning of the prompt, so that nothing after it is ever shared. Both are overwritten with
zeros, in place: the body keeps its length and every other byte.
"""

from __future__ import annotations

import re

from kvproxy.dialects.canonical import STAMP

_STAMP = re.compile(rb'"%b[^"\\]{0,500}' % STAMP.encode())
_CHANGING = re.compile(rb"(?<=cch=)\w+|(cc_version=\d+\.\d+\.\d+\.)(\w+)")


def without_changes(body: bytes, system_text: str) -> bytes:
    """`body` with its stamp made the same for all requests; as it is if it has none that is sure to be one.

    `system_text` is the system prompt of the body. A stamp is the beginning of that and of one string of the
    body alone: what somebody quotes is not touched.
    """
    if not system_text.startswith(STAMP):
        return body
    found = list(_STAMP.finditer(body))
    if len(found) != 1:
        return body
    start, end = found[0].span()
    return body[:start] + _CHANGING.sub(_zeros, body[start:end]) + body[end:]


def _zeros(found: re.Match[bytes]) -> bytes:
    kept = found[1] or b""
    return kept + b"0" * (len(found[0]) - len(kept))
