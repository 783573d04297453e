"""Kill `tidemill batch run` with SIGKILL at random instants of its work, and check that each row has its answer once.

    python batch_run_killer.py URL FOLDER SUFFIX KILLS [SEED]

A run is a forked child of this process, which has imported everything, so that an instant is one of real work. A table
that is complete is checked, and the next one begins. Prints counts as JSON; the server must answer with ANSWER.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pyarrow.parquet  # noqa: F401

import tidemill.run as runs
from tidemill import Batch, tables

ROWS, PART_LINES = 60, 15


def work(url: str, source: Path, output: Path) -> int:
    """Run in a child process; return its id."""
    child = os.fork()
    if child:
        return child
    code = 9
    try:
        runs.MAX_LINES, runs.POLL_SECONDS = PART_LINES, 0.01
        result = Batch(
            source, output, prompt="Rate {text}", max_tokens=60, url=url, follow=lambda _: None, tell=lambda _: None
        ).run()
        code = 0 if result.failed == 0 else 8
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    os._exit(code)


def check(output: Path) -> None:
    rows = list(tables.read_rows(output))
    assert [str(row["id"]) for row in rows] == [str(i) for i in range(ROWS)], "each row once, in order"
    assert {(row["status"], row["answer"]) for row in rows} == {("ok", rows[0]["answer"])}
    left = sorted(path.name for path in output.parent.iterdir())
    assert left == sorted([output.name, f"{output.name}.tidemill"]), left


def main(url: str, folder: Path, suffix: str, kills: int, seed: int) -> dict[str, int]:
    draw, killed, complete, longest = random.Random(seed), 0, 0, 0.0
    source = folder / f"in{suffix}"
    records = [{"id": i, "text": f"text {i}, {seed}\nline"} for i in range(ROWS)]
    tables.write_rows(source, lambda: records, {"id": "", "text": ""}, source.with_suffix(".jsonl"))
    while killed < kills:
        (place := folder / f"out-{complete}").mkdir()
        for row in records:
            row["text"] = f"{complete} {row['text']}"  # so that no request is one of the table before
        tables.write_rows(source, lambda: records, {"id": "", "text": ""}, source.with_suffix(".jsonl"))
        while True:
            begin = time.monotonic()
            child = work(url, source, place / f"out{suffix}")
            if longest and killed < kills:
                time.sleep(draw.uniform(0.0, 0.6 * longest))
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code != -signal.SIGKILL:
                assert code == 0, code
                break
            killed += 1
        longest = longest or time.monotonic() - begin
        check(place / f"out{suffix}")
        complete += 1
    return {"kills": killed, "tables": complete, "lines": complete * ROWS}


if __name__ == "__main__":
    where, into, form, number, *rest = sys.argv[1:]
    print(json.dumps(main(where, Path(into), form, int(number), int(rest[0]) if rest else 1)))
