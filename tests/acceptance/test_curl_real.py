"""curl, which asks for leave (`Expect: 100-continue`) to send a large body, and waits a second for it."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.support.load import words

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

ONE_SLOT = ("-c", "16384", "-np", "1", "--cache-ram", "0")
BODY_BYTES = 2 << 20
FEW = 80
"""Tokens that a later turn may have to compute: its question, and the end of the prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`trace` is what curl says that went over the wire (`--verbose`)."""

    status: int
    headers: dict[str, str]
    body: bytes
    trace: str

    @property
    def document(self) -> dict[str, Any]:
        """The answer, or the last event of a stream."""
        lines = [line[6:] for line in self.body.splitlines() if line.startswith(b"data: {")]
        document: dict[str, Any] = json.loads(lines[-1] if lines else self.body)
        return document

    @property
    def reused(self) -> int:
        return int(self.document["timings"]["cache_n"])

    @property
    def computed(self) -> int:
        return int(self.document["timings"]["prompt_n"])


async def curl(stage: Stage, tmp_path: Path, body: dict[str, Any], *options: str) -> Answer:
    """POST a chat of a conversation called `one`, as large as a picture makes it."""
    padded = json.dumps(body | {"metadata": {"picture": ""}})
    sent = padded.replace('"picture": ""', f'"picture": "{"x" * (BODY_BYTES - len(padded))}"')
    assert len(sent) == BODY_BYTES
    upload, answered = tmp_path / "body.json", tmp_path / "answer"
    upload.write_text(sent)
    command = [
        *("curl", "--silent", "--verbose", "--http1.1", "--max-time", "60", "--output", str(answered)),
        *("--write-out", '{"status": %{http_code}, "headers": %{header_json}}'),
        *("--header", "Content-Type: application/json", "--header", "X-Session-Id: one"),
        *("--data-binary", f"@{upload}", *options, f"{stage.url}/v1/chat/completions"),
    ]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    told, trace = await process.communicate()
    assert process.returncode == 0, trace.decode()
    document = json.loads(told)
    headers = {name: values[0] for name, values in document["headers"].items()}
    return Answer(document["status"], headers, answered.read_bytes(), trace.decode("latin-1"))


def asked(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return {"model": "any", "messages": turns, "max_tokens": 4, "temperature": 0}


AS_CURL_DOES: tuple[str, ...] = ()
IN_CHUNKS = ("--header", "Transfer-Encoding: chunked")


@pytest.mark.parametrize("options", [AS_CURL_DOES, IN_CHUNKS], ids=["with a length", "in chunks"])
async def test_two_mebibytes_are_let_in_at_once_and_find_their_conversation(
    set_stage: SetStage, measured: Measured, tmp_path: Path, options: tuple[str, ...]
) -> None:
    stage = await set_stage(*ONE_SLOT)
    document = words("curl", 300)
    first = await curl(stage, tmp_path, asked(document), *options)
    said = first.document["choices"][0]["message"]["content"]
    second = await curl(stage, tmp_path, asked(document, said, "go on") | {"stream": True}, *options)
    await stage.kvproxy.flush()
    await stage.llama.restart()
    third = await curl(stage, tmp_path, asked(document, said, "go on, please"), *options)
    answers = [first, second, third]
    for answer in answers:
        assert answer.status == 200
        assert "> Expect: 100-continue" in answer.trace
        assert "< HTTP/1.1 100 Continue" in answer.trace
    assert [one.headers["x-kvproxy-outcome"] for one in answers] == ["cold", "resident", "restored"]
    assert max(second.computed, third.computed) <= FEW
    measured(
        f"curl, 2 MiB {'in chunks' if options else 'with a length'}: computed "
        f"{[one.computed for one in answers]}, reused {[one.reused for one in answers]}"
    )


async def test_a_prompt_that_no_slot_can_hold_is_refused_by_the_server_itself(
    set_stage: SetStage, tmp_path: Path
) -> None:
    stage = await set_stage(*ONE_SLOT)
    first = await curl(stage, tmp_path, asked(words("curl", 300)))
    refused = await curl(stage, tmp_path, asked("x" * (1 << 20)))
    again = await curl(stage, tmp_path, asked(words("curl", 300), "yes", "go on"))
    assert [one.status for one in (first, refused, again)] == [200, 400, 200]
    assert refused.document["error"]["type"] == "exceed_context_size_error"
    assert again.reused >= first.computed - FEW
