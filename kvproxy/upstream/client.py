"""What kvproxy itself asks of llama-server: the only file that knows its management URLs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import aiohttp
import orjson

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.tasks import Failure, TaskSet
from kvproxy.upstream import replies
from kvproxy.upstream.calls import Calls, Reply
from kvproxy.upstream.replies import (
    ActionFailure,
    Adapter,
    Completed,
    Erased,
    Fault,
    Obstacle,
    Props,
    Restored,
    Saved,
    SlotInfo,
    Unavailable,
)
from kvproxy.upstream.unreachable import why

ROUTER_ADVICE = (
    "llama-server runs as a router of several models, so requests pass and nothing is saved: "
    "start one llama-server for each model (-m)"
)

T = TypeVar("T")
"""`Saved`, `Restored` or `Erased`."""

QUESTION_SECONDS = 2.0
ACTION_CAP_SECONDS = 600.0


class Action(Generic[T]):
    """A slot action under way. It goes on when the one who waits gives up: a request dropped at a deadline
    may still be run by the server, later, on what another session has put into the slot by then."""

    def __init__(self, task: asyncio.Task[T | ActionFailure]) -> None:
        self._task = task

    @property
    def done(self) -> bool:
        """Whether the fate is known."""
        return self._task.done()

    async def wait(self, timeout: float) -> T | ActionFailure:
        """The answer, or `TIMED_OUT` after `timeout` seconds: then the call goes on, see `fate`."""
        await asyncio.wait({self._task}, timeout=timeout)
        if not self._task.done():
            return ActionFailure(Fault.TIMED_OUT, f"no answer within {timeout:.3g} s")
        return self._answer()

    async def fate(self) -> T | ActionFailure:
        """How it ended; `TIMED_OUT` if that was never heard (the cap passed, or the client was closed)."""
        await asyncio.wait({self._task})
        return self._answer()

    def _answer(self) -> T | ActionFailure:
        if self._task.cancelled():
            return ActionFailure(Fault.TIMED_OUT, "the management client was closed")
        return self._task.result()


class LlamaServer:
    """The management side of the llama-server at `base_url`. Needs a running loop from the first call on.

    `on_failure` hears of an action that died of a bug; without it the loop's exception handler does.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        connect_timeout_seconds: float,
        action_cap_seconds: float = ACTION_CAP_SECONDS,
        on_failure: Failure | None = None,
    ) -> None:
        self._calls = Calls(base_url, api_key, connect_timeout_seconds=connect_timeout_seconds)
        self._cap_seconds = action_cap_seconds
        self._actions = TaskSet(on_failure or _tell_loop)

    @property
    def base_url(self) -> str:
        return self._calls.base_url

    async def props(self, timeout: float = QUESTION_SECONDS) -> Props | Unavailable:
        """Does not wake a sleeping server."""
        reply = await self._ask("/props", timeout)
        if isinstance(reply, Unavailable):
            return reply
        if replies.is_router(reply.body):
            return Unavailable(Obstacle.ROUTER, ROUTER_ADVICE)
        return replies.parse_props(reply.body) or _foreign("/props")

    async def slots(self, timeout: float = QUESTION_SECONDS) -> tuple[SlotInfo, ...] | Unavailable:
        """Wakes a sleeping server: ask `props` first. `UNSUPPORTED` where it runs with --no-slots."""
        reply = await self._ask("/slots", timeout)
        if isinstance(reply, Unavailable):
            return reply
        slots = replies.parse_slots(reply.body)
        return _foreign("/slots") if slots is None else slots

    async def model_meta(self, timeout: float = QUESTION_SECONDS) -> Mapping[str, Any]:
        """n_vocab, n_ctx_train, n_embd, n_params, size, ftype of the model; {} when it cannot be had."""
        reply = await self._ask("/v1/models", timeout)
        return {} if isinstance(reply, Unavailable) else replies.parse_meta(reply.body)

    async def apply_template(
        self, document: Mapping[str, object], timeout: float = QUESTION_SECONDS
    ) -> str | Unavailable:
        """The prompt that a chat/completions request is rendered to, by the code that serves such requests.

        `NOT_LLAMA_SERVER` where the template does not accept the messages; the message has its words.
        """
        reply = await self._ask("/apply-template", timeout, document)
        if isinstance(reply, Unavailable):
            return reply
        prompt = replies.parse_prompt(reply.body)
        return _foreign("/apply-template") if prompt is None else prompt

    async def tokenize(
        self, text: str, timeout: float = QUESTION_SECONDS, *, as_prompt: bool = False
    ) -> tuple[int, ...] | Unavailable:
        """`as_prompt`: with the special tokens that go before a prompt. Wakes a sleeping server."""
        special = {"add_special": True, "parse_special": True} if as_prompt else {}
        reply = await self._ask("/tokenize", timeout, {"content": text, **special})
        if isinstance(reply, Unavailable):
            return reply
        tokens = replies.parse_tokens(reply.body)
        return _foreign("/tokenize") if tokens is None else tokens

    async def complete(
        self, slot: SlotId, prompt: Sequence[int], *, n_predict: int, timeout: float
    ) -> Completed | Unavailable:
        """Put the token ids `prompt` through `slot` and generate exactly `n_predict` tokens after them.

        Whatever the slot held is lost, and the slot must be idle: a request pinned to a busy one can
        corrupt the answer it is giving.
        """
        body = {
            "prompt": list(prompt),
            "id_slot": slot,
            "cache_prompt": True,
            "n_predict": n_predict,
            "ignore_eos": True,
            "temperature": 0,
        }
        reply = await self._ask("/completion", timeout, body)
        if isinstance(reply, Unavailable):
            return reply
        return replies.parse_completed(reply.body) or _foreign("/completion")

    async def ask_message(self, slot: SlotId, text: str, timeout: float) -> bool:
        """Ask the Messages API for one token after `text`, naming `slot`, which it may ignore; whether it
        answered."""
        body = {
            "model": "any",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": text}],
            "id_slot": slot,
        }
        return not isinstance(await self._ask("/v1/messages", timeout, body), Unavailable)

    async def likely_next(
        self, slot: SlotId, prompt: str, *, top: int, timeout: float
    ) -> tuple[tuple[int, float], ...] | Unavailable:
        """The `top` likeliest tokens after `prompt`, by the model alone: id and natural logarithm of the
        probability. Computed in `slot` from the beginning; what holds for `complete` holds for it."""
        body = {
            "prompt": prompt,
            "id_slot": slot,
            "cache_prompt": False,
            "n_predict": 1,
            "n_probs": top,
            "post_sampling_probs": False,
            "temperature": 0,
            # The token it says, whatever is likeliest: after half a character the server tells no
            # probabilities. They are taken before the bias.
            "logit_bias": [["a", 1000]],
        }
        reply = await self._ask("/completion", timeout, body)
        if isinstance(reply, Unavailable):
            return reply
        return replies.parse_likely(reply.body) or _foreign("/completion")

    async def adapters(self, timeout: float = QUESTION_SECONDS) -> tuple[Adapter, ...] | Unavailable:
        """Wakes a sleeping server."""
        reply = await self._ask("/lora-adapters", timeout)
        if isinstance(reply, Unavailable):
            return reply
        adapters = replies.parse_adapters(reply.body)
        return _foreign("/lora-adapters") if adapters is None else adapters

    async def actions_supported(self, timeout: float = QUESTION_SECONDS) -> ActionFailure | None:
        """None if slot actions work. Asks for a save under a name that the server must refuse before it
        looks at the slot, so no slot is touched. Wakes a sleeping server."""
        outcome = await self._call("/slots/0?action=save", {"filename": "/"}, timeout)
        if isinstance(outcome, Reply):
            return None if outcome.status == 400 else _action_failure(outcome)
        return outcome

    def start_save(self, slot: SlotId, name: SnapshotName) -> Action[Saved]:
        return self._start("save", slot, name, replies.parse_saved)

    def start_restore(self, slot: SlotId, name: SnapshotName) -> Action[Restored]:
        """A restore that fails leaves the slot empty."""
        return self._start("restore", slot, name, replies.parse_restored)

    def start_erase(self, slot: SlotId) -> Action[Erased]:
        return self._start("erase", slot, None, replies.parse_erased)

    async def settled(self, timeout: float) -> bool:
        """Wait until every call now under way is over; False if one is not within `timeout` seconds.

        One that was made of the process before may still reach the one that took its place.
        """
        await asyncio.sleep(0)  # an action just started has not made its call yet
        return await self._calls.settled(timeout)

    async def close(self) -> None:
        """Cancel all actions and close every connection."""
        await self._actions.cancel()
        await self._calls.close()

    def _start(
        self, verb: str, slot: SlotId, name: SnapshotName | None, parse: Callable[[object], T | None]
    ) -> Action[T]:
        return Action(self._actions.spawn(self._act(verb, slot, name, parse), name=f"{verb} slot {slot}"))

    async def _act(
        self, verb: str, slot: SlotId, name: SnapshotName | None, parse: Callable[[object], T | None]
    ) -> T | ActionFailure:
        outcome = await self._call(
            f"/slots/{slot}?action={verb}", {} if name is None else {"filename": name}, self._cap_seconds
        )
        if isinstance(outcome, ActionFailure):
            return outcome
        if outcome.status != 200:
            return _action_failure(outcome)
        if replies.parse_slot_id(outcome.body) != slot:
            return ActionFailure(Fault.FAILED, f"the answer to {verb} names another slot", outcome.status)
        return parse(outcome.body) or ActionFailure(
            Fault.FAILED, f"the answer to {verb} is not llama-server's", outcome.status
        )

    async def _call(self, target: str, body: Mapping[str, str], cap: float) -> Reply | ActionFailure:
        try:
            return await self._calls.make("POST", target, cap, orjson.dumps(body))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return ActionFailure(Fault.UNREACHABLE, _told(error), was_sent=False)
        except aiohttp.ClientError as error:
            return ActionFailure(Fault.UNREACHABLE, _told(error))
        except TimeoutError:
            return ActionFailure(Fault.TIMED_OUT, f"no answer within {cap:.3g} s")
        except OSError as error:
            return ActionFailure(Fault.UNREACHABLE, _told(error))

    async def _ask(
        self, target: str, timeout: float, body: Mapping[str, object] | None = None
    ) -> Reply | Unavailable:
        """GET, or POST where there is a `body`."""
        try:
            data = None if body is None else orjson.dumps(body)
        except orjson.JSONEncodeError as error:  # a client's document, nested deeper than can be written
            message = f"what {target} is asked cannot be written: {error}"
            return Unavailable(Obstacle.UNWRITABLE, message)
        try:
            reply = await self._calls.make("GET" if data is None else "POST", target, timeout, data)
        except aiohttp.ClientError as error:
            return Unavailable(Obstacle.UNREACHABLE, _told(error))
        except TimeoutError:
            return Unavailable(Obstacle.UNREACHABLE, f"no answer within {timeout:.3g} s")
        except OSError as error:
            return Unavailable(Obstacle.UNREACHABLE, _told(error))
        except orjson.JSONEncodeError as error:  # a client's document, nested deeper than the library writes
            return Unavailable(Obstacle.NOT_LLAMA_SERVER, f"{target} cannot be asked: {error}")
        return reply if reply.status == 200 else _refused(target, reply)


