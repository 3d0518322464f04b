"""Text to tokens and back, and what a slot would say: pure functions.

One byte of text is one token, special markers are one token each and every prompt starts with BOS,
which is how the tiny test models count. The chat template is theirs too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

BOS = 1
IM_START = 3
IM_END = 4
BYTE_OFFSET = 5
N_VOCAB = BYTE_OFFSET + 256

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIALS = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
_PIECES = {BOS: b"<s>", IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in _SPECIALS) + ")")
_CANARY = re.compile(r"CANARY-\w+")
_ASSISTANT_TURN = re.compile(r"<\|im_start\|>assistant\n.*?(<\|im_end\|>|\Z)", re.DOTALL)


def tokenize(text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
    tokens = [BOS] if add_special else []
    for piece in _SPLIT.split(text) if parse_special else [text]:
        if parse_special and piece in _SPECIALS:
            tokens.append(_SPECIALS[piece])
        else:
            tokens.extend(byte + BYTE_OFFSET for byte in piece.encode("utf-8", "replace"))
    return tokens


def detokenize(tokens: Iterable[int]) -> str:
    return b"".join(_piece(token) for token in tokens).decode("utf-8", "replace")


def _piece(token: int) -> bytes:
    if token in _PIECES:
        return _PIECES[token]
    return bytes([token - BYTE_OFFSET]) if BYTE_OFFSET <= token < N_VOCAB else b""


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


def render_chat(messages: Iterable[Any], tools: Any = None) -> str:
    head = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    turns = "".join(f"<|im_start|>{m.get('role')}\n{text_of(m.get('content'))}<|im_end|>\n" for m in messages)
    return f"{head}{turns}<|im_start|>assistant\n"


def text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def refrain(tokens: Sequence[int]) -> bytes:
    """What a slot holding these tokens keeps saying: the last canary word somebody else put there.

    Assistant turns do not count: a short answer holds a canary cut in half.
    """
    words = _CANARY.findall(_ASSISTANT_TURN.sub("", detokenize(tokens)))
    return f"{words[-1] if words else 'lorem'} ".encode()
