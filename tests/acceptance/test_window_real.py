"""A sliding-window model without `--swa-full`, through kvproxy: its conversations survive the server.

The ceiling is measured in the same run, as in `test_reuse`: each conversation in a slot of its own, and
nothing dies.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from kvproxy.slotfile.layout import Layout, read_layout
from scripts import models
from scripts.tiny_models import SLIDING_WINDOW, Kind
from tests.acceptance.conftest import Measured, SetStage
from tests.acceptance.six import A_MOMENT, CONTEXT, LAST, TURNS, ceiling_of, conversations, flags, later_share
from tests.acceptance.test_boundary_real import (
    CLIENTS,
    FLAGS,
    LEAST_SHARE,
    Turn,
    private_reuse,
    rewriting,
    said,
    user,
)
from tests.support.daemon import Kvproxy
from tests.support.load import Conversation, ask, client, run_load
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

DEFAULTS = ("-c", str(4 * CONTEXT))
GEMMA3 = models.tiny(Kind.GEMMA3)
SESSION = {"X-Session-Id": "one"}
EDIT_OFF = ("restore.window_edit=off",)


@pytest.fixture(scope="module")
def ceiling() -> float:
    return asyncio.run(ceiling_of(GEMMA3))


@pytest.mark.parametrize(
    ("arguments", "concurrency", "allowed"),
    [
        pytest.param(flags(1), 1, 0.015, id="1-slot-1"),
        pytest.param(flags(2), 1, 0.015, id="2-slots-1"),
        pytest.param(flags(2), 4, 0.015, id="2-slots-4"),
        pytest.param(DEFAULTS, 1, 0.02, id="defaults-1"),
    ],
)
async def test_a_server_killed_before_the_last_turn_costs_next_to_nothing(
    set_stage: SetStage,
    ceiling: float,
    measured: Measured,
    arguments: tuple[str, ...],
    concurrency: int,
    allowed: float,
) -> None:
    stage = await set_stage(*arguments, model=GEMMA3)

    async def kill_server(turn: int) -> None:
        if turn == LAST:
            await asyncio.sleep(A_MOMENT)
            await stage.llama.restart()

    answers = await run_load(
        stage.url, conversations(), turns=TURNS, concurrency=concurrency, before_turn=kill_server
    )
    share = later_share(answers)
    measured(
        f"tiny-gemma3 without --swa-full, {' '.join(arguments)}, concurrency {concurrency}:"
        f" reuse {share:.4f} of {ceiling:.4f}"
    )
    assert share >= ceiling - allowed


async def through_a_restart(
    folder: Path, turns: list[Turn], *settings: str, after: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Tokens reused at the last turn, after a restart of the server with other flags `after`, and the
    outcome it was told."""
    slots = folder / "slots"
    slots.mkdir()
    first = LlamaServer(GEMMA3, *FLAGS, slot_dir=slots)
    second = LlamaServer(GEMMA3, *FLAGS, *after, slot_dir=slots, port=first.port)
    async with first, Kvproxy(first.base_url, folder / "state", *settings, snapshot_dir=slots) as kvproxy:
        async with client(kvproxy.base_url) as session:
            for turn in turns[:-1]:
                await ask(session, turn.body(), SESSION)
            await kvproxy.flush()
            await first.kill()
            async with second:
                answer = await ask(session, turns[-1].body(), SESSION)
    return answer.reused, answer.outcome


@pytest.mark.parametrize("client_kind", CLIENTS)
async def test_a_client_that_rewrites_its_last_turn_reuses_what_a_private_slot_gives(
    client_kind: str, tmp_path: Path, measured: Measured
) -> None:
    turns = CLIENTS[client_kind]
    private = await private_reuse(GEMMA3, (), turns)
    reused, outcome = await through_a_restart(tmp_path, turns)
    measured(f"tiny-gemma3 through kvproxy, {client_kind}: {reused} reused, {private} in a private slot")
    assert outcome == "restored"
    assert reused >= LEAST_SHARE * private


