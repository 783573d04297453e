"""A deterministic, torch-free runner for tests of the control plane: it believes nothing and checks everything.

The cache is modelled cell by cell: a cell (tier, unit, offset) remembers which token prefix was written there, at which
position, and as what (K, V or hidden state). A chunk reads its whole past through its block table and fails when a cell
holds anything but that request's own prefix in the form that the table says, so a block that is wrongly shared,
converted, swapped, reused too early or stale is found at once. The state of recurrent layers is the prefix that it has
seen, in a row or in a slot. The next token is a hash of the prefix that was read, so
every such error also changes the output.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from engine.api import EngineRequest, SamplingParams
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.scheduling.output import INVALID_TOKEN, Chunk, Collect, Draft, ModelRunnerOutput, SchedulerOutput
from predictor.features import EVERYTHING, BatchFeatures, Reach

Digest = bytes

_WAYS = {CacheAction.SWAP_OUT: ((Tier.DEVICE, Tier.HOST),), CacheAction.SWAP_IN: ((Tier.HOST, Tier.DEVICE),)}


def address_of(tier: Tier, unit: int) -> int:
    """The key of a unit's cells; those of the host are negative."""
    return unit if tier is Tier.DEVICE else ~unit


class _Cell(NamedTuple):
    part: str
    position: int
    digest: Digest


def features_of(output: SchedulerOutput, reach: Reach = EVERYTHING) -> BatchFeatures:
    """Count the features of a step anew from its chunks, for a latency model of this reach."""
    features = BatchFeatures(reach)
    contexts = [chunk.start + 1 for chunk in output.chunks if chunk.length == 1]
    features.add_decodes(len(contexts), reach.contexts(contexts))
    for chunk in output.chunks:
        if chunk.length > 1:
            features.add_chunk(chunk.start, chunk.length)
    features.add_cache_work(*output.features.cache_work)
    features.add_adapted(output.features.adapters, output.features.adapted_tokens)
    features.add_masked(output.features.masked_rows)
    return features


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    entries: list[CacheEntry] = field(default_factory=list)
    pooled: bool = False
    state: Digest = b""
    digests: list[Digest] = field(default_factory=list)
    due: dict[str, list[_Cell]] = field(default_factory=lambda: {"k": [], "v": [], "x": []})
    """By part, the content of its cells at each position. Kept: a past is compared at every step."""

    def cut(self, end: int) -> None:
        """Forget all tokens from `end` on."""
        for each in (self.token_ids, self.digests, *self.due.values()):
            del each[end:]

    def extend_to(self, end: int) -> None:
        _extend_digests(self.digests, self.token_ids, end)
        for part, cells in self.due.items():
            cells.extend(_Cell(part, at, self.digests[at]) for at in range(len(cells), end))


