from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from threading import Event as Flag
from typing import Literal

import pytest

from kvproxy.telemetry import logs
from kvproxy.telemetry.events import Event, TaskDied, Warned
from kvproxy.telemetry.logs import Logging, log_event
from tests.unit.telemetry import samples


@pytest.fixture(autouse=True)
def levels_as_they_were() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("kvproxy")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def written(
    *events: Event,
    level: Literal["debug", "info", "warning", "error"] = "debug",
    style: Literal["text", "json"] = "text",
) -> list[str]:
    stream = io.StringIO()
    log = Logging(level, style, stream)
    for event in events:
        log_event(event)
    log.close()
    return stream.getvalue().splitlines()


def test_a_text_line_is_time_level_name_and_fields() -> None:
    (line,) = written(samples.checkpoint())
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == (
        "info kv.session.save.success session=0123456789ab server=main slot=1 trigger=idle"
        " tokens=1538 bytes=170000000 duration_ms=250.2"
    )


def test_a_json_line_holds_the_same() -> None:
    (line,) = written(samples.checkpoint(), style="json")
    said = json.loads(line)
    assert said.pop("ts").endswith("Z")
    assert said == {
        "level": "info",
        "event": "kv.session.save.success",
        "session": "0123456789ab",
        "server": "main",
        "slot": 1,
        "trigger": "idle",
        "tokens": 1538,
        "bytes": 170_000_000,
        "duration_ms": 250.2,
    }


@pytest.mark.parametrize("style", ["text", "json"])
def test_every_event_but_a_traceback_is_one_line(style: Literal["text", "json"]) -> None:
    events = [event for event in samples.every() if not isinstance(event, TaskDied)]
    assert len(written(*events, style=style)) == len(events)


def test_a_value_cannot_forge_a_field_or_a_line() -> None:
    (line,) = written(Warned('x code=KV_INVARIANT\n2026 "info" kv.request.done'))
    assert line.endswith(r'message="x code=KV_INVARIANT\n2026 \"info\" kv.request.done"')


def test_a_task_that_died_is_told_with_its_traceback() -> None:
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError as error:
        died = TaskDied("sentinel", error)
    text = written(died)
    assert " error kv.task.died task=sentinel code=KV_INVARIANT" in text[0]
    assert text[-1] == "ZeroDivisionError: oops"
    (line,) = written(died, style="json")
    assert json.loads(line)["traceback"].endswith("ZeroDivisionError: oops")


def test_what_is_below_the_level_is_not_written() -> None:
    assert written(samples.acquired(), level="info") == []
    assert written(samples.request(), level="warning") == []
    assert len(written(samples.failed("upstream"), level="warning")) == 1


def test_a_librarys_warning_is_written_in_the_same_shape_and_its_chatter_is_not() -> None:
    stream = io.StringIO()
    log = Logging("debug", "json", stream)
    logging.getLogger("aiohttp.server").warning("bad %s", "request")
    logging.getLogger("aiohttp.server").info("chatter")
    log.close()
    said = json.loads(stream.getvalue())
    assert (said["event"], said["logger"], said["message"]) == ("kv.log", "aiohttp.server", "bad request")


def test_a_record_of_a_line_is_what_the_library_would_have_made(caplog: pytest.LogCaptureFixture) -> None:
    log_event(TaskDied("probe", error := ValueError("no")))
    (record,) = caplog.records
    like = logging.LogRecord(
        "kvproxy", logging.ERROR, "", 0, "kv.task.died", None, (type(error), error, None)
    )
    assert vars(record).keys() == vars(like).keys() | {"line", "message"}
    own = {"line", "message", "exc_text", "created", "msecs", "relativeCreated"}
    own |= {"thread", "threadName", "process", "processName"}
    told = {name: value for name, value in vars(record).items() if name not in own}
    assert told == {name: value for name, value in vars(like).items() if name not in own}
    for name in ("created", "relativeCreated"):
        assert 0 <= getattr(like, name) - getattr(record, name) < (5 if name == "created" else 5000)
    assert record.msecs == pytest.approx(record.created % 1 * 1000, abs=1)


def test_after_close_nothing_is_written() -> None:
    stream = io.StringIO()
    Logging("debug", "text", stream).close()
    log_event(samples.request())
    assert stream.getvalue() == ""


async def test_a_stalled_stderr_does_not_hold_the_loop_and_the_loss_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stalled(io.StringIO):
        entered, go_on = Flag(), Flag()

        def write(self, text: str) -> int:
            self.entered.set()
            self.go_on.wait()
            return super().write(text)

    monkeypatch.setattr(logs, "_MAX_WAITING", 2)
    stream = Stalled()
    log = Logging("info", "text", stream)
    log_event(Warned("first"))
    stream.entered.wait()
    for message in ("second", "third", "lost", "lost"):
        log_event(Warned(message))
    monkeypatch.setattr(logs, "_MAX_WAITING", 10)
    log_event(Warned("last"))
    stream.go_on.set()
    await asyncio.to_thread(log.close)
    said = [line.split(" ", 3)[-1] for line in stream.getvalue().splitlines()]
    assert said == [
        "message=first",
        "message=second",
        "message=third",
        '"2 log lines were dropped: stderr is not read fast enough"',
        "message=last",
    ]
