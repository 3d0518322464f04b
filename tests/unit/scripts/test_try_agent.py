from __future__ import annotations

import json

from scripts import try_agent
from scripts.overheard import Answered


def test_a_line_tells_what_the_agent_was_told() -> None:
    headers = {"x-kvproxy-outcome": "restored", "x-kvproxy-session": "0123456789ab"}
    told = try_agent.line(2, Answered("POST", "/v1/messages?beta=true", 200, headers, 288, 77_083))
    assert [cell.strip() for cell in told.split("|")] == [
        *("2", "POST /v1/messages?beta=true", "200", "restored", "-", "01234567", "288", "77,083")
    ]
    assert len(told) == len(try_agent.HEAD)


def test_a_request_that_is_none_of_ours_has_its_status() -> None:
    told = try_agent.line(1, Answered("HEAD", "/", 404, {}, None, None))
    assert [cell.strip() for cell in told.split("|")][1:] == ["HEAD /", "404", *["-"] * 5]


def test_the_log_is_summed_up() -> None:
    done = {"event": "kv.request.done", "level": "info", "verdict": "confirmed"}
    events = [
        *({**done, "outcome": outcome} for outcome in ("cold", "resident", "resident")),
        {"event": "kv.backend.restarted", "level": "warning"},
    ]
    log = "\n".join(["starting", *map(json.dumps, events)])
    assert list(try_agent.summary(log)) == [
        "outcomes: 1 cold, 2 resident",
        "verdicts: 3 confirmed",
        "warnings: 1 kv.backend.restarted",
    ]
