from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gguf
import pytest

from kvproxy.identifiers import SlotId
from kvproxy.snapshots.canaries import LIFE, Canaries
from kvproxy.snapshots.canary import Canary
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.telemetry.events import Warned
from kvproxy.upstream.acquaintance import (
    Acquaintance,
    Introduction,
    is_served,
    slot_for_canary,
)
from kvproxy.upstream.facts import KEY_ADVICE, SAVE_PATH_ADVICE, Facts, PersistenceMode, WindowFacts
from kvproxy.upstream.gguf import read_model_traits
from kvproxy.upstream.replies import ActionFailure, Adapter, Completed, Erased, Fault, Obstacle, Unavailable
from scripts.tiny_models import SLIDING_WINDOW
from tests.support.fakes_core import PROPS, UNREACHABLE, FakeScratch, FakeServer, Late, Sink, idle, processing

NEXT = replace(PROPS, marker="<__media_2__>")
UNMARKED = replace(PROPS, marker="")
ASLEEP = replace(PROPS, is_sleeping=True)
FULL = (idle(0, tokens=9), idle(1, tokens=9))
OTHER_CANARY = ((1, -0.9), (2, -1.5))


class Room:
    """A server and one who meets it, again and again."""

    def __init__(
        self,
        canaries: Canaries | None = None,
        setting: MemoryKind | None = None,
        *,
        opens_windows: bool = False,
    ) -> None:
        self.server = FakeServer()
        self.sink = Sink()
        self.canaries = canaries or Canaries()
        self.introduction = Introduction(
            cast(Any, self.server),
            self.canaries,
            self.sink,
            runtime_key="mine",
            setting=setting,
            scratch=FakeScratch(),
            opens_windows=lambda _: opens_windows,
        )

    async def meet(self, props: Any = PROPS, known: Facts | None = None, **answers: object) -> Acquaintance:
        for verb, answer in answers.items():
            self.server.answer(verb, answer)
        self.server.answer("props", replace(props, is_sleeping=False))
        self.server.log.clear()
        return await self.introduction.meet(props, known or Facts())

    def has_computed(self) -> bool:
        return any(entry.startswith("canary") for entry in self.server.log)


