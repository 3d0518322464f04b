"""What must be equal for a snapshot to be restorable: what the server tells, and what its canary shows.

Left out on purpose: the context size (a larger one takes the snapshot, and fit is checked by tokens), the
alias and the chat template (they change names and prompts, not KV), the media marker (new in each process).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvproxy.upstream.replies import Props

DIGEST_DIGITS = 16
CANARY_FIELD = "canary"
META_FIELDS = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Pairs of field name and value, sorted by name. A field that is absent equals an empty one."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def from_dict(cls, fields: Mapping[str, str]) -> Fingerprint:
        return cls(tuple(sorted(fields.items())))

    def as_dict(self) -> dict[str, str]:
        return dict(self.fields)

    def without(self, name: str) -> Fingerprint:
        return Fingerprint(tuple(pair for pair in self.fields if pair[0] != name))

    def get(self, name: str) -> str:
        """ "" for a field that is absent."""
        return self.as_dict().get(name, "")

    @property
    def digest(self) -> str:
        """16 hex digits; part of a manifest's file name."""
        told = sorted(pair for pair in self.fields if pair[1])
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:DIGEST_DIGITS]

    def diff(self, other: Fingerprint) -> tuple[str, ...]:
        """The names of the fields that differ, sorted."""
        mine, theirs = self.as_dict(), other.as_dict()
        names = sorted(mine.keys() | theirs.keys())
        return tuple(name for name in names if mine.get(name, "") != theirs.get(name, ""))


def fingerprint_of(
    props: Props,
    model_meta: Mapping[str, Any],
    runtime_key: str | None,
    *,
    adapters: str = "",
    model_file: str = "",
    canary: str = "",
) -> Fingerprint:
    """`model_meta` is `data[0].meta` of `GET /v1/models`, `runtime_key` the operator's own mark, `adapters`
    those that are applied, `model_file` tells the file of the model, `canary` is the name of its canary."""
    told = {
        "model_path": props.model_path,
        "model_ftype": props.model_ftype,
        "build": props.build,
        "total_slots": str(props.total_slots),
        "modalities": ",".join(props.modalities),
        "runtime_key": runtime_key or "",
        "adapters": adapters,
        "model_file": model_file,
        CANARY_FIELD: canary,
    }
    meta = {f"meta_{name}": _text(model_meta.get(name)) for name in META_FIELDS}
    return Fingerprint.from_dict(told | meta)


def _text(value: object) -> str:
    return "" if value is None else str(value)
