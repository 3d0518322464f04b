"""Everything dies again and again while people talk, leave and talk on: slow perhaps, not wrong or stuck."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.acceptance.test_isolation import chat, once
from tests.support.judge import TOLERANCE, Judge, Spoken
from tests.support.load import Conversation, Message, client, words

pytestmark = [pytest.mark.real, pytest.mark.slow]

WITH_RAM_CACHE = ("-c", "16384", "-np", "2")
SOON_SAVED = ("checkpoint.on_idle_seconds=1",)
TALKERS = 5
TURNS_OF_A_CONVERSATION = 6
PATIENCE_SECONDS = 30.0
AT_REST = {("idle", False), ("resident", False)}


@dataclass(slots=True)
class Chaos:
    stage: Stage
    session: aiohttp.ClientSession
    ends_at: float
    chooser: random.Random
    spoken: list[Spoken] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.ends_at

    async def talk(self, talker: int) -> None:
        number = 0
        while self.goes_on:
            one = Conversation.about(f"talker {talker} {number}", 60)
            for _ in range(TURNS_OF_A_CONVERSATION):
                number += 1
                await self._say(one, number)

    async def _say(self, one: Conversation, number: int) -> None:
        messages = [*one.messages, {"role": "user", "content": f"{number} {words((one.name, number), 10)}?"}]
        chance = self.chooser.random()
        try:
            if chance < 0.15:
                await self._leave_early(messages, one.name)
            elif chance < 0.3:
                self._heard(await chat(self.session, once(one.name, number), {"X-KVProxy-Bypass": "1"}))
            else:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    answer = self._heard(await chat(self.session, messages, {"X-Session-Id": one.name}))
                one.messages = [*messages, {"role": "assistant", "content": answer.text}]
        except (AssertionError, aiohttp.ClientError) as error:  # told so, or broken off: somebody is down
            self.counts[f"refused: {type(error).__name__}"] += 1
            await asyncio.sleep(0.1)

    async def _leave_early(self, messages: list[Message], name: str) -> None:
        self.counts["left"] += 1
        try:
            async with asyncio.timeout(self.chooser.random() * 0.2):
                await chat(self.session, messages, {"X-Session-Id": name})
        except TimeoutError:
            pass  # that is how one leaves

    def _heard(self, spoken: Spoken) -> Spoken:
        self.spoken.append(spoken)
        return spoken

    async def kill(self) -> None:
        while self.goes_on:
            await asyncio.sleep(1 + self.chooser.random() * 3)
            victim = self.chooser.choice(("llama-server", "kvproxy killed", "kvproxy stopped"))
            self.counts[victim] += 1
            if victim == "llama-server":
                await self.stage.llama.restart(self.chooser.random() * 0.5)
                continue
            await (self.stage.kvproxy.kill() if victim == "kvproxy killed" else self.stage.kvproxy.stop())
            await self.stage.kvproxy.start()


@pytest.mark.timeout(400)
async def test_deaths_all_around_make_nothing_wrong_and_nothing_stuck(
    set_stage: SetStage, judge: Judge, repeats: Callable[[int, int], int], measured: Measured
) -> None:
    stage = await set_stage(*WITH_RAM_CACHE, settings=SOON_SAVED, is_tapped=False)
    seconds = repeats(15, 120)
    async with client(stage.url) as session:
        chaos = Chaos(stage, session, time.monotonic() + seconds, random.Random(1))
        await asyncio.gather(*(chaos.talk(n) for n in range(TALKERS)), chaos.kill())
    await stage.kvproxy.until_slots(lambda slot: (slot["state"], slot["leased"]) in AT_REST)
    whole = [spoken for spoken in chaos.spoken if spoken.likely]
    worst = max([await judge.deviation(spoken, 3) for spoken in whole])
    assert worst <= TOLERANCE
    assert not stage.kvproxy.events("kv.task.died")
    measured(f"{len(whole)} answers amid deaths, largest deviation {worst:.4f}; {dict(chaos.counts)}")
