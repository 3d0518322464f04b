"""Three conversations on two slots of a real llama-server, through kvproxy and directly, kills in between.

Both ways get the same steps, one after the other, each with a llama-server of its own and the same flags.
Ends with code 1 if kvproxy lets anything be computed twice.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # run as a file, it would not find its package

from scripts import console, demo_processes, demo_report, llama_server, models
from scripts.demo_processes import Service
from scripts.demo_report import Step
from scripts.demo_talk import INCIDENT, JOURNAL, SPECIFICATION, TOPICS, Answer, Conversation, Topic, ask

SAVED_SECONDS = 30.0


class Demo:
    """The same conversations twice: behind `kvproxy`, and with `direct_llama`."""

    def __init__(self, proxied_llama: Service, kvproxy: Service, direct_llama: Service) -> None:
        self._llamas = (proxied_llama, direct_llama)
        self._kvproxy = kvproxy
        self._proxied = {topic: Conversation(topic) for topic in TOPICS}
        self._direct = {topic: Conversation(topic) for topic in TOPICS}
        self.steps: list[Step] = []

    def ask(self, title: str, topic: Topic, *, is_after_restart: bool = False) -> None:
        """One question both ways. Raises `console.Trouble` where kvproxy should have reused and did not."""
        number, known = len(self.steps) + 1, self._proxied[topic].prompt_tokens
        console.say(f"   ... {number}: {topic.name}")
        proxied = self._turn(self._kvproxy, self._proxied[topic])
        direct = self._turn(self._llamas[1], self._direct[topic])
        step = Step(number, title, known, proxied, direct, is_after_restart)
        self.steps.append(step)
        print(demo_report.line(step), flush=True)
        if (fault := demo_report.fault(step)) is not None:
            raise console.Trouble(fault, f"the last lines of kvproxy's log:\n{self._kvproxy.last_lines()}")

    def _turn(self, service: Service, conversation: Conversation) -> Answer:
        messages = conversation.next_messages()
        try:
            answer = ask(service.port, conversation.topic.name, messages)
        except (OSError, http.client.HTTPException) as error:
            raise console.Trouble(
                f"{service.name} broke off: {error!r}", f"its last lines:\n{service.last_lines()}"
            ) from error
        conversation.answered(messages, answer)
        return answer

    def happens(self, what: str, *deeds: Callable[[], None]) -> None:
        print(f"\n   {what}", flush=True)
        for deed in deeds:
            deed()

    def kill_llamas(self) -> None:
        for llama in self._llamas:
            llama.kill()

    def start_llamas(self) -> None:
        for llama in self._llamas:
            llama.start()

    def until_saved(self) -> None:
        """Wait for the checkpoint that kvproxy takes when it is left alone for a second."""
        until = time.perf_counter() + SAVED_SECONDS
        while demo_processes.is_dirty(self._status()):
            if time.perf_counter() > until:
                raise console.Trouble(
                    "kvproxy did not save", f"its last lines:\n{self._kvproxy.last_lines()}"
                )
            time.sleep(0.1)

    def _status(self) -> dict[str, object]:
        connection = http.client.HTTPConnection("127.0.0.1", self._kvproxy.port, timeout=10)
        try:
            connection.request("GET", "/kvproxy/status")
            status: dict[str, object] = json.loads(connection.getresponse().read())
            return status
        finally:
            connection.close()

    def play(self) -> None:
        print(demo_report.head())
        self.ask("specification, first question", SPECIFICATION)
        self.ask("incident, first question", INCIDENT)
        self.ask("journal, first question: a third one", JOURNAL)
        self.ask("back to the specification", SPECIFICATION)
        self.ask("back to the incident", INCIDENT)
        self.happens(
            "a second of quiet; then llama-server is killed (-9) and started again",
            self.until_saved,
            self.kill_llamas,
            self.start_llamas,
        )
        self.ask("the specification goes on", SPECIFICATION, is_after_restart=True)
        self.ask("the journal goes on", JOURNAL, is_after_restart=True)
        self.happens(
            "a second of quiet; then kvproxy is killed (-9) and started again",
            self.until_saved,
            self._kvproxy.kill,
            self._kvproxy.start,
        )
        self.ask("the journal goes on", JOURNAL)
        self.happens(
            "kvproxy is stopped (SIGTERM), llama-server killed (-9), and both are started again",
            self._kvproxy.stop,
            self.kill_llamas,
            self.start_llamas,
            self._kvproxy.start,
        )
        self.ask("the journal goes on", JOURNAL, is_after_restart=True)
        self.ask("the incident goes on", INCIDENT, is_after_restart=True)
        print(f"\n{demo_report.summary(self.steps)}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # ends us as Ctrl-C does: with everything stopped
    binary, model = llama_server.find_or_build(), models.chat_model()
    with tempfile.TemporaryDirectory(prefix="kvproxy-demo-") as name, ExitStack() as stack:
        folder = Path(name)
        proxied = demo_processes.llama_server(binary, model, folder / "proxied", "llama-server")
        direct = demo_processes.llama_server(binary, model, folder / "direct", "the direct llama-server")
        kvproxy = demo_processes.kvproxy(proxied, folder / "proxied")
        demo_processes.started((proxied, direct, kvproxy), stack)
        console.say("two llama-servers with two slots each, one of them behind kvproxy; about two minutes")
        Demo(proxied, kvproxy, direct).play()


if __name__ == "__main__":
    sys.exit(console.run(main))
