from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import gguf as reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream import gguf
from kvproxy.upstream.gguf import ModelTraits, read_model_traits

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
FORMATS = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value: float) -> bytes:
    return struct.pack("<I", kind) + struct.pack(FORMATS[kind], value)


def string(value: str) -> bytes:
    return struct.pack("<I", STRING) + text(value)


def numbers(kind: int, values: Sequence[float]) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + b"".join(
        struct.pack(FORMATS[kind], value) for value in values
    )


def strings(values: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


def header(*pairs: tuple[str, bytes], version: int = 3, count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 7, len(pairs) if count is None else count)
    return head + b"".join(text(name) + value for name, value in pairs)


ARCHITECTURE = ("general.architecture", string("lfm2"))
LFM2 = header(
    ARCHITECTURE,
    ("lfm2.block_count", scalar(U32, 4)),
    ("tokenizer.ggml.tokens", strings(["a", "word", "x" * 300_000, ""])),
    ("tokenizer.ggml.scores", numbers(F32, [0.5] * 5_000)),
    ("tokenizer.chat_template", string("y" * 70_000)),
    ("general.is_fine", scalar(BOOL, True)),
    ("lfm2.embedding_length", scalar(U64, 64)),
    ("lfm2.attention.head_count", scalar(U32, 4)),
    ("lfm2.attention.head_count_kv", numbers(I32, [0, 2, 0, 2])),
    ("lfm2.attention.layer_norm_rms_epsilon", scalar(F32, 1e-5)),
    ("lfm2.shortconv.l_cache", scalar(U32, 3)),
)


def traits_of(data: bytes, tmp_path: Path) -> ModelTraits | None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_model_traits(path)


def test_traits_are_found_before_and_behind_the_vocabulary(tmp_path: Path) -> None:
    traits = traits_of(LFM2 + bytes(1_000), tmp_path)

    assert traits is not None
    assert (traits.architecture, traits.kind) == ("lfm2", MemoryKind.HYBRID)
    assert (traits.blocks, traits.embedding_length, traits.window) == (4, 64, None)
    assert (traits.heads, traits.kv_heads, traits.has_state) == ((4,), (0, 2, 0, 2), True)


@pytest.mark.parametrize(
    ("key", "has_state"),
    [
        ("lfm2.ssm.conv_kernel", True),
        ("lfm2.shortconv.l_cache", True),
        ("lfm2.wkv.head_size", True),
        ("lfm2.kda.head_dim", True),
        ("lfm2.attention.recurrent_layers", True),
        ("other.ssm.conv_kernel", False),
        ("lfm2.attention.head_count", False),
    ],
)
def test_a_state_shows_in_the_architectures_own_keys(key: str, has_state: bool, tmp_path: Path) -> None:
    traits = traits_of(header(ARCHITECTURE, (key, scalar(U32, 4))), tmp_path)

    assert traits is not None
    assert traits.has_state is has_state


def test_query_heads_stand_for_the_kv_heads_that_are_not_told(tmp_path: Path) -> None:
    traits = traits_of(header(ARCHITECTURE, ("lfm2.attention.head_count", scalar(U32, 9))), tmp_path)

    assert traits is not None
    assert (traits.heads, traits.kv_heads) == ((9,), (9,))


def test_a_window_is_told_and_whether_it_slides(tmp_path: Path) -> None:
    found = [
        traits_of(
            header(
                ("general.architecture", string(name)),
                (f"{name}.attention.sliding_window", scalar(U32, 512)),
            ),
            tmp_path,
        )
        for name in ("gemma3", "llama4", "llama")
    ]

    assert [traits and (traits.kind, traits.window, traits.sliding_window) for traits in found] == [
        (MemoryKind.SLIDING_WINDOW, 512, 512),
        (MemoryKind.SLIDING_WINDOW, 512, None),
        (MemoryKind.FULL, 512, None),
    ]


def test_what_the_reference_library_writes_is_read(tmp_path: Path) -> None:
    writer = reference.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_token_list(["a", "b"])
    writer.add_block_count(3)
    writer.add_sliding_window(128)
    writer.add_head_count_kv([1, 2, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    traits = read_model_traits(tmp_path / "model.gguf")

    assert traits is not None
    assert (traits.architecture, traits.blocks, traits.window) == ("gemma3", 3, 128)
    assert traits.kv_heads == (1, 2, 1)


def test_the_identity_is_of_size_time_and_the_first_mebibyte(tmp_path: Path) -> None:
    data = LFM2 + bytes(2 << 20)
    first = traits_of(data, tmp_path)
    os.utime(tmp_path / "model.gguf", ns=(0, 1_234))
    touched = read_model_traits(tmp_path / "model.gguf")

    assert first is not None
    assert touched is not None
    assert touched.identity.size_bytes == len(data)
    assert touched.identity.mtime_ns == 1_234
    assert touched.identity.head_sha256 == hashlib.sha256(data[: 1 << 20]).hexdigest()
    assert touched != first


def test_any_part_of_a_split_model_stands_for_the_whole(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(LFM2)
    second.write_bytes(header(("split.no", scalar(U32, 1))))
    os.utime(second, ns=(0, first.stat().st_mtime_ns + 1_000))

    traits = read_model_traits(second)

    assert traits is not None
    assert traits == read_model_traits(first)
    assert traits.architecture == "lfm2"
    assert traits.identity.size_bytes == len(LFM2) + second.stat().st_size
    assert traits.identity.mtime_ns == second.stat().st_mtime_ns


def test_a_split_model_without_all_its_parts_is_none(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(LFM2)

    assert read_model_traits(tmp_path / "model-00001-of-00002.gguf") is None


@pytest.mark.parametrize("name", ["model-00003-of-00002.gguf", "model-00001-of-99999.gguf"])
def test_a_name_that_only_looks_like_a_part_is_a_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LFM2)

    assert read_model_traits(tmp_path / name) is not None


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(LFM2)
    (tmp_path / "model.gguf").symlink_to("blob")

    assert read_model_traits(tmp_path / "model.gguf") is not None


def test_what_cannot_be_opened_has_no_traits(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")

    assert [read_model_traits(tmp_path / name) for name in ("absent", "circle", "pipe", ".", "a\0")] == [
        None
    ] * 5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"qsgg" + LFM2[4:],
        header(ARCHITECTURE, version=1),
        header(ARCHITECTURE, version=4),
        struct.pack(">4sIQQ", b"GGUF", 3, 0, 1),
        header(),
        header(("general.architecture", scalar(U32, 1))),
        header(ARCHITECTURE, count=2),
        header(ARCHITECTURE, count=1 << 40),
        header(ARCHITECTURE, ("x", struct.pack("<I", 13))),
        header(ARCHITECTURE, ("x", struct.pack("<IIQ", ARRAY, ARRAY, 1))),
        header(ARCHITECTURE, ("x", struct.pack("<IIQ", ARRAY, U32, 1 << 62))),
        header(ARCHITECTURE, ("x", struct.pack("<IIQ", ARRAY, STRING, 1 << 62))),
        header(ARCHITECTURE, ("x", struct.pack("<IIQQ", ARRAY, STRING, 2, 1 << 62))),
        header(ARCHITECTURE, ("x", struct.pack("<IIQQ", ARRAY, STRING, 1, (1 << 64) - 1))),
        header(ARCHITECTURE, ("x", struct.pack("<IQ", STRING, 1 << 62))),
        header(ARCHITECTURE, ("k" * 70_000, scalar(U32, 1))),
    ],
)
def test_what_is_no_model_file_we_know_has_no_traits(data: bytes, tmp_path: Path) -> None:
    assert traits_of(data, tmp_path) is None


def test_a_header_cut_short_anywhere_has_no_traits(tmp_path: Path) -> None:
    small = header(ARCHITECTURE, ("d", numbers(U32, [1, 2])), ("e", string("f")), ("a", strings(["b", "c"])))
    assert traits_of(small, tmp_path) is not None

    assert {traits_of(small[:size], tmp_path) for size in range(len(small))} == {None}


@pytest.mark.parametrize("count", ["MOST_STRINGS", "MOST_PAIRS"])
def test_a_hostile_count_is_given_up(count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, count, 3)

    assert traits_of(LFM2, tmp_path) is None


def test_a_list_too_long_to_keep_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "LONGEST_LIST", 3)

    traits = traits_of(LFM2, tmp_path)

    assert traits is not None
    assert traits.kv_heads == (4,)
    assert traits.has_state


def test_flipped_bits_never_raise(tmp_path: Path) -> None:
    chance = random.Random(1)
    small = header(ARCHITECTURE, ("a", strings(["b", "c"])), ("lfm2.block_count", scalar(U32, 4)))
    for _ in range(1_000):
        data = bytearray(small)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        traits_of(bytes(data), tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.sampled_from([b"", LFM2[:24], header(ARCHITECTURE, count=9)]), rest=st.binary(max_size=200))
def test_no_bytes_make_the_reader_raise(start: bytes, rest: bytes, tmp_path: Path) -> None:
    traits_of(start + rest, tmp_path)
