"""Reading and writing of run folders: `summary.json`, `requests.jsonl.gz`, `timeline.csv`."""

import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from loadgen import metrics, records, report
from loadgen.checks import honesty
from loadgen.metrics import Slo
from loadgen.plan import Plan
from loadgen.records import Records

SCHEMA_VERSION = 1
UNITS = "seconds, tokens, tokens/s, requests/s; shares are 0 to 1"
SECRETS = ("--api-key", "--header")


@dataclass(frozen=True, slots=True)
class About:
    """Description of a run in its summary."""

    command: str
    server: dict[str, Any]
    device: str
    workload: dict[str, Any]
    label: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


def summarise(found: Records, plan: Plan, slo: Slo, about: About) -> dict[str, Any]:
    """Return the summary of a run."""
    window = plan.windows.measured(found.ended_at if plan.windows.horizon is not None else found.last_event)
    honest, invalid = honesty(found, window, slo, closed_loop=plan.closed_loop)
    return {
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": about.command,
        "label": about.label,
        "metadata": dict(about.metadata),
        "seeds": {"seed": plan.seed, "salt": plan.salt},
        "server": about.server,
        "device": about.device,
        "client": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "workload": about.workload,
        "units": UNITS,
        **metrics.run_metrics(found, window, slo),
        "honesty": honest,
        "valid": not invalid,
        "invalid": invalid,
        "interrupted": found.interrupted,
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line with the values of SECRETS replaced by `***`."""
    shown, hide = ["tidemill", "bench"], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide or (equals and name in SECRETS):
            argument = f"{name}=***" if equals and name in SECRETS else "***"
        hide = argument in SECRETS
        shown.append(argument)
    return shlex.join(shown)


def write(path: Path, summary: dict[str, Any], found: Records) -> None:
    """Write the three files into `path`, which is created if missing."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "summary.json").write_bytes(to_json(summary))
    records.save(found.requests, path / "requests.jsonl.gz")
    report.write_timeline(report.timeline(found), path / "timeline.csv")


def to_json(summary: dict[str, Any]) -> bytes:
    """Return a summary as indented JSON."""
    return orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def default_folder(root: Path, name: str) -> Path:
    """Return an unused folder name under `root`, made of the time and the workload's name."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path, number = root / f"{stamp}-{name}", 1
    while path.exists():
        number += 1
        path = root / f"{stamp}-{name}-{number}"
    return path
