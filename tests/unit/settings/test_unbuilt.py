from __future__ import annotations

from typing import Any

import pytest

from kvproxy.settings.model import Settings
from kvproxy.settings.problems import keys
from kvproxy.settings.unbuilt import UNBUILT, refused


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"state_dir": "/s", **sections})


def test_the_defaults_are_in_force() -> None:
    assert refused(settings()) == ()


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("upstreams.1", {"upstreams": [{}, {"name": "b"}]}),
        ("upstreams.0.models", {"upstreams": [{"models": ["qwen"]}]}),
        ("upstreams.0.slots", {"upstreams": [{"slots": [0, 1]}]}),
        ("security.api_keys", {"security": {"api_keys": ["k"]}}),
        ("security.cors_origins", {"security": {"cors_origins": ["https://a.example"]}}),
        ("admin.listen", {"admin": {"listen": "127.0.0.1:9000"}}),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(key: str, sections: dict[str, Any]) -> None:
    assert [entry.key for entry in refused(settings(**sections))] == [key]


def test_every_entry_of_a_list_is_looked_at() -> None:
    found = refused(settings(upstreams=[{"slots": [0]}, {"name": "b", "slots": [1]}]))
    assert {"upstreams.0.slots", "upstreams.1.slots"} <= {entry.key for entry in found}


def test_the_table_names_settings_that_exist() -> None:
    known = set(keys())
    assert [entry.key for entry in UNBUILT if entry.key.replace(".1", "") not in known] == []
