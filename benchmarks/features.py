"""Optional features of the server, each on a live server beside the same server without it.

    python -m benchmarks features NAME [--rounds N] [--set chats=3 --set history=200]

A row of FEATURES names the flags of both arms, the load (`benchmarks.feature_loads`) and the figures. The arms take
turns, each on a server of its own with the same requests in a round. `--set` changes a size of the load. Without
--model the model is the one of the row, with random weights.
"""

import argparse
import inspect
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import feature_loads as loads
from benchmarks.feature_loads import Samples
from benchmarks.figures import percentile
from benchmarks.frame import Arm, Table, compare
from benchmarks.live import CONFIG, PACKAGED, make_model_folder
from benchmarks.machine import describe


@dataclass(frozen=True, slots=True)
class Column:
    """A figure: its format, the samples it is computed from, and how the samples of all rounds become one value."""

    form: str
    samples: str
    pool: Callable[[Sequence[float]], float]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def count(values: Sequence[float]) -> float:
    return float(len(values))


def times(rank: float, samples: str, scale: float = 1e3) -> Column:
    """Return a column of a percentile of seconds, in milliseconds by default."""
    return Column("11.1f", samples, lambda values: scale * percentile(values, rank))


CHATS = {
    "chats": Column("6.0f", "kept", count),
    "kept": Column("7.1%", "kept", mean),
    "TTFT P50 ms": times(50, "ttft"),
    "TTFT P99 ms": times(99, "ttft"),
    "TBT P50 ms": times(50, "gap"),
    "TBT P99 ms": times(99, "gap"),
}


def ratios(feature: "Feature", found: Mapping[str, Sequence[Samples]]) -> str:
    """Return the feature's figure in every arm relative to the first arm."""
    column = feature.columns[feature.figure]
    values = {arm: column.pool(pooled(runs, column.samples)) for arm, runs in found.items()}
    first, *others = values
    if not values[first]:
        return f"{feature.figure}: no value of {first}"
    return ", ".join(f"{feature.figure}, {arm} / {first}: {values[arm] / values[first]:.2f}" for arm in others)


def equal_answers(feature: "Feature", found: Mapping[str, Sequence[Samples]]) -> str:
    """Return how many answers are equal in both arms. Raise SystemExit if one differs or is an error."""
    answers = (pooled(runs, feature.columns[feature.figure].samples) for runs in found.values())
    pairs = list(zip(*answers, strict=True))
    wrong = [number for number, (a, b) in enumerate(pairs) if a != b or not a.startswith("[")]
    equal = f"{len(pairs) - len(wrong)} of {len(pairs)} answers are equal"
    if wrong:
        pair = pairs[wrong[0]]
        place = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), 0)
        around = [text[max(0, place - 60) : place + 60] for text in pair]
        raise SystemExit(f"only {equal}; the first that differs, {wrong[0]}: {around}")
    return equal


@dataclass(frozen=True, slots=True)
class Feature:
    """One comparison. `figure` names the column that `closing` compares; `model` None: the packaged model."""

    about: str
    load: Callable[..., Coroutine[Any, Any, Samples]]
    arms: Mapping[str, Arm]
    columns: Mapping[str, Column]
    figure: str
    flags: Sequence[str] = ()
    model: Mapping[str, Any] | None = None
    closing: Callable[["Feature", Mapping[str, Sequence[Samples]]], str] = ratios


