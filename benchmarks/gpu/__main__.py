"""`make gpu-check`: every section in a process of its own, under a limit; one table and a JSON file.

A crash or a hang of a section is a row in the table: the others still run. Exits with 2 where there is no GPU, with 1
when a row failed or missed its target.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.gpu.setup import Setup, cuda_setup, tiny_setup
from benchmarks.gpu.table import Row, failure, render, row_from_json
from engine import __version__
from engine.machine.facts import cuda_driver

TOTAL_SECONDS = 570.0
SECTIONS: dict[str, tuple[str, str, float]] = {
    "limits": ("limits", "check_limits", 60.0),
    "kernels": ("kernels", "check_kernels", 120.0),
    "attention": ("kernels", "check_attention", 60.0),
    "equality": ("equality", "check_equality", 120.0),
    "drop": ("drop", "check_drop", 90.0),
    "features": ("features", "check_features", 120.0),
    "steps": ("steps", "check_steps", 150.0),
    "swap": ("swap", "check_swap", 60.0),
    "serving": ("serving", "check_serving", 180.0),
    "float8": ("float8", "check_float8", 150.0),
}
"""name -> (module, function, limit in seconds)"""

_MARK, _EQUAL = "gpu-check-row ", ": error"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"which of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--json", default="gpu-check.json", help="where the rows go (default: %(default)s)")
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
    return _run_all(setup, options.sections or list(SECTIONS), Path(options.json))


def run_here(setup: Setup, names: Sequence[str]) -> None:
    """Run sections in this process and print their rows as they come."""
    for name in names:
        module, function, _ = SECTIONS[name]
        check: Callable[[Setup], Iterator[Row]] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        for row in check(setup):
            print(_MARK + row.to_json(), flush=True)


def run_section(name: str, seconds: float, tiny: bool) -> list[Row]:
    """Run one section in a child process and return its rows, also of a section that fails or runs out of time."""
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--child", *(["--tiny"] if tiny else [])]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=seconds, check=False, text=True)
    except subprocess.TimeoutExpired as error:
        return [*_rows(_text(error.stdout)), failure(name, f"did not end within {seconds:.0f} s")]
    rows = _rows(ended.stdout)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.strip().splitlines() if line.strip()]
        rows.append(failure(name, lines[-1][:200] if lines else f"exit status {ended.returncode}"))
        print(ended.stderr[-4000:], file=sys.stderr)
    return rows


def describe(setup: Setup) -> dict[str, str]:
    """Return the device and the versions."""
    cuda = setup.device.type == "cuda"
    machine = torch.cuda.get_device_name(setup.device) if cuda else platform.processor() or platform.machine()
    driver, triton = cuda_driver() or "unknown", version("triton") if cuda else "interpreted"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    versions = {"driver": driver, "torch": torch.__version__, "triton": triton, "tidemill": __version__}
    return {"device": machine, **versions, "python": platform.python_version(), "date": date}


def summary(about: dict[str, str], rows: Sequence[Row]) -> str:
    """Return one line to paste: card and versions, kernels that pass or fail, and throughputs."""
    kernels = [row for row in rows if row.metric.endswith(_EQUAL)]
    failed = [row.metric.removesuffix(_EQUAL) for row in kernels if not row.met]
    sections = [row.metric for row in rows if row.measured is None]
    rates = [f"{row.metric} {row.measured:.3g} {row.unit}" for row in rows if row.measured and "tok/s" in row.unit]
    parts = [f"{len(kernels) - len(failed)} of {len(kernels)} kernels pass"]
    parts += [f"{what}: {', '.join(names)}" for what, names in (("FAIL", failed), ("no result", sections)) if names]
    return "; ".join((f"gpu-check: {', '.join(f'{key} {value}' for key, value in about.items())}", *parts, *rates))


def _run_all(setup: Setup, names: Sequence[str], target: Path) -> int:
    began, rows = time.monotonic(), list[Row]()
    about = describe(setup)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for name in names:
        left = TOTAL_SECONDS - (time.monotonic() - began)
        if left < 10:
            rows.append(failure(name, "no time was left for it"))
            continue
        found = run_section(name, min(SECTIONS[name][2], left), setup.tiny)
        print(f"{name}: {len(found)} rows after {time.monotonic() - began:.0f} s", file=sys.stderr)
        rows.extend(found)
    print(render(rows))
    print(summary(about, rows))
    target.write_text(json.dumps({**about, "rows": [json.loads(row.to_json()) for row in rows]}, indent=1) + "\n")
    return 1 if any(row.met is False for row in rows) else 0


def _rows(text: str) -> list[Row]:
    return [row_from_json(line.removeprefix(_MARK)) for line in text.splitlines() if line.startswith(_MARK)]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
