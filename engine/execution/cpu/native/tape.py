"""The tape of a model: the sequence of its operations, and the activation rows between them.

It is the layer loop of `engine.models.decoder` with additions fused into norms, and the activation of an MLP fused into
its first linear layer.

A model's weights for the operations of a tape: packed layers, and addresses of float constants.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.native.library import Epilogue, Kind, Op, TapeShape, TapeStep
from engine.execution.cpu.native.linear import Native, NativeInt8, NativeLinear, rows_for, stride_of
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.linear import Linear
from engine.models.spec import ModelSpec
from engine.models.torch_ops import attention_scaling, inverse_frequencies
from engine.models.weights import LayerWeights, ModelWeights, Norm, embedding_scale, matrices


class NativeWeights:
    """Weights of a model with the `kept` layers, whose matrices are packed and whose norms are float32.

    Layers that are not packed are packed here, in addition to torch's copy. Streamed layers must be packed; the
    addresses of their matrices are valid only inside `LayerSource.use`.
    """

    def __init__(self, native: Native, spec: ModelSpec, weights: ModelWeights, kept: range) -> None:
        for index in weights.layers.streamed:
            assert isinstance(weights.layers[index].qkv, NativeLinear), "streamed layers must be packed by this library"
        self._native = native
        self.embedding = weights.embedding.contiguous()
        self.embedding_scale = embedding_scale(spec, weights.embedding.dtype)
        self.local_frequencies = None if spec.local_rope is None else inverse_frequencies(spec.local_rope).contiguous()
        self.positions = weights.positions
        self.layers = {index: self._layer(weights.layers[index], spec.family.gated_mlp) for index in kept}
        self.final_norm = _floats(weights.final_norm)
        self.head = self._linear(weights.head)
        every = (self.head, *(each for layer in self.layers.values() for each in matrices(layer)))
        self.row_scales = max((each.row_scales for each in every if isinstance(each, NativeInt8)), default=0)
        """Most floats that go with a row of integers; 0 without layers on integers."""

    def _layer(self, layer: LayerWeights, gated: bool) -> LayerWeights:
        after = layer.branch_norms
        return replace(
            layer,
            input_norm=_floats(layer.input_norm),
            qkv=self._linear(layer.qkv),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm.float().contiguous(),
            out=self._linear(layer.out),
            post_norm=_floats(layer.post_norm),
            up=self._linear(layer.up, gated),
            down=self._linear(layer.down),
            branch_norms=None if after is None else (_floats(after[0]), _floats(after[1])),
        )

    def _linear(self, layer: Linear, gated: bool = False) -> NativeLinear:
        if isinstance(layer, NativeLinear) and layer.gated == gated:
            return layer
        return NativeLinear(self._native, *layer.dense_from(0), gated)


def _floats(norm: Norm) -> Norm:
    weight, bias = norm.weight, norm.bias
    return Norm(weight.float().contiguous(), None if bias is None else bias.float().contiguous())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_ACTIVATIONS = {
    "silu": Epilogue.SWIGLU,
    "gelu_tanh_gated": Epilogue.GEGLU,
    "gelu": Epilogue.GELU,
    "gelu_tanh": Epilogue.GELU_TANH,
    "relu": Epilogue.RELU,
}


class Buffers:
    """Activation rows of `tokens` tokens and `samples` samples. They start as zeros, so that padding is and stays zero.

    `row_scales`: see NativeWeights. `adapted`: include rows for MLP outputs before the activation, to which adapters
    add.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, tokens: int, samples: int, *, row_scales: int, adapted: bool = False
    ) -> None:
        def rows(width: int, count: int = tokens) -> Tensor:
            return torch.zeros(rows_for(count), stride_of(width), dtype=dtype)

        hidden = spec.hidden_size
        self.x, self.delta, self.normed = rows(hidden), rows(hidden), rows(hidden)
        self.other = rows(hidden) if spec.parallel_residual else None
        self.qkv = rows(spec.q_size + 2 * spec.kv_size)
        self.attended = rows(spec.q_size)
        self.inner = rows(spec.intermediate_size)
        self.up = rows(spec.intermediate_size * (1 + spec.family.gated_mlp)) if adapted else None
        self.last = rows(hidden, samples)
        widest = max(hidden, spec.q_size, spec.intermediate_size)  # integer rows have the strides of their float rows
        count = max(rows_for(tokens), rows_for(samples)) if row_scales else 0
        self.integers = torch.zeros(count * stride_of(widest), dtype=torch.int16)
        self.scales = torch.zeros(count * row_scales)
        self.angles = torch.zeros(tokens, spec.rope.rotary_dim) if spec.rope else None
        self.local_angles = torch.zeros(tokens, spec.local_rope.rotary_dim) if spec.local_rope else None