STREAMED = CONFIG | {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2816,
    "vocab_size": 8192, "tie_word_embeddings": False, "num_hidden_layers": 21,
}  # fmt: skip
"""A model of 512 MiB in bfloat16."""
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
    "layer_types": ["conv", "conv", "full_attention"] * 4, "vocab_size": 2560, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""A hybrid of short convolutions and attention, about 40 M parameters."""
UNLIMITED = ("--slo=ttft_p99=300s,tbt_p99=10s", "--max-queue-time=none")
RATE = {"output tokens/s": Column("15.1f", "rate", mean)}

FEATURES: dict[str, Feature] = {
    "turns": Feature(
        "the next turn of a chat beside a batch that fills the cache, without and with the host tier",
        loads.turns,
        {"device only": Arm(("--swap-space=0",)), "host tier": Arm(("--swap-space=0.5",))},
        {
            "later turns": Column("11.0f", "ttft", count),
            "TTFT P50 ms": times(50, "ttft"),
            "TTFT P90 ms": times(90, "ttft"),
            "from the host": Column("13.0f", "host", sum),
        },
        "TTFT P50 ms",
        (
            "--slo=ttft_p99=10s,tbt_p99=100ms", "--enable-prefix-caching", "--profile-seconds=8",
            "--num-gpu-blocks-override=256", "--max-model-len=1200",
        ),
        CONFIG,
    ),
    "recurrent": Feature(
        "the second turn of chats with recurrent layers, without and with checkpoints of their states",
        loads.second_turns,
        {"off": Arm(("--no-enable-prefix-caching",)), "on": Arm(("--enable-prefix-caching",))},
        {"second turns": Column("12.0f", "ttft", count), "TTFT P50 ms": times(50, "ttft")},
        "TTFT P50 ms",
        ("--dtype=float32", "--max-model-len=1756", "--max-num-seqs=4", "--slo=ttft_p99=60s", "--profile-seconds=5"),
        LFM2,
    ),
    "overload": Feature(
        "a burst that overflows the memory of two engines: recompute, swap, or one pipeline (KunServe)",
        loads.burst,
        {"recompute": Arm(), "swap": Arm(("--swap-space=1",)), "drop": Arm(("--overload=drop",))},
        CHATS
        | {
            "longest gap s": times(100, "gap", 1.0),
            "preempted": Column("9.0f", "preempted", sum),
            "drops": Column("5.0f", "drops", sum),
        },
        "TTFT P99 ms",
        (
            "--engines=2", "--slo=ttft_p99=30s,tbt_p99=2s", "--max-queue-time=none", "--dtype=float32",
            "--profile-seconds=8", "--num-gpu-blocks-override=96", "--max-model-len=384",
        ),
        CONFIG,
    ),
    "routing": Feature(
        "two engines behind one router, and two servers that get the chats in turn",
        loads.mixed_chats,
        {"in turn": Arm(("--threads=1",), servers=2), "router": Arm(("--engines=2",))},
        CHATS | {"TTFT P95 ms": times(95, "ttft"), "E2E P50 s": times(50, "e2e", 1), "E2E P95 s": times(95, "e2e", 1)},
        "TTFT P95 ms",
        ("--slo=ttft_p99=1s,tbt_p99=150ms", "--max-queue-time=none"),
        CONFIG,
    ),
    "larry": Feature(
        "an overload that waits for memory, with chats by arrival and by LARRY's score",
        partial(loads.mixed_chats, rate=4.0, seconds=40.0),
        {"fcfs": Arm(("--online-policy=fcfs",)), "larry": Arm(("--online-policy=larry",))},
        CHATS | {"TTFT P95 ms": times(95, "ttft")},
        "TTFT P50 ms",
        ("--max-queue-time=none", "--num-gpu-blocks-override=96", "--max-model-len=1024", "--swap-space=0"),
        CONFIG,
    ),
    "hidden": Feature(
        "a short cache beside streamed weights: recompute, run from hidden state (Apt-Serve), or stream "
        "it as K and V or as both kinds (HybridServe)",
        loads.at_once,
        {
            "recompute": Arm(("--num-gpu-blocks-override=160",)),
            "hidden": Arm(("--num-gpu-blocks-override=160", "--overload=hidden")),
            "streamed": Arm(("--num-gpu-blocks-override=640", "--swap-space=2")),
            "both streamed": Arm(("--num-gpu-blocks-override=640", "--swap-space=2", "--overload=hidden")),
        },
        RATE
        | {
            "TTFT P50 ms": times(50, "ttft"),
            "TBT P50 ms": times(50, "gap"),
            "hidden blocks": Column("13.1f", "hidden", mean),
            "preempted": Column("9.0f", "preempted", sum),
        },
        "output tokens/s",
        (
            "--offload-weights=0.2", "--max-model-len=256", "--online-policy=goodput-strict", "--profile-seconds=5",
            *UNLIMITED,
        ),
        STREAMED | {"num_hidden_layers": 16, "num_key_value_heads": 16},
    ),
    "offload": Feature(
        "weights that stream at half of the memory, also in fixed batches of 4 as by FlexGen's policy",
        partial(loads.at_once, prompt=8, output=32),
        {
            "fixed batches": Arm(("--offload-weights=0.25", "--max-num-seqs=4")),
            "streaming": Arm(("--offload-weights=0.25",)),
            "in memory": Arm(("--offload-weights=off",)),
        },
        RATE,
        "output tokens/s",
        ("--num-gpu-blocks-override=2048", "--max-model-len=512", "--profile-seconds=5", *UNLIMITED),
        STREAMED,
    ),
    "streamed-cache": Feature(
        "a job whose cache is four times the memory for it, beside weights that stream (HybridServe §4.2)",
        loads.at_once,
        {
            "in memory": Arm(("--num-gpu-blocks-override=128",)),
            "streamed": Arm(("--num-gpu-blocks-override=512", "--swap-space=1")),
            "4 x memory": Arm(("--num-gpu-blocks-override=512",)),
        },
        RATE,
        "output tokens/s",
        ("--offload-weights=0.25", "--max-model-len=512", "--profile-seconds=5", *UNLIMITED),
        STREAMED,
    ),
    "modules": Feature(
        "layers of the project and transformers' modules, by tokens/s",
        loads.speeds,
        {"transformers": Arm(("--model-impl=transformers",)), "own": Arm(("--model-impl=own",))},
        {name: Column("11.1f", name, mean) for name in ("one stream", "prefill", "8 streams", "16 streams")},
        "one stream",
        UNLIMITED,
        CONFIG,
    ),
    "structured": Feature(
        "chats beside offline rows without a form, with a schema, and with hostile schemas",
        loads.beside_rows,
        {name: Arm(settings={"forms": name}) for name in loads.FORMS},
        CHATS | {"rows": Column("6.0f", "answered", sum), "refused": Column("8.0f", "refused", sum)},
        "kept",
        ("--slo=ttft_p99=1.5s,tbt_p99=300ms",),
        CONFIG,
    ),
    "classes": Feature(
        "three service classes, without and with a batch beside them",
        loads.classes,
        {"alone": Arm(settings={"job_rate": 0.0}), "batch": Arm()},
        {name: Column("8.1%", name, mean) for name in loads.CLASSES}
        | {
            "premium TTFT P99 ms": times(99, "premium ttft"),
            "premium TBT P99 ms": times(99, "premium gap"),
            "lines/s": Column("8.2f", "lines", mean),
        },
        "premium",
        tuple(word for load in loads.CLASSES.values() for word in ("--slo", load.slo)),
        CONFIG,
    ),
    "identity": Feature(
        "random requests with drafts, a short cache and two engines: equal answers, bit for bit",
        loads.random_requests,
        {
            "calm": Arm(("--speculation=off",)),
            "hard": Arm(
                ("--speculation=on", "--num-gpu-blocks-override=80", "--swap-space=0.05", "--engines=2"),
            ),
        },
        {
            "answers": Column("8.0f", "answers", count),
            **{name: Column("15.0f", name, sum) for name in loads.SEEN},
        },
        "answers",
        ("--dtype=float32", "--max-model-len=1024", "--load-format=safetensors", *UNLIMITED),
        None,
        equal_answers,
    ),
}  # fmt: skip


def pooled(runs: Sequence[Samples], name: str) -> list[Any]:
    return [value for run in runs for value in run.get(name, [])]


def sizes_of(feature: Feature, texts: Sequence[str]) -> dict[str, Any]:
    """Return the sizes that `--set NAME=VALUE` gives, typed as the defaults. Raise SystemExit for unknown names."""
    known = {
        name: each.default
        for name, each in inspect.signature(feature.load).parameters.items()
        if isinstance(each.default, (int, float))
    }
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise SystemExit(f"--set {text}: the load has {', '.join(known)}")
        found[name] = type(known[name])(value)
    return found


def measure(
    feature: Feature, rounds: int, sizes: Mapping[str, Any], flags: Sequence[str] = ()
) -> dict[str, list[Samples]]:
    """Run all arms and print their table."""
    table = Table({"arm": "14"} | {title: column.form for title, column in feature.columns.items()})

    def row(arm: str, runs: Sequence[Samples]) -> str:
        return table.line(arm, *(each.pool(pooled(runs, each.samples)) for each in feature.columns.values()))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if feature.model is None:
            shutil.copytree(PACKAGED, folder, dirs_exist_ok=True)
        else:
            make_model_folder(folder, feature.model)
        return compare(
            folder,
            (*feature.flags, *flags),
            feature.arms,
            rounds,
            lambda urls, number, arm: feature.load(urls, number + 1, **{**arm.settings, **sizes}),
            table,
            row,
        )


def main(argv: Sequence[str] | None = None) -> None:
    names = "\n".join(f"  {name:11} {feature.about}" for name, feature in FEATURES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks features",
        description=f"{__doc__}\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(FEATURES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all arms (default: 2)")
    parser.add_argument(
        "--set", dest="sizes", action="append", default=[], metavar="NAME=VALUE", help="size of the load"
    )
    parser.add_argument(
        "--flag", dest="flags", action="append", default=[], help="flag of all servers: --flag=--threads=1"
    )
    options = parser.parse_args(argv)
    feature = FEATURES[options.name]
    sizes = sizes_of(feature, options.sizes)
    print(f"{options.name}: {feature.about}; {describe()}", flush=True)
    print(feature.closing(feature, measure(feature, options.rounds, sizes, options.flags)))
