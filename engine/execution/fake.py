"""A deterministic, torch-free runner for tests of the control plane: it believes nothing and checks everything.

The cache is modelled cell by cell: a cell (unit, offset) remembers which token prefix was written there. A chunk reads
its whole past through its block table and fails when a cell holds anything but that request's own prefix, so a block
that is wrongly shared, reused too early or stale is found at once. The next token is a hash of the prefix that was
read, so every such error also changes the output.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.cache.cache_map import CacheEntry
from engine.request import SamplingParams
from engine.scheduling.output import INVALID_TOKEN, Chunk, ModelRunnerOutput, SchedulerOutput

Digest = bytes


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    entries: list[CacheEntry] = field(default_factory=list)


class FakeRunner:
    """Executes steps on nothing.

    `fail_steps`: step ids that raise RuntimeError, before any delta is applied (a later step must do without it).
    `invalid(prefix)`: True for prefixes whose logits are NaN. `latency(output)`: seconds that a step claims to take.
    """

    def __init__(
        self,
        *,
        block_size: int,
        vocab_size: int,
        fail_steps: frozenset[int] = frozenset(),
        invalid: Callable[[Sequence[int]], bool] | None = None,
        latency: Callable[[SchedulerOutput], float] | None = None,
        sleep: bool = False,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.fail_steps = fail_steps
        self._invalid = invalid or (lambda _: False)
        self._latency = latency or (lambda _: 0.0)
        self._sleep = sleep
        self._rows: dict[int, _Row] = {}
        self._cells: dict[tuple[int, int], Digest] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the deltas in the documented order, run the chunks, sample."""
        latency = self._latency(output)
        if self._sleep:
            time.sleep(latency)
        if output.step_id in self.fail_steps:
            raise RuntimeError(f"step {output.step_id} was told to fail")
        for row in output.released_rows:
            self._rows.pop(row, None)
        for new in output.new_requests:
            assert new.row not in self._rows, f"row {new.row} is given to {new.request_id} but not released"
            self._rows[new.row] = _Row(list(new.token_ids), new.num_prompt_tokens, new.sampling, list(new.entries))
        for appended in output.appended:
            self._rows[appended.row].entries.extend(appended.entries)
        assert len({chunk.row for chunk in output.chunks}) == len(output.chunks), "one chunk per request in a step"
        sampled = [self._run(chunk) for chunk in output.chunks]
        tokens = [token for token in sampled if token is not None]
        return ModelRunnerOutput(output.step_id, tokens, None, latency)

    def _run(self, chunk: Chunk) -> int | None:
        row = self._rows[chunk.row]
        end = chunk.start + chunk.length
        assert chunk.length > 0 and end <= len(row.token_ids), "a chunk beyond the known tokens"
        assert end <= len(row.entries) * self.block_size, "the block table is too short"
        digests = _prefix_digests(row.token_ids[:end])
        for position in range(end):
            for unit in row.entries[position // self.block_size].units:
                cell = (unit, position % self.block_size)
                if position >= chunk.start:
                    self._cells[cell] = digests[position]
                else:
                    assert self._cells.get(cell) == digests[position], f"position {position} is not this request's"
        assert chunk.sample == (end == len(row.token_ids)), "a chunk samples iff it reaches the last known token"
        if not chunk.sample:
            return None
        if self._invalid(row.token_ids):
            row.token_ids.append(0)
            return INVALID_TOKEN
        num_outputs = end - row.num_prompt_tokens
        token = _next_token(digests[-1], num_outputs, row.sampling, self.vocab_size)
        row.token_ids.append(token)
        return token


def solo_tokens(prompt: list[int], sampling: SamplingParams, vocab_size: int) -> list[int]:
    """What a request gives when it runs alone: the reference of every control-plane test."""
    token_ids = list(prompt)
    outputs: list[int] = []
    while len(outputs) < sampling.max_tokens:
        token = _next_token(_prefix_digests(token_ids)[-1], len(outputs), sampling, vocab_size)
        token_ids.append(token)
        outputs.append(token)
        if token in sampling.stop_token_ids:
            break
    return outputs


def _prefix_digests(token_ids: Sequence[int]) -> list[Digest]:
    digests = []
    parent = b""
    for token in token_ids:
        parent = blake2b(parent + token.to_bytes(8, "little", signed=True), digest_size=8).digest()
        digests.append(parent)
    return digests


def _next_token(digest: Digest, num_outputs: int, sampling: SamplingParams, vocab_size: int) -> int:
    """A hash of the prefix; a stop id before `min_tokens` is passed over, as a real sampler masks it."""
    token = int.from_bytes(digest, "little") % vocab_size
    while num_outputs < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % vocab_size
    return token