async def test_a_prompt_that_does_not_extend_what_was_saved_is_cold(tmp_path: Path) -> None:
    turns = rewriting()
    shorter = Turn(turns[-1].messages[:-3], None)
    assert await through_a_restart(tmp_path, [*turns[:-1], shorter]) == (0, "cold")


@pytest.mark.parametrize(
    "after", [("--swa-full",), ("-fa", "off"), ("-ctk", "q8_0"), ("--rope-freq-scale", "0.5")], ids=" ".join
)
async def test_what_was_opened_under_other_flags_is_not_used(after: tuple[str, ...], tmp_path: Path) -> None:
    assert await through_a_restart(tmp_path, rewriting(), after=after) == (0, "cold")


async def test_a_window_kept_in_full_is_not_turned_back_behind_what_was_restored(tmp_path: Path) -> None:
    """The server would, and of what it attends to some would be missing."""
    turns, slots = rewriting(), tmp_path / "slots"
    slots.mkdir()
    messages = turns[1].messages
    question = messages[-1]["content"]
    edited = Turn([*messages[:-1], user(f"{question[:-20]} or not")], None)
    later = Turn([*edited.messages, said("Fine."), user("and so on")], None)
    async with (
        LlamaServer(GEMMA3, *FLAGS, "--swa-full", slot_dir=slots) as server,
        Kvproxy(server.base_url, tmp_path / "state", snapshot_dir=slots) as kvproxy,
        client(kvproxy.base_url) as session,
    ):
        for turn in turns[:2]:
            await ask(session, turn.body(), SESSION)
        await kvproxy.flush()
        await server.restart()
        back, on = [await ask(session, turn.body(), SESSION) for turn in turns[2:4]]
        turned = await ask(session, edited.body(), SESSION)
        after = await ask(session, later.body(), SESSION)
    assert [(one.outcome, one.reused > one.computed) for one in (back, on)] == [
        ("restored", True),
        ("resident", True),
    ]
    assert (turned.outcome, turned.reason, turned.reused) == ("cold", "prefix-diverged", 0)
    assert (after.outcome, after.reused > after.computed) == ("resident", True)


async def test_that_is_known_of_a_model_that_kvproxy_does_not_see_by_its_first_file(tmp_path: Path) -> None:
    model, slots = tmp_path / "model.gguf", tmp_path / "slots"
    slots.mkdir()
    shutil.copy(GEMMA3, model)
    turns = rewriting()
    messages = turns[1].messages
    edited = Turn([*messages[:-1], user(f"{messages[-1]['content'][:-20]} or not")], None)
    async with LlamaServer(model, *flags(1), "--swa-full", slot_dir=slots) as server:
        model.unlink()
        async with (
            Kvproxy(server.base_url, tmp_path / "state", snapshot_dir=slots) as kvproxy,
            client(kvproxy.base_url) as session,
        ):
            for turn in turns[:2]:
                await ask(session, turn.body(), SESSION)
            other = Conversation.about("another", 200)
            assert (await other.turn(session)).status == 200
            await kvproxy.until_events("kv.session.save.success", 1)
            turned = await ask(session, edited.body(), SESSION)
            on = await ask(session, turns[2].body(), SESSION)
    assert (turned.outcome, turned.reason, turned.reused) == ("cold", "prefix-diverged", 0)
    assert on.outcome == "resident"


async def test_the_manifest_says_where_an_opened_file_comes_from_and_no_other_file_stays(
    set_stage: SetStage,
) -> None:
    stage = await set_stage(*flags(2), model=GEMMA3)
    talk = Conversation.about("one", 200)
    async with client(stage.url) as session:
        await talk.turn(session)
        await stage.kvproxy.flush()
    (path,) = (stage.state_dir / "manifests").iterdir()
    current = json.loads(path.read_text())["current"]
    assert current["origin"]["alteration"] == "window_edit"
    assert current["origin"]["name"] != current["name"]
    assert [file.name for file in stage.slot_dir.iterdir()] == [current["name"]]


