"""HybridServe's evaluation (§5, Figures 4 and 12 to 15): throughput with weights and cache on the host.

OPT 6.7B to 66B on an RTX 4090 behind PCIe 4.0, with 882 GB of host memory. A batch of requests generates 128 tokens
each; throughput is that of the whole run, prefill included. The arms differ in the form of the past on the host: K and
V, activations (ACT), a division of both, or token ids. The split of `hybrid` is the engine's own closed form
(`engine.cache.placement`) with costs that are measured on the simulated device, as at the start of an engine.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal, NamedTuple

from benchmarks.drawing import Series
from benchmarks.experiments.offload import Case, algorithm_1, measure_costs, split_context
from benchmarks.experiments.pipelines import BLOCK, Compact, OffloadDevice, lay_out
from benchmarks.experiments.replay import Each
from benchmarks.experiments.table import Result, figure, mean
from engine.cache.placement import HostSplit, OffloadCosts
from loadgen.simulation.gpu import DEVICES, MODELS, NOISE, SimulatedDevice
from loadgen.simulation.run import Metrics

GRID = 40
"""Parts into which `hybrid-best` divides the share of ACT blocks."""
MIXED = (128, 1920)
"""Prompts of the points with mixed lengths: uniform between these."""

Rule = Literal["kv", "act", "half", "closed-form", "algorithm-1", "best"]


@dataclass(frozen=True, slots=True)
class Arm:
    """How the past is held: the stand-in for K and V, and by which rule it shares the host with them."""

    name: str
    compact: Compact
    rule: Rule


ARMS = (
    Arm("flexgen-kv", "none", "kv"),
    Arm("act-only", "project", "act"),
    Arm("token-recompute", "tokens", "half"),
    Arm("hybrid-half", "project", "half"),
    Arm("algorithm-1", "project", "algorithm-1"),
    Arm("hybrid", "project", "closed-form"),
    Arm("hybrid-best", "project", "best"),
)
"""`token-recompute`: half of the blocks as token ids (Figure 4). `hybrid-half`: half of the host's room each (the
default of Figure 15). `algorithm-1`: the paper's, for the whole host, with its mini-batches. `hybrid-best`: the best of
a grid of shares."""

LINK = DEVICES["rtx-4090"].pcie
SLOW_LINK = LINK / 2
"""About the rate that the paper's Figure 4 can be had with; it does not state the rate of its link."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model, a batch of requests, their prompts in tokens (None: mixed lengths, by seed), and the link in bytes/s."""

    model: str
    batch: int
    prompt: int | None
    link: float = LINK


OPT = ("opt-6.7b", "opt-13b", "opt-30b", "opt-66b")
PROMPTS = (128, 256, 512, 1024, 1920)


@dataclass(frozen=True, slots=True)
class Config:
    """Figure 12 has a batch of 128; Figures 13 and 14 have OPT-30B at smaller ones, Figure 4 a batch of 64."""

    loads: tuple[Load, ...] = (
        *(Load(model, 128, prompt) for model in OPT for prompt in (*PROMPTS, None)),
        *(Load("opt-30b", batch, prompt) for batch in (32, 64) for prompt in PROMPTS),
        Load("opt-66b", 64, 512),
        *(Load(model, 128, prompt, SLOW_LINK) for model in OPT for prompt in PROMPTS),
        Load("opt-30b", 64, 1024, SLOW_LINK),
        Load("opt-66b", 64, 512, SLOW_LINK),
    )
    device: str = "rtx-4090"
    output: int = 128
    host_bytes: float = 882e9
    prefill_tokens: int = 8192
    arms: tuple[Arm, ...] = ARMS


CONFIG = Config()
SHORT = replace(CONFIG, loads=tuple(Load(model, 128, prompt) for model in OPT for prompt in (512, 1920)))


@dataclass(frozen=True, slots=True)
class Point:
    """One run: an arm under a load, with one seed."""

    config: Config
    load: Load
    arm: Arm
    seed: int


