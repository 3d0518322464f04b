from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.snapshots import compatibility
from kvproxy.snapshots.canary import Canary
from kvproxy.snapshots.compatibility import Compatible, Differs, Identity
from kvproxy.snapshots.fingerprint import Fingerprint

FIELDS = {
    "model_path": "/m/one.gguf",
    "model_ftype": "Q4_1",
    "meta_size": "98362432",
    "meta_n_params": "134515008",
    "build": "b11434-abc",
    "adapters": "",
    "runtime_key": "",
}
CANARY = Canary.of([(7, -0.5), (9, -1.5), (3, -2.5)])
NEAR = Canary.of([(7, -0.6), (9, -1.5), (3, -2.5)])
FAR = Canary.of([(8, -0.5), (9, -1.5), (7, -4.5)])
SAVED = Identity(Fingerprint.from_dict(FIELDS), CANARY, file_version=4)


def changed(**fields: str) -> Identity:
    return replace(SAVED, fingerprint=Fingerprint.from_dict(FIELDS | fields))


def judged(present: Identity, saved: Identity = SAVED, *, accept: bool = True) -> Compatible | Differs:
    return compatibility.compare(saved, present, accept_other_builds=accept)


def test_the_same_identity_is_compatible() -> None:
    assert judged(SAVED) == Compatible()


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - {"build"}))
def test_a_differing_field_is_named_whatever_the_canary_says(field: str) -> None:
    assert judged(changed(**{field: "other"})) == Differs((field,))


def test_a_field_that_only_a_later_version_fills_is_named() -> None:
    assert judged(changed(draft="/m/draft.gguf")) == Differs(("draft",))


def test_another_build_goes_on_if_file_format_and_canary_agree() -> None:
    assert judged(changed(build="b11500")) == Compatible(other_build=True)


def test_another_build_is_refused_where_the_setting_says_so() -> None:
    assert judged(changed(build="b11500"), accept=False) == Differs(("build",))


def test_another_build_of_another_file_format_is_refused() -> None:
    present = replace(changed(build="b11500"), file_version=5)
    assert judged(present) == Differs(("build", "file_version"))


def test_a_file_format_nobody_can_see_is_left_to_the_server() -> None:
    assert judged(replace(changed(build="b11500"), file_version=None)) == Compatible(other_build=True)


def test_another_build_that_computes_differently_is_refused() -> None:
    present = replace(changed(build="b11500"), canary=NEAR)
    assert judged(present) == Differs(("build", "canary"), compatibility.NEAR_CAUSE)


def test_another_build_without_canaries_is_refused() -> None:
    saved, present = replace(SAVED, canary=None), replace(changed(build="b11500"), canary=None)
    assert judged(present, saved) == Differs(("build",))


def test_an_accepted_build_is_not_named_beside_what_differs() -> None:
    assert judged(changed(build="b11500", runtime_key="x")) == Differs(("runtime_key",))


def test_without_any_canary_the_fingerprint_decides() -> None:
    nothing = replace(SAVED, canary=None)
    assert judged(nothing, nothing) == Compatible()


@pytest.mark.parametrize(("saved", "present"), [(CANARY, None), (None, CANARY)])
def test_a_canary_of_one_side_only_proves_nothing(saved: Canary | None, present: Canary | None) -> None:
    outcome = judged(replace(SAVED, canary=present), replace(SAVED, canary=saved))
    assert outcome == Differs(("canary",), compatibility.ONE_SIDED_CAUSE)


@pytest.mark.parametrize(
    ("canary", "cause", "words"),
    [
        (NEAR, compatibility.NEAR_CAUSE, ("rope", "KV type", "-fa", "adapter", "weights")),
        (FAR, compatibility.FAR_CAUSE, ("rope", "adapter", "weights")),
    ],
)
def test_a_differing_canary_comes_with_its_likely_cause(
    canary: Canary, cause: str, words: tuple[str, ...]
) -> None:
    assert judged(replace(SAVED, canary=canary)) == Differs(("canary",), cause)
    assert all(word in cause for word in words)


def test_a_difference_too_large_for_numerics_does_not_blame_them() -> None:
    assert "KV type" not in compatibility.FAR_CAUSE


def test_all_that_differs_is_named_in_order() -> None:
    present = replace(changed(runtime_key="x", adapters="y"), canary=FAR, file_version=5)
    outcome = judged(present)
    assert isinstance(outcome, Differs)
    assert outcome.fields == ("adapters", "canary", "file_version", "runtime_key")


def test_the_tolerance_is_the_callers() -> None:
    present = replace(SAVED, canary=NEAR)
    outcome = compatibility.compare(SAVED, present, accept_other_builds=True, tolerance=0.2)
    assert outcome == Compatible()


@pytest.mark.parametrize(
    ("differs", "reason"),
    [(Differs(("build", "meta_size")), "build, meta_size"), (Differs(("canary",), "why"), "canary: why")],
)
def test_the_reason_names_the_fields_and_the_cause(differs: Differs, reason: str) -> None:
    assert differs.reason == reason
