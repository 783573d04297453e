"""`make gpu-check`: every section in a process of its own, under a limit; one table and a JSON file.

A crash or a hang of a section is a row in the table: the others still run. Exits with 2 where there is no GPU, with 1
when a row failed or missed its target.

`--ordered FOLDER` is for a GPU that is lent for minutes: part 1 in 330 s, part 2 in 420 s, the most valuable section
first. Each row goes to FOLDER/rows.jsonl at once. FOLDER/gpu-PART.json is a table for `python -m benchmarks results`.
"""

import argparse
import importlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import IO

import torch

from benchmarks.gpu.setup import Setup, cuda_setup, tiny_setup
from benchmarks.gpu.table import Row, failure, render, result_of, row_from_json
from engine import __version__
from engine.machine.facts import cuda_driver

TOTAL_SECONDS = 570.0
SECTIONS: dict[str, tuple[str, str, float]] = {
    "limits": ("setup", "check_limits", 60.0),
    "kernels": ("kernels", "check_kernels", 120.0),
    "options": ("kernels", "check_options", 120.0),
    "attention": ("kernels", "check_attention", 60.0),
    "equality": ("equality", "check_equality", 120.0),
    "drop": ("drop", "check_drop", 90.0),
    "features": ("features", "check_features", 120.0),
    "steps": ("steps", "check_steps", 150.0),
    "swap": ("steps", "check_swap", 60.0),
    "serving": ("serving", "check_serving", 180.0),
    "int4": ("checkpoints", "check_int4", 90.0),
    "blocks": ("checkpoints", "check_blocks", 90.0),
    "float8": ("checkpoints", "check_float8", 90.0),
    "experts": ("checkpoints", "check_experts", 90.0),
    "gpt-oss": ("checkpoints", "check_gpt_oss", 90.0),
    "drafts": ("features", "check_drafts", 120.0),
    "headline": ("headline", "check_headline", 180.0),
    **{f"static-{tokens}": ("headline", f"check_static_{tokens}", 120.0) for tokens in (128, 256, 512, 2048)},
}
"""name -> (module, function, limit in seconds)"""
ORDERED: dict[int, dict[str, float]] = {
    1: {
        "kernels+options+features+equality": 105, "experts": 45, "gpt-oss": 40, "int4": 35, "steps": 45, "blocks": 30,
        "attention": 20,
    },
    2: {"headline": 106, "static-512": 58, "static-256": 58, "static-2048": 58, "static-128": 58, "drafts": 72},
}  # fmt: skip
"""part -> sections in order, with their limits in seconds; this process and its imports take ten more. Sections that
take no times run at once, so that their kernels are compiled by many cores."""
GRACE = 5.0
"""Seconds for a section to stop its servers when its time is up."""

_MARK, _EQUAL = "gpu-check-row ", ": faults"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", help=f"which of {', '.join(SECTIONS)} (default: all but those of part 2)"
    )
    parser.add_argument("--json", default="gpu-check.json", help="where the rows go (default: %(default)s)")
    parser.add_argument("--ordered", type=Path, metavar="FOLDER", help="run a part of the ordered plan instead")
    parser.add_argument("--part", type=int, choices=ORDERED, default=1, help="of the ordered plan (default: 1)")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install the wheels of a folder first")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU: a test of the check itself")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"unknown section '{name}'; known: {', '.join(SECTIONS)}")
    setup = tiny_setup() if options.tiny else cuda_setup()
    if setup is None:
        print("gpu-check: torch finds no CUDA device here; nothing was measured.", file=sys.stderr)
        return 2
    if options.child:
        run_here(setup, options.sections)
        return 0
    if options.wheels:
        _install(options.wheels)
    if options.ordered is None:
        wanted = options.sections or [name for name in SECTIONS if name not in ORDERED[2]]
        return _run_all(setup, {name: SECTIONS[name][2] for name in wanted}, TOTAL_SECONDS, Path(options.json), None)
    options.ordered.mkdir(parents=True, exist_ok=True)
    target, log = options.ordered / f"gpu-{options.part}.json", options.ordered / "rows.jsonl"
    return _run_all(setup, ORDERED[options.part], math.inf, target, log)


def _install(wheels: Path) -> None:
    """Install wheels beside this Python, for the processes of sections."""
    target, files = tempfile.mkdtemp(), map(str, sorted(wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target]
    subprocess.run([*command, *files], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), target)))


