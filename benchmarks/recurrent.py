"""What a state of fixed size costs beside keys and values, computed: how many requests run at once where the rows'
states are set aside at the start, and where they would share one pool with K and V, as items of fixed cost in the
knapsack; and what part of the prompts of chats is computed with checkpoints of the state.

Nothing is measured: the core schedules for a runner that answers at once, with any token. Sizes are those of published
configs, a state's elements taken as 4 bytes.
"""

import argparse
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.frame import Table
from engine.api import EngineRequest, SamplingParams
from engine.config import CHECKPOINT_TOKENS, SchedulerConfig
from engine.core import EngineCore
from engine.execution.memory import CHECKPOINT_PART, useful_slots
from engine.scheduling.knapsack import Columns, choose
from engine.scheduling.output import ModelRunnerOutput
from predictor.limits import UNITS_PER_BLOCK, Limits

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
        """(rows, slots of checkpoints, tokens of K and V) as a start divides the room."""
        rows = max(1, min(self.most_rows, self.room // 2 // self.state))
        left = self.room - rows * self.state
        blocks = left // (self.token * BLOCK)
        wanted = useful_slots(Limits(rows, 2048, 2**17, UNITS_PER_BLOCK * blocks, BLOCK), blocks)
        slots = min(wanted, left // CHECKPOINT_PART // self.state)
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
        max_num_batched_tokens=2048, state_slots=state_slots, checkpoint_tokens=every, enable_prefix_caching=prefixes,
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
    stats = core.stats()
    return 1.0 - stats.prefix_hit_tokens / max(1, stats.prefix_queried_tokens)


def main(argv: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m benchmarks recurrent", description=__doc__).parse_args(argv)
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
        shares = {every: computed_share(slots, every) for every in (128, CHECKPOINT_TOKENS, 2048)}
        print(f"  {slots} slots: " + ", ".join(f"{share:.1%} (every {every})" for every, share in shares.items()))


if __name__ == "__main__":
    main(())