class TestCanary:
    async def test_it_is_computed_in_the_last_empty_slot_which_is_erased_again(self) -> None:
        room = Room()
        met = await room.meet(slots=(idle(0), idle(1), idle(2, tokens=7)))
        assert [entry for entry in room.server.log if entry[-1].isdigit()] == ["canary 1", "erase 1"]
        assert met.fingerprint.get("canary") == met.canary
        assert not met.canary.startswith(LIFE)

    @pytest.mark.parametrize(
        "slots", [FULL, (idle(0), processing(1)), UNREACHABLE], ids=["full", "busy", "not shown"]
    )
    async def test_a_server_that_is_full_or_busy_is_not_disturbed(self, slots: object) -> None:
        room = Room()
        met = await room.meet(slots=slots)
        assert not room.has_computed()
        assert met.canary.startswith(LIFE)

    async def test_a_server_that_cannot_save_is_not_asked_for_one(self) -> None:
        room = Room()
        await room.meet(supported=ActionFailure(Fault.UNSUPPORTED, "", 501))
        assert not room.has_computed()

    async def test_the_next_life_that_computes_the_same_has_the_same_name(self) -> None:
        room = Room()
        first = await room.meet()
        second = await room.meet(NEXT, canary=((1, -0.50001), (2, -1.5)))
        assert (room.has_computed(), second.canary) == (True, first.canary)
        assert second.fingerprint == first.fingerprint

    async def test_one_that_computes_something_else_has_another_and_returns_to_the_first(self) -> None:
        room = Room()
        first = await room.meet()
        other = await room.meet(NEXT, canary=OTHER_CANARY)
        assert other.fingerprint.diff(first.fingerprint) == ("canary",)
        back = await room.meet(replace(PROPS, marker="<__media_3__>"), canary=((1, -0.5), (2, -1.5)))
        assert back.fingerprint == first.fingerprint

    async def test_the_same_process_is_known_by_its_marker_when_its_slots_are_full(self) -> None:
        room = Room()
        first = await room.meet()
        again = await room.meet(slots=FULL)
        assert (room.has_computed(), again.fingerprint) == (False, first.fingerprint)

    async def test_another_model_of_the_same_process_is_not_taken_for_the_first(self) -> None:
        room = Room()
        await room.meet()
        other = await room.meet(replace(PROPS, model_path="/models/two.gguf"), slots=FULL)
        assert other.canary.startswith(LIFE)

    async def test_adapters_that_changed_meanwhile_are_another_identity(self) -> None:
        room = Room()
        first = await room.meet()
        met = await room.meet(slots=FULL, adapters=(Adapter(0, "/a.gguf", 1.0),))
        assert met.fingerprint.diff(first.fingerprint) == ("adapters", "canary")

    async def test_an_unknown_life_has_a_name_of_its_own_that_lasts_as_long(self) -> None:
        room = Room()
        first, again = await room.meet(slots=FULL), await room.meet(slots=FULL)
        other = await room.meet(NEXT, slots=FULL)
        assert first.fingerprint == again.fingerprint
        assert other.fingerprint.diff(first.fingerprint) == ("canary",)

    async def test_without_a_marker_nothing_is_remembered_and_nothing_unknown_is_ever_equal(self) -> None:
        room = Room()
        await room.meet(UNMARKED)
        one, two = await room.meet(UNMARKED, slots=FULL), await room.meet(UNMARKED, slots=FULL)
        assert one.canary != two.canary

    async def test_an_answer_of_another_process_than_the_one_that_was_met_is_not_believed(self) -> None:
        room = Room()
        room.server.answer("props", NEXT)
        met = await room.introduction.meet(PROPS, Facts())
        assert met.canary.startswith(LIFE)
        assert (await room.meet(slots=FULL)).canary == met.canary, "and not remembered"

    async def test_one_that_does_not_come_in_time_is_done_without(self) -> None:
        room = Room()
        met = await room.meet(canary=UNREACHABLE)
        assert met.canary.startswith(LIFE)
        assert met.leftover is not None
        assert (met.leftover.slot, met.leftover.erase) == (SlotId(1), None)
        assert "erase 1" not in room.server.log

    async def test_an_erase_that_is_late_is_handed_over(self) -> None:
        late = Late()
        met = await Room().meet(erase=late)
        assert met.leftover is not None
        assert met.leftover.erase is not None
        late.end(Erased(1))

    async def test_a_life_that_was_seen_to_clear_idle_slots_is_known_for_it(self) -> None:
        room = Room()
        assert not (await room.meet()).is_volatile
        await room.introduction.found_volatile(PROPS)
        assert (await room.meet(slots=FULL)).is_volatile
        assert not (await room.meet(replace(PROPS, marker="<__media_2__>"))).is_volatile

    async def test_a_file_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        room = Room(Canaries(tmp_path / "missing" / "canaries.json"))
        await room.meet()
        (warned,) = room.sink.of(Warned)
        assert "canaries.json" in warned.message


class TestWhatIsTold:
    async def test_adapters_and_the_operators_mark_are_part_of_the_fingerprint(self) -> None:
        met = await Room().meet(adapters=(Adapter(0, "/a.gguf", 0.5),))
        assert met.fingerprint.get("adapters") == '[[0,"/a.gguf","0.5"]]'
        assert met.fingerprint.get("runtime_key") == "mine"

    async def test_adapters_that_are_not_told_are_not_none(self) -> None:
        met = await Room().meet(adapters=Unavailable(Obstacle.UNREACHABLE, "no answer"))
        assert met.fingerprint.get("adapters") == "unknown"

    async def test_a_question_for_them_that_was_lost_is_put_again(self) -> None:
        room = Room()
        room.server.answer("adapters", UNREACHABLE, ())
        assert (await room.meet()).fingerprint.get("adapters") == ""

    @pytest.mark.parametrize(
        ("failure", "mode", "reason"),
        [
            (None, PersistenceMode.PLAIN, ""),
            (ActionFailure(Fault.UNSUPPORTED, "", 501), PersistenceMode.OFF, SAVE_PATH_ADVICE),
            (ActionFailure(Fault.UNAUTHORIZED, "key", 401), PersistenceMode.OFF, KEY_ADVICE),
            (ActionFailure(Fault.TIMED_OUT, "slow"), PersistenceMode.UNKNOWN, "slow"),
        ],
    )
    async def test_what_it_allows(
        self, failure: ActionFailure | None, mode: PersistenceMode, reason: str
    ) -> None:
        met = await Room().meet(supported=failure)
        assert (met.persistence.mode, met.persistence.reason) == (mode, reason)


