"""The safetensors files of a checkpoint folder and their headers; torch-free.

Pickled weights (.bin, .pt) are refused and never opened, because reading them can run code.
"""

import json
import mmap
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NO_GGUF = "GGUF files are not supported; use the model's safetensors repository"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale")
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the library's own limit in bytes
_PIECE = 1 << 24
_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class StoredTensor(NamedTuple):
    """A tensor in a file; its bytes begin at `start` and end before `end`."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(folder: Path) -> list[str]:
    """Return the files of the checkpoint, as transformers selects them: the whole file, those of the index, or all.

    Raises ModelLoadError if there are none, the index cannot be read, or a file that it names is missing.
    """
    if (folder / WHOLE).is_file():
        return [WHOLE]
    index = folder / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            lost = next((name for name in named if not (folder / name).is_file()), None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelLoadError(f"{index} is not a readable safetensors index") from None
        if lost is not None:
            raise ModelLoadError(f"{folder} lacks {lost}, which {INDEX} names")
        return named
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelLoadError(f"{folder} has pickled weights only ({pickled[0]}); convert them to safetensors")
    if any(folder.glob("*.gguf")):
        raise ModelLoadError(f"{folder}: {NO_GGUF}")
    raise ModelLoadError(f"{folder} has no *.safetensors file")


_TEXT = re.compile(r"(?:model\.)?language_model\.(?:(lm_head\.)|(?:model\.)?)")
_HEAD = "lm_head."


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return stored names by the names in a checkpoint of the text part alone.

    In a multimodal wrapper, tensors of the other parts are left out. All names of another checkpoint stay as they are.
    """
    found = list(names)
    if not any(map(_TEXT.match, found)):
        return {name: name for name in found}
    parts = {}
    for name in found:
        if (outer := _TEXT.match(name)) is not None:
            parts[(outer[1] or "model.") + name[outer.end() :]] = name
        elif name.startswith(_HEAD):
            parts[name] = name
    return parts


def files_of(folder: Path, tensor: str) -> str:
    """Return the files of the checkpoint that store a tensor, or else all, as text of at most three names."""
    files = weight_files(folder)
    found = [name for name in files if tensor in read_header(folder / name)] or files
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")


def stored_bytes(folder: Path) -> int:
    """Return the size of the checkpoint's files in bytes. Raises ModelLoadError; see `weight_files`."""
    return sum((folder / name).stat().st_size for name in weight_files(folder))


def stored_type(folder: Path) -> str | None:
    """Return the type of most floating values of the checkpoint; None without readable weights or such values."""
    sizes = dict.fromkeys(_TYPES, 0)
    for each in _stored(folder).values():
        if each.kind in sizes:
            sizes[each.kind] += each.end - each.start
    kind = max(sizes, key=sizes.__getitem__)
    return _TYPES[kind] if sizes[kind] else None


def quantized_tensor(folder: Path) -> str | None:
    """Return the name of a tensor that only quantized layers have; None without one, or without readable weights."""
    return next((name for name in _stored(folder) if name.endswith(_QUANTIZED)), None)


def has_own_head(folder: Path, heads: Iterable[str], embeddings: Iterable[str]) -> bool:
    """Return whether the checkpoint stores an output head that differs from its embedding.

    `heads` and `embeddings` are possible names of the modules. A quantized head counts as different. Returns False for
    a folder without readable weights, whose error is reported when they are loaded.
    """
    found = _stored(folder)
    stored = {name: found[outer] for name, outer in text_names(found).items()}
    head = next((module for module in heads if any(name.startswith(f"{module}.") for name in stored)), None)
    embedding = next((each for name in embeddings if (each := stored.get(f"{name}.weight")) is not None), None)
    if head is None or embedding is None:
        return False
    own = stored.get(f"{head}.weight")
    return own is None or not _is_equal(own, embedding)


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name; none without readable weights."""
    try:
        return {name: each for file in weight_files(folder) for name, each in read_header(folder / file).items()}
    except (ModelLoadError, OSError):
        return {}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raises ModelLoadError if the file is damaged, OSError if it is missing."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size > _MAX_HEADER:
            raise ModelLoadError(f"{path} is not a readable safetensors file")
        header = file.read(size)
    begin = _LENGTH_BYTES + size
    try:
        found = {
            name: StoredTensor(path, each["dtype"], tuple(each["shape"]), *(begin + at for at in each["data_offsets"]))
            for name, each in json.loads(header).items()
            if name != "__metadata__"
        }
        whole, end = path.stat().st_size, max((each.end for each in found.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelLoadError(f"{path} is not a readable safetensors file") from None
    if end > whole:
        raise ModelLoadError(f"{path} is incomplete: {whole / 1e6:.1f} of {end / 1e6:.1f} MB")
    return found


def damage_of(path: Path) -> str:
    """Return how a safetensors file that cannot be opened is damaged."""
    with suppress(OSError):
        try:
            read_header(path)
        except ModelLoadError as error:
            return error.message.removeprefix(f"{path} ")
    return "is not a readable safetensors file"


def _is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        mine = mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ)
        theirs = mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ)
        with mine, theirs:
            return all(
                mine[one.start + at : min(one.start + at + _PIECE, one.end)]
                == theirs[other.start + at : min(other.start + at + _PIECE, other.end)]
                for at in range(0, one.end - one.start, _PIECE)
            )
