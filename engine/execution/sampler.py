"""Sampling on the host, vectorised over rows; only rows with special parameters cost extra time.

Order of operations: log-probabilities from the raw logits; logit bias, minimum length, penalties; grammar masks;
temperature, min-p, top-k, top-p; inverse CDF in order of token ids at a given uniform number. Every row is computed
independently (sums are prefix sums along the row), so other rows cannot change its token. A row with NaN, +inf or only
-inf gets INVALID_TOKEN.

The caller must have checked token ids against the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.api import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from engine.arrays import FloatArray, Int32Array, IntArray
from engine.execution.masks import StepMasks
from engine.execution.rows import SamplingTable, uniforms
from engine.scheduling.output import INVALID_TOKEN, LATE_TOKEN, UNMASKED_TOKEN

_Lowest = Callable[[Tensor, Tensor], Tensor]

_LOWEST_EXPONENT = -80.0  # smaller weights are never drawn, and subnormal sums are ten times slower on a CPU
_FIRST_CANDIDATES = 64  # first guess for top-p; multiplied until the candidates hold the required share
_MORE_CANDIDATES = 16


LOGPROB_COLUMNS = 1 + 2 * MAX_LOGPROBS
"""Maximum number of columns of `RowLogprobs.packed`."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of samples.

    Attributes:
        packed: [w, 1 + 2n] int32 on the device: bits of the chosen token's and the n best log-probabilities, then the
            ids of the n best tokens.
        places: [w], samples with log-probabilities.
        counts: [w], number of best tokens wanted.
    """

    packed: Tensor
    places: IntArray
    counts: IntArray

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, places: IntArray, counts: IntArray) -> Self:
        """Compute them from the logits [w, vocab] and tokens [w] of the samples `places`."""
        values = logits.float().log_softmax(dim=-1)
        chosen = values.gather(1, tokens.clamp(min=0).long()[:, None])
        top = values.topk(min(max(int(counts.max()), 1), values.shape[1]), dim=-1)
        packed = torch.cat((chosen.view(torch.int32), top.values.view(torch.int32), top.indices.to(torch.int32)), dim=1)
        return cls(packed, places, counts)

    def read(self, packed: Int32Array, tokens: Int32Array | IntArray) -> list[TokenLogprobs | None]:
        """Decode a host copy; None for samples without a token or without log-probabilities."""
        results: list[TokenLogprobs | None] = [None] * len(tokens)
        most = packed.shape[1] // 2
        values, ids = packed[:, : 1 + most].view(np.float32), packed[:, 1 + most :]
        for index, (place, count) in enumerate(zip(self.places.tolist(), self.counts.tolist(), strict=True)):
            if tokens[place] >= 0:
                best = zip(ids[index, :count].tolist(), values[index, 1 : 1 + count].tolist(), strict=True)
                results[place] = TokenLogprobs(float(values[index, 0]), tuple(best))
        return results


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """`tokens [S]` int32 on the device, negative for samples without a token (`engine.scheduling.output`)."""

    tokens: Tensor
    logprobs: RowLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleInput:
    """For each of R logits rows: row in the table, number of prompt tokens, and tokens so far."""

    rows: IntArray
    num_prompt: IntArray
    token_ids: Sequence[IntArray]

    @property
    def output_positions(self) -> IntArray:
        lengths = np.array([len(ids) for ids in self.token_ids], dtype=np.int64)
        return lengths - self.num_prompt


def sample(
    logits: Tensor, table: SamplingTable, batch: SampleInput, masks: StepMasks | None = None
) -> tuple[IntArray, list[TokenLogprobs | None] | None]:
    """Sample logits [R, vocab] of any float type: tokens [R], and log-probabilities per row if any row wants them."""
    rows = batch.rows
    wanted = np.flatnonzero(table.num_logprobs[rows] >= 0)
    edited = np.flatnonzero(table.edits[rows])
    raw = logits.float()
    chosen_from = raw
    if edited.size or masks is not None:
        chosen_from = raw.clone() if wanted.size or raw is logits else raw
        _edit(chosen_from, edited, table, batch)
        if masks is not None:
            apply_masks(chosen_from, masks)
    tokens, best = _argmax(chosen_from)
    valid = np.isfinite(best)
    if edited.size or masks is not None:  # edits or masks may hide a NaN
        valid &= np.isfinite(_argmax(logits)[1])
    drawn = np.flatnonzero(~table.greedy[rows] & valid)
    if drawn.size:
        tokens[drawn] = _draw(_select(chosen_from, drawn), table, rows[drawn], batch.output_positions[drawn])
    logprobs = _logprobs(raw, tokens, wanted[valid[wanted]], table.num_logprobs[rows]) if wanted.size else None
    tokens[~valid] = INVALID_TOKEN
    if masks is not None:
        mark_unmasked(tokens, masks)
    return tokens, logprobs


_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
_ADDED = _ADDED.astype(np.float32)
"""[256, 8], values that eight mask bits add to their logits."""


def apply_masks(logits: Tensor, masks: StepMasks) -> None:
    """Set logits [R, vocab] to -inf in place where a row's mask has no bit."""
    # Adding avoids the branch per bit of a fill, which is more than ten times slower for mixed masks.
    octets, vocab = masks.bits.view(np.uint8), logits.shape[1]
    added = np.empty((octets.shape[1], 8), dtype=np.float32)
    for place, row in zip(masks.places.tolist(), octets, strict=True):
        np.take(_ADDED, row, axis=0, out=added, mode="clip")
        logits[place].add_(torch.from_numpy(added.reshape(-1)[:vocab]).to(logits.device))