class FakeRunner:
    """Executes steps on nothing, when their results are asked for.

    `fail_steps`: step ids that raise RuntimeError, before any delta is applied (a later step must do without it);
    `fail_after_operations`: those that raise it when deltas and cache operations are done and chunks are not.
    `scratch_blocks`: the most distinct blocks of hidden state that a step's chunks may use; `host_units`: the host
    tier. `state_slots`: of snapshots of recurrent layers, which there are where it is more than 0, and on the host
    `host_state_slots`. `window`: tokens that a token sees, itself included (0: all); blocks before those may be
    anybody's.
    `invalid(prefix)`: True for prefixes whose logits are NaN. `latency(output)`: seconds that a step claims to take.
    """

    def __init__(
        self,
        *,
        block_size: int,
        vocab_size: int,
        fail_steps: frozenset[int] = frozenset(),
        fail_after_operations: frozenset[int] = frozenset(),
        scratch_blocks: int = 0,
        host_units: int = 0,
        window: int = 0,
        state_slots: int = 0,
        host_state_slots: int = 0,
        invalid: Callable[[Sequence[int]], bool] | None = None,
        latency: Callable[[SchedulerOutput], float] | None = None,
        sleep: bool = False,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.fail_steps = fail_steps
        self.fail_after_operations = fail_after_operations
        self.scratch_blocks = scratch_blocks
        self.host_units = host_units
        self.window = window
        self.state_slots, self.host_state_slots = state_slots, host_state_slots
        self._states: dict[int, Digest] = {}
        self._invalid = invalid or (lambda _: False)
        self._latency = latency or (lambda _: 0.0)
        self._sleep = sleep
        self._rows: dict[int, _Row] = {}
        self._units: dict[int, list[_Cell | None]] = {}

    def launch(self, output: SchedulerOutput) -> Collect:
        return partial(self._execute, output)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the deltas in the documented order, run the chunks, sample."""
        if output.features.num_tokens:
            assert output.features == features_of(output, output.features.reach), "the features are of another step"
        latency = self._latency(output)
        if self._sleep:
            time.sleep(latency)
        if output.step_id in self.fail_steps:
            raise RuntimeError(f"step {output.step_id} was told to fail")
        self._park_states(output)
        for row in output.released_rows:
            self._rows.pop(row, None)
        for new in output.new_requests:
            assert new.row not in self._rows, f"row {new.row} is given to {new.request_id} but not released"
            self._rows[new.row] = _Row(
                list(new.token_ids), new.num_prompt_tokens, new.sampling, list(new.entries), new.pooling is not None,
                self._states[new.state] if new.state >= 0 else b"",
            )  # fmt: skip
        for appended in output.appended:
            self._rows[appended.row].entries.extend(appended.entries)
        for replaced in output.replaced:
            self._rows[replaced.row].entries[replaced.block] = replaced.entry
        self._operate(output.operations)
        if output.step_id in self.fail_after_operations:
            raise RuntimeError(f"step {output.step_id} was told to fail after its operations")
        self._check_tables(output.chunks)
        self._save_states(output)
        drafted = {draft.row: draft for draft in output.drafts}
        plain = [chunk.row for chunk in output.chunks if chunk.row not in drafted]
        assert len(set(plain)) == len(plain), "one chunk per request in a step"
        assert len(plain) + sum(1 + len(draft.token_ids) for draft in output.drafts) == len(output.chunks)
        for row, start, token_ids in output.drafts:
            assert len(self._rows[row].token_ids) == start and token_ids, "a draft follows the known tokens"
            self._rows[row].token_ids.extend(token_ids)
        sampled = [self._run(chunk, drafted.get(chunk.row)) for chunk in output.chunks]
        by_row = [(chunk.row, token) for chunk, token in zip(output.chunks, sampled, strict=True)]
        for draft in output.drafts:
            self._keep_right(draft, [token for row, token in by_row if row == draft.row])
        tokens = [token for token in sampled if token is not None]
        ends = {number: self._rows[chunk.row] for number, chunk in enumerate(output.chunks) if self._is_end(chunk)}
        pooled = {number: b"\0\0\0\0" for number, row in ends.items() if row.pooled}
        return ModelRunnerOutput(output.step_id, tokens, None, latency, pooled=pooled)

    def _park_states(self, output: SchedulerOutput) -> None:
        """Copy states to the host, whose slots are numbered behind the device's."""
        targets = [self.state_slots + target for _, target in output.parked_states]
        read = {new.state for new in output.new_requests}
        assert len(set(targets)) == len(targets) and read.isdisjoint(targets), "written twice, or while it is read"
        assert all(target < self.state_slots + self.host_state_slots for target in targets), "no such slot on the host"
        for (slot, _), target in zip(output.parked_states, targets, strict=True):
            self._states[target] = self._states[slot]

    def _save_states(self, output: SchedulerOutput) -> None:
        """Move the states of rows on, and keep the states on the way."""
        slots = [saved.slot for saved in output.saved_states]
        taken = {new.state for new in output.new_requests}
        assert len(set(slots)) == len(slots) and taken.isdisjoint(slots), "a slot is written twice, or while it is read"
        assert all(0 <= slot < self.state_slots for slot in slots), "no such slot"
        for row, start, length, _ in output.chunks if self.state_slots else ():
            state = self._rows[row]
            state.extend_to(start + length)
            assert state.state == (state.digests[start - 1] if start else b""), "a state of other tokens goes on"
            state.state = state.digests[start + length - 1]
            for saved in output.saved_states:
                if saved.row == row:
                    assert start < saved.num_tokens <= start + length, "a state is saved that the chunk does not pass"
                    self._states[saved.slot] = state.digests[saved.num_tokens - 1]

    def _is_end(self, chunk: Chunk) -> bool:
        return chunk.start + chunk.length == self._rows[chunk.row].num_prompt_tokens

    def _operate(self, operations: Sequence[CacheOperation]) -> None:
        """Move and convert cells. No unit is a target twice, nor one that a neighbour of its action reads: those may
        run at the same time."""
        written: set[tuple[Tier, int]] = set()
        read: set[tuple[Tier, int]] = set()
        running: CacheAction | None = None
        for action, source, target, start in operations:
            if action is not running:
                running = action
                read.clear()
            units = {(target.tier, unit) for unit in target.units}
            assert written.isdisjoint(units), "a unit is written twice in a step"
            assert read.isdisjoint(units), "a unit is written while it may be read"
            assert all(unit < self.host_units for tier, unit in units if tier is Tier.HOST), "no such host unit"
            written |= units
            read |= {(source.tier, unit) for unit in source.units}
            if action is CacheAction.RESTORE:
                self._restore(source, target, start)
                continue
            assert (source.tier, target.tier) in _WAYS[action] and source.kind is target.kind, "no such copy"
            for old, new in zip(source.units, target.units, strict=True):
                self._units[address_of(target.tier, new)] = list(self._unit(source.tier, old))

    def _restore(self, source: CacheEntry, target: CacheEntry, start: int) -> None:
        assert (source.kind, target.kind) == (CacheKind.HIDDEN, CacheKind.KV), "hidden state is restored to KV"
        assert source.tier is target.tier is Tier.DEVICE, "a block is restored on the device"
        kept = [
            # others are an earlier owner's, behind the last token; or an error, which the next read finds
            cell if cell is not None and (cell.part, cell.position) == ("x", start + offset) else None
            for offset, cell in enumerate(self._unit(Tier.DEVICE, source.units[0]))
        ]
        for part, unit in zip("kv", target.units, strict=True):
            self._units[unit] = [cell and cell._replace(part=part) for cell in kept]

    def _unit(self, tier: Tier, unit: int) -> list[_Cell | None]:
        address = address_of(tier, unit)
        cells = self._units.get(address)
        if cells is None:
            cells = self._units[address] = [None] * self.block_size
        return cells

    def _check_tables(self, chunks: Sequence[Chunk]) -> None:
        """Rows lie on the device, and the hidden blocks of the step fit the scratch."""
        hidden: set[CacheEntry] = set()
        for chunk in chunks:
            used = self._rows[chunk.row].entries[: -(-(chunk.start + chunk.length) // self.block_size)]
            assert all(entry.tier is Tier.DEVICE for entry in used), "a block on the host is read"
            hidden.update(entry for entry in used if entry.kind is CacheKind.HIDDEN)
        assert len(hidden) <= self.scratch_blocks, "more hidden blocks than scratch"

    def _keep_right(self, draft: Draft, samples: Sequence[int | None]) -> None:
        """Keep the samples of a draft up to the first that differs from the next drafted token."""
        pairs = zip(draft.token_ids, samples, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._rows[draft.row].cut(draft.start)
        self._rows[draft.row].token_ids.extend(token for token in samples[: right + 1] if token is not None)

    def _run(self, chunk: Chunk, draft: Draft | None = None) -> int | None:
        row = self._rows[chunk.row]
        end = chunk.start + chunk.length
        assert chunk.length > 0 and end <= len(row.token_ids), "a chunk beyond the known tokens"
        assert end <= len(row.entries) * self.block_size, "the block table is too short"
        row.extend_to(end)
        for first, entry in zip(range(0, end, self.block_size), row.entries, strict=False):
            past, stop = max(chunk.start - first, 0), end - first
            if self.window and first + self.block_size <= chunk.start - self.window + 1:
                continue
            parts = "kv" if entry.kind is CacheKind.KV else "x"
            for part, unit in zip(parts, entry.units, strict=True):
                due, cells = row.due[part][first : first + self.block_size], self._unit(Tier.DEVICE, unit)
                assert cells[:past] == due[:past], f"a position of {first} to {first + past} is not this request's"
                cells[past:stop] = due[past:stop]
        known = row.token_ids[:end]
        reaches = draft is not None or (end == len(row.token_ids) and not row.pooled)
        assert chunk.sample == reaches, "a chunk samples iff it reaches the last known token"
        if not chunk.sample:
            return None
        if draft is None and self._invalid(known):
            row.token_ids.append(0)
            return INVALID_TOKEN
        token = self.choose(row.digests[end - 1], known[row.num_prompt_tokens :], row.sampling)
        if draft is None:
            row.token_ids.append(token)
        return token

    def choose(self, digest: Digest, outputs: Sequence[int], sampling: SamplingParams) -> int:
        """The next token behind a prefix."""
        return _next_token(digest, len(outputs), sampling, self.vocab_size)


def solo_tokens(prompt: list[int], sampling: SamplingParams, vocab_size: int) -> list[int]:
    """Return the tokens of a request that runs alone: the reference of every control-plane test."""
    token_ids = list(prompt)
    outputs: list[int] = []
    digests: list[Digest] = []
    while len(outputs) < sampling.max_tokens:
        _extend_digests(digests, token_ids)
        token = _next_token(digests[-1], len(outputs), sampling, vocab_size)
        token_ids.append(token)
        outputs.append(token)
        if token in sampling.stop_token_ids:
            break
    return outputs


def solo(request: EngineRequest, vocab_size: int) -> list[int]:
    return solo_tokens(list(request.prompt_token_ids), request.sampling, vocab_size)


def _extend_digests(digests: list[Digest], token_ids: Sequence[int], end: int | None = None) -> None:
    """Append the hash of all tokens up to it for every token before `end` that has none yet."""
    parent = digests[-1] if digests else b""
    for token in token_ids[len(digests) : end]:
        parent = blake2b(parent + token.to_bytes(8, "little", signed=True), digest_size=8).digest()
        digests.append(parent)


def _next_token(digest: Digest, num_outputs: int, sampling: SamplingParams, vocab_size: int) -> int:
    """A hash of the prefix; a stop id before `min_tokens` is passed over, as a real sampler masks it."""
    token = int.from_bytes(digest, "little") % vocab_size
    while num_outputs < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % vocab_size
    return token
