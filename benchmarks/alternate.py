"""One online load on one server, with offline work let in and kept out by turns.

`python -m benchmarks colocation --alternate 15 --slo 5%`: a tolerance promises a ratio, and the speed of a machine
that others share changes by more than that from one minute to the next. So both arms are measured in the same minutes:
in every second spell of so many seconds 24 clients have an offline request open, and go at its end. Requests near the
border of a spell are left out, as they may have met both.

An aggregate (mean, percentile) is that of all requests of an arm. Its interval comes from drawing the pairs of spells
anew (400 times, with replacement): 95 % of the ratios lie within it.
"""

import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import colocation, live
from benchmarks.frame import Table
from loadgen.arrivals import constant_rate
from loadgen.records import RequestRecord
from predictor.judge import aggregate
from predictor.slo import SLO, Objective

BORDER = 2.0
"""Seconds after the beginning of a spell, and before its end, whose arrivals do not count."""
DRAWS = 400
BUDGET = ("latency_budget", "budget_origin", "rule", "interference_weight", "decode_value", "offline_share")
FLAT_FILL = """
from dataclasses import replace

from engine.colocation import waits

priced = waits.initial_budget
waits.initial_budget = lambda slo, model: replace(priced(slo, model), policy="hygen")
"""
"""`sitecustomize.py` of a server whose budget searches try flat budgets alone. No setting of a server does this."""

