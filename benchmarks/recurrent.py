"""What a state of fixed size costs beside keys and values, computed: how many requests run at once where the rows'
states are set aside at the start, and where they would share one pool with K and V, as items of fixed cost in the
knapsack; and what part of the prompts of chats is computed with snapshots of the state.

`--live` measures instead how much sooner the second turn of a chat starts with snapshots: two servers of an LFM2 of
random weights, with and without prefix caching, asked in alternation.

Otherwise nothing is measured: the core schedules for a runner that answers at once, with any token. Sizes are those of
published configs, a state's elements taken as 4 bytes.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import live
from benchmarks.frame import Table
from benchmarks.machine import describe
from engine.api import EngineRequest, SamplingParams
from engine.core import EngineCore
from engine.execution.memory import SNAPSHOT_PART, useful_slots
from engine.limits import SNAPSHOT_TOKENS, UNITS_PER_BLOCK, Limits, SchedulerConfig
from engine.scheduling.output import ModelRunnerOutput
from engine.scheduling.report import report_stats
from engine.scheduling.selection import Columns, choose

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "layer_types": ["conv", "conv", "full_attention"] * 4,
    "vocab_size": 2560,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A hybrid of short convolutions and attention, about 40 M parameters."""
QUESTION = 40
BLOCK, GIB = 16, 2**30
CONTEXTS = (512, 2048, 8192, 32768)
SYSTEMS = (900, 1700, 2500, 3300)
CHATS, TURNS, RUNNING, ANSWER = 48, 5, 16, 64


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Bytes of K and V of a token, of the state of a request, and of the room for both."""

    name: str
    token: int
    state: int
    room: int
    most_rows: int

    def split(self) -> tuple[int, int, int]:
        """(rows, slots of snapshots, tokens of K and V) as a start divides the room."""
        rows = max(1, min(self.most_rows, self.room // 2 // self.state))
        left = self.room - rows * self.state
        blocks = left // (self.token * BLOCK)
        wanted = useful_slots(Limits(rows, 2048, 2**17, UNITS_PER_BLOCK * blocks, BLOCK), blocks)
        slots = min(wanted, left // SNAPSHOT_PART // self.state)
        return rows, slots, (left - slots * self.state) // self.token


HYBRIDS = (
    Hybrid("LFM2-1.2B, 4 GiB", 6 * 2 * 512 * 2, 10 * 2048 * 3 * 4, 4 * GIB, 64),
    Hybrid("Qwen3-Next-80B, 40 GiB", 12 * 2 * 512 * 2, 36 * (32 * 128 * 128 + 8192 * 4) * 4, 40 * GIB, 256),
    Hybrid("Granite-4.0-H-Small, 8 GiB", 4 * 2 * 1024 * 2, 36 * (128 * 64 * 128 + 8448 * 4) * 4, 8 * GIB, 256),
)


def at_once(model: Hybrid, context: int) -> tuple[int, int]:
    """How many requests of such a context run: with rows set aside, and out of one pool."""
    rows, slots, tokens = model.split()
    pool = model.room - slots * model.state
    return min(rows, tokens // context), min(model.most_rows, pool // (model.state + context * model.token))


def chosen(model: Hybrid, contexts: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """What the knapsack's choice of a mixed queue is worth in either case, as a part of the whole queue."""
    rows, slots, tokens = model.split()
    blocks, nothing = -(-np.array(contexts) // BLOCK), np.zeros(len(contexts), np.int64)
    worth = np.array(values)
    apart = choose(Columns(worth, blocks, nothing), tokens // BLOCK).kv[:rows]
    state = -(-model.state // (model.token * BLOCK))
    room = (model.room - slots * model.state) // (model.token * BLOCK)
    together = choose(Columns(worth, blocks + state, nothing), room).kv[: model.most_rows]
    return float(worth[list(apart)].sum() / worth.sum()), float(worth[list(together)].sum() / worth.sum())


def computed_share(state_slots: int, every: int, *, prefixes: bool = True) -> float:
    """The part of all prompts of the chats that is computed: a turn sends all before it, behind one of four texts."""
    config = SchedulerConfig(
        num_units=UNITS_PER_BLOCK * 32768, max_model_len=8192, block_size=BLOCK, max_num_seqs=RUNNING,
        max_num_batched_tokens=2048, state_slots=state_slots, snapshot_tokens=every, enable_prefix_caching=prefixes,
    )  # fmt: skip
    core, chance, numbers = EngineCore(config), random.Random(1), count()
    texts = [[chance.randrange(50_000) for _ in range(length)] for length in SYSTEMS]
    histories = [list(chance.choice(texts)) for _ in range(CHATS)]
    turns, running = deque([*range(CHATS)] * TURNS), dict[str, int]()
    while turns or running:
        while turns and len(running) < RUNNING:
            chat = turns.popleft()
            histories[chat] += [chance.randrange(50_000) for _ in range(chance.randrange(20, 300))]
            running[name := str(next(numbers))] = chat
            core.add_request(EngineRequest(name, tuple(histories[chat]), SamplingParams(max_tokens=ANSWER)), 0.0)
        step = core.schedule(0.0)
        assert step is not None, "requests are left and nothing runs"
        result = ModelRunnerOutput(step.step_id, [7] * sum(chunk.sample for chunk in step.chunks), None, 0.0)
        for output in core.update(step, result, 0.0):
            histories[running[output.request_id]] += output.token_ids
            if output.finish_reason is not None:
                del running[output.request_id]
    stats = report_stats(core.state)
    return 1.0 - stats.prefix_hit_tokens / max(1, stats.prefix_queried_tokens)


async def second_turns(url: str, history: int, chats: int, seed: int) -> list[float]:
    """Return the seconds until the first token of each chat's second turn, one chat after another."""
    chance, seconds = random.Random(seed), []
    async with live.completions(url, 1) as ask:
        for _ in range(chats):
            prompt = [chance.randrange(16, 2000) for _ in range(history)]
            for turn in (prompt, prompt + [chance.randrange(16, 2000) for _ in range(QUESTION)]):
                began = time.monotonic()
                status, answer = await ask(model="model", prompt=turn, max_tokens=1, temperature=0.0)
                if status != 200:
                    raise SystemExit(f"the server answered {status}: {answer}")
            seconds.append(time.monotonic() - began)
    return seconds


def measure_live(history: int, chats: int, rounds: int) -> None:
    """Print the median time to the first token of second turns, without and with snapshots."""
    flags = (
        "--dtype=float32",
        f"--max-model-len={history + 256}",
        "--max-num-seqs=4",
        "--slo=ttft_p99=60s",
        "--profile-seconds=5",
    )
    found: dict[str, list[float]] = {"--no-enable-prefix-caching": [], "--enable-prefix-caching": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        live.make_model_folder(folder, LFM2)
        states = {arm: f"--state-dir={folder / arm.strip('-')}" for arm in found}
        urls = {arm: stack.enter_context(live.server(folder, 0, *flags, states[arm], arm)) for arm in found}
        for seed in range(rounds):
            for arm, url in urls.items():
                found[arm] += asyncio.run(second_turns(url, history, chats, seed))
    without, beside = (median(seconds) * 1e3 for seconds in found.values())
    print(f"second turn behind {history} tokens, {describe()}: TTFT P50 {without:.0f} ms without snapshots, ", end="")
    print(f"{beside:.0f} ms with them: {without / beside:.1f} x sooner ({chats * rounds} chats an arm)")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recurrent", description=__doc__)
    parser.add_argument("--live", action="store_true", help="measure the second turn of chats on two servers")
    parser.add_argument("--history", type=int, default=1500, help="tokens of a first turn, with --live")
    parser.add_argument("--chats", type=int, default=4, help="chats of a round, with --live")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both servers in turn, with --live")
    arguments = parser.parse_args(argv)
    if arguments.live:
        measure_live(arguments.history, arguments.chats, arguments.rounds)
        return
    chance = random.Random(0)
    queue = [round(2 ** chance.uniform(8, 15)) for _ in range(1000)]
    values = [chance.expovariate(1.0) for _ in queue]
    titles = [*(f"context {each}" for each in CONTEXTS), "worth of a mixed queue"]
    table = Table({"model and room": "<26", **{title: f">{len(title)}" for title in titles}})
    print("Requests at once with rows set aside / out of one pool:\n" + table.heading)
    for model in HYBRIDS:
        cells = ["{} / {}".format(*at_once(model, context)) for context in CONTEXTS]
        print(table.line(model.name, *cells, "{:.1%} / {:.1%}".format(*chosen(model, queue, values))))
        print("  {} rows, {} slots, {} tokens;".format(*model.split()), end=" ")
        print(f"a state is as large as {model.state / model.token:.0f} tokens")
    print(f"\nOf the prompts of {CHATS} chats with {TURNS} turns behind {len(SYSTEMS)} texts is computed:")
    print(f"  without prefixes {computed_share(0, 1, prefixes=False):.1%}, K and V alone {computed_share(0, 1):.1%}")
    for slots in (8, 32, 128, 512):
        shares = {every: computed_share(slots, every) for every in (128, SNAPSHOT_TOKENS, 2048)}
        print(f"  {slots} slots: " + ", ".join(f"{share:.1%} (every {every})" for every, share in shares.items()))


if __name__ == "__main__":
    main(())
