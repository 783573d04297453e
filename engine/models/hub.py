"""Locate a model's files (a local folder, or a Hugging Face id that is downloaded once) and select its implementation.

Downloads go through the hub's own library and cache. This module selects the files and words the errors. A checkpoint
runs as native layers if its family is supported, else as transformers modules (`--model-impl`). Answers end at the end
tokens of its configs and of its tokenizer. Torch-free unless transformers is needed.
"""

import importlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ModelLoadError, first_line
from engine.models.spec import ModelShape, load_spec
from engine.models.stored_tensors import NO_GGUF

_WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]
# Some repositories hold the weights twice, once in the layout of their author.
_UNWANTED = ["original/*", "consolidated*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository, its size in bytes, and whether it is in the cache."""

    path: str
    num_bytes: int
    is_here: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """Files of a model on the hub at one commit, limited to those that the engine uses.

    Attributes:
        revision: Requested revision, under which the cache finds the files.
        commit: Commit of the revision.
        cache: Folder of the repository in the cache.
    """

    name: str
    revision: str | None
    commit: str
    files: tuple[RemoteFile, ...]
    pickles: bool
    cache: Path

    @property
    def total_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files if not file.is_here)

    @property
    def weight_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files if file.path.endswith(".safetensors"))


def is_hub_id(name: str) -> bool:
    """Return whether `name`, if not a folder, has the form of a repository ("owner/name")."""
    parts = name.split("/")
    return not name.startswith(("/", ".", "~")) and len(parts) == 2 and all(parts)


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the cached folder of a hub id, or None if files are missing. Uses no network."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=True
        )
    except Exception:  # any damage of the cache is repaired by a download
        return None
    return Path(found) if any(Path(found).glob("*.safetensors")) else None


def resolve_model_folder(name: str, revision: str | None = None) -> Path:
    """Return the local folder of `name`; a hub id ("owner/name") is downloaded (safetensors and JSON) at `revision`.

    Raises ModelLoadError, one line, if there is no such folder or model, the hub is unreachable, or a folder is given
    together with a revision.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"--revision {revision} applies to hub models, but {name} is a folder; omit it")
        return folder
    if folder.suffix == ".gguf":
        raise ModelLoadError(f"{name}: {NO_GGUF}")
    if not is_hub_id(name):
        raise ModelLoadError(f"{name!r} is neither a folder nor a Hugging Face id (owner/name)")
    return _download(name, revision, _WANTED)


def look_up(name: str, revision: str | None) -> Offer:
    """Look a model up on the hub; offline, in the cache. Raises ModelLoadError, one line."""
    if not is_hub_id(name):
        raise ModelLoadError(f"{name!r} is not a Hugging Face id (owner/name)")
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    try:
        info = HfApi(endpoint=_endpoint()).model_info(name, revision=revision, files_metadata=True)
    except Exception as error:  # httpx or httpx2 errors, depending on the library's version, besides its own
        folder = cached_folder(name, revision) if _is_offline(error) else None
        if folder is None:
            raise _problem(name, revision, error) from None
        return _local_offer(name, revision, folder)
    siblings = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    commit = info.sha or revision or "main"
    files = tuple(
        RemoteFile(path, siblings[path], isinstance(try_to_load_from_cache(name, path, revision=commit), str))
        for path in filter_repo_objects(siblings, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    )
    cache = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=name, repo_type="model")
    return Offer(name, revision, commit, files, any(path.endswith(_PICKLES) for path in siblings), cache)


def _local_offer(name: str, revision: str | None, folder: Path) -> Offer:
    files = tuple(
        RemoteFile(str(path.relative_to(folder)), path.stat().st_size, True)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    return Offer(name, revision, folder.name, files, False, folder.parent.parent)


def check_offer(offer: Offer) -> ModelShape:
    """Return the shape of the model; downloads only its config. Raises ModelLoadError if it cannot be served."""
    if not offer.weight_bytes:
        if offer.pickles:
            raise ModelLoadError(
                f"{offer.name} has only pickled weights (.bin), which can run code and are not loaded; convert "
                "it at https://huggingface.co/spaces/safetensors/convert, then run "
                f"tidemill pull {offer.name} --revision refs/pr/N"
            )
        raise ModelLoadError(f"{offer.name} has no safetensors weights; choose another repository")
    return choose(_download(offer.name, offer.revision, ["config.json", "generation_config.json"]), "auto").shape


def fetch(offer: Offer) -> Path:
    """Download missing files and return the folder. Raises ModelLoadError, one line."""
    return _download(offer.name, offer.revision, _WANTED)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # takes 0.2 s, not needed for a local folder

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED, endpoint=_endpoint()
        )
    except Exception as error:  # httpx or httpx2 errors, depending on the library's version, besides its own
        raise _problem(name, revision, error) from None
    return Path(found)


def _problem(name: str, revision: str | None, error: BaseException) -> ModelLoadError:
    """Word an error of the library, with the next step to take."""
    from huggingface_hub import constants, errors

    again = f"tidemill pull {name}" + (f" --revision {revision}" if revision else "")
    where = (_endpoint() or constants.ENDPOINT).rstrip("/")
    causes = list(_causes(error))
    if _is_offline(error):
        text = f"{name} is not on this machine and HF_HUB_OFFLINE forbids downloads; run HF_HUB_OFFLINE=0 {again}"
    elif any(isinstance(cause, errors.GatedRepoError) for cause in causes):
        text = f"{name} is gated; accept its licence at {where}/{name}, then run hf auth login and {again}"
    elif any(isinstance(cause, errors.RepositoryNotFoundError) for cause in causes):
        text = f"{where} has no model {name}, or it is private; check the name, or run hf auth login and {again}"
    elif any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        text = f"{name} has no revision {revision}; tidemill pull {name} takes the newest"
    elif isinstance(error, errors.HFValidationError):
        text = f"{name!r} is neither a folder nor a valid id (owner/name of letters, digits, '-', '_' and '.')"
    elif any(isinstance(cause, errors.HfHubHTTPError) for cause in causes):
        text = f"download of {name} from {where} failed ({first_line(causes[-1])}); try again later: {again}"
    elif isinstance(error, OSError) and error.errno is not None:
        text = f"{name} could not be stored: {error.strerror}"
    else:
        cause = first_line(causes[-1])
        text = (
            f"no connection to {where} ({cause}); serve a downloaded folder (tidemill serve /path), set HF_ENDPOINT to "
            f"a mirror, or repeat {again}"
        )
    return ModelLoadError(text)


def _is_offline(error: BaseException) -> bool:
    """Return whether the library was told not to use the network."""
    from huggingface_hub import errors

    return any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in _causes(error))


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


OWN, TRANSFORMERS = "own", "transformers"


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected implementation (OWN or TRANSFORMERS) and the reason in words."""

    shape: ModelShape
    implementation: str
    why: str


