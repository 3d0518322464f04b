from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from scripts import models
from scripts.tiny_models import Kind
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call-1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}
TOOL_LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Read "}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "nothing in it"},
]
RENDERED_LOOP = """\
<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Read \n\
a<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "read_file", "arguments": {"path": "a"}}
</tool_call><|im_end|>
<|im_start|>tool
nothing in it<|im_end|>
<|im_start|>assistant
"""


@pytest.mark.parametrize("kind", Kind)
async def test_every_tiny_model_answers_a_tool_loop_and_reuses_all_of_its_own_answer(
    kind: Kind, llama_server_binary: Path
) -> None:
    async with LlamaServer(models.tiny(kind), "-np", "1", "-c", "8192", binary=llama_server_binary) as server:
        request = {"messages": TOOL_LOOP, "tools": TOOLS}
        rendered = (await server.post_json("/apply-template", request))["prompt"]
        first = await server.post_json("/v1/chat/completions", request | {"max_tokens": 30})
        answer = first["choices"][0]["message"]
        longer = request | {"messages": [*TOOL_LOOP, answer, {"role": "user", "content": "and now?"}]}
        second = await server.post_json("/v1/chat/completions", longer | {"max_tokens": 5})

    assert rendered.endswith(RENDERED_LOOP)
    assert '"name": "read_file"' in rendered.removesuffix(RENDERED_LOOP)
    assert first["choices"][0]["finish_reason"] == "length"
    assert set(answer["content"]) <= set("abcdefghijklmnopqrstuvwxyz ")
    # The last token of an answer is sampled and never evaluated.
    assert second["timings"]["cache_n"] == first["timings"]["prompt_n"] + 29


@pytest.mark.parametrize("kind", Kind)
async def test_one_byte_of_text_is_one_token(kind: Kind, llama_server_binary: Path) -> None:
    text = " Two words, 3 \u00e4\n"
    async with LlamaServer(models.tiny(kind), "-np", "1", "-c", "512", binary=llama_server_binary) as server:
        tokens = (await server.post_json("/tokenize", {"content": text}))["tokens"]
        back = (await server.post_json("/detokenize", {"tokens": tokens}))["content"]
    assert len(tokens) == len(text.encode())
    assert back == text


async def test_a_restart_is_a_new_life_on_the_same_port_with_empty_slots(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with LlamaServer(tiny_llama, "-np", "2", "-c", "1024", slot_dir=tmp_path) as server:
        url, life, pid = server.base_url, (await server.props())["media_marker"], server.pid
        await server.post_json("/completion", {"prompt": "abc", "n_predict": 2, "id_slot": 1})
        await server.post_json("/slots/1?action=save", {"filename": "kept.bin"})
        assert (await server.metrics())["llamacpp:prompt_tokens_total"] > 0

        await server.restart()

        assert server.base_url == url
        assert server.pid != pid
        assert (await server.props())["media_marker"] != life
        assert len(await server.slots()) == 2
        assert (await server.metrics())["llamacpp:prompt_tokens_total"] == 0
        assert (tmp_path / "kept.bin").stat().st_size > 0


async def test_a_server_that_dies_at_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "no-model.gguf").write_bytes(b"not a model")
    server = LlamaServer(tmp_path / "no-model.gguf")
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1.*no-model\.gguf"):
        await server.start()
    assert not server.is_running


async def test_a_stopped_server_has_ended_and_its_log_is_kept(tiny_llama: Path) -> None:
    server = LlamaServer(tiny_llama, "-c", "512")
    await server.start()
    ended = asyncio.create_task(server.wait())
    await server.stop()
    assert await ended == 0
    assert "listening" in server.log()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
