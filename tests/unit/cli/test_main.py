from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from types import SimpleNamespace

import pytest

from kvproxy import __version__
from kvproxy.cli import main
from kvproxy.cli.main import COMMANDS, Command
from kvproxy.errors import SettingsError, StateDirError

# The package has a function of the module's name; only the import system still finds the module.
cli_main = importlib.import_module("kvproxy.cli.main")


def install(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> None:
    def run(args: argparse.Namespace) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    command = SimpleNamespace(NAME="try", HELP="Try.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli_main, "COMMANDS", (command,))


def accepts_json(command: Command) -> bool:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return "--json" in parser.format_help()


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (SettingsError("a: 1: bad\nb: 2: bad"), 2, "kvproxy try: a: 1: bad\nkvproxy try: b: 2: bad\n"),
        (StateDirError("locked by 7"), 1, "kvproxy try: locked by 7\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_outcome_is_an_exit_code_and_an_error_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: int | BaseException,
    code: int,
    told: str,
) -> None:
    install(monkeypatch, outcome)
    assert main(["try"]) == code
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("argv", [[], ["nope"], ["check-config", "--nope"], ["check-config", "--set", "x"]])
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "--help" in shown.err


def test_an_argument_that_a_command_does_not_have_leads_to_the_help_of_that_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gc", "--dryrun"]) == 2
    assert capsys.readouterr().err == (
        "kvproxy gc: unrecognized arguments: --dryrun; see kvproxy gc --help\n"
    )


WITH_JSON = [command.NAME for command in COMMANDS if accepts_json(command)]


@pytest.mark.parametrize("command", WITH_JSON)
def test_wrong_usage_with_json_is_an_object_beside_the_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--json", "--nope"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error["code"] == "KV_USAGE_INVALID"
    assert shown.err.endswith(f": {error['message']}\n")


@pytest.mark.parametrize("command", sorted({*WITH_JSON} - {"inspect"}))  # which takes no settings
def test_wrong_settings_with_json_are_an_object_beside_the_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROXY_SERVER__LISTEN", "nonsense")
    session = ["s"] if command in ("save", "invalidate", "purge") else []
    assert main([command, *session, "--json"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error["code"] == "KV_USAGE_INVALID"
    assert "server.listen" in error["message"]
    assert shown.err == f"kvproxy {command}: {error['message']}\n"


def test_a_bug_is_not_dressed_up_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command = SimpleNamespace(NAME="try", HELP="Try.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli_main, "COMMANDS", (command,))
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"kvproxy {__version__}\n")


def test_a_reader_who_has_seen_enough_gets_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        sys.stdout.write("one line\n")
        return 0

    command = SimpleNamespace(NAME="try", HELP="Try.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli_main, "COMMANDS", (command,))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["try"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == ""
