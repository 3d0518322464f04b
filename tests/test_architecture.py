"""The shape of the package: which module may import which, and what must lie beside each."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvproxy"

# A module imports from its own floor or from below, never from above.
# New module: add its name (without "kvproxy.") to the lowest floor that holds all it imports.
FLOORS: dict[int, tuple[str, ...]] = {
    0: ("identifiers", "errors", "clock", "token_ids", "frozen"),  # words
    1: (  # rules: values and decisions, nothing that waits, reads or knows the time
        "settings.address",
        "settings.model",
        "settings.overrides",
        "settings.problems",
        "settings.unbuilt",
        "checkpoint.outcome",
        "checkpoint.policy",
        "checkpoint.trust",
        "checkpoint.verdict",
        "telemetry.events",
        "telemetry.lines",
        "upstream.replies",
        "upstream.breaker",
        "upstream.rate",
        "upstream.facts",
        "upstream.architectures",
        "slots.state",
        "slots.slot",
        "slots.placement",
        "slots.want",
        "slots.settling",
        "slots.living",
        "slots.cells",
        "slots.needs",
        "sessions.adapters",
        "sessions.key",
        "sessions.sources",
        "sessions.identity",
        "sessions.lines",
        "sessions.newcomers",
        "sessions.session",
        "snapshots.fingerprint",
        "snapshots.canary",
        "snapshots.compatibility",
        "snapshots.manifest",
        "snapshots.memory_kind",
        "snapshots.names",
        "snapshots.alterations",
        "snapshots.retention",
        "proxy.rewrite",
        "proxy.stays",
        "proxy.headers",
        "proxy.guard",
        "proxy.tap",
        "boundary.continuations",
        "boundary.turn",
        "boundary.evidence",
        "dialects.endpoints",
        "dialects.errors",
        "dialects.patience",
        "dialects.stamp",
        "auxiliary.signals",
        "auxiliary.fingerprints",
        "auxiliary.structure",
        "auxiliary.sorting",
        "dialects.opening",
        "dialects.as_chat",
        "dialects.shapes",
        "dialects.canonical",
        "dialects.reading",
        "dialects.usage",
        "doctor.check",
        "doctor.verdicts",
        "doctor.sizes",
    ),
    2: (  # state: one writer each, changed between awaits only
        "tasks",
        "auxiliary.habits",
        "slots.adrift",
        "slots.record",
        "slots.table",
        "slots.lease",
        "slots.leases",
        "sessions.registry",
        "sessions.branches",
        "snapshots.index",
        "telemetry.tally",
    ),
    3: (  # doors: files, sockets, the outside
        "settings.load",
        "auxiliary.library",
        "upstream.calls",
        "upstream.client",
        "upstream.canary",
        "upstream.adapters",
        "upstream.connections",
        "upstream.transport",
        "upstream.unreachable",
        "upstream.sentinel",
        "upstream.reuse_probe",
        "upstream.messages_pin",
        "upstream.gguf",
        "snapshots.access",
        "snapshots.atomic",
        "snapshots.opened",
        "slotfile.head",
        "slotfile.source",
        "slotfile.blocks",
        "slotfile.layout",
        "slotfile.copying",
        "slotfile.window",
        "slotfile.prefix",
        "snapshots.canaries",
        "snapshots.checks",
        "snapshots.files",
        "snapshots.state_dir",
        "snapshots.store",
        "snapshots.lock",
        "sessions.memory",
        "doctor.directories",
        "telemetry.bus",
        "telemetry.metrics",
        "telemetry.logs",
    ),
    4: (  # deeds: what kvproxy does, step by step
        "checkpoint.actions",
        "checkpoint.candidates",
        "checkpoint.opener",
        "checkpoint.extension",
        "checkpoint.cutter",
        "checkpoint.parts",
        "checkpoint.preparer",
        "checkpoint.rounds",
        "checkpoint.publisher",
        "checkpoint.shaper",
        "snapshots.keeping",
        "snapshots.inspection",
        "checkpoint.checkpointer",
        "checkpoint.mooring",
        "checkpoint.finder",
        "checkpoint.restorer",
        "checkpoint.room",
        "checkpoint.proofs",
        "upstream.acquaintance",
        "upstream.findings",
        "upstream.watch",
        "upstream.probe",
        "upstream.living",
        "upstream.volatility",
        "upstream.trial",
        "upstream.late_canary",
        "upstream.obstruction",
        "proxy.envelope",
        "proxy.receive",
        "proxy.call",
        "proxy.recogniser",
        "proxy.account",
        "proxy.relay",
        "proxy.vigil",
        "proxy.sorter",
        "proxy.visit",
        "proxy.sending",
        "proxy.holding",
        "proxy.lessons",
        "proxy.steering",
        "proxy.pinned",
        "proxy.unpinned",
        "proxy.exchange",
        "boundary.prefix",
        "boundary.rewind",
        "doctor.probe",
        "doctor.findings",
        "doctor.traits",
        "doctor.examine",
    ),
    5: ("proxy.app", "proxy.server", "admin.app", "admin.views"),  # faces: HTTP in, values out
    6: ("assembly", "house", "wiring"),  # the only place that knows everything
    7: (  # a process: signals, flags, exit codes
        "verdict",
        "daemon",
        "cli",
        "cli.main",
        "cli.serve",
        "cli.settings_arguments",
        "cli.check_config",
        "cli.daemon_client",
        "cli.table",
        "cli.doctor",
        "cli.status",
        "cli.slots",
        "cli.sessions",
        "cli.snapshots",
        "cli.save",
        "cli.invalidate",
        "cli.purge",
        "cli.flush",
        "cli.gc",
        "cli.inspect",
        "__main__",
    ),
}

FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}

IMPURE = frozenset(
    {"asyncio", "aiohttp", "prometheus_client", "time", "os", "socket", "subprocess", "threading"}
)
"""What words and rules do without, so that a test of them needs no loop, no disk and no clock."""

MAY_BE_IMPURE = {"clock": "it is the clock"}

READS_FILES = frozenset({"open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir"})

WITHOUT_UNIT_TEST = {
    "identifiers": "names of types",
    "errors": "names of errors; what they become is tested where they are answered",
    "clock": "two functions of the machine's clocks",
    "checkpoint.outcome": "names of outcomes; tested where they are decided and where they are told",
    "telemetry.events": "values without behaviour",
    "__main__": "one call",
    "checkpoint.parts": "a record",
    "boundary.turn": "records",
    "checkpoint.publisher": "the second half of the checkpointer, tested with it",
    "assembly": "tested over sockets in tests/integration",
    "slots.record": "the slot table's record, tested with it",
    "wiring": "tested over sockets in tests/integration",
    "proxy.app": "tested over sockets in tests/integration",
    "proxy.exchange": "tested over sockets in tests/integration",
    "proxy.visit": "tested over sockets in tests/integration",
    "proxy.holding": "tested over sockets in tests/integration",
    "proxy.unpinned": "tested over sockets in tests/integration",
}
"""Shrinks only: a module that gains a test leaves this list."""

LONGEST_MODULE = 400


def modules() -> dict[str, Path]:
    """Every module that holds code, by its name without the package's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] != "__init__" or imports_of(path):
            found[name] = path
    return found


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def imports_of(path: Path) -> set[str]:
    """All modules that are imported anywhere in the file; `from a import b` is `a.b` where that is one."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def own_imports_of(path: Path) -> set[str]:
    names = {name.removeprefix("kvproxy.") for name in imports_of(path) if name.startswith("kvproxy.")}
    return names & modules().keys()


def test_every_module_has_one_floor() -> None:
    listed = [name for names in FLOORS.values() for name in names]
    assert len(listed) == len(set(listed)), "a module is listed twice in FLOORS"
    missing = sorted(modules().keys() - FLOOR_OF.keys())
    assert not missing, f"give each of these a floor in FLOORS of {Path(__file__).name}: {missing}"


def test_no_module_imports_from_a_floor_above() -> None:
    upward = [
        f"{name} (floor {FLOOR_OF[name]}) imports {other} (floor {FLOOR_OF[other]})"
        for name, path in modules().items()
        for other in own_imports_of(path)
        if name in FLOOR_OF and FLOOR_OF.get(other, 0) > FLOOR_OF[name]
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    # A package imports its own module on purpose; the module is what the others know.
    graph = {name: own_imports_of(path) - {name, "cli"} for name, path in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def words_and_rules() -> list[str]:
    return [name for name in modules() if FLOOR_OF.get(name, 9) <= 1 and name not in MAY_BE_IMPURE]


@pytest.mark.parametrize("name", words_and_rules())
def test_words_and_rules_neither_wait_nor_read_nor_know_the_time(name: str) -> None:
    path = modules()[name]
    assert not {module.partition(".")[0] for module in imports_of(path)} & IMPURE
    assert not set(_calls(path)) & READS_FILES


def _calls(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", ""))


def test_every_module_can_be_imported_alone() -> None:
    """A circle that one order of imports hides shows in another."""
    program = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "kvproxy"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""
    names = [f"kvproxy.{name}" for name in modules() if name != "__main__"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_module_has_a_unit_test_of_its_path() -> None:
    missing = [
        f"{unit_test_of(name).relative_to(ROOT)}"
        for name in modules()
        if not unit_test_of(name).exists() and name not in WITHOUT_UNIT_TEST and name != "cli"
    ]
    assert not missing, f"write these, or give the reason in WITHOUT_UNIT_TEST: {missing}"


def test_the_list_of_untested_modules_holds_no_tested_and_no_vanished_one() -> None:
    tested = [name for name in WITHOUT_UNIT_TEST if unit_test_of(name).exists()]
    assert not tested, "has a test now: take it off the list"
    assert WITHOUT_UNIT_TEST.keys() <= modules().keys()


def unit_test_of(name: str) -> Path:
    *folders, last = name.split(".")
    return ROOT.joinpath("tests", "unit", *folders, f"test_{last}.py")


@pytest.mark.parametrize("name", modules())
def test_no_module_is_longer_than_one_can_hold_in_mind(name: str) -> None:
    assert len(modules()[name].read_text("utf-8").splitlines()) <= LONGEST_MODULE
