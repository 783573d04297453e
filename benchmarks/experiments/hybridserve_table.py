"""How the experiment `hybridserve` is shown: factors beside the paper's, and its Figures 12 and 14."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.drawing import Series
from benchmarks.experiments.hybridserve import LINK
from benchmarks.experiments.table import Result, figure, mean

PAPER = {"all": (1.61, 2.19), "opt-6.7b": (None, 2.05), "opt-66b": (None, 2.33)}
"""Throughput of act-only and hybrid over FlexGen's: geometric means over the prompts of Figure 12 (§5.2)."""

Key = tuple[str, int, int | str, float]


def key_of(result: Result) -> Key:
    """(model, batch, prompt, link)."""
    setting = result.setting
    return setting["model"], setting["batch"], setting["prompt"], setting["link"]


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that the paper's factors are. Raises ValueError without values."""
    if not values:
        raise ValueError("no values to average")
    return math.exp(sum(map(math.log, values)) / len(values))


def factors(results: Sequence[Result], key: Key) -> dict[str, float]:
    """Throughput of every policy over the first one's (K and V only), means over the seeds."""
    group: dict[str, list[Result]] = {}
    for result in results:
        if key_of(result) == key:
            group.setdefault(result.policy, []).append(result)
    rates = {policy: mean(rows, "output_tokens_per_s") for policy, rows in group.items()}
    base = next(iter(rates.values()))
    return {policy: rate / base for policy, rate in rates.items()}


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: factors over `flexgen-kv`; then their geometric means over prompts beside the paper's.

    `busy`: share of the decode steps that the device computes. `traffic`: bytes of cache over the link, K and V alone
    over hybrid.
    """
    policies = list(dict.fromkeys(r.policy for r in results))
    keys = list(dict.fromkeys(map(key_of, results)))
    header = ["model", "batch", "prompt", "GB/s", "kv tok/s", *policies[1:], "paper act", "paper hybrid"]
    found: dict[Key, dict[str, float]] = {key: factors(results, key) for key in keys}
    rows: list[list[Any]] = []
    for key in keys:
        model, batch, prompt, link = key
        mine = [r for r in results if key_of(r) == key]
        base, ours = ([r for r in mine if r.policy == name] for name in ("flexgen-kv", "hybrid"))
        extra = [100.0 * mean(rows_, "device_busy") for rows_ in (base, ours)]
        moved = [mean(rows_, "kv_bytes") + mean(rows_, "act_bytes") for rows_ in (base, ours)]
        extra.append(moved[0] / moved[1] if moved[1] else 1.0)
        rate = mean(base, "output_tokens_per_s")
        shown = [found[key][policy] for policy in policies[1:]]
        rows.append([model, batch, prompt, link / 1e9, rate, *shown, None, None, *extra])
    for link in dict.fromkeys(key[3] for key in keys):
        rows += _means(found, policies, link)
    return [*header, "busy kv %", "hybrid %", "traffic"], rows


def _means(found: dict[Key, dict[str, float]], policies: Sequence[str], link: float) -> list[list[Any]]:
    """Rows of Figure 12's means at one rate of the link: by model, then over all."""
    largest = max(key[1] for key in found)
    keys = [key for key in found if key[1] == largest and key[2] != "mixed" and key[3] == link]
    rows: list[list[Any]] = []
    for model in (*dict.fromkeys(key[0] for key in keys), "all"):
        mine = [found[key] for key in keys if model in (key[0], "all")]
        shown = [geometric_mean([each[policy] for each in mine]) for policy in policies[1:]]
        paper = PAPER.get(model, (None, None))
        rows.append([model, largest, "mean", link / 1e9, None, *shown, *paper, None, None, None])
    return rows


DRAWN = ("flexgen-kv", "act-only", "token-recompute", "hybrid")
UTILIZATION = ("opt-30b", ("flexgen-kv", "hybrid"))
"""What Figure 14 shows."""


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Throughput against the prompt by model (Figure 12), and the device's utilization by batch (Figure 14)."""
    fast = [r for r in results if r.setting["link"] == LINK and r.setting["prompt"] != "mixed"]
    found = {}
    for model in dict.fromkeys(r.setting["model"] for r in fast):
        rows = [r for r in fast if r.setting["model"] == model]
        rows = [r for r in rows if r.setting["batch"] == max(each.setting["batch"] for each in rows)]
        lines = [_line(policy, rows, policy, "output_tokens_per_s") for policy in DRAWN]
        title = f"{model}, batch {rows[0].setting['batch']}: tokens/s with weights and cache on the host"
        found[f"{model}-throughput"] = figure(title, lines, "prompt, tokens", "tokens/s", log_x=True)
    model, policies = UTILIZATION
    rows = [r for r in fast if r.setting["model"] == model]
    batches = sorted({r.setting["batch"] for r in rows})
    if batches:
        lines = [
            _line(f"{policy}, {batch}", [r for r in rows if r.setting["batch"] == batch], policy, "device_busy")
            for policy in policies
            for batch in dict.fromkeys((batches[0], batches[-1]))
        ]
        title = f"{model}: share of the decode steps that the device computes, by batch"
        found["device-busy"] = figure(title, lines, "prompt, tokens", "share", log_x=True)
    return found


def _line(name: str, results: Sequence[Result], policy: str, metric: str) -> Series:
    mine = [r for r in results if r.policy == policy]
    prompts = sorted({r.setting["prompt"] for r in mine})
    values = [mean([r for r in mine if r.setting["prompt"] == prompt], metric) for prompt in prompts]
    return Series(name, prompts, values, points=True)
