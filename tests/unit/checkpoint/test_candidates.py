from __future__ import annotations

from typing import Any, cast

import pytest

from kvproxy.checkpoint.candidates import Chooser, serves
from kvproxy.checkpoint.outcome import RestoreOutcome
from kvproxy.identifiers import Revision
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.canaries import Canaries, stand_in
from kvproxy.snapshots.canary import Canary
from kvproxy.snapshots.compatibility import Compatible, Differs
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Origin
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import new_name
from kvproxy.upstream.facts import Facts, WindowFacts
from tests.support.fakes_core import OWNER, A, FakeStore, generation_of, manifest_of

ONE = Canary.of([(1, -0.5), (2, -1.5)])
OTHER = Canary.of([(1, -0.7), (2, -1.5)])
NAMES = Canaries()
ONE_NAME, OTHER_NAME = NAMES.name(ONE), NAMES.name(OTHER)


def server(**changes: str) -> Fingerprint:
    told = {"model_path": "/models/one.gguf", "build": "b1", "canary": ONE_NAME}
    return Fingerprint.from_dict(told | changes)


class Room:
    def __init__(self, *, accepts: bool = True) -> None:
        self.canaries = Canaries()
        self.store = FakeStore([])
        self.chooser = Chooser(cast(Any, self.store), self.canaries, accepts_other_builds=accepts)

    async def knows(self, *canaries: Canary) -> None:
        for canary in canaries:
            await self.canaries.remember(canary, None, "")

    def keep(self, fingerprint: Fingerprint, revision: int = 1) -> None:
        generation = generation_of(revision=Revision(revision))
        self.store.index.put(manifest_of(A, generation, fingerprint=fingerprint))

    def found(self, present: Fingerprint) -> list[str]:
        """The builds of the snapshots that may be restored, best first."""
        chosen = self.chooser.candidates(A, present).manifests
        return [manifest.fingerprint.get("build") for manifest in chosen]


async def test_what_this_server_saved_needs_no_canary() -> None:
    room = Room()
    room.keep(server(canary=stand_in("life")))
    assert room.found(server(canary=stand_in("life"))) == ["b1"]


async def test_another_build_that_computes_the_same_is_accepted() -> None:
    room = Room()
    await room.knows(ONE)
    room.keep(server())
    assert room.found(server(build="b2")) == ["b1"]
    assert room.chooser.judge(server(), server(build="b2")) == Compatible(other_build=True)


async def test_it_is_not_where_the_operator_does_not_want_it() -> None:
    room = Room(accepts=False)
    await room.knows(ONE)
    room.keep(server())
    none = room.chooser.candidates(A, server(build="b2"))
    assert (none.manifests, none.outcome) == ((), RestoreOutcome.FINGERPRINT_MISMATCH)
    assert none.detail == "differs in build"


async def test_one_that_computes_something_else_is_not_and_the_log_can_say_why() -> None:
    room = Room()
    await room.knows(ONE, OTHER)
    room.keep(server())
    none = room.chooser.candidates(A, server(build="b2", canary=OTHER_NAME))
    assert none.detail.startswith("differs in build, canary: the rope base")


async def test_a_canary_that_is_not_known_any_more_is_equal_to_nothing_but_itself() -> None:
    room = Room()
    assert room.chooser.judge(server(), server(canary=OTHER_NAME)) != Compatible()
    assert room.chooser.judge(server(), server()) == Compatible()


async def test_two_lives_whose_canaries_are_not_known_never_agree() -> None:
    verdict = Room().chooser.judge(server(canary=stand_in("a")), server(canary=stand_in("b")))
    assert isinstance(verdict, Differs)
    assert verdict.fields == ("canary",)


async def test_a_snapshot_without_a_canary_is_not_restored_where_there_is_one() -> None:
    room = Room()
    await room.knows(ONE)
    verdict = room.chooser.judge(server(canary=""), server())
    assert isinstance(verdict, Differs)
    assert verdict.fields == ("canary",)


async def test_what_was_saved_before_the_canary_was_known_is_restorable_once_it_is() -> None:
    room = Room()
    await room.canaries.remember(ONE, "life", "")
    assert room.chooser.judge(server(canary=stand_in("life")), server()) == Compatible()


async def test_the_newest_work_comes_first_whoever_saved_it() -> None:
    room = Room()
    await room.knows(ONE)
    room.keep(server(build="b1"), revision=5)
    room.keep(server(build="b2"), revision=9)
    assert room.found(server(build="b1")) == ["b2", "b1"]
    room.keep(server(build="b2"), revision=5)
    assert room.found(server(build="b1")) == ["b1", "b2"]


async def test_a_build_whose_file_was_refused_is_not_tried_again() -> None:
    room = Room()
    await room.knows(ONE)
    room.keep(server())
    room.chooser.refused(server(), server(build="b2"))
    assert room.found(server(build="b2")) == []
    assert room.found(server()) == ["b1"]


async def test_a_session_that_was_never_saved_has_none() -> None:
    assert Room().chooser.candidates(A, server()).outcome is RestoreOutcome.NO_SNAPSHOT


class TestWindow:
    """What has an open window is for the server that needs it; what has not, for one that needs none."""

    PLAIN = generation_of()
    OPENED = generation_of(origin=Origin(alteration=Alteration.WINDOW_EDIT, name=new_name(OWNER)))

    def facts(self, opened: int | None, is_whole: bool | None, **changes: str) -> Facts:
        window = WindowFacts(opened, is_whole)
        return Facts(fingerprint=server(**changes), kind=MemoryKind.SLIDING_WINDOW, window=window)

    @pytest.mark.parametrize(
        ("opened", "is_whole", "plain", "edited"),
        [
            (64, False, False, True),
            (64, None, True, True),
            (None, True, True, False),
            (None, None, True, False),
            (None, False, False, False),
        ],
        ids=["shut", "not seen", "kept whole", "not seen and never opened", "shut and never opened"],
    )
    def test_each_server_goes_on_from_its_own(
        self, opened: int | None, is_whole: bool | None, plain: bool, edited: bool
    ) -> None:
        facts = self.facts(opened, is_whole)
        assert serves(self.PLAIN, facts, server()) is plain
        assert serves(self.OPENED, facts, server()) is edited

    @pytest.mark.parametrize(
        "changes", [{"build": "b2"}, {"model_path": "/models/two.gguf"}, {"canary": OTHER_NAME}]
    )
    def test_an_opened_one_is_given_to_no_other_build_model_or_flags(self, changes: dict[str, str]) -> None:
        assert not serves(self.OPENED, self.facts(64, None, **changes), server())
        assert serves(self.PLAIN, self.facts(64, None, **changes), server())

    def test_other_memory_has_no_window(self) -> None:
        facts = Facts(fingerprint=server(), kind=MemoryKind.FULL)
        assert serves(self.PLAIN, facts, server())
