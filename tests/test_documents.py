"""Documents that can be wrong are tests."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, Reason, RestoreOutcome, Verdict
from kvproxy.cli.main import COMMANDS
from kvproxy.errors import ErrorCode
from kvproxy.sessions.session import SessionState
from kvproxy.settings.load import load, read
from kvproxy.settings.model import Section, Settings
from kvproxy.settings.problems import keys
from kvproxy.settings.unbuilt import UNBUILT
from kvproxy.telemetry.lines import Line, line_of
from kvproxy.telemetry.metrics import Metrics
from kvproxy.upstream.facts import PersistenceMode
from tests.unit.telemetry import samples

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "config.example.yaml"
ENVIRON = {"HOME": "/home/someone"}


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def rows_of(name: str) -> list[str]:
    return [line for line in text_of(name).splitlines() if line.startswith("| `")]


# The example file


def test_the_example_holds_the_defaults() -> None:
    assert load(EXAMPLE, environ=ENVIRON) == load(environ=ENVIRON)


def test_the_example_holds_every_setting_in_the_order_of_the_model() -> None:
    assert list(_keys_in(read(EXAMPLE), "")) == list(keys())


def _keys_in(mapping: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in mapping.items():
        yield prefix + name
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            yield from _keys_in(inner, f"{prefix}{name}.{'*.' if inner is not value else ''}")


def test_the_example_explains_every_key_in_the_line_before_it() -> None:
    lines = EXAMPLE.read_text("utf-8").splitlines()
    bare = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r" *(- )?[a-z_]+:", line) and not before.lstrip().startswith("#")
    ]
    assert bare == []


def test_the_example_says_what_is_not_built_yet() -> None:
    lines = EXAMPLE.read_text("utf-8").splitlines()
    for entry in UNBUILT:
        name = entry.key.replace(".1", "").rpartition(".")[2]
        candidates = [
            "\n".join(lines[max(0, n - 3) : n])
            for n, line in enumerate(lines)
            if re.match(rf" *(- )?{name}:", line)
        ]
        assert any("ot built yet" in before for before in candidates), entry.key


# docs/configuration.md


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting that is no section, with its key."""
    for key in keys():
        section: Any = Settings
        *folders, name = [part for part in key.split(".") if part != "*"]
        for folder in folders:
            annotation = section.model_fields[folder].annotation
            section = annotation if isinstance(annotation, type) else get_args(annotation)[0]
        field = section.model_fields[name]
        if not _holds_sections(field.annotation):
            yield key, field


def _holds_sections(annotation: Any) -> bool:
    kinds = [annotation, *get_args(annotation)]
    return any(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds)


def setting_row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {_default(key, field)} | {_bounds(field)} | {field.description} |"


def _default(key: str, field: FieldInfo) -> str:
    if key == "state_dir":
        return "`null`"
    value: Any = load(environ=ENVIRON).masked()
    for part in key.replace("*", "0").split("."):
        value = value[int(part)] if part.isdigit() else value[part]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _bounds(field: FieldInfo) -> str:
    found = {
        type(bound).__name__: getattr(bound, type(bound).__name__.lower(), None) for bound in field.metadata
    }
    low = f"{found['Ge']}" if "Ge" in found else f"over {found['Gt']}" if "Gt" in found else ""
    return f"{low} to {found['Le']}" if low else ""


@pytest.mark.parametrize(("key", "field"), list(fields()))
def test_the_reference_has_a_row_for_each_setting(key: str, field: FieldInfo) -> None:
    assert setting_row(key, field) in rows_of("docs/configuration.md")


def test_the_reference_names_no_setting_that_does_not_exist() -> None:
    named = {row.split("`")[1] for row in rows_of("docs/configuration.md")}
    assert named == {key for key, _ in fields()}


def test_the_reference_says_what_is_not_built_yet() -> None:
    section = text_of("docs/configuration.md").partition("## Not built yet")[2]
    named = re.findall(r"^- `([^`]+)`", section, re.MULTILINE)
    assert named == [entry.key.replace(".1", "") for entry in UNBUILT]


# docs/commands.md


def test_every_command_has_a_row_and_no_other() -> None:
    table = text_of("docs/commands.md").partition("## ")[0]
    named = re.findall(r"^\| `([a-z-]+)", table, re.MULTILINE)
    assert named == [command.NAME for command in COMMANDS]


# docs/observability.md


def metric_rows() -> list[str]:
    metrics = Metrics([samples.MAIN], ["chat/completions"])
    rows = []
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        rows.append(f"| `{name}` | {family.type} | {' '.join(sorted(labels))} | {family.documentation} |")
    return rows


@pytest.mark.parametrize("row", metric_rows())
def test_every_metric_has_a_row(row: str) -> None:
    assert row in rows_of("docs/observability.md")


def event_rows() -> list[str]:
    """The row of each log event up to its meaning."""
    lines: dict[str, list[Line]] = {}
    for event in samples.every():
        lines.setdefault(line_of(event).name, []).append(line_of(event))
    return [_event_row(name, alike) for name, alike in sorted(lines.items())]


def _event_row(name: str, alike: list[Line]) -> str:
    levels = sorted({line.level for line in alike})
    fields = dict.fromkeys(field for line in alike for field in line.fields)
    return f"| `{name}` | {' '.join(logging.getLevelName(n).lower() for n in levels)} | {' '.join(fields)} | "


@pytest.mark.parametrize("start", event_rows())
def test_every_log_event_has_a_row_with_a_meaning(start: str) -> None:
    rows = [row for row in rows_of("docs/observability.md") if row.startswith(start)]
    assert len(rows) == 1
    assert len(rows[0]) > len(start) + 10


def test_the_reference_names_no_event_and_no_metric_that_does_not_exist() -> None:
    named = {row.split("`")[1] for row in rows_of("docs/observability.md")}
    known = {row.split("`")[1] for row in [*metric_rows(), *event_rows()]}
    assert {name for name in named if name.startswith(("kv.", "kvproxy_"))} == known


WORDS = {"outcome": Outcome, "reason": Reason, "verdict": Verdict, "session": SessionState} | {
    "persistence": PersistenceMode,
    "code": ErrorCode,
    "save": CheckpointOutcome,
    "restore": RestoreOutcome,
}


@pytest.mark.parametrize(("title", "words"), WORDS.items(), ids=WORDS)
def test_every_word_of_status_and_headers_is_explained(title: str, words: type[StrEnum]) -> None:
    text = text_of("docs/observability.md")
    table = re.search(rf"^\| `?{title}`? \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE | re.IGNORECASE)
    assert table is not None
    assert set(re.findall(r"^\| `([^`]+)`", table[1], re.MULTILINE)) == set(words)


# Links

DOCUMENTS = ("README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(name))
    paths = [link.partition("#")[0] for link in links if "://" not in link]
    missing = [path for path in paths if not (ROOT / name).parent.joinpath(path).exists()]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_heading_of_the_same_page_finds_it(name: str) -> None:
    text = text_of(name)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


# README.md


def code_in(name: str) -> str:
    """What a reader would type: fenced blocks and code spans, one a line."""
    text = text_of(name)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", text)])


def test_the_readmes_make_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code_in("README.md"), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_the_readmes_kvproxy_commands_exist() -> None:
    named = set(re.findall(r"^(?:\$ )?kvproxy ([a-z-]+)", code_in("README.md"), re.MULTILINE))
    assert named
    assert named <= {command.NAME for command in COMMANDS}