def run_here(setup: Setup, names: Sequence[str]) -> None:
    """Run sections in this process and print their rows as they come."""
    for name in names:
        module, function, _ = SECTIONS[name]
        check: Callable[[Setup], Iterator[Row]] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        for row in check(setup):
            print(_MARK + row.to_json(), flush=True)


def command_of(name: str, tiny: bool) -> list[str]:
    """Return the command that runs a section."""
    return [sys.executable, "-m", "benchmarks.gpu", name, "--child", *(["--tiny"] if tiny else [])]


def run_section(name: str, seconds: float, tiny: bool, take: Callable[[Row], None]) -> None:
    """Run one section in a child process. Take its rows as they come, and one more if it fails or is stopped."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command_of(name, tiny), stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        reader = threading.Thread(target=_read, args=(child.stdout, take), daemon=True)
        reader.start()
        reason = _wait(child, seconds)
        reader.join(1.0)  # a process of the child may hold its output open
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    if child.returncode and not reason:
        reason = lines[-1][:200] if lines else f"exit status {child.returncode}"
        print("\n".join(lines[-40:]), file=sys.stderr)
    if reason:
        take(failure(name, reason))


def _read(lines: IO[str], take: Callable[[Row], None]) -> None:
    with lines:
        for row in _rows(lines):
            take(row)


def _wait(child: "subprocess.Popen[str]", seconds: float) -> str:
    """Wait for a section. Return why it was stopped; empty if it ended. It gets GRACE seconds to end what it began."""
    try:
        child.wait(max(0.0, seconds - GRACE))
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return f"did not end within {seconds:.0f} s"
    return ""


def describe(setup: Setup) -> dict[str, str]:
    """Return the device and the versions."""
    cuda = setup.device.type == "cuda"
    machine = torch.cuda.get_device_name(setup.device) if cuda else platform.processor() or platform.machine()
    driver, triton = cuda_driver() or "unknown", version("triton") if cuda else "interpreted"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    versions = {"driver": driver, "torch": torch.__version__, "triton": triton, "tidemill": __version__}
    return {"device": machine, **versions, "python": platform.python_version(), "date": date}


def summary(about: dict[str, str], rows: Sequence[Row]) -> str:
    """Return one line to paste: card and versions, cases of kernels that pass or fail, and throughputs."""
    kernels = [row for row in rows if row.metric.endswith(_EQUAL)]
    failed = [row.metric.removesuffix(_EQUAL) for row in kernels if not row.met]
    sections = [row.metric for row in rows if row.measured is None]
    rates = [f"{row.metric} {row.measured:.3g} {row.unit}" for row in rows if row.measured and "tok/s" in row.unit]
    parts = [f"{len(kernels) - len(failed)} of {len(kernels)} cases of kernels pass"]
    parts += [f"{what}: {', '.join(names)}" for what, names in (("FAIL", failed), ("no result", sections)) if names]
    return "; ".join((f"gpu-check: {', '.join(f'{key} {value}' for key, value in about.items())}", *parts, *rates))


def _run_all(setup: Setup, plan: Mapping[str, float], total: float, target: Path, log: Path | None) -> int:
    """Run sections under their limits; what one leaves of its limit is for the next ones. With `log`, write each row
    there and a result for the performance page to `target`, else all rows to `target`."""
    began, deadline, rows = time.monotonic(), 0.0, list[Row]()
    about = describe(setup)
    print(", ".join(f"{key} {value}" for key, value in about.items()))

    def take(row: Row) -> None:
        rows.append(row)
        if log is not None:
            with log.open("a") as file:
                file.write(row.to_json() + "\n")

    for name, seconds in plan.items():
        deadline = min(deadline + seconds, total)
        left = deadline - (time.monotonic() - began)
        if left < 10:
            take(failure(name, "no time was left for it"))
            continue
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(run_section, each, left, setup.tiny, take) for each in name.split("+")]:
                done.result()
        print(f"{name}: {len(rows)} rows after {time.monotonic() - began:.0f} s", file=sys.stderr)
        found = (
            {**about, "rows": [json.loads(row.to_json()) for row in rows]} if log is None else result_of(rows, about)
        )
        target.write_text(json.dumps(found, indent=1) + "\n")
    print(render(rows))
    print(summary(about, rows))
    return 1 if any(row.met is False for row in rows) else 0


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    return (row_from_json(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK))


if __name__ == "__main__":
    sys.exit(main())
