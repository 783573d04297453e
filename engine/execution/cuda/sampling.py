"""Sampling on the device: the equivalent of `engine.execution.sampler` without synchronisation.

Order: logit bias and minimum length (a list of edits), penalties (a history per row on the device), grammar masks,
draws, log-probabilities, each only if a row of the step uses it. Nothing depends on values that only the device knows,
so the next step can be launched before this one has ended.
"""

import numpy as np
import torch
from torch import Tensor

from engine.arrays import Int32Array, IntArray
from engine.execution.cuda.buffers import StepBuffers, StepWishes, send
from engine.execution.layout import Layout
from engine.execution.masks import StepMasks
from engine.execution.rows import RowTable
from engine.execution.sampler import DeviceSamples, RowLogprobs
from engine.scheduling.output import LATE_TOKEN, UNMASKED_TOKEN
from engine.triton_kernels import Kernels


class Sampling:
    """Sampling of one device.

    `history [rows, vocab]` int32 as in `engine.triton_kernels.penalties` takes 4 bytes per row and token.
    """

    def __init__(
        self, rows: RowTable, kernels: Kernels, buffers: StepBuffers, vocab: int, device: torch.device
    ) -> None:
        self._rows, self._kernels, self._buffers = rows, kernels, buffers
        self._history = torch.zeros((rows.num_rows, vocab), dtype=torch.int32, device=device)
        self._loaded = np.full(rows.num_rows, -1, dtype=np.int64)  # generation whose history is on the device

    def begin(self, layout: Layout) -> StepWishes:
        """Write the parameters of a step's samples to the host side of the buffers, before the upload."""
        where = layout.sampled_rows
        if not len(where):
            return StepWishes()
        ends = layout.positions[layout.sampled_tokens] + 1
        # Tokens that were not sampled here are missing in the history, which is then rebuilt.
        self._loaded[where[layout.lengths[layout.sampled] > 1]] = -1
        return self._buffers.fill_wishes(where, ends, self._rows, self._history.shape[1])

    def choose(self, raw: Tensor, greedy: Tensor, wishes: StepWishes, masks: StepMasks | None) -> DeviceSamples:
        """Return tokens [S] int32 of logits [S, vocab] with argmax `greedy` (negative: not finite), after the upload.

        Masks are applied in place if no log-probabilities are wanted.
        """
        logits, tokens, kernels = raw, greedy, self._kernels
        if wishes.edits or wishes.penalties:
            logits = raw.to(torch.float32, copy=True)
        elif masks is not None and wishes.logprobs:
            logits = raw.clone()
        self._edit(logits, wishes)
        masked = masks is not None and len(masks.places) > 0
        if masks is not None and masked:
            places = send(masks.places.astype(np.int32), logits.device)
            kernels.token_mask(logits, places, send(masks.bits, logits.device))
        if logits is not raw or masked:
            tokens = _best(logits, greedy)
        if wishes.draws is not None:
            tokens = kernels.draw(logits, tokens, *wishes.draws)
        if masks is not None:
            tokens = _without_masks(tokens, masks)
        if wishes.penalties is not None:
            kernels.count_tokens(self._history, wishes.penalties.rows, wishes.penalties.places, tokens)
        return DeviceSamples(tokens, _logprobs(raw, tokens, wishes))

    def _edit(self, logits: Tensor, wishes: StepWishes) -> None:
        for index, values in wishes.edits:
            logits.view(-1).index_add_(0, index, values)
        penalties = wishes.penalties
        if penalties is None:
            return
        loads = self._loads(penalties.host_rows, penalties.host_ends)
        if loads is not None:
            rows, places, values = (send(part, logits.device) for part in loads)
            self._history.index_fill_(0, rows, 0)
            self._history.view(-1).index_copy_(0, places, values)
        self._kernels.penalise(logits, penalties.places, penalties.rows, self._history, penalties.values)

    def _loads(self, where: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, Int32Array] | None:
        """Return the histories to load: rows sampled for the first time, or after forced tokens.

        Returns rows [n] to clear, flat indices [m] into the history, and values [m]; None if there are none. All tokens
        of such rows are known.
        """
        rows = self._rows
        new = self._loaded[where] != rows.generation[where]
        if not new.any():
            return None
        places, values = [], []
        for row, end in zip(where[new].tolist(), ends[new].tolist(), strict=True):
            tokens, first = rows.tokens[row, :end], int(rows.num_prompt[row])
            assert (tokens >= 0).all(), "all tokens of a new history must be known"
            ids, inverse = np.unique(tokens, return_inverse=True)
            said = 2 * np.bincount(inverse[first:], minlength=len(ids))
            said[np.unique(inverse[:first])] += 1
            places.append(row * self._history.shape[1] + ids)
            values.append(said.astype(np.int32))
        self._loaded[where[new]] = rows.generation[where[new]]
        return where[new], np.concatenate(places), np.concatenate(values)


def _best(logits: Tensor, greedy: Tensor) -> Tensor:
    """Return the argmax [S] int32 of changed logits; negative where the raw logits were not finite, because a mask may
    hide a NaN."""
    best, tokens = logits.max(dim=-1)
    return torch.where((greedy < 0) | ~best.isfinite(), greedy.clamp(max=-1), tokens.to(torch.int32))


def _without_masks(tokens: Tensor, masks: StepMasks) -> Tensor:
    """Replace tokens [S] at places without a mask by the reason."""
    for places, reason in ((masks.late, LATE_TOKEN), (masks.failed, UNMASKED_TOKEN)):
        if len(places):
            tokens = tokens.index_fill(0, send(places.astype(np.int32), tokens.device).long(), reason)
    return tokens


def _logprobs(raw: Tensor, tokens: Tensor, wishes: StepWishes) -> RowLogprobs | None:
    wanted = wishes.logprobs
    if wanted is None:
        return None
    values = raw.index_select(0, wanted.places).float().log_softmax(dim=-1)
    chosen = values.gather(1, tokens.index_select(0, wanted.places).clamp(min=0).long()[:, None])
    top = values.topk(min(max(int(wanted.counts.max()), 1), values.shape[1]), dim=-1)
    packed = torch.cat((chosen.view(torch.int32), top.values.view(torch.int32), top.indices.to(torch.int32)), dim=1)
    return RowLogprobs(packed, wanted.host_places, wanted.counts)