@dataclass(frozen=True, slots=True)
class Composed:
    """Operations of a step, and the range of operations of each local layer."""

    ops: list[Op]
    layers: list[range]

    def linear_ops(self, layer: int) -> tuple[int, ...]:
        """Return the operations that read the matrices of a layer, in the order of `engine.models.weights.matrices`."""
        return tuple(place for place in self.layers[layer] if self.ops[place].kind == Kind.LINEAR)


def compose(
    spec: ModelSpec,
    weights: NativeWeights,
    buffers: Buffers,
    *,
    adapted: bool = False,
    sampled: Buffers | None = None,
) -> Composed:
    """Compose the operations of a step, from token ids to the largest logits.

    `adapted`: omit activations of MLPs, which the caller applies between its linear layers. `sampled`: buffers for
    sampled tokens; operations needed only by these, from the queries of the last layer on, run on them only.
    """
    return _Composer(spec, weights, buffers, adapted, sampled).compose()


class _Composer:
    def __init__(
        self, spec: ModelSpec, weights: NativeWeights, buffers: Buffers, adapted: bool, sampled: Buffers | None
    ) -> None:
        self._spec = spec
        self._adapted = adapted
        self._weights = weights
        self._at = buffers
        self._sampled = sampled
        self._alone = 0  # 1 once operations run only for sampled tokens

    def compose(self) -> Composed:
        at, ops, layers = self._at, [self._embed()], []
        if at.angles is not None:
            ops.append(Op(kind=Kind.ANGLES, out=at.angles.data_ptr()))
        if (local := self._spec.local_rope) is not None:
            source, out = _address(self._weights.local_frequencies), _address(at.local_angles)
            ops.append(Op(kind=Kind.ANGLES, out=out, input=source, scale=attention_scaling(local)))
        last_index = max(self._weights.layers)
        for index, layer in self._weights.layers.items():
            first = len(ops)
            ops += self._attention(index, layer, self._sampled if index == last_index else None)
            ops += self._mlp(layer)
            layers.append(range(first, len(ops)))
        last = self._norm(self._weights.final_norm, at.last, added=True)
        if not self._alone:
            last.kind, self._alone = Kind.GATHER_NORM, 1
        head = self._linear(self._weights.head, at.last, None, Epilogue.LOGITS)
        head[-1].softcap = self._spec.logit_softcap or 0.0
        ops += [last, *head, Op(kind=Kind.BEST)]
        return Composed(ops, layers)

    def _embed(self) -> Op:
        return Op(
            kind=Kind.EMBED,
            weight=self._weights.embedding.data_ptr(),
            other=_address(self._weights.positions),
            n=self._spec.family.position_offset or 0,
            out=self._at.x.data_ptr(),
            out_stride=self._at.x.stride(0),
            scale=self._weights.embedding_scale or 0.0,
        )

    def _attention(self, index: int, layer: LayerWeights, sampled: Buffers | None) -> list[Op]:
        """Compose attention; with `sampled`, continue with the sampled tokens in these buffers."""
        at, spec = self._at, self._spec
        qkv, attended = at.qkv.data_ptr(), at.attended.data_ptr()
        place = index - min(self._weights.layers)  # index of its slices in a unit
        rope = Op(kind=Kind.ROPE_KV, layer=place, weight=_address(layer.qk_norm), out=qkv, out_stride=at.qkv.stride(0))
        angles = at.local_angles if spec.rope_of(index) is spec.local_rope else at.angles
        rope.input, rope.eps = _address(angles), spec.norm_eps
        attend = Op(kind=Kind.ATTEND, layer=place, input=qkv, in_stride=at.qkv.stride(0), out=attended)
        attend.n, attend.softcap = spec.window_of(index) or 0, spec.softcap or 0.0
        merge = Op(kind=Kind.MERGE, layer=place, out=attended)
        attend.out_stride = merge.out_stride = at.attended.stride(0)
        ops = [
            self._norm(layer.input_norm, at.normed, added=index > 0),
            *self._linear(layer.qkv, at.normed, at.qkv),
            rope,
            attend,
            merge,
        ]
        if sampled is not None:
            attend.sampled = merge.sampled = self._alone = 1
            ops += [_gather(at.attended, sampled.attended, spec.q_size), _gather(at.x, sampled.x, spec.hidden_size)]
            at = self._at = sampled
        return [*ops, *self._linear(layer.out, at.attended, at.delta), *self._branch_norm(layer, 0)]

    def _mlp(self, layer: LayerWeights) -> list[Op]:
        """Compose the MLP; the next norm adds its result, instead of that of attention or in addition to it."""
        at, spec = self._at, self._spec
        result = at.delta if at.other is None else at.other
        norm = self._norm(layer.post_norm, at.normed, added=True)
        if spec.parallel_residual:  # both branches read the same rows
            norm.input = norm.other = None
        if self._adapted:
            up = self._linear(layer.up, at.normed, at.up)
        else:
            up = self._linear(layer.up, at.normed, at.inner, _ACTIVATIONS[spec.activation])
        return [norm, *up, *self._linear(layer.down, at.inner, result), *self._branch_norm(layer, 1)]

    def _branch_norm(self, layer: LayerWeights, which: int) -> list[Op]:
        """Compose the norm of a branch, in place, if the family has one."""
        if layer.branch_norms is None:
            return []
        norm, delta = self._norm(layer.branch_norms[which], self._at.delta, added=False), self._at.delta
        norm.residual, norm.in_stride = delta.data_ptr(), delta.stride(0)
        return [norm]

    def _norm(self, norm: Norm, out: Tensor, *, added: bool) -> Op:
        at = self._at
        return Op(
            kind=Kind.NORM,
            k=self._spec.hidden_size,
            in_stride=at.x.stride(0),
            out_stride=out.stride(0),
            input=at.delta.data_ptr() if added else None,
            other=_address(at.other) if added else None,
            weight=norm.weight.data_ptr(),
            bias=_address(norm.bias),
            out=out.data_ptr(),
            residual=at.x.data_ptr(),
            eps=self._spec.norm_eps,
            sampled=self._alone,
        )

    def _linear(self, layer: Linear, rows: Tensor, out: Tensor | None, epilogue: Epilogue = Epilogue.PLAIN) -> list[Op]:
        assert isinstance(layer, NativeLinear), "layers of a tape are packed"
        op = layer.op(epilogue)
        assert op.in_stride == rows.stride(0) and (out is None or op.out_stride == out.stride(0))
        op.input = rows.data_ptr()
        op.out = _address(out)
        op.sampled = self._alone
        if not isinstance(layer, NativeInt8):
            return [op]
        integers = layer.quantize_op()
        integers.sampled = self._alone
        integers.input, integers.out = op.input, self._at.integers.data_ptr()
        integers.residual = op.scales = self._at.scales.data_ptr()
        op.input = integers.out
        return [integers, op]


