"""Snapshots of memory that cannot roll back, through kvproxy and a restart, against a private slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from scripts import models
from scripts.tiny_models import Kind
from tests.acceptance.conftest import Measured
from tests.acceptance.test_boundary_real import (
    CLIENTS,
    FLAGS,
    LEAST_SHARE,
    Json,
    Turn,
    opening,
    private_reuse,
    rewriting,
    said,
    user,
    words,
)
from tests.support.daemon import Kvproxy
from tests.support.hearing import say
from tests.support.judge import TOLERANCE, Judge, Spoken
from tests.support.load import Message, ask, client
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

SESSION = {"X-Session-Id": "one"}


async def through_kvproxy(
    model: Path, flags: Sequence[str], turns: Sequence[Turn], folder: Path
) -> tuple[int, str]:
    """Tokens reused at the last turn, after a restart of the server, and the outcome it was told."""
    slots = folder / "slots"
    slots.mkdir()
    async with (
        LlamaServer(model, *FLAGS, *flags, slot_dir=slots) as server,
        Kvproxy(server.base_url, folder / "state", snapshot_dir=slots) as kvproxy,
    ):
        async with client(kvproxy.base_url) as session:
            for turn in turns[:-1]:
                await ask(session, turn.body(), SESSION)
            await kvproxy.flush()
            await server.restart()
            answer = await ask(session, turns[-1].body(), SESSION)
        return answer.reused, answer.outcome


@pytest.mark.parametrize("client_kind", CLIENTS)
@pytest.mark.parametrize("kind", [Kind.MAMBA, Kind.LFM2])
async def test_a_client_that_rewrites_its_last_turn_reuses_what_a_private_slot_gives(
    kind: Kind, client_kind: str, tmp_path: Path, measured: Measured
) -> None:
    turns = CLIENTS[client_kind]
    private = await private_reuse(models.tiny(kind), (), turns)
    reused, outcome = await through_kvproxy(models.tiny(kind), (), turns, tmp_path)
    measured(f"tiny-{kind} through kvproxy, {client_kind}: {reused} reused, {private} in a private slot")
    assert outcome == "restored"
    assert reused >= LEAST_SHARE * private


async def test_a_sliding_window_kept_in_full_goes_on_after_a_restart(tmp_path: Path) -> None:
    private = await private_reuse(models.tiny(Kind.GEMMA3), ("--swa-full",), rewriting())
    reused, outcome = await through_kvproxy(models.tiny(Kind.GEMMA3), ("--swa-full",), rewriting(), tmp_path)
    assert outcome == "restored"
    assert reused >= LEAST_SHARE * private


async def without_first_halves(url: str, before_last: Callable[[], Awaitable[object]]) -> tuple[int, str]:
    """Tokens reused at the last of four turns, and the outcome, of a client that drops the first half of
    each reply; `before_last` is what happens before it."""
    messages: list[Json] = opening()
    async with client(url) as session:
        for number in range(4):
            if number == 3:
                await before_last()
            answer = await ask(session, Turn(messages, None).body(), SESSION)
            half = answer.text[len(answer.text) // 2 :]
            assert half
            messages = [*messages, said(half), user(f"go on {words(10 + number, 30)}")]
    return answer.reused, answer.outcome


async def nothing() -> None:
    """Its server is private and lives on."""


@pytest.mark.parametrize("kind", [Kind.MAMBA, Kind.LFM2])
async def test_a_client_that_drops_the_first_half_of_each_reply_reuses_what_a_private_slot_gives(
    kind: Kind, tmp_path: Path, measured: Measured
) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    async with LlamaServer(models.tiny(kind), *FLAGS) as server:
        private, _ = await without_first_halves(server.base_url, nothing)
    async with (
        LlamaServer(models.tiny(kind), *FLAGS, slot_dir=slots) as server,
        Kvproxy(server.base_url, tmp_path / "state", snapshot_dir=slots) as kvproxy,
    ):

        async def save_and_restart() -> None:
            await kvproxy.flush()
            await server.restart()

        reused, outcome = await without_first_halves(kvproxy.base_url, save_and_restart)
    measured(f"tiny-{kind}, first halves dropped: {reused} reused, {private} in a private slot")
    assert outcome == "restored"
    assert reused >= LEAST_SHARE * private


DROPPED = 30
"""Tokens; with those that begin the reply, fewer than the window holds."""
WINDOW = (*FLAGS, "--swa-full")


def rollback() -> tuple[list[Message], list[Message]]:
    """A prompt, and the same without the last words of its second question: another first one would be
    another conversation."""
    begun = [
        {"role": "system", "content": words(1, 200)},
        {"role": "user", "content": words(3, 20)},
        {"role": "assistant", "content": words(4, 5)},
    ]
    question = words(2, 100)
    before = {"role": "user", "content": question}
    after = {"role": "user", "content": question[:-DROPPED]}
    return [*begun, before], [*begun, after]


async def deviation_of(spoken: Spoken, model: Path) -> float:
    """Of an answer from what a server computes that was never restored."""
    async with LlamaServer(model, *WINDOW, "-np", "1") as server:
        return await Judge(server).deviation(spoken)


async def test_a_rollback_of_a_restored_sliding_window_is_taken_by_the_server_and_wrong(
    tiny_gemma3: Path, tmp_path: Path, measured: Measured
) -> None:
    """What the rule is for."""
    whole, cut = rollback()
    async with (
        LlamaServer(tiny_gemma3, *WINDOW, slot_dir=tmp_path) as server,
        client(server.base_url) as session,
    ):
        await say(session, whole, {}, 1, id_slot=0)
        await server.post_json("/slots/0?action=save", {"filename": "a"})
        await server.restart()
        await server.post_json("/slots/0?action=restore", {"filename": "a"})
        heard = await say(session, cut, {}, id_slot=0)
    deviation = await deviation_of(heard.spoken, tiny_gemma3)
    measured(f"the same without kvproxy: {heard.reused} reused, deviation {deviation:.5f}")
    assert heard.reused > heard.computed
    assert deviation > TOLERANCE


async def test_a_rollback_of_a_restored_sliding_window_is_cold_and_right(
    tiny_gemma3: Path, tmp_path: Path, measured: Measured
) -> None:
    whole, cut = rollback()
    slots = tmp_path / "slots"
    slots.mkdir()
    async with (
        LlamaServer(tiny_gemma3, *WINDOW, slot_dir=slots) as server,
        Kvproxy(server.base_url, tmp_path / "state", snapshot_dir=slots) as kvproxy,
        client(kvproxy.base_url) as session,
    ):
        await say(session, whole, SESSION, 1)
        await kvproxy.flush()
        await server.restart()
        heard = await say(session, cut, SESSION)
    deviation = await deviation_of(heard.spoken, tiny_gemma3)
    measured(f"rollback of a window after a restart: {heard.told}, deviation from a cold run {deviation:.5f}")
    assert heard.told == ("cold", "prefix-diverged")
    assert heard.reused == 0
    assert deviation <= TOLERANCE
