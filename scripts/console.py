"""How the scripts talk: progress and trouble on stderr, so that stdout carries results alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO


class Trouble(Exception):
    """What went wrong, and what the person at the terminal can do about it."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(what)
        self.mend = mend


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(main: Callable[[], None]) -> int:
    """Run a script's main function and return its exit code."""
    try:
        main()
    except Trouble as trouble:
        say(f"error: {trouble}\n  mend: {trouble.mend}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


class Progress:
    """Percent of a job done: one line rewritten in place on a terminal, else a line every `step` percent."""

    def __init__(self, label: str, stream: TextIO | None = None, step: int = 5) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._step = 1 if self._stream.isatty() else step
        self._shown = -step

    def update(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        # A build adds steps while it runs, which takes the share back: only new ground is shown.
        if percent < self._shown + self._step and not (percent == 100 > self._shown):
            return
        self._shown = percent
        before, after = ("\r", "\n" if percent == 100 else "") if self._stream.isatty() else ("", "\n")
        self._stream.write(f"{before}{self._label}: {percent:3d} % ({done} of {total}){after}")
        self._stream.flush()
