"""What outlives kvproxy of the conversations it knew."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from kvproxy.identifiers import SessionKey
from kvproxy.sessions.branches import Branch, Branches, Match, Where
from kvproxy.sessions.lines import Asked, Cause
from kvproxy.sessions.memory import BranchMemory, decode, encode
from tests.support.chats import chat, line, raw

WHERE = Where(b"s" * 16)
LONG = "x" * 200


def asked(memory: BranchMemory, text: str) -> Asked:
    return Asked(memory.secret, chat(text))


class Life:
    """One life of kvproxy on a state directory."""

    def __init__(self, folder: Path) -> None:
        self.branches = Branches()
        self.memory = BranchMemory(folder, self.branches)

    def run(self, text: str) -> Match:
        match = self.branches.match(
            self.branches.look(WHERE, asked(self.memory, text)), lambda name: SessionKey(f"key {name}")
        )
        self.branches.take(match)
        return match


async def begun(folder: Path) -> Life:
    life = Life(folder)
    assert await life.memory.load() is None
    return life


async def test_a_conversation_is_known_again_after_a_restart(tmp_path: Path) -> None:
    before = await begun(tmp_path)
    key = before.run("S:s U:a A:b U:c").branch.key
    assert await before.memory.write() is None
    after = await begun(tmp_path)
    match = after.run("S:s U:a A:b U:c A:d U:e")
    assert (match.branch.key, match.cause) == (key, None)


async def test_one_whose_end_was_not_written_comes_back_under_its_name(tmp_path: Path) -> None:
    before = await begun(tmp_path)
    key = before.run("S:s U:a").branch.key
    after = await begun(tmp_path)
    assert after.run("S:s U:a A:b U:c A:d U:e").branch.key == key


async def test_nothing_is_written_where_nothing_changed(tmp_path: Path) -> None:
    life = await begun(tmp_path)
    life.run("S:s U:a")
    await life.memory.write()
    file = tmp_path / "conversations.json"
    before = file.stat().st_mtime_ns, file.stat().st_ino
    life.run("S:s U:a")
    await life.memory.write()
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before


async def test_neither_a_word_nor_an_unkeyed_digest_of_one_is_kept(tmp_path: Path) -> None:
    life = await begun(tmp_path)
    life.run("S:confidential U:private A:secret U:more")
    await life.memory.write()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    digests = chat("S:confidential U:private A:secret U:more").digests
    assert not any(word in written for word in (b"confidential", b"private", b"secret"))
    assert not any(digest.hex()[:16].encode() in written for digest in digests)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


async def test_what_must_not_reach_the_disk_does_not(tmp_path: Path) -> None:
    life = await begun(tmp_path)
    life.run("S:s U:a").branch.may_persist = False
    kept = life.run("S:s U:b").branch.name
    await life.memory.write()
    rows = orjson.loads((tmp_path / "conversations.json").read_bytes())["branches"]
    assert [row["name"] for row in rows] == [kept]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version":2,"branches":[]}', b"\xff" * 99])
async def test_a_damaged_file_is_told_of_and_written_anew(tmp_path: Path, damage: bytes) -> None:
    before = await begun(tmp_path)
    (tmp_path / "conversations.json").write_bytes(damage)
    after = Life(tmp_path)
    complaint = await after.memory.load()
    assert complaint is not None
    assert "damaged" in complaint
    assert after.memory.secret == before.memory.secret
    after.run("S:s U:a")
    assert await after.memory.write() is None
    assert len((await begun(tmp_path)).branches) == 1


async def test_a_damaged_secret_is_made_anew_and_what_it_keyed_is_not_found(tmp_path: Path) -> None:
    before = await begun(tmp_path)
    before.run("S:s U:a")
    await before.memory.write()
    (tmp_path / "conversations.key").write_bytes(b"not hex")
    after = await begun(tmp_path)
    assert after.memory.secret != before.memory.secret
    assert after.run("S:s U:a").cause is Cause.NEW


async def test_a_folder_that_cannot_be_used_costs_the_knowledge_of_before(tmp_path: Path) -> None:
    life = Life(tmp_path / "absent")
    complaint = await life.memory.load()
    assert complaint is not None
    life.run("S:s U:a")
    assert life.run("S:s U:a A:b U:c").cause is None
    assert await life.memory.write() is not None
    assert await life.memory.write() is None, "each write complains, and not only the first"


def test_rows_that_cannot_be_read_cost_no_others() -> None:
    whole = [
        Branch(WHERE.scope, f"n{n}", SessionKey("k"), line(reading), n, SessionKey("p"), past)
        for n, (reading, past) in enumerate(
            [(chat("S:s U:a A:b U:c"), line("U:a")), (raw(LONG * 9), None), (chat("U:a"), None)]
        )
    ]
    document = orjson.loads(encode(whole))
    found, is_whole = decode(orjson.dumps(document))
    assert is_whole
    assert [(one.name, one.line, one.past, one.parent) for one in found] == [
        (one.name, one.line, one.past, one.parent) for one in whole
    ]
    for field, value in (("scope", "zz"), ("line", None), ("key", ""), ("born", "x"), ("past", {})):
        broken = {
            **document,
            "branches": [{**document["branches"][0], field: value}, *document["branches"][1:]],
        }
        found, is_whole = decode(orjson.dumps(broken))
        assert ([one.name for one in found], is_whole) == (["n1", "n2"], False)


@pytest.mark.parametrize(
    ("field", "value"), [("chain", "AAAA"), ("ends", ""), ("head", 4), ("head", -1), ("before_reply", 0)]
)
def test_a_line_that_contradicts_itself_is_none(field: str, value: object) -> None:
    document = orjson.loads(encode([Branch(WHERE.scope, "n", SessionKey("k"), line("S:s U:a A:b U:c"), 1)]))
    document["branches"][0]["line"][field] = value
    assert decode(orjson.dumps(document)) == ([], False)