def _obstacle(reply: Reply) -> Obstacle:
    if reply.status in (401, 403):
        return Obstacle.UNAUTHORIZED
    if reply.status == 501:
        return Obstacle.UNSUPPORTED
    if reply.status == 503 and replies.parse_error(reply.body):
        return Obstacle.LOADING
    return Obstacle.UNREACHABLE if reply.status >= 500 else Obstacle.NOT_LLAMA_SERVER


_FAULTS = {
    400: Fault.REFUSED,
    401: Fault.UNAUTHORIZED,
    403: Fault.UNAUTHORIZED,
    404: Fault.UNSUPPORTED,
    501: Fault.UNSUPPORTED,
    503: Fault.UNREACHABLE,
}


def _action_failure(reply: Reply) -> ActionFailure:
    return ActionFailure(_FAULTS.get(reply.status, Fault.FAILED), reply.message, reply.status)


def _refused(target: str, reply: Reply) -> Unavailable:
    obstacle = _obstacle(reply)
    if obstacle is Obstacle.NOT_LLAMA_SERVER and not replies.parse_error(reply.body):
        return Unavailable(obstacle, f"{_foreign(target).message} ({reply.message})")
    return Unavailable(obstacle, reply.message)


def _foreign(target: str) -> Unavailable:
    return Unavailable(Obstacle.NOT_LLAMA_SERVER, f"the answer to {target} is not llama-server's")


def _told(error: Exception) -> str:
    return replies.one_line(why(error))


def _tell_loop(name: str, error: BaseException) -> None:
    context = {"message": f"{name} died", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)
