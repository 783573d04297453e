"""An engine without a server: a worker process that takes a batch of requests as a line and tells when tokens came.

A line in: `{"requests": [body, ...]}`, bodies as a server with OpenAI's completions would get them, all begun at once.
A line out: `{"requests": [{"input": tokens, "at": [seconds, ...], "tokens": [count, ...]}, ...]}`, seconds after the
line was read. The first line out says that it is ready: `{"ready": text}`. A worker that fails at something ends.
"""

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.live import ANSWER_SECONDS, READY_SECONDS, Served
from loadgen.plan import Plan
from loadgen.records import RequestRecord

END_SECONDS = 10.0
"""How long a worker may take to end by itself."""


class Ended(Exception):
    """The worker has ended, or says nothing."""


@dataclass(frozen=True, slots=True)
class Worker(Served):
    process: subprocess.Popen[bytes]

    async def answers(self, plan: Plan) -> list[RequestRecord]:
        """The online requests of a plan, all at once; nothing else runs in this loop meanwhile."""
        assert plan.online is not None, "a worker answers online requests"
        trace, maker = plan.online, plan.maker()
        bodies = [plan.body(maker, trace, row, row) for row in range(len(trace))]
        records = [
            RequestRecord(row, "online", 0.0, int(trace.input_tokens[row]), int(trace.output_tokens[row]), sent_at=0.0)
            for row in range(len(trace))
        ]
        try:
            found = self._ask({"requests": bodies})["requests"]
        except (Ended, OSError) as error:
            for record in records:
                record.outcome, record.error = "cut", f"the worker: {error}"
            return records
        for record, row in zip(records, found, strict=True):
            fill(record, **row)
        return records

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()
        return read_line(self.process.stdout, ANSWER_SECONDS)


def fill(record: RequestRecord, input: int, at: list[float], tokens: list[int]) -> None:
    """Fill a record with the worker's answer to a request, which was sent when the worker began."""
    record.input_tokens, record.output_tokens = input, sum(tokens)
    record.chunk_at, record.chunk_tokens = at, tokens
    record.outcome = "ok" if at else "empty"
    if at:
        record.first_token_at, record.ended_at = at[0], at[-1]


def read_line(stream: IO[bytes], seconds: float) -> dict[str, Any]:
    """The next line; raises Ended."""
    if not select.select([stream], [], [], seconds)[0]:
        raise Ended(f"nothing was said for {seconds:g} s")
    line = stream.readline()
    if not line:
        raise Ended("it has ended")
    found: dict[str, Any] = json.loads(line)
    return found


@contextmanager
def working(command: Sequence[str], environment: Mapping[str, str], folder: Path, out: IO[bytes]) -> Iterator[Worker]:
    """A worker until the end of the block, started in `folder`. Raises SystemExit when it does not come up."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdin=pipe, stdout=pipe, stderr=out, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    try:
        try:
            print(read_line(process.stdout, READY_SECONDS)["ready"], flush=True)
        except Ended as error:
            raise SystemExit(f"the worker did not start: {error}") from None
        yield Worker("", process.pid, process)
    finally:
        with suppress(OSError):
            process.stdin.close()  # it ends when there is nothing more to read
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
