"""`tidemill worth`: estimate the value of the batch work that a machine does beside its chats under one or more SLOs.

It runs the planner of `tidemill simulate` once for each SLO, on the same traffic.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from engine.config import EngineConfig
from engine.errors import ConfigError, TidemillError
from loadgen import InputError, simulate
from loadgen.simulation.planner import Answer, answer
from loadgen.simulation.report import aligned
from predictor.slo import SLO, SLOError

HOUR, MILLION = 3600.0, 1e6
_EPILOG = (
    "All other flags of `tidemill simulate` describe the machine, the traffic and the offline lines as they do there."
)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million prompt and output tokens, and the rent of the GPU for an hour, in one currency."""

    prompt: float
    output: float
    rent: float | None

    def value(self, prompt: float, output: float) -> float:
        return (prompt * self.prompt + output * self.output) / MILLION


@dataclass(frozen=True, slots=True)
class Hourly:
    """Offline work beside the chats in one hour. `kept`: whether the SLO holds."""

    slo: str
    kept: bool
    lines: float
    prompt_tokens: float
    output_tokens: float
    value: float | None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that `tidemill simulate` does not have."""
    made = argparse.ArgumentParser(
        prog="tidemill worth", description=__doc__.split("\n", 1)[0], epilog=_EPILOG, allow_abbrev=False
    )
    made.add_argument("--slo", action="append", help=f"SLO; repeatable (default: {EngineConfig().slo})")
    made.add_argument("--price-in", type=float, metavar="P", help="price of a million prompt tokens")
    made.add_argument("--price-out", type=float, metavar="Q", help="price of a million output tokens")
    made.add_argument("--gpu-hour", type=float, metavar="R", help="rent of the GPU for an hour, in the same currency")
    made.add_argument("--json", action="store_true", help="print the rows and assumptions as JSON")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to a file as well")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 2 for any error."""
    own, others = parser().parse_known_args(argv)
    try:
        return _run(own, simulate.parser().parse_args(others))
    except (InputError, TidemillError) as error:
        print(f"tidemill worth: {error}", file=sys.stderr)
        return 2


def _run(own: argparse.Namespace, arguments: argparse.Namespace) -> int:
    prices = _prices(own)
    slos = [_parsed(text) for text in own.slo or [EngineConfig().slo]]
    arguments.slo = str(slos[0])
    asked = simulate.ask(arguments)
    if not asked.traffic.jobs:
        raise InputError("without offline lines nothing is left to value; leave out --no-offline")
    answers = []
    for slo in slos:
        print(f"{slo}:", file=sys.stderr, flush=True)
        answers.append(answer(simulate.question_of(arguments, asked, slo), simulate.say))
    rows = [hourly(found, prices) for found in answers]
    notes = _assumptions(answers[-1], prices, (*asked.traffic.notes, *asked.device.notes))
    document = {"rows": rows, "rent": prices.rent if prices else None, "assumptions": notes}
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
    print(text if own.json else show(rows, prices, answers[-1], notes))
    if own.out is not None:
        own.out.write_text(text + "\n")
    return 0


def _parsed(text: str) -> SLO:
    try:
        return SLO.parse(text)
    except SLOError as error:
        raise ConfigError(f"--slo: {error}") from None


def _prices(own: argparse.Namespace) -> Prices | None:
    given = [price for price in (own.price_in, own.price_out, own.gpu_hour) if price is not None]
    if any(not 0.0 <= price < float("inf") for price in given):
        raise InputError("prices must not be negative")
    if (own.price_in is None) != (own.price_out is None):
        raise InputError("--price-in and --price-out belong together")
    if own.price_in is None:
        if own.gpu_hour is not None:
            raise InputError("--gpu-hour needs --price-in and --price-out")
        return None
    return Prices(own.price_in, own.price_out, own.gpu_hour)


def hourly(found: Answer, prices: Prices | None) -> Hourly:
    """Return the offline work of an hour; nothing if not even the chats alone keep the SLO."""
    beside = found.beside
    scale = HOUR / beside.seconds
    output = beside.offline_output_tokens * scale
    prompt = beside.offline_tokens * scale - output
    value = None if prices is None else prices.value(prompt, output)
    return Hourly(str(found.question.slo), found.kept, beside.offline_lines * scale, prompt, output, value)


def show(rows: Sequence[Hourly], prices: Prices | None, found: Answer, notes: Sequence[str]) -> str:
    """Return the table and its assumptions as text."""
    machine = found.question.machine
    titles = ["SLO", "kept", "lines/h", "prompt tokens/h", "output tokens/h"]
    titles += ["value/h"] if prices else []
    titles += ["of the rent"] if prices and prices.rent else []
    table = [titles]
    for row in rows:
        cells = [row.slo, "yes" if row.kept else "NO"]
        cells += [f"{each:,.0f}" for each in (row.lines, row.prompt_tokens, row.output_tokens)]
        if row.value is not None and prices is not None:
            cells += [f"{row.value:,.2f}"]
            cells += [f"{row.value / prices.rent:.0%}"] if prices.rent else []
        table.append(cells)
    head = f"What one {machine.name} with {machine.model_name} gives beside its chats, estimated:"
    return "\n".join([head, "", aligned(table), "", "Assumptions:", *(f"- {note}" for note in notes)])


def _assumptions(found: Answer, prices: Prices | None, notes: Sequence[str]) -> list[str]:
    question, online = found.question, found.question.traffic.online
    lines = [
        "the machine is simulated by the server's own scheduler; HTTP and tokenization are not included",
        f"the latency model is {question.machine.mape:.1%} off on this device's step times",
    ]
    if online is not None and found.alone is not None:
        lines.append(
            f"chats: {question.traffic.name}, {found.alone.requests / found.alone.seconds:.3g} a second, on average "
            f"{online.input_tokens.mean():.0f} prompt and {online.output_tokens.mean():.0f} output tokens, at all hours"
        )
    for job in question.traffic.jobs:
        size = f"{job.lines.input_tokens.mean():.0f} prompt and {job.lines.output_tokens.mean():.0f} output tokens"
        lines.append(f"batch lines: on average {size}; there is always a line to run")
    if prices is not None:
        lines.append(f"prices: {prices.prompt:g} and {prices.output:g} for a million prompt and output tokens")
    return [*lines, *notes]


if __name__ == "__main__":
    sys.exit(main())
