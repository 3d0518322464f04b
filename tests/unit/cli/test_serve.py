from __future__ import annotations

import pytest

from kvproxy.cli import main, serve
from kvproxy.settings.model import Settings


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_daemon_gets_the_settings_and_its_exit_code_is_the_commands(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    served: list[Settings] = []

    def daemon(settings: Settings) -> int:
        served.append(settings)
        return code

    monkeypatch.setattr(serve, "serve", daemon)
    assert main(["serve", "--listen", "127.0.0.1:7"]) == code
    assert [str(settings.server.listen) for settings in served] == ["127.0.0.1:7"]


def test_bad_settings_start_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "serve", lambda settings: pytest.fail("started"))
    assert main(["serve", "--listen", "x"]) == 2
    assert capsys.readouterr().err.startswith("kvproxy serve: server.listen: x")
