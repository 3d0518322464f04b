"""Child processes that end with us and leave the last lines of their output behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; `tail` is the end of its output, stdout and stderr together."""

    code: int
    tail: str


def die_with_parent(death_signal: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` that has the kernel send `death_signal` to the child when its parent thread dies.

    None where the kernel cannot (anything but Linux): a killed parent then leaves its child running.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: between fork and exec it might deadlock
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # it died before the kernel knew of the wish
            os._exit(1)

    return ask_kernel


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
) -> Ended:
    """Run a command to its end, giving `on_line` each line of output as it comes."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent(signal.SIGTERM),
    )
    with process:
        try:
            for line in process.stdout or ():
                tail.append(line)
                if on_line:
                    on_line(line)
        except BaseException:
            process.terminate()
            raise
    return Ended(process.returncode, "".join(tail))
