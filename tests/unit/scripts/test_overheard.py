from __future__ import annotations

import json
import socket
import threading

import pytest

from scripts import overheard
from scripts.overheard import Answered, Wire

CHAT = ("POST", "/v1/chat/completions")


def whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers))
    return head.encode() + b"\r\n\r\n" + body


def in_chunks(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-KVProxy-Outcome: restored\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def test_answers_on_one_connection_are_told_apart() -> None:
    timings = json.dumps({"timings": {"prompt_n": 3, "cache_n": 40}}).encode()
    carried = whole(b"", status="404 Not Found") + whole(timings, "X-KVProxy-Outcome: resident")
    first, second = overheard.answers([("GET", "/"), CHAT], carried)
    assert first == Answered("GET", "/", 404, {"content-length": "0"}, None, None)
    assert (second.status, second.headers["x-kvproxy-outcome"]) == (200, "resident")
    assert (second.computed, second.reused) == (3, 40)


def test_a_head_has_no_body_whatever_length_it_names() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    first, second = overheard.answers([("HEAD", "/"), CHAT], head + whole(b"{}"))
    assert (first.status, second.status) == (200, 200)


def test_leave_to_send_is_not_taken_for_the_answer() -> None:
    (only,) = overheard.answers([CHAT], b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"{}"))
    assert only.status == 200


def test_events_are_read_across_chunks() -> None:
    event = b'data: {"timings":{"prompt_n":5,"cache_n":60}}\n\n'
    (only,) = overheard.answers(
        [CHAT], in_chunks(b": hello\n\n" + event[:20], event[20:] + b"data: [DONE]\n\n")
    )
    assert (only.headers["x-kvproxy-outcome"], only.computed, only.reused) == ("restored", 5, 60)


def test_a_stream_that_was_cut_tells_what_it_had_told() -> None:
    usage = b'{"input_tokens":7,"cache_read_input_tokens":80}'
    said = b'event: message_start\ndata: {"message":{"usage":%b}}\n\n' % usage
    cut = in_chunks(said, b'data: {"delta": "and')[:-12]
    (only,) = overheard.answers([("POST", "/v1/messages")], cut)
    assert (only.status, only.computed, only.reused) == (200, 7, 80)


def test_what_was_never_answered_has_no_status() -> None:
    (only,) = overheard.answers([CHAT], b"")
    assert only == Answered(*CHAT, 0, {}, None, None)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"timings": {"prompt_n": 1, "cache_n": 20}}', (1, 20)),
        (b'{"usage": {"input_tokens": 2, "cache_read_input_tokens": 30}}', (2, 30)),
        (b'{"usage": {"input_tokens": 43, "input_tokens_details": {"cached_tokens": 40}}}', (3, 40)),
        (
            b'data: {"response": {"usage": null}}\n\ndata: {"response": {"usage":'
            b' {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}}}',
            (1, 8),
        ),
        (b'{"error": {"message": "no"}}', (None, None)),
        (b"<html>", (None, None)),
        (b"[]", (None, None)),
    ],
)
def test_tokens_are_found_in_every_dialect(body: bytes, tokens: tuple[int | None, int | None]) -> None:
    assert overheard.tokens_of(body) == tokens


def test_a_wire_passes_all_on_and_remembers_it_once() -> None:
    request = b"POST /v1/messages HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(len(request), socket.MSG_WAITALL) == request
                connection.sendall(whole(b"{}", "X-KVProxy-Outcome: cold"))

        server = threading.Thread(target=serve)
        server.start()
        wire = Wire(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", int(wire.url.rpartition(":")[2]))) as client:
            client.sendall(request)
            got = b"".join(iter(lambda: client.recv(4096), b""))
        server.join()
    assert got.endswith(b"{}")
    (only,) = wire.take()
    assert (only.target, only.headers["x-kvproxy-outcome"]) == ("/v1/messages", "cold")
    assert wire.take() == []