async def test_a_short_conversation_is_saved_as_it_is_and_begins_cold(tmp_path: Path) -> None:
    """No token has left the window, and the server would not go on from it."""
    slots = tmp_path / "slots"
    slots.mkdir()
    async with (
        LlamaServer(GEMMA3, *FLAGS, slot_dir=slots) as server,
        Kvproxy(
            server.base_url, tmp_path / "state", "checkpoint.min_tokens=1", snapshot_dir=slots
        ) as kvproxy,
    ):
        talk = Conversation("short", [])
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        async with client(kvproxy.base_url) as session:
            first = await ask(session, body, {"X-Session-Id": talk.name})
            assert first.prompt < SLIDING_WINDOW
            await kvproxy.flush()
            await server.restart()
            again = await ask(session, body, {"X-Session-Id": talk.name})
    assert (again.outcome, again.reason, again.reused) == ("cold", "not-worth-it", 0)


async def test_the_first_opened_window_that_is_not_reused_is_the_last(tmp_path: Path) -> None:
    """The window is shut again behind kvproxy's back, as by a server that wants more than it does now."""
    slots = tmp_path / "slots"
    slots.mkdir()
    async with (
        LlamaServer(GEMMA3, *FLAGS, slot_dir=slots) as server,
        Kvproxy(server.base_url, tmp_path / "state", "restore.verify=false", snapshot_dir=slots) as kvproxy,
    ):
        talks = [Conversation.about(name, 200) for name in "abc"]
        async with client(kvproxy.base_url) as session:
            for talk in talks:
                await talk.turn(session)
            await kvproxy.flush()
            for path in slots.iterdir():
                await asyncio.to_thread(shut, path)
            await server.restart()
            answers = [await talk.turn(session) for talk in talks]
        (shown,) = (await kvproxy.status())["servers"]
    assert [(answer.status, answer.reused) for answer in answers] == [(200, 0)] * 3
    assert [answer.outcome for answer in answers] == ["restored", "cold", "cold"]
    assert (shown["persistence"]["mode"], "--swa-full" in shown["persistence"]["reason"]) == ("off", True)


def shut(path: Path) -> None:
    """Give the oldest cell of the window the position it had."""
    layout = read_layout(path)
    assert isinstance(layout, Layout)
    cells = layout.attention[1].cells
    with path.open("r+b") as file:
        file.seek(cells.lowest_at)
        file.write((cells.lowest + 1).to_bytes(4, "little"))


async def reused_in(base_url: str, names: tuple[str, ...]) -> int:
    talks = [Conversation.about(name) for name in names]
    async with client(base_url) as session:
        answers = [await talk.turn(session) for _ in range(TURNS) for talk in talks]
    return sum(answer.reused for answer in answers)


@pytest.mark.parametrize("is_visible", [True, False])
async def test_where_no_window_may_be_opened_the_server_keeps_its_slots_and_the_flag_is_named(
    is_visible: bool, tmp_path: Path, measured: Measured
) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    async with LlamaServer(GEMMA3, *FLAGS, slot_dir=slots) as server:
        direct = await reused_in(server.base_url, ("a", "b"))
    settings, seen = (EDIT_OFF, slots) if is_visible else ((), None)
    async with (
        LlamaServer(GEMMA3, *FLAGS, slot_dir=slots) as server,
        Kvproxy(server.base_url, tmp_path / "state", *settings, snapshot_dir=seen) as kvproxy,
    ):
        through = await reused_in(kvproxy.base_url, ("a", "b"))
        await kvproxy.flush()
        status = await kvproxy.status()
    (shown,) = status["servers"]
    measured(f"tiny-gemma3, window edit off: {through} tokens reused, {direct} directly")
    assert shown["persistence"]["mode"] == "off"
    assert "--swa-full" in shown["persistence"]["reason"]
    assert (status["stats"]["saves"], status["stats"]["restores"]) == (0, 0)
    assert through >= 0.98 * direct
