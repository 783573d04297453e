"""CPU device with the forward pass in the C++ library; everything else is inherited from `TorchDevice`.

Steps with hidden state use torch operators with the same weights, because tapes do not support its scratch. So do steps
with adapters if layers are streamed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.device import TorchDevice, clear_begun_blocks
from engine.execution.cpu.native.library import TYPES, Tape, TapeShape, TapeStep, activation_dtype
from engine.execution.cpu.native.linear import Native
from engine.execution.cpu.native.tape import Buffers, Composed, NativeWeights, compose, shape_over, step_over
from engine.execution.masks import FinishMasks
from engine.execution.pool import PoolOptions
from engine.execution.pooling import TakeHidden
from engine.execution.rows import Layout, has_hidden
from engine.execution.sampler import DeviceSamples
from engine.limits import Limits
from engine.models import torch_ops
from engine.models.decoder import Decoder
from engine.models.lora import Delta, Site, StepAdapters
from engine.models.torch_ops import attention_scaling, inverse_frequencies
from engine.models.weights import matrices
from engine.scheduling.output import INVALID_TOKEN

if TYPE_CHECKING:
    from engine.execution.runner import FinishForward


_FIRST_TOKENS = 512  # initial rows of the buffers
MANY_A_SAMPLE = 4
"""Tokens per sample from which the end of a step runs only for sampled tokens."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of a step for each sampling chunk, in order.

    Attributes:
        best: Largest logit; if not finite, no token can be chosen.
        best_ids: Lowest token id of the largest logit.
        logits: [n, vocab] float32 if requested.
    """

    best: np.ndarray
    best_ids: IntArray
    logits: Tensor | None

    def as_given(self) -> tuple[Tensor, DeviceSamples | None]:
        """Return the result of `Device.forward`: logits, or tokens."""
        if self.logits is not None:
            return self.logits, None
        tokens = np.where(np.isfinite(self.best), self.best_ids, INVALID_TOKEN)
        return torch.empty((len(tokens), 0)), DeviceSamples(torch.from_numpy(tokens.astype(np.int32)))


class NativeDevice(TorchDevice):
    """A `TorchDevice` whose steps run in `native`, the library with its threads."""

    def __init__(self, decoder: Decoder, native: Native, limits: Limits, **pool: Unpack[PoolOptions]) -> None:
        super().__init__(decoder, limits, **pool)
        self.native = native
        self._spec, self._max_model_len, self._max_samples = decoder.spec, limits.max_model_len, limits.max_num_seqs
        self._dtype = decoder.weights.embedding.dtype
        self._level = native.level_for(self._dtype)
        self._weights = NativeWeights(native, self._spec, decoder.weights, self.layers)
        rope = self._spec.rope
        self._frequencies = [inverse_frequencies(rope, is_long=each).contiguous() for each in (False, True) if rope]
        self._best = np.empty(self._max_samples, dtype=np.float32)
        self._best_ids = np.empty(self._max_samples, dtype=np.int64)
        self._kept = torch.empty(0, self._weights.head.out_features)
        self._takes_adapters = False
        self._activation = torch_ops.ACTIVATIONS[self._spec.activation]
        self._make_room(_FIRST_TOKENS)

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """See Device. Without streamed layers the tapes run later steps with adapters."""
        if not self.decoder.weights.layers.streamed:
            if not self._takes_adapters:
                self._takes_adapters = True
                self._make_room(self._max_tokens)
            deltas = {site: delta.to(activation_dtype(self._level)) for site, delta in deltas.items()}
        super().adapt(number, deltas)

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device. Unrestricted greedy tokens are chosen here, all others by the host."""
        by_torch = len(self.adapters) > 0 and not self._takes_adapters
        has_adapters = self.rows.adapters[chunks[:, 0]].any()
        if has_hidden(self.rows, chunks) or (has_adapters and by_torch):
            return super().forward(chunks, masks, take)
        self.pool.begin(self.rows, chunks)
        if self.pool.scratch_blocks or by_torch:  # a later step with torch reads whole blocks
            clear_begun_blocks(self.pool, self.rows, chunks)
        adapted = None
        if has_adapters:
            numbers = np.repeat(self.rows.adapters[chunks[:, 0]], chunks[:, 2])
            adapted = self.adapters.of_step(numbers, self.pool.device)
        result = self.run(chunks, logits=not self._is_plain(chunks, masks), whole=take is not None, adapters=adapted)
        if take is not None:
            hidden = self._hidden(int(chunks[:, 2].sum()))
            take(Layout.of(chunks, np.arange(len(chunks))), self.decoder.normed(hidden), self.decoder.head)
        return result.as_given()

    def begin_forward(self, chunks: IntArray, masks: FinishMasks | None) -> "FinishForward":
        finish = self._begin_stage(chunks, logits=not self._is_plain(chunks, masks))
        return lambda: finish().as_given()

    def _is_plain(self, chunks: IntArray, masks: FinishMasks | None) -> bool:
        """Return whether all samples of a step are unrestricted and greedy."""
        return masks is None and bool(self.rows.sampling.plain(chunks[chunks[:, 3] > 0, 0]))

    def run(
        self,
        chunks: IntArray,
        *,
        logits: bool,
        whole: bool = False,
        adapters: StepAdapters | None = None,
    ) -> Sampled:
        """Run chunks [n, 4] (row, start, length, sample) of rows whose blocks all hold K and V.

        Args:
            whole: Whether `_hidden` must be valid for all tokens.
            adapters: Adapters of the tokens, chunk by chunk; not with streamed layers.

        Raises:
            StepError: For an invalid step.
            StreamingError: If a streamed layer cannot be read.
        """
        if self.beyond is not None:
            return self._begin_stage(chunks, logits=logits, whole=whole)()
        chunks = self._take(chunks)
        count = int(np.count_nonzero(chunks[:, 3]))
        kept = self._logits_for(count) if logits and count else None
        step = self._step(chunks, kept)
        if adapters is not None:
            self._run_adapted(step, int(chunks[:, 2].sum()), adapters)
        elif self.pool.stream is not None or self.decoder.weights.layers.streamed:
            self._run_streamed(step)
        else:
            lean = self._lean if not whole and int(chunks[:, 2].sum()) >= MANY_A_SAMPLE * count else None
            (lean or self._tape).run(self.native.team, step)
        return Sampled(self._best[:count], self._best_ids[:count], kept)

    def keep(self, layers: range) -> None:
        super().keep(layers)
        self._weights = NativeWeights(self.native, self._spec, self.decoder.weights, layers)
        self._make_room(self._max_tokens)

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        chunks, tape, team = self._take(chunks), self._tape, self.native.team
        step = self._step(chunks, None)
        tape.begin(team, step)
        first, last = self._composed.layers[0].start, self._composed.layers[-1].stop
        tape.run_ops(team, 1, first)  # everything before the layers except the embedding
        self._put(np.arange(hidden.shape[1]), hidden)
        tape.run_ops(team, first, last)
        if self.beyond is None:
            return self._parts(wanted)
        self.beyond.send(chunks, self._parts(np.arange(hidden.shape[1])), wanted)
        return self.beyond.answers()()[0]

    def _begin_stage(self, chunks: IntArray, *, logits: bool, whole: bool = False) -> Callable[[], Sampled]:
        """Run the layers kept here in micro-batches, as `run` does, and return a function for the rest of the step.

        It waits for the other stages; its head reads the rows of the micro-batches as if they had run together.
        """
        assert self.beyond is not None, "no stage follows"
        chunks, team, beyond = self._take(chunks), self.native.team, self.beyond
        for part in beyond.cut(chunks, whole=whole):
            self._tape.begin(team, self._step(part, None))
            self._tape.run_ops(team, 0, self._composed.layers[-1].stop)
            beyond.send(part, self._parts(np.arange(int(part[:, 2].sum()))), _wanted(part, whole))
        answers, count = beyond.answers(), int(np.count_nonzero(chunks[:, 3]))

        def finish() -> Sampled:
            hidden = torch.cat(answers(), dim=1)
            kept = self._logits_for(count) if logits and count else None
            self._tape.begin(team, self._step(chunks, kept))
            self._put(_wanted(chunks, whole), hidden)
            self._tape.run_ops(team, self._composed.layers[-1].stop, len(self._composed.ops))
            return Sampled(self._best[:count], self._best_ids[:count], kept)

        return finish

    def _addends(self) -> list[Tensor]:
        """Return the rows whose sum is the hidden state between layers."""
        at, size = self._buffers, self._spec.hidden_size
        return [each[:, :size] for each in (at.x, at.delta, at.other) if each is not None]

    def _parts(self, tokens: IntArray) -> Tensor:
        return torch.stack([each[torch.from_numpy(tokens)] for each in self._addends()])

    def _put(self, tokens: IntArray, parts: Tensor) -> None:
        for each, part in zip(self._addends(), parts, strict=True):
            each[torch.from_numpy(tokens)] = part

    def _take(self, chunks: IntArray) -> IntArray:
        """Return the chunks [n, 4] as contiguous int64, after ensuring room for their tokens."""
        chunks = np.ascontiguousarray(chunks, dtype=np.int64)
        total = int(chunks[:, 2].sum())
        if total > self._max_tokens:
            self._make_room(max(total, 2 * self._max_tokens))
        return chunks

    def _run_streamed(self, step: TapeStep) -> None:
        """Run the tape in segments around the layers whose weights or cache are streamed."""
        tape, team, layers = self._tape, self.native.team, self.decoder.weights.layers
        streams = self.pool.stream is not None
        tape.begin(team, step)
        done = 0
        for index, part in enumerate(self._composed.layers):
            if not streams and index not in layers.streamed:
                continue
            tape.run_ops(team, done, part.start)
            with layers.use(index) as layer, self.pool.use(index):
                if index in layers.streamed:
                    for op, matrix in zip(self._composed.linear_ops(index), matrices(layer), strict=True):
                        tape.set_weight(op, matrix.data().data_ptr())
                if streams:
                    step.pool = self.pool.slices[self.pool.places[index] :].data_ptr()
                    tape.begin(team, step)
                tape.run_ops(team, part.start, part.stop)
            done = part.stop
        tape.run_ops(team, done, len(self._composed.ops))

    def _run_adapted(self, step: TapeStep, num_tokens: int, adapters: StepAdapters) -> None:
        """Run the tape in segments, and add the contributions of adapters to the outputs of linear layers."""
        assert self._adapted is not None, "adapt() must precede steps with adapters"
        (composed, tape), team, spec, at = self._adapted, self.native.team, self._spec, self._buffers
        assert at.up is not None
        hidden, ffn, result = spec.hidden_size, spec.intermediate_size, at.delta if at.other is None else at.other
        up = ffn * (1 + spec.family.gated_mlp)
        slots = {
            "qkv": (at.normed[:num_tokens, :hidden], at.qkv[:num_tokens, : spec.q_size + 2 * spec.kv_size]),
            "out": (at.attended[:num_tokens, : spec.q_size], at.delta[:num_tokens, :hidden]),
            "up": (at.normed[:num_tokens, :hidden], at.up[:num_tokens, :up]),
            "down": (at.inner[:num_tokens, :ffn], result[:num_tokens, :hidden]),
        }
        tape.begin(team, step)
        done = 0
        for index in range(len(composed.layers)):
            for op, (slot, (x, y)) in zip(composed.linear_ops(index), slots.items(), strict=True):
                site = Site(index, slot)
                if slot != "up" and not adapters.has(site):
                    continue
                tape.run_ops(team, done, op + 1)
                done = op + 1
                adapters.add(site, x, y)
                if slot == "up":
                    at.inner[:num_tokens, :ffn] = self._activation(y)
        tape.run_ops(team, done, len(composed.ops))

    def _hidden(self, num_tokens: int) -> Tensor:
        """Return the hidden states [T, H] of the last step before the final norm, for tokens that were not sampled."""
        return torch.stack([part[:num_tokens].float() for part in self._addends()]).sum(dim=0).to(self._dtype)

    def _step(self, chunks: IntArray, logits: Tensor | None) -> TapeStep:
        return step_over(
            self.pool,
            self.rows,
            chunks,
            logits_stride=self._weights.head.out_features,
            logits=None if logits is None else logits.data_ptr(),
            best=self._best.ctypes.data,
            best_id=self._best_ids.ctypes.data,
        )

    def _logits_for(self, count: int) -> Tensor:
        if not len(self._kept):
            self._kept = self._kept.new_empty(self._max_samples, self._weights.head.out_features)
        return self._kept[:count]

    def _make_room(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._buffers = Buffers(
            self._spec, activation_dtype(self._level), max_tokens, self._max_samples,
            row_scales=self._weights.row_scales, adapted=self._takes_adapters,
        )  # fmt: skip
        self._composed = self._compose()
        self._tape = Tape(self.native.library, self._shape(), self._composed.ops)
        self._lean = self._lean_tape() if len(self._weights.layers) == self._spec.num_layers else None
        self._adapted: tuple[Composed, Tape] | None = None
        if self._takes_adapters:
            adapted = self._compose(adapted=True)
            self._adapted = adapted, Tape(self.native.library, self._shape(), adapted.ops)

    def _compose(self, **more: Any) -> Composed:
        composed = compose(self._spec, self._weights, self._buffers, **more)
        for op in composed.ops if self.pool.stream is not None else ():
            op.layer = 0  # `_run_streamed` passes the buffer of the layer
        return composed

    def _lean_tape(self) -> Tape:
        """Return a tape that skips unused work for tokens that are not sampled."""
        dtype, count = activation_dtype(self._level), self._max_samples
        self._sampled = Buffers(self._spec, dtype, count, count, row_scales=self._weights.row_scales)
        composed = self._compose(sampled=self._sampled)
        return Tape(self.native.library, self._shape(), composed.ops)

    def _shape(self) -> TapeShape:
        spec = self._spec
        return shape_over(
            self.pool,
            self.rows,
            self._max_model_len,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim if spec.rope else 0,
            hidden=spec.hidden_size,
            vocab=spec.vocab_size,
            max_tokens=self._max_tokens,
            rounds_once=int(spec.family.centered_norms),
            level=self._level,
            type=TYPES[self._dtype],
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            rotary_scaling=attention_scaling(spec.rope) if spec.rope else 1.0,
            inverse_frequencies=self._frequencies[0].data_ptr() if spec.rope else None,
            long_frequencies=self._frequencies[1].data_ptr() if spec.rope and spec.short_context else None,
        )


def _wanted(chunks: IntArray, whole: bool) -> IntArray:
    """Return the tokens of a step, chunk by chunk, whose final hidden state is used."""
    ends = np.cumsum(chunks[:, 2])
    return np.arange(int(ends[-1])) if whole else ends[chunks[:, 3] > 0] - 1