def make_case(point: Point) -> Case:
    """The arm's device and prompts. Raises ValueError when the run does not fit the device, the host or the model."""
    config, load, compact = point.config, point.load, point.arm.compact
    machine = SimulatedDevice(MODELS[load.model], replace(DEVICES[config.device], pcie=load.link))
    device = OffloadDevice(machine)
    prompts = _prompts(point)
    longest = machine.model.max_model_len
    if max(prompts) + config.output > longest:
        raise ValueError(f"prompts and outputs must be at most {longest} tokens together")
    held = sum(-(-(prompt + config.output) // BLOCK) for prompt in prompts) * device.layers * device.block_bytes
    if held + device.layers * device.layer_bytes > config.host_bytes:
        raise ValueError(f"weights and K and V of {load.batch} requests do not fit the host")
    kept = sum(prompts) // 2 if compact == "tokens" else 0
    layout = lay_out(device, compact, prefill_tokens=config.prefill_tokens, kept_tokens=kept)
    return Case(device, layout, compact, compact == "project", prompts, config.output)


def _prompts(point: Point) -> tuple[int, ...]:
    load = point.load
    if load.prompt is not None:
        return (load.prompt,) * load.batch
    lengths = random.Random(f"lengths {point.seed}")
    return tuple(lengths.randint(*MIXED) for _ in range(load.batch))


class Choice(NamedTuple):
    """A case with its split of the host, and the measured costs that mini-batches need."""

    case: Case
    split: HostSplit
    costs: OffloadCosts


FIXED = {"kv": HostSplit(1, 0), "act": HostSplit(0, 1), "half": HostSplit(1, 2)}
"""Blocks by kind; `half` is equal room at r = 1/2."""


def choose(point: Point, case: Case) -> Choice:
    """The arm's split of the host, for the middle of the run.

    The cache on the device is ACT. The closed form may also hold K and V there, or leave ACT out, which
    frees its buffers: it takes what costs least by the measured costs.
    """
    rule, noise = point.arm.rule, random.Random(f"costs {point.seed}")
    if rule in FIXED:
        split = HostSplit(1, 1) if case.compact == "tokens" else FIXED[rule]
        return Choice(case, split, measure_costs(case, 1, noise))
    if rule == "algorithm-1":
        return _balance(point, replace(case, printed=True), noise)
    cases = [case, replace(case, act_resident=False)] if case.device_blocks else [case]
    plain = _plain(point, noise)
    if rule == "closed-form":
        return min([*(_balance(point, each, noise) for each in cases), plain], key=_expected)
    grid = [Choice(each, HostSplit(GRID - act, act), plain.costs) for each in cases for act in range(GRID + 1)]
    middle = case.output // 2
    return min([*grid, plain], key=lambda each: each.case.step(each.split, each.costs, middle).timeline.seconds)


def _plain(point: Point, noise: random.Random) -> Choice:
    """K and V alone."""
    case = make_case(replace(point, arm=ARMS[0]))
    step = case.step(FIXED["kv"], measure_costs(case, 1, noise), case.output // 2)
    return Choice(case, HostSplit(step.kv, 0), measure_costs(case, step.batches, noise))


def _balance(point: Point, case: Case, noise: random.Random) -> Choice:
    """The closed form, or Algorithm 1 for the whole host."""
    device, costs, split = case.device, measure_costs(case, 1, noise), FIXED["half"]
    for _ in range(2):  # the number of mini-batches depends on the split, and the costs on it
        step = case.step(split, costs, case.output // 2)
        costs = measure_costs(case, step.batches, noise)
        act_device = step.on_device if case.act_resident else 0
        if point.arm.rule == "closed-form":
            split = split_context(costs, step.kv + step.act, act_device)
        else:
            room = (point.config.host_bytes / device.layers - device.layer_bytes) / device.block_bytes
            split = algorithm_1(costs, int(room), act_device)
    return Choice(case, split, costs)


def _expected(found: Choice) -> float:
    """Seconds of a layer by the measured costs: the slower pipeline, in the middle of the run."""
    case, split, costs = found
    on_device = sum(each.device for each in case.blocks(split, case.output // 2)) if case.act_resident else 0
    return max(costs.link_seconds(*split), costs.device_seconds(*split, on_device))


def run_point(point: Point) -> Metrics:
    """Run one batch to its end; deterministic. Bytes are those of the decode steps, to the device."""
    case, split, costs = choose(point, make_case(point))
    noise = random.Random(f"steps {point.seed} {point.load}")
    overhead = case.device.step_overhead(len(case.prompts))
    block = case.device.layers * case.device.block_bytes
    decode = link = device = kv = act = blocks = held = batches = 0.0
    steps = case.output - 1  # the first token is prefill's
    for first in range(0, steps, BLOCK):
        count = min(BLOCK, steps - first)
        found = case.step(split, costs, first + (count + 1) // 2)
        factors = sum(max(0.8, 1.0 + NOISE * noise.gauss(0.0, 1.0)) for _ in range(count))
        decode += factors * (found.timeline.seconds + overhead)
        link += factors * found.timeline.link_busy
        device += factors * (found.timeline.device_busy + overhead)
        kv, act, batches = kv + count * found.kv, act + count * found.act, batches + count * found.batches
        held += count * (found.act + (found.on_device if case.act_resident else 0))
        blocks += count * (found.kv + found.act + found.on_device)
    prefill = case.prefill_seconds(split, point.config.prefill_tokens)
    return {
        "output_tokens_per_s": len(case.prompts) * case.output / (prefill + decode),
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "step_seconds": decode / steps,
        "device_busy": device / decode,
        "link_busy": link / decode,
        "weight_bytes": steps * case.device.layers * case.streamed,
        "kv_bytes": kv * block,
        "act_bytes": act * case.device.layers * case.act_bytes,
        "act_share": held / blocks,
        "mini_batches": batches / steps,
        "resident": case.layout.resident,
    }


def run_seed(config: Config, _data: Path | None, seed: int, _each: Each, say: Callable[[str], None]) -> list[Result]:
    results = []
    for load in config.loads:
        setting: dict[str, Any] = {
            "model": load.model,
            "device": config.device,
            "batch": load.batch,
            "output": config.output,
        }
        setting |= {"prompt": "mixed" if load.prompt is None else load.prompt, "link": load.link}
        for arm in config.arms:
            metrics = run_point(Point(config, load, arm, seed))
            results.append(Result("hybridserve", arm.name, setting, seed, metrics))
    say(f"seed {seed}: {len(results)} runs")
    return results


# --- table and figures: factors beside the paper's, and its Figures 12 and 14

PAPER = {"all": (1.61, 2.19), "opt-6.7b": (None, 2.05), "opt-66b": (None, 2.33)}
"""Throughput of act-only and hybrid over FlexGen's: geometric means over the prompts of Figure 12 (§5.2)."""

Key = tuple[str, int, int | str, float]


def key_of(result: Result) -> Key:
    """(model, batch, prompt, link)."""
    setting = result.setting
    return setting["model"], setting["batch"], setting["prompt"], setting["link"]


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
