"""A folder of safetensors as a tensor source: one tensor in memory at a time, with a check that all tensors are used.
Quantized weights are unpacked while they are read.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.families import family_named
from engine.models.linear import MakeLinear, make_linear
from engine.models.packing import Packing
from engine.models.quantized import BlockWeight, PackedWeight, RoundedWeight, StoredWeight
from engine.models.spec import ModelSpec
from engine.models.stored_tensors import damage_of, weight_files
from engine.models.unpacking import CACHE_SCALES, blocks_of, bytes_of, dense, is_packed, names_of, nibbles_of, weight_of
from engine.models.weights import (
    DummyTensors,
    Gather,
    LayerWeights,
    ModelWeights,
    ResidentLayers,
    build_layers,
    build_weights,
    torch_dtype,
)
from engine.panics import LibraryPanicError, as_error

_INERT = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)$")
_BY_TOKEN = re.compile(r"(embed_tokens|embed_in|embed_out|lm_head)\.weight$")  # one row for each token
PROGRESS_SECONDS = 5.0
_NAMED = 3  # tensors that a message names
_T = TypeVar("_T")
log = logging.getLogger("tidemill.engine")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_weights(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    make: MakeLinear = make_linear,
    gather: Gather = ResidentLayers,
    stored: bool = False,
) -> ModelWeights:
    """Load the checkpoint in `folder`, or create random weights of its shape with `load_format` "dummy".

    Args:
        dtype: Type of the weights; "auto": the type of the checkpoint.
        load_format: "auto" or "dummy".
        stored: Whether layers stored in 8 or 4 bits compute with these bits.

    Raises:
        ModelLoadError: One line that names the missing or wrong tensor or file.
    """
    kind = torch_dtype(spec.dtype if dtype == "auto" else dtype)
    target = torch.device(device)
    with torch.inference_mode():
        if load_format == "dummy":
            return build_weights(spec, DummyTensors(0, kind, target), make, gather)
        with Checkpoint(folder, kind, target, spec.packing, stored=stored) as checkpoint:
            weights = build_weights(spec, checkpoint, make, gather)
            copies = tuple(f"{name}.weight" for name in family_named(spec.family).names.head)
            checkpoint.check_all_used(tied_copies=copies if spec.tie_word_embeddings else ())
        if weights.layers.streamed:
            checkpoint.forget()  # page cache of the files must not add to a stated memory budget
        return weights


def load_layers(
    spec: ModelSpec,
    folder: Path,
    wanted: Sequence[int],
    *,
    dtype: str,
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    make: MakeLinear = make_linear,
    stored: bool = False,
    keep: Callable[[int, LayerWeights], LayerWeights] = lambda _index, layer: layer,
) -> list[LayerWeights]:
    """Load some layers again, by ascending index, with the same result as `load_weights`.

    `keep` is applied to each layer before the next one is loaded. Raises ModelLoadError.
    """
    kind, target = torch_dtype(dtype), torch.device(device)
    with torch.inference_mode():
        if load_format != "dummy":
            with Checkpoint(folder, kind, target, spec.packing, stored=stored) as checkpoint:
                return list(map(keep, wanted, build_layers(spec, checkpoint, wanted, make)))
        kept: list[LayerWeights] = []

        def gather(layers: Iterator[LayerWeights]) -> ResidentLayers:
            kept.extend(keep(index, layer) for index, layer in enumerate(layers) if index in wanted)
            return ResidentLayers()

        # Random weights depend on all numbers drawn before them.
        build_weights(spec, DummyTensors(0, kind, target), make, gather)
        return kept


class Checkpoint:
    """Tensors of a checkpoint folder; a context manager that maps the files while it is open.

    Raises ModelLoadError if the folder has no safetensors, or a file is missing, damaged or inconsistent.

    Args:
        packing: Storage format of quantized linear layers; None: none are quantized.
        vocabulary: Number of tokens of the model. Of tensors with one row per token, callers may then fetch fewer
            rows, which are taken from the middle.
        stored: Whether `fetch_bytes` returns weights stored in 8 or 4 bits.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | None = None,
        *,
        vocabulary: int | None = None,
        stored: bool = False,
    ) -> None:
        self._packing = packing
        self._bytes = stored and packing is not None and packing.computes
        self._vocabulary = vocabulary
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._unused: set[str] = set()
        self._next_report = 0.0

    def __enter__(self) -> Self:
        for name in weight_files(self._folder):
            for tensor in self._open(name).keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if tensor in self._where:
                    raise ModelLoadError(f"{self._folder}: tensor {tensor} is in {self._where[tensor]} and in {name}")
                self._where[tensor] = name
        self._unused = set(self._where)
        self._next_report = time.monotonic() + PROGRESS_SECONDS
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.clear()

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name, or a quantized weight."""
        return name in self._where or bool(self._stored(name))

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return one tensor, converted. Raises ModelLoadError if it is missing, not floating or of another shape."""
        if self._stored(name):
            weight = self._unpack(name, dense)
            return self._converted(name, weight[self._rows(name, tuple(weight.shape), shape)])
        if name not in self._where:
            files = ", ".join(sorted(self._files)[:_NAMED]) + (", ..." if len(self._files) > _NAMED else "")
            raise ModelLoadError(f"{self._folder} lacks tensor {name} (files: {files})")
        file = self._files[self._where[name]]
        rows = self._rows(name, tuple(file.get_slice(name).get_shape()), shape)
        return self._converted(name, self._floats(name, rows))

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:
        """See TensorSource."""
        if not self._bytes or not self._stored(name):
            return None
        if self._packing is not None and self._packing.nibbles:
            parts = self._unpack(name, nibbles_of)
            if parts is None:
                return None
            self._rows(name, (len(parts[0]), 2 * parts[0].shape[1]), shape)
            values, scales, zeros = (part.to(self._device) for part in parts)
            return PackedWeight(values, scales, zeros, self._dtype)
        if self._packing is not None and self._packing.blocks:
            found = self._unpack(name, blocks_of)
            if found is None:
                return None
            self._rows(name, tuple(found[0].shape), shape)
            values, scales = (part.to(self._device) for part in found)
            return BlockWeight.of(values, scales, self._packing.block, self._dtype)
        values, scales, inputs = self._unpack(name, bytes_of)
        self._rows(name, tuple(values.shape), shape)
        inputs = None if inputs is None else inputs.to(self._device)
        return RoundedWeight(values.to(self._device), scales.to(self._device), self._dtype, inputs)

    def dense_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: quantized layers unpacked to the requested type, others unchanged."""
        assert self._packing is not None
        found = dict[str, Tensor]()
        bodies = (weight_of(self._packing, name) for name in self._where)
        for weight in sorted(filter(None, bodies)):
            if self._stored(weight):
                found[weight] = self._unpack(weight, dense).to(self._device, self._dtype)
        for name in sorted(self._unused):
            if not _INERT.search(name) and name.rpartition(".")[2] not in CACHE_SCALES:
                found[name] = self._floats(name).to(self._device)
        return found

    def check_all_used(self, *, tied_copies: tuple[str, ...] = ()) -> None:
        """Raise ModelLoadError if a tensor was never fetched, because the model would differ from the trained one.

        Rotary and mask buffers, scales of a quantized cache, and zero biases of quantized layers are named in one
        warning instead. `tied_copies` are copies of a tied head.
        """
        unused = sorted(self._unused.difference(tied_copies))
        inert = [name for name in unused if self._is_inert(name)]
        if left := [name for name in unused if name not in inert]:
            shown = self._shown(left)
            raise ModelLoadError(f"{self._folder} has tensors this model does not use: {shown}")
        if inert:
            log.warning("%s: tensors without effect are not used: %s", self._folder, self._shown(inert))

    def _shown(self, names: Sequence[str]) -> str:
        """Return the first of some stored tensors with their files, and the number of the others."""
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(f"{name} ({self._where[name]})" for name in names[:_NAMED]) + more

    def _is_inert(self, name: str) -> bool:
        module, _, last = name.rpartition(".")
        if _INERT.search(name) or (self._packing is not None and last in CACHE_SCALES):
            return True
        return last == "bias" and bool(self._stored(f"{module}.weight")) and not bool(self._floats(name).any())

    def _stored(self, name: str) -> dict[str, str]:
        """Return the stored tensor names of a quantized weight, by part; empty for any other weight."""
        if self._packing is None:
            return {}
        named = names_of(self._packing, name)
        found = {part: stored for part, stored in named.items() if stored in self._where}
        return found if is_packed(self._packing, tuple(found)) else {}

    def _unpack(self, name: str, how: Callable[[Packing, dict[str, Tensor]], _T]) -> _T:
        assert self._packing is not None
        stored = self._stored(name)
        try:
            parts = {part: self._files[self._where[each]].get_tensor(each) for part, each in stored.items()}
            found = how(self._packing, parts)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._folder}: weight {name} by {self._packing.name}: {error.message}") from None
        self._mark_used(stored.values())
        return found

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor on the device in the requested type. Raises ModelLoadError if a value is not finite."""
        converted = tensor.to(self._device, self._dtype)
        if not is_finite(converted):
            where = self._file_of(name)
            kind = str(self._dtype).removeprefix("torch.")
            cause = f"does not fit into {kind}; set --dtype" if is_finite(tensor) else "is damaged; download it again"
            raise ModelLoadError(f"{self._folder}: tensor {name} ({where}) has NaN or infinity: it {cause}")
        return converted

    def _floats(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return a tensor, or some of its rows, unconverted."""
        file = self._files[self._where[name]]
        tensor: Tensor = file.get_tensor(name) if rows == slice(None) else file.get_slice(name)[rows]
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(f"{self._folder}: tensor {name} is of type {kind}, and config.json does not say how")
        self._mark_used((name,))
        return tensor

    def _mark_used(self, names: Iterable[str]) -> None:
        """Mark tensors as loaded; log the progress every PROGRESS_SECONDS."""
        self._unused.difference_update(names)
        if (now := time.monotonic()) >= self._next_report:
            self._next_report = now + PROGRESS_SECONDS
            total = len(self._where)
            log.info("%d of %d tensors of the weights are loaded", total - len(self._unused), total)

    def _rows(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> slice:
        """Return the rows of a tensor that make one of this shape."""
        if found == shape:
            return slice(None)
        if found[0] == self._vocabulary and found[1:] == shape[1:]:
            return slice((found[0] - shape[0]) // 2, (found[0] + shape[0]) // 2)
        stored = f"tensor {name} ({self._file_of(name)}) is {list(found)}"
        whole = [self._vocabulary or shape[0], *shape[1:]] if _BY_TOKEN.search(name) else list(shape)
        raise ModelLoadError(f"{self._folder}: {stored}, config.json implies {whole}")

    def _file_of(self, name: str) -> str:
        return self._where.get(name) or self._where[next(iter(self._stored(name).values()))]

    def forget(self) -> None:
        """Drop the unmapped pages of the files from the page cache; call it after the context has ended."""
        for name in sorted(set(self._where.values())):
            with (self._folder / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self, name: str) -> Any:
        path = self._folder / name
        try:
            self._files[name] = safe_open(path, framework="pt", device="cpu")
        except BaseException as raised:
            error = as_error(raised)
            if not isinstance(error, SafetensorError | OSError | LibraryPanicError):
                raise
            raise ModelLoadError(f"{path} {damage_of(path)} ({error}); download it again") from None
        return self._files[name]


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. A sum is fast, but may overflow; then the values decide."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