def mark_unmasked(tokens: IntArray | Int32Array, masks: StepMasks) -> None:
    """Replace the tokens [R] at places without a mask by the reason."""
    tokens[masks.late] = LATE_TOKEN
    tokens[masks.failed] = UNMASKED_TOKEN


def _argmax(logits: Tensor) -> tuple[IntArray, np.ndarray]:
    """Return the lowest id of the largest logit per row [R], and that logit (NaN if the row has one)."""
    if logits.device.type == "cpu":
        values = logits.float().numpy()  # numpy's argmax is several times faster than torch's
        tokens = values.argmax(axis=1)
        return tokens, values[np.arange(len(tokens)), tokens]
    best, tokens_ = logits.float().max(dim=-1)
    return tokens_.cpu().numpy(), best.cpu().numpy()


def _select(logits: Tensor, places: IntArray) -> Tensor:
    if len(places) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.from_numpy(places).to(logits.device))


def _edit(logits: Tensor, places: IntArray, table: SamplingTable, batch: SampleInput) -> None:
    """Apply logit bias, minimum length and penalties to rows `places` of float32 logits, in place."""
    for place in places.tolist():
        row, token_ids, num_prompt = logits[place], batch.token_ids[place], int(batch.num_prompt[place])
        ids, added = table.additions(int(batch.rows[place]), len(token_ids) - num_prompt)
        if ids.size:
            row.index_add_(0, _tensor(ids, row), torch.from_numpy(added).to(row))
        params = table.params[batch.rows[place]]
        if params is not None and params.has_penalties:
            _penalise(row, params, token_ids, num_prompt)


def _penalise(row: Tensor, params: SamplingParams, token_ids: IntArray, num_prompt: int) -> None:
    """Apply the repetition penalty over prompt and output, and frequency and presence penalties over the output."""
    if params.repetition_penalty != 1:
        seen = _tensor(np.unique(token_ids), row)
        values = row.index_select(0, seen)
        penalty = params.repetition_penalty
        row.index_copy_(0, seen, torch.where(values > 0, values / penalty, values * penalty))
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(token_ids[num_prompt:], return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        row.index_add_(0, _tensor(ids, row), torch.from_numpy(-penalties).to(row))


def _tensor(ids: IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(ids).to(like.device)


def _draw(logits: Tensor, table: SamplingTable, rows: IntArray, output_positions: IntArray) -> IntArray:
    """Draw a token for each row of finite float32 logits [r, vocab]."""
    device = logits.device
    weights = _weights(logits, torch.from_numpy(table.temperature[rows]).to(device, torch.float32)[:, None])
    _filter(weights, np.flatnonzero(table.min_p[rows] > 0), table.min_p[rows], _lowest_min_p)
    top_k = table.top_k[rows]
    _filter(weights, np.flatnonzero((top_k > 0) & (top_k < logits.shape[1])), top_k, _lowest_top_k)
    _filter(weights, np.flatnonzero(table.top_p[rows] < 1), table.top_p[rows], _lowest_top_p)
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.from_numpy(uniforms(table.seed[rows], output_positions)).to(device)[:, None]
    drawn = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    if device.type != "cpu":  # parallel prefix sums may decrease by rounding and select a token of weight 0
        drawn = torch.where(weights.gather(1, drawn) > 0, drawn, weights.argmax(dim=-1, keepdim=True))
    return drawn[:, 0].cpu().numpy()


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return unnormalised weights: the largest is 1 and none is subnormal."""
    exponents = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    return functional.threshold(exponents, _LOWEST_EXPONENT, -torch.inf, inplace=True).exp_()


def _filter(weights: Tensor, places: IntArray, values: FloatArray | IntArray, lowest: _Lowest) -> None:
    """Zero the weights below the lowest weight to keep, for the rows in `places`. Ties stay."""
    if not places.size:
        return
    some = _select(weights, places)
    kept = some * (some >= lowest(some, torch.from_numpy(values[places]).to(some.device)[:, None]))
    weights.index_copy_(0, torch.from_numpy(places).to(weights.device), kept)


def _lowest_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    return min_p.to(weights.dtype)  # the largest weight is 1


def _lowest_top_k(weights: Tensor, top_k: Tensor) -> Tensor:
    return weights.topk(int(top_k.max()), dim=-1).values.gather(1, top_k - 1)


def _lowest_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest weight of the smallest token set with a share of at least top_p; sorts as few as possible."""
    target = top_p * weights.cumsum(dim=-1)[:, -1:].double()
    vocab_size, num_candidates = weights.shape[1], _FIRST_CANDIDATES
    while True:
        num_candidates = min(num_candidates, vocab_size)
        best = weights.topk(num_candidates, dim=-1).values
        missing = (best.double().cumsum(dim=-1) < target).sum(dim=-1, keepdim=True)
        if num_candidates == vocab_size or int(missing.max()) < num_candidates:
            return best.gather(1, missing.clamp(max=num_candidates - 1))
        num_candidates *= _MORE_CANDIDATES


def _logprobs(logits: Tensor, tokens: IntArray, places: IntArray, num_logprobs: IntArray) -> list[TokenLogprobs | None]:
    """Return natural log-probabilities of raw float32 logits for rows `places`; None for the others."""
    if not places.size:
        return [None] * len(tokens)
    chosen = torch.from_numpy(tokens[places]).to(logits.device)
    best = RowLogprobs.of(_select(logits, places), chosen, places, num_logprobs[places])
    return best.read(best.packed.cpu().numpy(), tokens)
