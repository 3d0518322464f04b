"""What browsers, probes and resumable streams need: passed on, with nothing added but what is ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.proxy import house
from tests.support.talk import Talk

CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-session-id",
}


async def test_a_preflight_needs_no_key_and_is_answered_once_by_the_server(tmp_path: Path) -> None:
    async with house(tmp_path, api_key="secret", upstream={"api_key": "secret"}) as here:
        async with here.proxy.client.options(CHAT, headers=PREFLIGHT) as response:
            assert response.status == 200
            assert response.headers.getall("Access-Control-Allow-Origin") == ["https://chat.example"]
        assert here.fake.calls[-1].method == "OPTIONS"


async def test_a_browsers_page_may_read_what_it_is_told(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk = Talk("alpha")
        answer = await here.proxy.post(CHAT, talk.body(), Origin="https://chat.example", **talk.headers)
        exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
        own = {name for name in answer.headers if name.lower().startswith("x-kvproxy-")}
        assert own
        assert own == set(exposed)


async def test_others_are_not_told_what_a_browser_needs(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        assert "Access-Control-Expose-Headers" not in (await here.proxy.turn(Talk("alpha"))).headers


@pytest.mark.parametrize("path", ["/api/hello", "/nothing/here?x=1"])
async def test_an_unknown_probe_gets_the_servers_own_404(tmp_path: Path, path: str) -> None:
    async with house(tmp_path) as here, here.proxy.client.head(path) as response:
        assert response.status == 404
        assert await response.read() == b""


async def test_a_resumable_stream_is_known_by_its_id_which_passes_as_it_is(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk, ids = Talk("alpha"), {"X-Conversation-Id": "c1::some-model"}
        answer = await here.proxy.post(CHAT, talk.body(), **ids)
        sent = next(call for call in here.fake.calls if call.path == CHAT)
        assert sent.headers["X-Conversation-Id"] == "c1::some-model"
        talk.heard(answer.text)
        again = await here.proxy.post(CHAT, talk.body(), **ids)
        assert again.told == ("resident", None)
        assert (await here.proxy.admin("GET", "sessions/c1")).status == 200


async def test_no_other_id_ever_becomes_a_resumable_streams(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        await here.proxy.turn(Talk("beta"))
        assert here.fake.calls
        assert not any("X-Conversation-Id" in call.headers for call in here.fake.calls)


async def test_a_resumable_stream_that_is_left_keeps_its_slot_until_it_was_seen_to_end(
    tmp_path: Path,
) -> None:
    """The server goes on with it; another conversation that was put there would be mixed with it."""
    async with house(tmp_path, token_delay=0.01) as here:
        talk = Talk("alpha", predict=40)
        body = talk.body(stream=True)
        async with here.proxy.client.post(CHAT, json=body, headers={"X-Conversation-Id": "c1"}) as response:
            await response.content.readany()
            response.close()
        await here.proxy.until(lambda: here.proxy.slot_states == ["cancelling"])
        other = await here.proxy.turn(Talk("beta"))
        assert other.status == 200
        assert here.fake.max_concurrent_on_slot == 1
        back = await here.proxy.post(CHAT, talk.body(), **{"X-Conversation-Id": "c1"})
        assert back.told == ("restored", None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/stream?conv_id=c1&from=0"),
        ("DELETE", "/v1/stream?conv_id=c1"),
        ("POST", "/v1/streams/lookup"),
    ],
)
async def test_the_routes_of_resumable_streams_pass_without_a_slot(
    tmp_path: Path, method: str, path: str
) -> None:
    async with house(tmp_path, token_delay=0.01) as here:
        async with here.proxy.stream(Talk("alpha", predict=60)) as busy:
            await busy.first()
            async with here.proxy.client.request(method, path) as response:
                await response.read()
            call = here.fake.calls[-1]
            assert (call.method, call.path) == (method, path.partition("?")[0])
            assert here.proxy.runtime.desk.waiting == 0
