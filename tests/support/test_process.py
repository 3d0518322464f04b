from __future__ import annotations

import sys

import pytest

from tests.support.process import ManagedProcess

SERVES = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


class Program(ManagedProcess):
    def __init__(self, code: str, *, seconds: float = 20.0) -> None:
        super().__init__("program")
        self._code = code
        self._seconds = seconds

    async def start(self) -> None:
        await self._start("/", self._seconds)

    def _command(self) -> list[str]:
        return [sys.executable, "-c", self._code, str(self.port)]


async def test_a_killed_program_comes_back_on_its_port_and_its_log_goes_on() -> None:
    async with Program(SERVES) as program:
        url, pid = program.base_url, program.pid
        await program.kill()
        assert (await program.wait(), program.is_running) == (-9, False)
        await program.start()
        assert program.pid != pid
        assert program.log().count("GET / ") >= 2
        assert repr(program) == f"<program at {url}, pid {program.pid}>"
    assert repr(program) == f"<program at {url}, not running>"


async def test_one_that_ends_at_start_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)program ended with code 3; .*no luck"):
        await Program("import sys; print('no luck', flush=True); sys.exit(3)").start()


async def test_one_that_is_never_up_is_ended() -> None:
    program = Program("import time; time.sleep(60)", seconds=0.3)
    with pytest.raises(RuntimeError, match="was not up within"):
        await program.start()
    assert not program.is_running


async def test_one_that_was_never_started_has_nothing_to_kill() -> None:
    await Program(SERVES).kill()
