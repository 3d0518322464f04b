from __future__ import annotations

from kvproxy.identifiers import SlotId
from kvproxy.slots.settling import QUIET_SECONDS, Settling, look
from kvproxy.upstream.replies import SlotInfo
from tests.support.fakes_core import idle, processing

UNSEEN = Settling(SlotId(0), was_seen=False)
SEEN = Settling(SlotId(0), was_seen=True)


def looked(settling: Settling, *looks: tuple[float, list[SlotInfo]]) -> Settling | None:
    """What is left of the waiting after looks at these times."""
    for now, infos in looks:
        after = look(settling, infos, now)
        if after is None:
            return None
        settling = after
    return settling


def test_a_request_that_was_seen_to_run_is_over_when_its_slot_is_seen_idle() -> None:
    assert look(SEEN, [idle(0)], 1.0) is None


def test_a_request_that_still_runs_is_not_over_and_has_been_seen() -> None:
    after = look(UNSEEN, [processing(0)], 1.0)

    assert after is not None
    assert after.was_seen
    assert look(after, [idle(0)], 1.1) is None


def test_a_request_that_was_never_seen_may_still_be_launched_while_its_slot_looks_idle() -> None:
    still = looked(UNSEEN, (10.0, [idle(0)]), (10.0 + QUIET_SECONDS - 0.01, [idle(0)]))
    assert still is not None


def test_a_request_that_was_never_seen_is_over_after_enough_quiet() -> None:
    assert looked(UNSEEN, (10.0, [idle(0)]), (10.0 + QUIET_SECONDS, [idle(0)])) is None


def test_one_look_proves_no_quiet_however_late_it_comes() -> None:
    assert look(UNSEEN, [idle(0)], 1e9) is not None


def test_a_long_prompt_takes_longer_to_be_launched() -> None:
    long = Settling(SlotId(0), was_seen=False, body_bytes=3_000_000)

    assert looked(long, (0.0, [idle(0)]), (4.9, [idle(0)])) is not None
    assert looked(long, (0.0, [idle(0)]), (4.9, [idle(0)]), (5.0, [idle(0)])) is None


def test_time_in_which_the_servers_loop_sat_in_anothers_batch_does_not_count() -> None:
    stuck = [idle(0), processing(1, progress=512)]

    assert looked(UNSEEN, (0.0, stuck), (60.0, stuck)) is not None


def test_time_in_which_another_slot_made_progress_counts() -> None:
    first, second = ([idle(0), processing(1, progress=n)] for n in (512, 1024))

    assert looked(UNSEEN, (0.0, first), (QUIET_SECONDS, second)) is None


def test_quiet_begins_anew_after_the_request_was_seen() -> None:
    after = looked(UNSEEN, (0.0, [idle(0)]), (1.9, [idle(0)]), (2.0, [processing(0)]))

    assert after is not None
    assert after.quiet_seconds == 0.0


def test_a_slot_that_the_server_no_longer_has_is_not_waited_for() -> None:
    assert look(UNSEEN, [idle(1)], 1.0) is None
