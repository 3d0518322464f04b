"""Save, restore, erase: what they answer, what they leave in the slot and on the disk."""

from __future__ import annotations

import struct

import aiohttp
import pytest

from tests.contract.subject import Flags, Reply, Subject

LONG = "abcdefghijklmnopqrstuvwxyz" * 8


async def saved_whole(server: Subject, name: str = "whole") -> bytes:
    await server.complete(LONG, n_predict=3, id_slot=0)
    assert (await server.act("save", 0, name)).status == 200
    return (server.slot_dir / name).read_bytes()


def assert_unrestorable(reply: Reply) -> None:
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["message"].startswith("Unable to restore slot: ")


async def test_a_save_counts_prompt_and_answer_but_for_the_last_token(server: Subject) -> None:
    answer = await server.complete(LONG, n_predict=5, id_slot=1)
    reply = await server.act("save", 1, "one")
    assert reply.json.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    assert reply.json["id_slot"] == 1
    assert reply.json["filename"] == "one"
    assert reply.json["n_saved"] == answer["tokens_evaluated"] + 5 - 1
    assert reply.json["n_written"] == (server.slot_dir / "one").stat().st_size
    assert "save_ms" in reply.json["timings"]


async def test_a_snapshot_begins_with_magic_version_and_token_ids(server: Subject) -> None:
    data = await saved_whole(server)
    tokens = (await server.ask("POST", "/tokenize", {"content": LONG, "add_special": True})).json["tokens"]
    version, n_packed, first, second, n_tokens = struct.unpack_from("<IIiII", data, 4)
    assert data[:4] == b"qsgg"
    assert (version, first, second) == (4, -1, 1)
    assert n_tokens == len(tokens) + 2
    assert n_packed >= n_tokens + 3
    assert list(struct.unpack_from(f"<{len(tokens)}I", data, 24)) == tokens


async def test_an_empty_slot_saves_as_a_tiny_file_that_restores_as_nothing(server: Subject) -> None:
    saved = await server.act("save", 0, "empty")
    assert saved.status == 200
    assert saved.json["n_saved"] == 0
    assert 0 < saved.json["n_written"] == (server.slot_dir / "empty").stat().st_size < 64
    restored = await server.act("restore", 1, "empty")
    assert restored.status == 200
    assert restored.json["n_restored"] == 0


async def test_a_restored_slot_serves_the_next_request(server: Subject) -> None:
    size = len(await saved_whole(server))
    held = await server.held(0)
    reply = await server.act("restore", 1, "whole")
    assert reply.json.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
    assert reply.json["n_restored"] == held
    assert reply.json["n_read"] == size
    answer = await server.complete(LONG, id_slot=1)
    assert answer["timings"]["cache_n"] == answer["tokens_evaluated"] - 1
    assert answer["timings"]["prompt_n"] == 1


async def test_a_restore_survives_the_servers_death(server: Subject) -> None:
    await saved_whole(server)
    await server.process.restart()
    cold = await server.complete(LONG, id_slot=1)
    await server.act("restore", 0, "whole")
    warm = await server.complete(LONG, id_slot=0)
    assert cold["timings"]["cache_n"] == 0
    assert warm["timings"]["cache_n"] == warm["tokens_evaluated"] - 1


async def test_slots_do_not_show_what_a_restore_brought(server: Subject) -> None:
    await saved_whole(server)
    await server.act("restore", 1, "whole")
    assert "n_prompt_tokens" not in (await server.slots())[1]


async def test_a_restore_of_a_missing_file_empties_the_slot(server: Subject) -> None:
    await server.complete(LONG, id_slot=0)
    assert_unrestorable(await server.act("restore", 0, "missing"))
    assert (await server.slots())[0]["n_prompt_tokens"] == 0
    assert (await server.complete(LONG, id_slot=0))["timings"]["cache_n"] == 0


@pytest.mark.parametrize("missing", [4, 5, 100, 5000])
async def test_a_truncated_file_is_refused_and_the_slot_emptied(server: Subject, missing: int) -> None:
    data = await saved_whole(server)
    (server.slot_dir / "cut").write_bytes(data[:-missing])
    assert_unrestorable(await server.act("restore", 0, "cut"))
    assert await server.held(0) == 0


@pytest.mark.parametrize("size", [0, 1, 12, 30])
async def test_a_stump_is_refused(server: Subject, size: int) -> None:
    data = await saved_whole(server)
    (server.slot_dir / "stump").write_bytes(data[:size])
    assert_unrestorable(await server.act("restore", 0, "stump"))


@pytest.mark.parametrize("missing", [1, 2, 3])
async def test_a_file_short_by_up_to_three_bytes_kills_the_server(server: Subject, missing: int) -> None:
    data = await saved_whole(server)
    (server.slot_dir / "short").write_bytes(data[:-missing])
    with pytest.raises(aiohttp.ClientConnectionError):
        await server.act("restore", 1, "short")
    with pytest.raises(aiohttp.ClientConnectionError):
        await server.ask("GET", "/health")


async def test_bytes_after_the_end_are_not_noticed(server: Subject) -> None:
    data = await saved_whole(server)
    (server.slot_dir / "longer").write_bytes(data + b"more")
    assert (await server.act("restore", 1, "longer")).json["n_read"] == len(data)


