"""Decodes that read hidden state itself, of models whose K is linear in it: a part of steps that graphs replay.

No past of theirs is projected, so that how much of it is hidden state changes no launch and no size. K's table says
which blocks are: below zero, as `RowTable` and `engine.execution.hidden` write it. New tokens that are kept as hidden
state have no K and V anywhere. Prompts beside them keep K and V in scratch for the step, and what they have to project
of an earlier part makes a step one without a graph (`engine.execution.cuda.hidden`). Apt-Serve §4, MLA's absorption.
"""

from functools import partial

import torch
from torch import Tensor

from engine.execution.cuda.buffers import StepInputs
from engine.execution.cuda.forward import Forward
from engine.execution.cuda.kernels import Kernels
from engine.execution.pool import UnitPool
from engine.models.absorption import Absorption
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.triton_kernels.work import AbsorbedScratch


def reads_hidden(spec: ModelSpec) -> bool:
    """Whether decodes of a model may."""
    return spec.absorbs_kv and spec.num_heads == spec.num_kv_heads


def scratch_bytes(spec: ModelSpec, max_items: int, itemsize: int) -> int:
    """What the kernels leave for each other, beside what attention has for itself."""
    return max_items * spec.num_heads * (spec.hidden_size * itemsize + 4)


class AbsorbedDecodes:
    """Call it with the inputs of a step that projects nothing, as `Forward`. `max_items`: of its work list."""

    def __init__(
        self,
        forward: Forward,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: Kernels,
        pool: UnitPool,
        max_items: int,
    ) -> None:
        self._forward, self._kernels, self._scratch_base = forward, kernels, pool.scratch_base
        absorption = Absorption(spec, weights)
        self._layers = [absorption.of_layer(layer) for layer in range(spec.num_layers)]
        self._scale = spec.head_dim**-0.5
        self._sizes = spec.num_heads, spec.hidden_size
        items = max_items * spec.num_heads
        self._gathered = weights.embedding.new_zeros(items * spec.hidden_size)
        self._lse = torch.zeros(items, dtype=torch.float32, device=weights.embedding.device)

    def __call__(self, inputs: StepInputs) -> None:
        self._forward(inputs, partial(self._store, inputs), decode=self.attend)

    def _store(self, inputs: StepInputs, layer: int, x: Tensor) -> None:
        self._forward.store(layer, self._forward.tables, x, inputs.stored, inputs.positions)

    def attend(self, layer: int, q: Tensor, inputs: StepInputs, out: Tensor) -> None:
        """See Decode."""
        (heads, width), items = self._sizes, len(inputs.partial)
        gathered = self._gathered[: heads * items * width].view(heads, items, width)
        lse = self._lse[: items * heads].view(items, heads)
        self._kernels.absorbed_attention(
            q, self._forward.cells, self._forward.tables, self._layers[layer], inputs.decode,
            AbsorbedScratch(gathered, lse, inputs.partial, inputs.partial_lse), out, layer=layer,
            scratch_base=self._scratch_base, scale=self._scale,
        )  # fmt: skip
