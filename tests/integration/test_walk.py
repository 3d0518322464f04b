"""A random walk of thousands of steps before a server of which everything can be seen.

Between any two requests the server may die, sleep, change its model, its flags or its slots, lose a file or
fail; kvproxy may end; and requests may come several at once or be dropped. Each answer is its own
conversation's, and no header claims what the answer disproves (see `tests.support.oracle`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvproxy.clock import SystemClock
from kvproxy.upstream.watch import FRESH_SECONDS
from tests.fakes.llama_server import FakeLlamaServer
from tests.fakes.tokens import render_chat, tokenize
from tests.support.oracle import Claim, Oracle
from tests.support.proxy import KvProxy, make_settings
from tests.support.talk import Answer, Talk

STEPS = 500
"""About twice as many requests."""
SEEDS = range(1, 11 if os.environ.get("KVPROXY_TEST_REPEAT", "") not in ("", "0") else 3)
TALKS = 5
TURNS_OF_A_TALK = 8
AT_FIRST: dict[str, Any] = {
    "slots": 2,
    "n_ctx": 8192,
    "model": "/models/fake.gguf",
    "weights": "first",
    "kv_type": "f16",
    "adapters": (),
    "volatile": False,
    "unified": False,
    "build": "b11434-1",
}
OTHERWISE: tuple[dict[str, Any], ...] = (
    {"slots": 1},
    {"slots": 3},
    {"model": "/models/other.gguf"},
    {"weights": "second"},
    {"kv_type": "q8_0"},
    {"adapters": ("/models/lora.gguf",)},
    {"volatile": True, "slots": 4, "n_ctx": 16384},
    {"unified": True, "slots": 3, "n_ctx": 4096},
    {"build": "b11500-2"},
)
IDENTITY = ("model", "weights", "kv_type", "adapters")
"""What a snapshot may not outlive. The number of slots is no part of what was computed."""


class Hours(SystemClock):
    """The real time, and as much more as one likes."""

    def __init__(self) -> None:
        self.more = 0.0

    def now(self) -> float:
        return super().now() + self.more


@dataclass(slots=True)
class Walk:
    chooser: random.Random
    fake: FakeLlamaServer
    proxy: KvProxy
    clock: Hours
    slot_dir: Path
    oracle: Oracle = field(default_factory=Oracle)
    talks: list[Talk] = field(default_factory=list)
    began: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.talks = [self._talk() for _ in range(TALKS)]

    async def run(self, steps: int) -> None:
        happenings: dict[Callable[[], Awaitable[None]], int] = {
            self._nothing: 6,
            self._a_while: 3,
            self._flush: 3,
            self._kill: 3,
            self._kill_unseen: 1,
            self._sleep: 2,
            self._become_another: 3,
            self._become_as_at_first: 3,
            self._lose_a_file: 1,
            self._save_badly: 2,
            self._restore_badly: 1,
            self._drop_a_request: 2,
            self._restart_kvproxy: 1,
            self._drain_kvproxy: 1,
        }
        for number in range(steps):
            (happening,) = self.chooser.choices(list(happenings), weights=list(happenings.values()))
            self.counts[happening.__name__.strip("_")] += 1
            self.trace.append(f"{number} {happening.__name__.strip('_')}")
            await happening()
            await self._turns()
            assert self.fake.violations == [], self._story()

    # -- what happens ------------------------------------------------------------------------------------

    async def _nothing(self) -> None:
        pass

    async def _a_while(self) -> None:
        self.clock.more += self.chooser.choice((2.0, 40.0, 400.0))
        await self.proxy.runtime.rounds.run_once()

    async def _flush(self) -> None:
        await self.proxy.admin("POST", "flush")

    async def _kill(self) -> None:
        await self._restart()

    async def _kill_unseen(self) -> None:
        await self.fake.kill()
        absent = await self.proxy.turn(self.talks[0])
        assert absent.status in (502, 503), self._story()
        await self._restart()

    async def _sleep(self) -> None:
        """A second at least after it last had something to do, and not while we look."""
        await self.proxy.at_rest()
        await self.proxy.runtime.living.keep()
        self.clock.more += FRESH_SECONDS + 0.01
        self.fake.sleep()

    async def _become_another(self) -> None:
        await self._restart(**self.chooser.choice(OTHERWISE))

    async def _become_as_at_first(self) -> None:
        await self._restart(**AT_FIRST)

    async def _lose_a_file(self) -> None:
        files = sorted(self.slot_dir.iterdir())
        if files:
            self.chooser.choice(files).unlink()

    async def _save_badly(self) -> None:
        self.fake.faults.fail("save", self.chooser.choice(("error", "short_file", "lost_answer")), 1)

    async def _restore_badly(self) -> None:
        self.fake.faults.fail("restore", self.chooser.choice(("error", "garbage", "lost_answer")), 1)

    async def _drop_a_request(self) -> None:
        talk = self.chooser.choice(self.talks)
        self.fake.faults.token_delay = 0.001
        async with self.proxy.stream(talk, max_tokens=200) as stream:
            await stream.first()
        self.fake.faults.token_delay = 0.0
        self.trace.append(f"  {talk.name}")
        self.oracle.dropped((self._identity, talk.name), tokenize(render_chat(talk.messages)))

    async def _restart_kvproxy(self) -> None:
        await self.proxy.restart()
        await self.proxy.ready()

    async def _drain_kvproxy(self) -> None:
        await self.proxy.drain()
        await self._restart_kvproxy()

    async def _restart(self, **changes: Any) -> None:
        # In the midst of what kvproxy does between two requests: a save, a look, an erase.
        await asyncio.sleep(self.chooser.choice((0.0, 0.0, 0.001, 0.002, 0.004, 0.008)))
        self.oracle.life += 1
        if self.fake.alive:
            await self.fake.kill()
        await self.fake.start(**changes)
        self.trace.append(f"  {self._identity} {self.fake.setup.slots} slots {changes}")

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def _identity(self) -> tuple[Any, ...]:
        return tuple(getattr(self.fake.setup, name) for name in IDENTITY)

    def _talk(self) -> Talk:
        self.began += 1
        return Talk(f"w{self.began}", words=self.chooser.randint(3, 12), predict=self.chooser.randint(1, 40))

    async def _turns(self) -> None:
        """Those of one conversation, or of several at once."""
        several = self.chooser.choice((1, 1, 1, 2, 4))
        await asyncio.gather(*(self._turn(place) for place in self.chooser.sample(range(TALKS), several)))

    async def _turn(self, place: int) -> None:
        talk = self.talks[place]
        if len(talk.messages) > 2 and self.chooser.random() < 0.1:
            del talk.messages[-2:]  # the client takes back what it said last
        prompt = tokenize(render_chat(talk.messages))
        answer = await self.proxy.turn(talk)
        self._check(talk, prompt, answer)
        if len(talk.messages) > 2 * TURNS_OF_A_TALK:
            self.talks[place] = self._talk()

    def _check(self, talk: Talk, prompt: list[int], answer: Answer) -> None:
        assert answer.status == 200, self._story(answer.raw)
        restored = int(answer.headers["X-KVProxy-Restored-Tokens"])
        told = " ".join(filter(None, answer.told))
        self.trace.append(
            f"  {talk.name} {told}: {answer.reused} of {len(prompt)} reused, {restored} restored"
        )
        claim = Claim(prompt, answer.outcome or "", restored, answer.reused)
        who = (self._identity, talk.name)
        objection = self.oracle.objection(who, claim)
        assert objection is None, self._story(objection)
        said = tokenize(answer.text, add_special=False, parse_special=False)
        self.oracle.heard(who, prompt, said)
        self.counts[told] += 1

    def _story(self, *last: object) -> str:
        calls = [f"{c.at:.4f} {c.method} {c.target} {c.body[-40:]}" for c in self.fake.calls[-40:]]
        return "\n".join([*self.trace[-60:], *map(str, last), *calls])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_between_two_requests_no_header_claims_what_is_not(
    seed: int, tmp_path: Path
) -> None:
    slot_dir = tmp_path / "slots"
    slot_dir.mkdir()
    async with FakeLlamaServer(slot_dir=slot_dir, mix_on_busy=True, http_poll=0.05, **AT_FIRST) as fake:
        settings = make_settings(fake.base_url, tmp_path / "state", slot_dir)
        clock = Hours()
        async with KvProxy(settings, clock=clock) as proxy:
            await proxy.ready()
            walk = Walk(random.Random(seed), fake, proxy, clock, slot_dir)
            await walk.run(STEPS)
            await proxy.at_rest()
    assert min(walk.counts["restored"], walk.counts["resident"]) > STEPS / 10, walk.counts