def choose(folder: Path, wish: str, *, experts: str | None = "they need a GPU") -> Choice:
    """Select the implementation of the model in `folder` for `wish` (auto, own, transformers).

    `experts`: see `Backend.experts_refusal`. Raises ModelLoadError, one line.
    """
    choice = _choose(folder, wish, experts)
    return replace(choice, shape=with_tokenizer_end(choice.shape, folder))


def _choose(folder: Path, wish: str, experts: str | None) -> Choice:
    if wish == TRANSFORMERS:
        return Choice(_foreign(folder), TRANSFORMERS, "asked for")
    try:
        own = load_spec(folder)
    except ModelLoadError as error:
        if wish == OWN or not (folder / "config.json").is_file():
            raise
        return Choice(_instead(folder, error), TRANSFORMERS, "no family of ours")
    if own.experts is not None and (experts is not None or own.dtype == "float32"):
        why = experts or "they are of float32, not of 16 bits"
        if wish == OWN:
            raise ModelLoadError(f"{folder}: own layers with experts cannot run here: {why}; set --model-impl auto")
        return Choice(_foreign(folder), TRANSFORMERS, f"layers with experts are not ours here: {why}")
    return Choice(own, OWN, f"the family {own.family.name} is ours")


def _instead(folder: Path, own: ModelLoadError) -> ModelShape:
    """Return the transformers model after the native implementation refused; an error gives both reasons."""
    try:
        return _foreign(folder)
    except ModelLoadError as error:
        if error.message == own.message:
            raise own from None
        raise ModelLoadError(
            f"{own.message}; transformers cannot run it either: {error.message.removeprefix(f'{folder}: ')}"
        ) from None


def _foreign(folder: Path) -> ModelShape:
    shape: ModelShape = importlib.import_module("engine.models.transformers_shape").load_shape(folder)
    return shape


Shape = TypeVar("Shape", bound=ModelShape)


def with_tokenizer_end(shape: Shape, folder: Path) -> Shape:
    """Return the shape with the tokenizer's end token, which fine-tuned models may have in the tokenizer only."""
    found = tokenizer_end(folder)
    if found is None or found[1] in shape.eos_token_ids or not 0 <= found[1] < shape.vocab_size:
        return shape
    text, token = found
    others = ", ".join(map(str, sorted(shape.eos_token_ids))) or "none"
    note = f"answers also end at {text} ({token}), the tokenizer's eos_token; the end tokens of the configs: {others}"
    return replace(shape, eos_token_ids=shape.eos_token_ids | {token}, notes=(*shape.notes, note))


def tokenizer_end(folder: Path) -> tuple[str, int] | None:
    """Return text and id of the tokenizer's `eos_token`; None without a tokenizer, or one that names no such token."""
    config = _read(folder / "tokenizer_config.json")
    text = _text(config.get("eos_token")) or _text(_read(folder / "special_tokens_map.json").get("eos_token"))
    if not text:
        return None
    for token, each in _mapping(config.get("added_tokens_decoder")).items():
        if _text(each) == text and str(token).isdigit():
            return text, int(token)
    tokenizer = _read(folder / "tokenizer.json")
    for each in tokenizer.get("added_tokens") or ():
        if _text(each) == text and isinstance(each.get("id"), int):
            return text, int(each["id"])
    token_id = _mapping(_mapping(tokenizer.get("model")).get("vocab")).get(text)
    return (text, token_id) if isinstance(token_id, int) else None


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or broken, which loading the tokenizer reports."""
    with suppress(OSError, ValueError):
        return dict(_mapping(json.loads(path.read_text(encoding="utf-8"))))
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(token: Any) -> str:
    """Return the text of a token, which is written as a string or as an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
