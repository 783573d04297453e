"""The machine of a figure, in one line."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

from engine.machine.facts import read_processor


def describe() -> str:
    """Processor, cores, instruction sets that matter, and the date."""
    processor = read_processor()
    features = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in processor.features]
    found = ", ".join(features) or "no avx512"
    return f"{processor.name}, {os.cpu_count()} cores ({found}), {datetime.now(UTC):%Y-%m-%d}"


def provenance(argv: Sequence[str]) -> dict[str, str]:
    """Return command, commit, machine and date of a result; the commit is empty outside a checkout."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=os.path.dirname(__file__))
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *argv[1:]]),
        "commit": found.stdout.strip(),
        "machine": describe(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
