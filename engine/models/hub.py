"""Where a model's files are: a folder, or a Hugging Face id that is fetched once. Torch-free.

The hub's own library downloads, into its own cache; here is what is asked for, and a sentence for each way to fail.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.implementation import choose
from engine.models.spec import ModelShape

_WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]
# Some repositories carry the same weights twice, once in their author's own layout.
_UNWANTED = ["original/*", "consolidated*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: its size in bytes, and whether it is in the cache."""

    path: str
    num_bytes: int
    is_here: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """What the hub has of a model at one commit, as far as it is wanted; `revision` is what was asked for, under which
    the cache will find it. `pickles`: whether it has weights that would have to be unpickled. `cache`: the folder where
    the repository's files lie or will lie."""

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

    def bytes_on_disk(self) -> int:
        """What of the repository is in the cache, unfinished files included."""
        total = 0
        for path in (self.cache / "blobs").glob("*"):
            try:
                total += path.stat().st_size
            except OSError:  # an unfinished file that has just got its name
                continue
        return total


def is_hub_id(name: str) -> bool:
    """Whether a name that is no folder may be that of a repository, "owner/name"."""
    parts = name.split("/")
    return not name.startswith(("/", ".", "~")) and len(parts) == 2 and all(parts)


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a hub id whose files are all on this machine; None if some are not. Asks nobody."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=True
        )
    except Exception:  # whatever is wrong with what is here, a fetch puts it right
        return None
    return Path(found) if any(Path(found).glob("*.safetensors")) else None


def resolve_model_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of `name`, downloading safetensors and JSON if it is a hub id ("owner/name"), at `revision`.

    Errors: ModelLoadError, one line, if there is no such folder and the hub has no such model or cannot be reached,
    and for the revision of a folder.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"--revision {revision} is of models from the hub, and {name} is a folder")
        return folder
    _check_id(name)
    return _download(name, revision, _WANTED)


def look_up(name: str, revision: str | None) -> Offer:
    """What the hub has of a model; offline, what is here. Errors: ModelLoadError, one sentence."""
    _check_id(name)
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    try:
        info = HfApi(endpoint=_endpoint()).model_info(name, revision=revision, files_metadata=True)
    except Exception as error:  # httpx's or httpx2's, by the library's version, beside its own
        folder = cached_folder(name, revision) if _is_offline(error) else None
        if folder is None:
            raise _problem(name, revision, error) from None
        return _local_offer(name, revision, folder)
    siblings = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    commit = info.sha or revision or "main"
    files = tuple(
        RemoteFile(path, siblings[path], isinstance(try_to_load_from_cache(name, path, revision=commit), str))
        for path in siblings
        if _matches(path, _WANTED) and not _matches(path, _UNWANTED)
    )
    cache = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=name, repo_type="model")
    return Offer(name, revision, commit, files, any(path.endswith(_PICKLES) for path in siblings), cache)


def _matches(path: str, patterns: list[str]) -> bool:
    """As the library matches: a star also stands for folders."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def _local_offer(name: str, revision: str | None, folder: Path) -> Offer:
    files = tuple(
        RemoteFile(str(path.relative_to(folder)), path.stat().st_size, True)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    return Offer(name, revision, folder.name, files, False, folder.parent.parent)


def check_offer(offer: Offer) -> ModelShape:
    """The model's spec, for which only its smallest files are fetched.

    Errors: ModelLoadError for what cannot be served."""
    if not offer.weight_bytes:
        if offer.pickles:
            raise ModelLoadError(
                f"{offer.name} has its weights only as pickles (.bin), which can run code and are not loaded: convert "
                "it at https://huggingface.co/spaces/safetensors/convert, then "
                f"tidemill pull {offer.name} --revision refs/pr/N"
            )
        raise ModelLoadError(f"{offer.name} has no weights in safetensors: choose another repository")
    return choose(_download(offer.name, offer.revision, ["config.json", "generation_config.json"]), "auto").shape


@contextmanager
def without_bars() -> Iterator[None]:
    """The library shows no progress of its own."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def fetch(offer: Offer) -> Path:
    """Download what is missing; returns the folder. Errors: ModelLoadError, one sentence."""
    return _download(offer.name, offer.revision, _WANTED)


def _check_id(name: str) -> None:
    if not is_hub_id(name):
        raise ModelLoadError(f"no folder {name!r}, and it is not a Hugging Face id (owner/name) either")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # 0.2 s that a local folder need not pay

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED, endpoint=_endpoint()
        )
    except Exception as error:  # httpx's or httpx2's, by the library's version, beside its own
        raise _problem(name, revision, error) from None
    return Path(found)


def _problem(name: str, revision: str | None, error: BaseException) -> ModelLoadError:
    """The sentence for what went wrong, with what to do next."""
    from huggingface_hub import constants, errors

    again = f"tidemill pull {name}" + (f" --revision {revision}" if revision else "")
    where = (_endpoint() or constants.ENDPOINT).rstrip("/")
    causes = list(_causes(error))
    if _is_offline(error):
        text = f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it: HF_HUB_OFFLINE=0 {again}"
    elif any(isinstance(cause, errors.GatedRepoError) for cause in causes):
        text = f"{name} is gated: accept its licence at {where}/{name}, then hf auth login and {again}"
    elif any(isinstance(cause, errors.RepositoryNotFoundError) for cause in causes):
        text = f"{where} has no model {name}, or it is private: check the name, or hf auth login and {again}"
    elif any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        text = f"{name} has no revision {revision}: tidemill pull {name} takes the newest"
    elif isinstance(error, errors.HFValidationError):
        text = f"no folder {name!r}, and the hub has no such names: owner/name, of letters, digits, '-', '_' and '.'"
    elif any(isinstance(cause, errors.HfHubHTTPError) for cause in causes):
        text = f"{where} did not give {name} ({_first_line(causes[-1])}): try again later, {again}"
    elif isinstance(error, OSError) and error.errno is not None:
        text = f"{name} could not be kept: {error.strerror}"
    else:
        text = f"{where} cannot be reached ({_first_line(causes[-1])}): HF_ENDPOINT names a mirror, {again} tries again"
    return ModelLoadError(text)


def _is_offline(error: BaseException) -> bool:
    """Whether the library was told not to use the network."""
    from huggingface_hub import errors

    return any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in _causes(error))


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