class TestAsleep:
    async def test_the_same_process_stays_what_it_was(self) -> None:
        room = Room(setting=MemoryKind.FULL)
        first = await room.meet()
        known = Facts(
            props=PROPS,
            fingerprint=first.fingerprint,
            persistence=first.persistence,
            kind=first.kind,
            canary=first.canary,
        )
        asleep = await room.meet(ASLEEP, known)
        assert room.server.log == []
        assert (asleep.fingerprint, asleep.persistence) == (first.fingerprint, first.persistence)
        assert (asleep.kind, asleep.canary) == (first.kind, first.canary)

    async def test_one_met_before_is_known_by_its_marker_and_not_woken(self) -> None:
        room = Room()
        first = await room.meet(adapters=(Adapter(0, "/a.gguf", 0.5),))
        asleep = await room.meet(ASLEEP)
        assert room.server.log == []
        assert asleep.fingerprint == first.fingerprint
        assert asleep.persistence.mode is PersistenceMode.UNKNOWN

    async def test_one_that_was_never_met_is_nobody_known(self) -> None:
        asleep = await Room().meet(ASLEEP)
        assert asleep.canary.startswith(LIFE)


class TestModelFile:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_embedding_length(64)
        writer.add_head_count(4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    async def test_a_file_we_see_tells_the_kind_and_is_part_of_the_fingerprint(self, model: Path) -> None:
        met = await Room().meet(replace(PROPS, model_path=str(model)), meta={"n_embd": 64, "size": 10})
        assert met.kind is MemoryKind.FULL
        assert met.fingerprint.get("model_file").startswith(f"{model.stat().st_size}:")

    async def test_a_file_of_the_same_path_that_is_another_model_says_nothing(self, model: Path) -> None:
        met = await Room().meet(replace(PROPS, model_path=str(model)), meta={"n_embd": 4096, "size": 10})
        assert (met.kind, met.fingerprint.get("model_file")) == (MemoryKind.UNKNOWN, "")

    async def test_where_no_file_is_seen_the_operators_word_counts(self) -> None:
        assert (await Room(setting=MemoryKind.HYBRID).meet()).kind is MemoryKind.HYBRID
        assert (await Room().meet()).kind is MemoryKind.UNKNOWN

    def test_a_file_smaller_than_the_tensors_it_should_hold_is_another_one(self, model: Path) -> None:
        traits = read_model_traits(model)
        assert traits is not None
        assert is_served(traits, {})
        assert is_served(traits, {"n_embd": 64, "size": traits.identity.size_bytes})
        assert not is_served(traits, {"n_embd": 64, "size": traits.identity.size_bytes + 1})
        assert not is_served(replace(traits, identity=_huge(traits.identity)), {"size": 10})


def _huge(identity: Any) -> Any:
    return replace(identity, size_bytes=1 << 40)


def test_the_slot_for_a_canary_is_one_that_never_ran_or_was_erased() -> None:
    assert slot_for_canary((idle(0, tokens=0), idle(1, tokens=5))) == 0
    assert slot_for_canary(()) is None


class TestWindow:
    """A sliding window is asked once whether anything restored is reused."""

    async def met(self, *, reused: int, slots: object = None) -> Acquaintance:
        room = Room(setting=MemoryKind.SLIDING_WINDOW)
        room.server.answer("complete", Completed(10, 0), Completed(1, reused))
        return await room.meet(slots=slots or (idle(0), idle(1)))

    async def test_one_that_reuses_nothing_is_off_and_names_the_flag(self) -> None:
        met = await self.met(reused=0)
        assert met.persistence.mode is PersistenceMode.OFF
        assert "--swa-full" in met.persistence.reason

    async def test_one_that_reuses_what_was_restored_is_on(self) -> None:
        assert (await self.met(reused=79)).persistence.is_on

    async def test_without_an_empty_slot_the_answers_will_have_to_tell(self) -> None:
        assert (await self.met(reused=0, slots=FULL)).persistence.is_on

    async def test_other_memory_is_not_asked(self) -> None:
        room = Room(setting=MemoryKind.HYBRID)
        await room.meet()
        assert not any(entry.startswith("evaluate") for entry in room.server.log)


class TestOpenedWindow:
    """Where nothing restored is reused as it is, but a window may be opened in snapshots."""

    async def met(
        self,
        model: Path,
        *,
        reused: int = 0,
        slots: object = (idle(0), idle(1)),
        opens_windows: bool = True,
        props: Any = PROPS,
    ) -> Acquaintance:
        room = Room(opens_windows=opens_windows)
        room.server.answer("complete", Completed(10, 0), Completed(1, reused))
        return await room.meet(replace(props, model_path=str(model)), slots=slots, meta={})

    async def test_its_length_is_the_models_and_persistence_stays_on(self, tiny_gemma3: Path) -> None:
        met = await self.met(tiny_gemma3)
        assert met.persistence.is_on
        assert met.window == WindowFacts(SLIDING_WINDOW, is_whole=False)

    async def test_a_server_that_keeps_it_whole_needs_no_such_thing(self, tiny_gemma3: Path) -> None:
        met = await self.met(tiny_gemma3, reused=79)
        assert met.persistence.is_on
        assert met.window == WindowFacts(None, is_whole=True)

    async def test_where_that_cannot_be_tried_it_is_opened_which_harms_nothing(
        self, tiny_gemma3: Path
    ) -> None:
        met = await self.met(tiny_gemma3, slots=FULL)
        assert met.persistence.is_on
        assert met.window == WindowFacts(SLIDING_WINDOW, is_whole=None)

    @pytest.mark.parametrize(("reused", "is_whole"), [(79, True), (0, False)])
    async def test_what_was_seen_of_a_life_is_known_when_its_slots_are_full(
        self, tiny_gemma3: Path, reused: int, is_whole: bool
    ) -> None:
        """As when kvproxy starts again in front of it."""
        room = Room(opens_windows=True)
        room.server.answer("complete", Completed(10, 0), Completed(1, reused))
        props = replace(PROPS, model_path=str(tiny_gemma3))
        await room.meet(props, meta={})
        again = Room(room.canaries, opens_windows=True)
        met = await again.meet(props, slots=FULL, meta={})
        assert met.window == WindowFacts(None if is_whole else SLIDING_WINDOW, is_whole)

    async def test_where_it_may_not_be_opened_persistence_is_off(self, tiny_gemma3: Path) -> None:
        met = await self.met(tiny_gemma3, opens_windows=False)
        assert met.persistence.mode is PersistenceMode.OFF
        assert met.window.opened is None

    async def test_a_model_whose_file_is_not_seen_is_left_alone(self) -> None:
        room = Room(setting=MemoryKind.SLIDING_WINDOW, opens_windows=True)
        room.server.answer("complete", Completed(10, 0), Completed(1, 0))
        met = await room.meet(slots=(idle(0), idle(1)))
        assert met.persistence.mode is PersistenceMode.OFF
        assert met.window.opened is None

    async def test_a_server_that_fell_asleep_is_what_it_was(self) -> None:
        window = WindowFacts(64, is_whole=False)
        awake = await Room().meet()
        known = Facts(props=PROPS, fingerprint=awake.fingerprint, window=window)
        met = await Room().introduction.meet(ASLEEP, known)
        assert met.window == window


async def test_a_canary_that_comes_late_makes_what_was_saved_before_it_the_same_identity() -> None:
    room = Room()
    met = await room.meet(slots=FULL)
    canary = Canary.of(((1, -0.5), (2, -1.5)))
    known = await room.introduction.identify(met.fingerprint, PROPS, canary)
    assert known.diff(met.fingerprint) == ("canary",)
    assert room.canaries.canary(met.canary) == room.canaries.canary(known.get("canary")) == canary
    again = await room.meet(slots=FULL)
    assert again.fingerprint == known
