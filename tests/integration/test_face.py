"""What a client meets at the door: hosts, closed routes, limits, errors in its dialect, and our headers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxy import house
from tests.support.raw import connection
from tests.support.talk import Talk


async def test_a_request_for_a_host_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path, security={"allowed_hosts": ["kv.example"]}) as here:
        a = Talk("alpha")
        here.forget_calls()
        rebound = await here.proxy.post("/v1/chat/completions", a.body(), Host="evil.example")
        assert (rebound.status, rebound.code) == (403, "KV_HOST_FORBIDDEN")
        admin = await here.proxy.get("/kvproxy/status", Host="evil.example")
        assert (admin.status, admin.code) == (403, "KV_HOST_FORBIDDEN")
        assert here.completions() == 0
        allowed = await here.proxy.post("/v1/chat/completions", a.body(), Host="kv.example:8090")
        assert allowed.status == 200
        assert (await here.proxy.get("/kvproxy/healthz", Host="10.0.0.7")).status == 200


async def test_a_request_without_a_host_is_told_what_it_lacks(tmp_path: Path) -> None:
    async with house(tmp_path) as here, connection(here.proxy.port) as client:
        await client.send(b"GET /health HTTP/1.0\r\n\r\n")
        answer = await asyncio.wait_for(client.rest(), 10)
    assert b" 403 " in answer
    assert b"the request has no Host header: send one" in answer


CLOSED = [
    ("POST", "/slots/0?action=erase"),
    ("POST", "/slots/0?action=save"),
    ("POST", "/sl%6fts/0?action=erase"),
    ("POST", "/props"),
    ("POST", "/lora-adapters"),
    ("POST", "/models/load"),
    ("POST", "/models/unload"),
    ("DELETE", "/models"),
    ("GET", "/cors-proxy"),
    ("POST", "/tools"),
]


@pytest.mark.parametrize(("method", "path"), CLOSED, ids=[f"{m} {p}" for m, p in CLOSED])
async def test_a_management_route_is_closed_to_clients(tmp_path: Path, method: str, path: str) -> None:
    async with house(tmp_path) as here:
        here.forget_calls()
        async with here.proxy.client.request(method, path, json={}) as response:
            assert response.status == 403
            assert response.headers["X-KVProxy-Error"] == "KV_ROUTE_FORBIDDEN"
            assert (await response.json())["error"]["code"] == "KV_ROUTE_FORBIDDEN"
        assert {call.path for call in here.fake.calls} <= {"/health", "/props"}


async def test_a_management_route_is_closed_however_the_server_lets_it_be_spelled(tmp_path: Path) -> None:
    async with house(tmp_path) as here, connection(here.proxy.port) as client:
        host = f"Host: 127.0.0.1:{here.proxy.port}\r\n"
        await client.send(f"POST /sl%u006fts/0?action=erase HTTP/1.1\r\n{host}\r\n".encode())
        assert b" 403 " in await asyncio.wait_for(client.head(), 10)


async def test_what_only_looks_passes(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        for path in ("/health", "/v1/models", "/props", "/slots", "/lora-adapters"):
            answer = await here.proxy.get(path)
            assert answer.status == 200, path
            assert answer.outcome is None
        assert (await here.proxy.post("/tokenize", {"content": "abc"})).body["tokens"]
        assert here.proxy.slot_states == ["idle"]


async def test_with_keys_the_slots_are_shown_to_nobody(tmp_path: Path) -> None:
    async with house(tmp_path, api_key="secret", upstream={"api_key": "secret"}) as here:
        answer = await here.proxy.get("/slots")
        assert (answer.status, answer.code) == (403, "KV_ROUTE_FORBIDDEN")


BIG: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 4}


async def test_a_body_over_the_limit_is_refused_in_the_callers_dialect(tmp_path: Path) -> None:
    async with house(tmp_path, server={"listen": "127.0.0.1:0", "max_body_bytes": 2048}) as here:
        openai = await here.proxy.post("/v1/chat/completions", BIG)
        assert (openai.status, openai.code) == (413, "KV_BODY_TOO_LARGE")
        assert openai.body["error"]["code"] == "KV_BODY_TOO_LARGE"
        assert set(openai.body["error"]) == {"message", "type", "code"}
        anthropic = await here.proxy.post("/v1/messages", BIG)
        assert (anthropic.status, anthropic.code) == (413, "KV_BODY_TOO_LARGE")
        assert anthropic.body["type"] == "error"
        assert anthropic.body["error"]["type"] == "request_too_large"
        assert here.completions() == 0
        assert (await here.proxy.turn(Talk("alpha", words=1))).status == 200


async def test_our_headers_can_be_switched_off(tmp_path: Path) -> None:
    async with house(tmp_path, server={"listen": "127.0.0.1:0", "response_headers": False}) as here:
        a = Talk("alpha")
        for talk in (a, Talk("beta"), a):
            answer = await here.proxy.turn(talk)
            assert not [name for name in answer.headers if name.lower().startswith("x-kvproxy")]
        assert here.proxy.done[-1].outcome == "restored"


async def test_an_error_of_the_server_passes_as_it_is_and_leaves_the_slot_as_it_was(tmp_path: Path) -> None:
    async with house(tmp_path, n_ctx=600) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        said = [*a.messages, {"role": "user", "content": "x" * 700}]
        answer = await here.proxy.post("/v1/chat/completions", {"messages": said}, **a.headers)
        assert (answer.status, answer.code) == (400, None)
        assert answer.body["error"]["type"] == "exceed_context_size_error"
        assert (await here.proxy.turn(a)).told == ("resident", None)


async def test_the_authority_of_an_absolute_target_is_the_host_that_was_asked_for(tmp_path: Path) -> None:
    async with house(tmp_path) as here, connection(here.proxy.port) as client:
        await client.send(b"GET http://localhost:9/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(client.head(), 10)
        (call,) = [call for call in here.fake.calls if call.path == "/v1/models"]
        assert call.target == "/v1/models"
        assert call.headers["X-Forwarded-Host"] == "localhost:9"


async def test_our_own_request_headers_do_not_reach_the_server(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        headers = {**a.headers, "X-KVProxy-Persist": "no", "X-KVProxy-Purpose": "main"}
        await here.proxy.post("/v1/chat/completions", a.body(), **headers)
        (call,) = (call for call in here.fake.calls if call.path == "/v1/chat/completions")
        assert not [name for name in call.headers if name.lower().startswith("x-kvproxy")]
        assert call.headers["X-Session-Id"] == "alpha"


async def test_the_body_differs_by_two_fields_at_its_end_and_nothing_else(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        body = b'{ "max_tokens": 4e0, "messages" : [{"role":"user","content":"CANARY-\\u0061"}] ,"x":1.10 }\n'
        await here.proxy.post("/v1/chat/completions", body, **{"X-Session-Id": "alpha"})
        (call,) = (call for call in here.fake.calls if call.path == "/v1/chat/completions")
        assert call.body == body.replace(b" }\n", b' ,"id_slot":0,"cache_prompt":true}\n')


@pytest.mark.parametrize(
    "header", ["x-session-id", "x-session-affinity", "x-opencode-session", "agent-session-id"]
)
async def test_each_known_header_names_a_conversation(tmp_path: Path, header: str) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        for told in (("cold", "new-session"), ("resident", None)):
            answer = await here.proxy.post("/v1/chat/completions", a.body(), **{header: "alpha"})
            assert answer.told == told


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses"])
async def test_a_conversation_survives_a_switch_on_every_endpoint_that_can_be_pinned(
    tmp_path: Path, path: str
) -> None:
    async with house(tmp_path) as here:
        text = "CANARY-alpha says something long enough to be worth it " * 3
        body = {
            "prompt": text,
            "input": text,
            "messages": [{"role": "user", "content": text}],
            "n_predict": 4,
            "max_tokens": 4,
            "max_output_tokens": 4,
        }
        session = {"X-Session-Id": "alpha"}
        assert (await here.proxy.post(path, body, **session)).told == ("cold", "new-session")
        await here.proxy.turn(Talk("beta"))
        assert (await here.proxy.post(path, body, **session)).told == ("restored", None)
        await here.proxy.at_rest()
        done = here.proxy.done[-1]
        assert done.reused_tokens is not None
        assert done.reused_tokens > 100
        assert done.verdict == "confirmed"