async def test_a_wrong_magic_or_version_is_refused(server: Subject) -> None:
    data = await saved_whole(server)
    (server.slot_dir / "magic").write_bytes(b"xxxx" + data[4:])
    (server.slot_dir / "version").write_bytes(data[:4] + b"\x09" + data[5:])
    assert_unrestorable(await server.act("restore", 1, "magic"))
    assert_unrestorable(await server.act("restore", 1, "version"))


async def test_a_failed_restore_leaves_the_other_slot_alone(server: Subject) -> None:
    await saved_whole(server)
    held = await server.held(0)
    assert_unrestorable(await server.act("restore", 1, "missing"))
    assert await server.held(0) == held


async def test_a_save_overwrites_in_place(server: Subject) -> None:
    await saved_whole(server, "same")
    inode = (server.slot_dir / "same").stat().st_ino
    await server.act("erase", 0)
    assert (await server.act("save", 0, "same")).json["n_saved"] == 0
    assert (server.slot_dir / "same").stat().st_ino == inode
    assert (server.slot_dir / "same").stat().st_size < 64


async def test_a_save_into_a_directory_that_is_gone_is_a_server_error(server: Subject) -> None:
    server.slot_dir.rmdir()
    reply = await server.act("save", 0, "x")
    assert reply.status == 500
    assert reply.error == {"code": 500, "message": "Unable to save slot", "type": "server_error"}


async def test_erase_tells_how_much_was_held(server: Subject) -> None:
    await server.complete(LONG, id_slot=0)
    held = await server.held(0)
    assert (await server.act("erase", 0)).json == {"id_slot": 0, "n_erased": held}
    assert (await server.act("erase", 0)).json == {"id_slot": 0, "n_erased": 0}
    assert (await server.slots())[0]["n_prompt_tokens"] == 0


async def test_slot_ids_wrap_and_are_echoed_as_given(server: Subject) -> None:
    await server.complete(LONG, id_slot=1)
    held = await server.held(1)
    assert (await server.act("save", 7, "x")).json["id_slot"] == 7
    assert (await server.act("save", 7, "x")).json["n_saved"] == held
    assert (await server.act("save", -1, "x")).json["id_slot"] == -1
    assert (await server.act("save", -1, "x")).json["n_saved"] == held
    assert (await server.act("erase", "1x")).json == {"id_slot": 1, "n_erased": held}


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\\b", "a:b", "a\nb", " a", "a.", "x" * 256])
async def test_a_file_name_that_is_no_bare_name_is_refused(server: Subject, name: str) -> None:
    for action in ("save", "restore"):
        reply = await server.act(action, 0, name)
        assert reply.error == {"code": 400, "message": "Invalid filename", "type": "invalid_request_error"}


async def test_malformed_actions_are_invalid_requests(server: Subject) -> None:
    assert (await server.act("erase", "abc")).error["message"] == "Invalid slot ID"
    assert (await server.act("shuffle", 0)).error["message"] == "Invalid action"
    assert (await server.ask("POST", "/slots/0")).error["message"] == "Invalid action"
    assert "filename" in (await server.ask("POST", "/slots/0?action=save", {})).error["message"]
    assert (await server.ask("POST", "/slots/0?action=save", "nonsense")).status == 400


@pytest.mark.parametrize("flags", [Flags(can_save=False)])
async def test_without_a_save_path_every_action_is_unsupported(server: Subject) -> None:
    for action in ("save", "restore", "erase"):
        reply = await server.act(action, 0, "x")
        assert reply.status == 501
        assert reply.error["type"] == "not_supported_error"
        assert "--slot-save-path" in reply.error["message"]


async def test_another_number_of_slots_refuses_the_file(server: Subject) -> None:
    await saved_whole(server)
    await server.restart_with(slots=4)
    assert_unrestorable(await server.act("restore", 1, "whole"))


async def test_a_smaller_context_refuses_the_file(server: Subject) -> None:
    await server.complete("x" * 600, n_predict=1, id_slot=0)
    await server.act("save", 0, "big")
    await server.restart_with(n_ctx=512)
    await server.complete(LONG, id_slot=0)
    assert_unrestorable(await server.act("restore", 0, "big"))
    assert await server.held(0) == 0


@pytest.mark.parametrize("flags", [Flags(unified=True, n_ctx=512)])
async def test_a_shared_memory_that_is_full_refuses_a_restore_as_if_the_file_were_bad(
    server: Subject,
) -> None:
    await saved_whole(server)
    for slot in (0, 1):
        await server.complete(LONG, id_slot=slot)
    await server.act("erase", 0)
    await server.complete(LONG + LONG[:100], id_slot=1)
    refused = await server.act("restore", 0, "whole")
    assert_unrestorable(refused)
    assert "No available space in KV cache or invalid slot save file" in refused.error["message"]
    assert (await server.held(0), await server.held(1) > 300) == (0, True)
    await server.act("erase", 1)
    assert (await server.act("restore", 0, "whole")).status == 200


@pytest.mark.parametrize("flags", [Flags(unified=True, n_ctx=512)])
async def test_a_prompt_that_finds_no_room_empties_an_idle_slot(server: Subject) -> None:
    await server.complete(LONG, id_slot=0)
    assert await server.held(0) > 200
    await server.complete(LONG[::-1] + LONG[::-1][:150], id_slot=1)
    assert await server.held(0) == 0
