from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvproxy.boundary.prefix import Boundary
from kvproxy.boundary.rewind import NotRewound, Rewound, rewind
from kvproxy.identifiers import SlotId
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Completed, Obstacle, Unavailable

BOUNDARY = Boundary(tuple(range(20)), kept=20)


class Server:
    def __init__(self, answer: Completed | Unavailable) -> None:
        self.answer = answer
        self.asked: list[tuple[SlotId, Sequence[int], dict[str, Any]]] = []

    async def complete(self, slot: SlotId, prompt: Sequence[int], **more: Any) -> Completed | Unavailable:
        self.asked.append((slot, prompt, more))
        return self.answer


async def rewound(server: Server) -> Rewound | NotRewound:
    return await rewind(cast(LlamaServer, server), SlotId(3), BOUNDARY, timeout=7)


async def test_the_boundary_is_evaluated_in_the_slot_and_nothing_is_generated() -> None:
    server = Server(Completed(computed=3, reused=17))
    assert await rewound(server) == Rewound(computed=3, reused=17)
    assert server.asked == [(SlotId(3), BOUNDARY.ids, {"n_predict": 0, "timeout": 7})]


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (Unavailable(Obstacle.UNREACHABLE, "no answer within 7 s"), "no answer within 7 s"),
        (Completed(computed=3, reused=16), "19 tokens where 20 were sent"),
    ],
)
async def test_a_slot_that_is_not_known_to_hold_the_boundary_is_not_rewound(
    answer: Completed | Unavailable, detail: str
) -> None:
    assert await rewound(Server(answer)) == NotRewound(detail)
