from __future__ import annotations

import pytest

from kvproxy.upstream.rate import MARGIN, MIN_SAMPLE_BYTES, START_BYTES_PER_SECOND, Rate

MB = 1_000_000


def test_it_starts_with_a_slow_disk() -> None:
    assert Rate().bytes_per_second == pytest.approx(START_BYTES_PER_SECOND)


def test_it_comes_near_to_what_is_measured() -> None:
    rate = Rate(10 * MB)
    for _ in range(30):
        rate.observe(100 * MB, 0.1)
    assert rate.bytes_per_second == pytest.approx(1000 * MB, rel=0.15)


def test_it_believes_a_slow_move_sooner_than_a_fast_one() -> None:
    slower, faster = Rate(100 * MB), Rate(100 * MB)
    slower.observe(100 * MB, 2.0)
    faster.observe(100 * MB, 0.5)
    assert slower.bytes_per_second < 70 * MB
    assert faster.bytes_per_second < 130 * MB


@pytest.mark.parametrize(("size", "seconds"), [(MIN_SAMPLE_BYTES - 1, 5.0), (10 * MB, 0.0), (10 * MB, -1.0)])
def test_it_learns_nothing_from_small_files_and_impossible_times(size: int, seconds: float) -> None:
    rate = Rate(100 * MB)
    rate.observe(size, seconds)
    assert rate.bytes_per_second == pytest.approx(100 * MB)


def test_a_deadline_is_a_batch_and_the_bytes_with_a_margin() -> None:
    assert Rate(100 * MB).deadline(1000 * MB, 15.0, 8.0) == pytest.approx(8.0 + MARGIN * 10.0)


def test_a_deadline_is_never_below_the_floor() -> None:
    assert Rate(100 * MB).deadline(1000, 15.0, 8.0) == 15.0
