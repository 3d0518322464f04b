from __future__ import annotations

from tests.fakes.state import PromptCache, Slot, SlotBank

A = [1, *range(100, 150)]
B = [1, *range(200, 250)]


def bank(*contents: list[int], ram_cache: bool = False, volatile: bool = False) -> SlotBank:
    made = SlotBank(len(contents), 1000, ram_cache=ram_cache, volatile=volatile)
    for slot, tokens in zip(made.slots, contents, strict=True):
        slot.hold(tokens)
    return made


def chosen(slots: SlotBank, prompt: list[int], pin: int = -1) -> int | None:
    slot = slots.choose(prompt, pin)
    return None if slot is None else slot.id


def test_ids_wrap_like_unsigned_numbers() -> None:
    three = bank([], [], [])
    assert [three.by_id(i).id for i in (0, 4, -1, -2)] == [0, 1, (2**64 - 1) % 3, (2**64 - 2) % 3]


def test_the_longest_prefix_above_a_tenth_wins_and_ties_go_to_the_lowest() -> None:
    assert chosen(bank(A, B), [*B, 7]) == 1
    assert chosen(bank(A, A), [*A, 7]) == 0


def test_a_prefix_of_a_tenth_is_not_enough() -> None:
    slots = bank(A, B)
    slots.slots[0].last_used, slots.slots[1].last_used = 5, 3
    assert chosen(slots, [*A[:5], *range(500, 545)]) == 1


def test_the_least_recently_used_wins_and_ties_go_to_the_highest() -> None:
    slots = bank([], [], [])
    assert chosen(slots, A) == 2
    slots.slots[2].last_used = 9
    assert chosen(slots, A) == 1


def test_busy_slots_are_passed_over_unless_pinned() -> None:
    slots = bank(A, B)
    slots.slots[0].running = 7
    assert chosen(slots, A) == 1
    assert chosen(slots, A, pin=0) == 0
    slots.slots[1].running = 8
    assert chosen(slots, A) is None


def test_a_preferred_slot_is_taken_by_unpinned_requests_only() -> None:
    slots = bank(A, B)
    assert slots.choose(A, -1, preferred=1) is slots.slots[1]
    assert slots.choose(A, 0, preferred=1) is slots.slots[0]


def test_at_least_one_token_is_always_computed() -> None:
    slot = Slot(0, 1000, tokens=list(A))
    assert slot.begin(A, reuse=True) == len(A) - 1
    assert slot.tokens == A[:-1]


def test_without_reuse_nothing_is_kept() -> None:
    slot = Slot(0, 1000, tokens=list(A))
    assert slot.begin(A, reuse=False) == 0
    assert slot.tokens == []


def test_a_launch_on_a_volatile_server_clears_other_idle_slots_into_the_cache() -> None:
    slots = bank(A, B, volatile=True)
    slots.slots[1].running = 1
    slots.launched()
    assert [len(slot.tokens) for slot in slots.slots] == [0, len(B)]
    slots.slots[1].running = None
    assert slots.choose([*A, 7], -1) is not None
    assert A in [slot.tokens for slot in slots.slots]


def test_a_pin_on_an_empty_slot_skips_the_prompt_cache() -> None:
    slots = bank(A, [], ram_cache=True)
    slots.launched()
    slots.choose([*A, 7], 1)
    assert slots.slots[1].tokens == []


def test_with_a_prompt_cache_a_pin_on_a_busy_slot_swaps_its_content() -> None:
    slots = bank(A, B, ram_cache=True)
    slots.launched()
    slots.slots[1].running = 1
    slots.choose([*A, 7], 1)
    assert slots.slots[1].tokens == A


def test_the_prompt_cache_keeps_one_entry_per_line_of_text() -> None:
    cache = PromptCache()
    cache.save(A[:10])
    cache.save(A)
    cache.save(A[:20])
    assert cache.entries == [A]


def test_the_prompt_cache_gives_up_only_entries_that_serve() -> None:
    cache = PromptCache([A, B])
    assert cache.take_better([], [*A[:5], 900]) is None
    assert cache.take_better([], [*A, 900]) == A
    assert cache.entries == [B]
