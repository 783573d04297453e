"""`tidemill try`: chats for a few seconds, then the same chats beside a batch, with the server's own figures."""

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.client import MAX_SEARCHED, TERMINAL, ChatError, ServerClient

QUESTIONS = tuple(f"What is the capital of {name}?" for name in ("France", "Italy", "Spain", "Japan"))
CHAT_TOKENS, LINE_TOKENS = 48, 64
LINES = 20_000
"""Lines of the batch, which is deleted at the end."""
ENDPOINT = "/v1/messages"
"""Endpoint of the batch: only batches of messages can be deleted."""
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 2.0
"""Time in which the last chats of a part end and are judged."""
_SAMPLE = r"^tidemill_{} (\S+)$"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the server at one time; times in seconds."""

    at: float
    good: float
    bad: float
    busy: float
    """Time in model steps of one engine."""


@dataclass(slots=True)
class Trial:
    """One trial of a server. `rate`: chats a second; `seconds`: length, a third of it without the batch."""

    client: ServerClient
    rate: float = 1.0
    seconds: float = 30.0
    show: Callable[[str], None] = print
    failures: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run both parts, show a line for each, delete the batch. Raises ChatError if the server is unreachable."""
        model = self.client.first_model()
        before = self._part(model, self.seconds / 3, None)
        idle = 1.0 - before.busy / before.at
        self.show(f"chats alone: {_kept(before)}; the machine was idle {max(0.0, idle):.0%} of the time")
        input_id = self._upload(model)
        try:
            batch = self._create(input_id)
            began = time.monotonic()
            beside = self._part(model, self.seconds * 2 / 3, batch)
            ended = self.client.batch(batch)
            for error in (ended["errors"] or {}).get("data", []):
                raise ChatError(f"the batch failed: {error['message']}")
            lines = ended["request_counts"]["completed"]
            passed = time.monotonic() - began
        finally:
            self._delete(input_id)
        self.show(f"chats beside a batch: {_kept(beside)}; {lines:,} lines done, {lines / passed:.1f} a second")
        if self.failures:
            self.show(f"{len(self.failures)} chats failed: {self.failures[0]}")

    def _part(self, model: str, seconds: float, batch: str | None) -> Reading:
        """Send chats at an even rate, and return how much the counters have grown."""
        name = "chats beside a batch" if batch else "chats alone"
        if not sys.stderr.isatty():
            print(f"{name}, {seconds:.0f} s ...", file=sys.stderr)
        start, chats = self._reading(), list[threading.Thread]()
        while (passed := time.monotonic() - start.at) < seconds:
            if len(chats) <= passed * self.rate:
                question = QUESTIONS[len(chats) % len(QUESTIONS)]
                chats.append(threading.Thread(target=self._chat, args=(model, question), daemon=True))
                chats[-1].start()
            time.sleep(min(LOOK_SECONDS, 0.5 / self.rate))
            if sys.stderr.isatty():
                print(f"\r{name}: {passed:.0f} of {seconds:.0f} s", end="", file=sys.stderr)
        end = self._reading()
        for chat in chats:
            chat.join(timeout=60.0)
        time.sleep(min(SETTLE_SECONDS, self.seconds / 10))
        judged = self._reading()
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        return Reading(end.at - start.at, judged.good - start.good, judged.bad - start.bad, end.busy - start.busy)

    def _chat(self, model: str, question: str) -> None:
        try:
            for _ in self.client.stream(model, [{"role": "user", "content": question}]):
                pass
        except ChatError as error:
            self.failures.append(str(error))

    def _reading(self) -> Reading:
        page = self.client.metrics()

        def value(name: str) -> float:
            return sum(float(found) for found in re.findall(_SAMPLE.format(name), page, re.MULTILINE))

        good, bad = (value(rf'slo_requests_total{{good="{each}"}}') for each in ("true", "false"))
        engines = max(1, len(re.findall(r"^tidemill_engine_ready\{", page, re.MULTILINE)))
        return Reading(time.monotonic(), good, bad, value("step_seconds") / engines)

    def _upload(self, model: str) -> str:
        """Store the lines of the batch; return the id of the file."""
        with tempfile.TemporaryDirectory(prefix="tidemill-") as folder:
            path = Path(folder) / "trial.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for number in range(LINES):
                    question = [{"role": "user", "content": f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"}]
                    body = {"model": model, "messages": question, "max_tokens": LINE_TOKENS}
                    line = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}
                    file.write(json.dumps(line) + "\n")
            return self.client.upload(path)

    def _create(self, input_id: str) -> str:
        body = {"endpoint": ENDPOINT, "completion_window": "1h", "input_file_id": input_id}
        return str(self.client.call("POST", "/v1/batches", body)["id"])

    def _delete(self, input_id: str) -> None:
        """Cancel the batch, wait for its end, and delete it with its files, also if its creation was interrupted."""
        try:
            for batch in self.client.batches(MAX_SEARCHED):
                if batch["input_file_id"] == input_id:
                    if batch["status"] not in TERMINAL:
                        self.client.call("POST", f"/v1/batches/{batch['id']}/cancel")
                    for _ in self.client.changes(batch["id"]):
                        pass
                    self.client.call("DELETE", f"{ENDPOINT}/batches/msg{batch['id']}")
            self.client.call("DELETE", f"/v1/files/{input_id}")
        except (ChatError, KeyboardInterrupt) as error:
            self.show(f"the batch of {input_id} may remain; `tidemill batch list` shows it: {error or 'interrupted'}")
            if isinstance(error, KeyboardInterrupt):
                raise


def _kept(grown: Reading) -> str:
    judged = grown.good + grown.bad
    return f"{grown.good / judged:.0%} of {judged:.0f} in time" if judged else "none was judged"