def _gather(rows: Tensor, sampled: Tensor, width: int) -> Op:
    """Copy the rows of sampled tokens."""
    op = Op(kind=Kind.GATHER, n=width, in_stride=rows.stride(0), out_stride=sampled.stride(0))
    op.input, op.out = rows.data_ptr(), sampled.data_ptr()
    return op


def shape_over(pool: UnitPool, rows: RowTable, max_model_len: int, **model: Any) -> TapeShape:
    """Return the shape of the cache, completed by properties of the model."""
    return TapeShape(
        max_samples=rows.num_rows,
        layers=pool.num_layers,
        cell=pool.num_kv_heads * pool.head_dim,
        block_size=pool.block_size,
        pool_units=pool.num_units,
        num_rows=rows.num_rows,
        max_blocks=rows.k_table.shape[1],
        max_positions=min(max_model_len, rows.tokens.shape[1]),
        int8_cache=int(pool.bytes is not None),
        **model,
    )


def step_over(pool: UnitPool, rows: RowTable, chunks: IntArray, **results: Any) -> TapeStep:
    """Return a step of chunks [n, 4], int64, contiguous, kept alive by the caller; `results`: their addresses."""
    return TapeStep(
        num_chunks=len(chunks),
        token_stride=rows.tokens.shape[1],
        table_stride=rows.k_table.shape[1],
        chunks=chunks.ctypes.data,
        tokens=rows.tokens.ctypes.data,
        k_table=rows.k_table.ctypes.data,
        v_table=rows.v_table.ctypes.data,
        num_blocks=rows.num_blocks.ctypes.data,
        pool=pool.slices.data_ptr(),
        is_long=rows.is_long.ctypes.data,
        num_prompt=rows.num_prompt.ctypes.data,
        **results,
    )