TABLE = Table({
    "aggregate": "10", "alone, ms": "9.1f", "beside, ms": "10.1f", "change": "+7.1%", "lowest": "+7.1%",
    "highest": "+7.1%", "promised": "8",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spell:
    """Seconds [begin, end) of a run, with offline clients or without."""

    begin: float
    end: float
    beside: bool

    def counts(self, record: RequestRecord) -> bool:
        """Whether a request came here, and not near a border."""
        return self.begin + BORDER <= record.scheduled_at < self.end - BORDER


def spells_of(seconds: float, length: float) -> list[Spell]:
    """By turns, without offline work first; always in pairs."""
    pairs = int(seconds // (2 * length))
    return [Spell(i * length, (i + 1) * length, i % 2 == 1) for i in range(2 * pairs)]


class Turns:
    """The offline clients of a run: a `Watch` that does not only look. `tokens`: of all spells beside."""

    def __init__(self, spells: Sequence[Spell], seed: int) -> None:
        self._spells = spells
        self._random = np.random.default_rng(seed)
        self.tokens = 0.0

    async def follow(self, url: str, start: float) -> None:
        """Until cancelled."""
        async with live.completions(url, colocation.OUTSTANDING) as ask:
            for spell in self._spells:
                if not spell.beside:
                    continue
                await asyncio.sleep(start + spell.begin - time.monotonic())
                before = await _offline_tokens(url)
                clients = [asyncio.create_task(self._client(ask)) for _ in range(colocation.OUTSTANDING)]
                await asyncio.sleep(start + spell.end - time.monotonic())
                for client in clients:
                    client.cancel()
                for ended in await asyncio.gather(*clients, return_exceptions=True):
                    if not isinstance(ended, asyncio.CancelledError):
                        raise SystemExit(f"an offline client has ended: {ended}")
                self.tokens += await _offline_tokens(url) - before
        await asyncio.Event().wait()

    async def _client(self, ask: live.Ask) -> None:
        """One offline request after the other."""
        while True:
            prompt = self._random.integers(100, 40_000, colocation.OFFLINE_PROMPT).tolist()
            status, answer = await ask(
                model="model", prompt=prompt, max_tokens=colocation.OFFLINE_OUTPUT, ignore_eos=True, service_tier="flex"
            )
            if status != 200:
                raise SystemExit(f"an offline request was answered with {status}: {answer}")


async def _offline_tokens(url: str) -> float:
    return live.read_metric(await live.metrics_page(url), colocation.TOKENS, missing=0.0)


@dataclass(frozen=True, slots=True)
class Change:
    """An aggregate alone and beside offline work, seconds; `low` and `high` bound beside / alone - 1."""

    key: str
    alone: float
    beside: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return self.beside / self.alone - 1.0


def measure(records: Sequence[RequestRecord], spells: Sequence[Spell], keys: Sequence[str], seed: int) -> list[Change]:
    """What changed beside offline work, key by key. Raises ValueError without an answer in one of the arms."""
    held = [[(r.ttft, r.gaps().tolist()) for r in records if r.ttft is not None and s.counts(r)] for s in spells]
    pairs = [(alone, beside) for alone, beside in zip(held[::2], held[1::2], strict=True)]
    if not all(any(arm) for arm in zip(*pairs, strict=True)):
        raise ValueError("there is not an answer in both arms: take longer spells, or more of them")
    random, drawn = np.random.default_rng(seed), []

    def ratios(chosen: Sequence[int]) -> tuple[dict[str, float], dict[str, float]]:
        alone, beside = ([request for i in chosen for request in pairs[i][arm]] for arm in (0, 1))
        return aggregate(alone, keys), aggregate(beside, keys)

    alone, beside = ratios(range(len(pairs)))
    for _ in range(DRAWS):
        a, b = ratios(random.integers(0, len(pairs), len(pairs)).tolist())
        drawn.append([b[key] / a[key] - 1.0 if a[key] else 0.0 for key in keys])
    low, high = np.percentile(np.array(drawn), [2.5, 97.5], axis=0).tolist()
    return [Change(key, alone[key], beside[key], low[i], high[i]) for i, key in enumerate(keys)]


def promise(objective: Objective) -> str:
    """What an objective says of its aggregate."""
    if objective.tolerance is not None:
        return f"+{objective.tolerance:.1%}"
    assert objective.limit is not None
    return f"{objective.limit * 1e3:g} ms"


def run(
    text: str, rate: float, seconds: float, length: float, seed: int, learning: float, *, flat: bool = False
) -> None:
    """Prints the table of one SLO. `learning`: seconds of the same that come first and do not count. `flat`: the
    server's searches try flat budgets alone."""
    slo = SLO.parse(text)
    spells = spells_of(learning + seconds, length)
    if not spells:
        raise SystemExit(f"no pair of spells of {length:g} s fits in {seconds:g} s")
    arrivals = colocation.poisson(constant_rate(rate), spells[-1].end, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live.make_model_folder(folder)
        flags = ("--slo", str(slo), "--state-dir", str(folder / "state"))
        if flat:
            (folder / "sitecustomize.py").write_text(FLAT_FILL)
        with live.server(folder, 0, *flags, patches=folder if flat else None) as url:
            turns = Turns(spells, seed)
            plan = colocation.plan_arm(url, arrivals, spells[-1].end, None, seed)
            records = asyncio.run(live.run(plan, turns)).requests
            with urllib.request.urlopen(f"{url}/ready") as answer:
                state = json.load(answer)
    counted = [spell for spell in spells if spell.begin >= learning]
    counted = counted[len(counted) % 2 :]
    lost = sum(not record.ok for record in records)
    online = [sum(s.counts(r) for s in counted if s.beside is beside for r in records) for beside in (False, True)]
    print(f"{online[0]} requests alone, {online[1]} beside; {lost} of all {len(records)} failed")
    print(TABLE.heading)
    objectives = {objective.key: objective for objective in slo.objectives}
    for change in measure(records, counted, list(objectives), seed):
        cells = (change.alone * 1e3, change.beside * 1e3, change.ratio, change.low, change.high)
        print(TABLE.line(change.key, *cells, promise(objectives[change.key])))
    found = {name: state["colocation"][name] for name in BUDGET}
    print("budget: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    beside = sum(spell.end - spell.begin for spell in spells if spell.beside)
    print(f"{turns.tokens / beside:.0f} offline tokens/s in spells with offline work, those of the beginning included")
