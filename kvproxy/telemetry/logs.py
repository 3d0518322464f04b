"""The log on stderr: one line for each event, as text or JSON.

Lines are handed to a thread, because a terminal or a pipe that nobody reads blocks its writer, and the
writer would be the event loop.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from queue import SimpleQueue
from threading import Event, Thread
from typing import Literal, TextIO

from kvproxy.clock import SystemClock
from kvproxy.telemetry import events as e
from kvproxy.telemetry.lines import ALWAYS_DEBUG, Line, line_of

_MAX_WAITING = 10_000
_LAST_LINES_SECONDS = 2.0
_GATHER_SECONDS = 0.02

_logger = logging.getLogger("kvproxy")


def log_event(event: e.Event) -> None:
    """The listener. Builds no line that would not be written."""
    if type(event) in ALWAYS_DEBUG and not _logger.isEnabledFor(logging.DEBUG):
        return
    line = line_of(event)
    if not _logger.isEnabledFor(line.level):
        return
    _logger.handle(_record(line))


_BLANK = {
    **vars(logging.LogRecord(_logger.name, logging.NOTSET, "", 0, "", None, None)),
    **dict.fromkeys(("thread", "threadName", "process", "processName")),
}
"""What all records of lines have in common."""


def _record(line: Line) -> logging.LogRecord:
    """Made by hand: `Logger.log` would walk the stack for a caller that no line shows, and the record's own
    `__init__` would take his file's name apart."""
    now, error = SystemClock.wall(), line.error
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__ = {
        **_BLANK,
        "msg": line.name,
        "levelno": line.level,
        "levelname": logging.getLevelName(line.level),
        "exc_info": None if error is None else (type(error), error, error.__traceback__),
        "created": now,
        "msecs": int(now * 1000) % 1000 + 0.0,
        "relativeCreated": _BLANK["relativeCreated"] + (now - _BLANK["created"]) * 1000,
        "line": line,
    }
    return record


class Logging:
    """The process's log from construction to `close`, also for what libraries log (warnings and worse)."""

    def __init__(
        self,
        level: Literal["debug", "info", "warning", "error"] = "info",
        style: Literal["text", "json"] = "text",
        stream: TextIO | None = None,
    ) -> None:
        # What no line shows need not be found out for each (see "Optimization" in the logging HOWTO).
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        target = logging.StreamHandler(stream or sys.stderr)
        target.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
        self._handler = _Handover(target)
        _logger.setLevel(level.upper())
        root = logging.getLogger()
        root.setLevel(max(logging.WARNING, _logger.level))
        root.addHandler(self._handler)

    def close(self) -> None:
        """Write what waits, for two seconds at most: after the event loop, which it would hold."""
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()


class _Handover(logging.Handler):
    """Puts records into a bounded line before the writing thread; beyond that they are counted, not kept."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self._target = target
        self._waiting: SimpleQueue[logging.LogRecord | None] = SimpleQueue()
        self._dropped = 0
        self._closing = Event()
        self._thread = Thread(target=self._write, name="kvproxy-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            self._dropped += 1
            return
        if self._dropped:
            self._waiting.put(_dropped_record(self._dropped))
            self._dropped = 0
        self._waiting.put(record)

    def close(self) -> None:
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(_LAST_LINES_SECONDS)
        super().close()

    def _write(self) -> None:
        while (record := self._waiting.get()) is not None:
            self._target.handle(record)
            # Let more lines gather: to be woken for each one takes the interpreter from the event loop.
            if self._waiting.empty():
                self._closing.wait(_GATHER_SECONDS)


def _dropped_record(count: int) -> logging.LogRecord:
    message = f"{count} log lines were dropped: stderr is not read fast enough"
    return logging.LogRecord("kvproxy", logging.WARNING, "", 0, message, None, None)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info kv.request.done session=… slot=0 …`"""

    def format(self, record: logging.LogRecord) -> str:
        line: Line | None = getattr(record, "line", None)
        words = [_time(record), record.levelname.lower()]
        if line is None:
            words += [record.name, _word(record.getMessage())]
        else:
            words += [line.name, *(f"{k}={_word(v)}" for k, v in line.fields.items() if v is not None)]
        text = " ".join(words)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """The same, one JSON object a line, with `ts`, `level` and `event` first."""

    def format(self, record: logging.LogRecord) -> str:
        line: Line | None = getattr(record, "line", None)
        said: dict[str, object] = {"ts": _time(record), "level": record.levelname.lower()}
        if line is None:
            said |= {"event": "kv.log", "logger": record.name, "message": record.getMessage()}
        else:
            said |= {"event": line.name, **{k: v for k, v in line.fields.items() if v is not None}}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _word(value: object) -> str:
    """Quoted if a reader could take it for more than one word, or for more than one line."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if _PLAIN.fullmatch(text) is not None:  # nearly all are
        return text
    is_plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)


_PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)
"""Of these letters a word is one to any reader."""
