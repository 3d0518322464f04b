from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import child

PYTHON = sys.executable  # before the machine fixture puts a stub in its place
ROOT = Path(child.__file__).parent.parent
PARENT = """\
import signal, subprocess, sys
from scripts import child
held = subprocess.Popen(["/bin/sleep", "60"], preexec_fn=child.die_with_parent(signal.SIGKILL))
print(held.pid, flush=True)
sys.stdin.read()
"""


def test_every_line_is_handed_on_and_the_last_ones_are_kept() -> None:
    lines: list[str] = []
    count = child.TAIL_LINES + 3
    script = f"i=0; while [ $i -lt {count} ]; do echo $i; i=$((i+1)); done; echo last >&2; exit 4"
    ended = child.run(["/bin/sh", "-c", script], on_line=lines.append)
    assert lines == [*(f"{number}\n" for number in range(count)), "last\n"]
    assert ended == child.Ended(4, "".join(lines[-child.TAIL_LINES :]))


def test_a_child_is_ended_when_its_reader_fails() -> None:
    pids: list[int] = []

    def fail(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run(["/bin/sh", "-c", "echo $$; exec /bin/sleep 60"], on_line=fail)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


# PR_SET_PDEATHSIG has no counterpart elsewhere, and `die_with_parent` does nothing there.
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen(
        [PYTHON, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        held = int(parent.stdout.readline())
        watch = os.pidfd_open(held)
        parent.send_signal(signal.SIGKILL)
        _wait_for_end(watch)


def _wait_for_end(watch: int) -> None:
    ready, _, _ = select.select([watch], [], [], 10)
    os.close(watch)
    assert ready, "the child still runs"
