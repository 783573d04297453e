"""Where a model's files are: a folder, or a Hugging Face id that is fetched once. Torch-free."""

from pathlib import Path

from engine.errors import ModelLoadError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]
# Some repositories carry the same weights twice, once in their author's own layout.
_UNWANTED = ["original/*", "consolidated*"]


def is_hub_id(name: str) -> bool:
    """Whether a name that is no folder may be that of a repository, "owner/name"."""
    parts = name.split("/")
    return not name.startswith(("/", ".", "~")) and len(parts) == 2 and all(parts)


def cached_folder(name: str) -> Path | None:
    """The folder of a hub id whose files are on this machine already; None if they are not. Asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def resolve_model_folder(name: str) -> Path:
    """The local folder of `name`, downloading safetensors and JSON if it is a hub id ("owner/name").

    Errors: ModelLoadError, one line, if there is no such folder and the hub has no such model or cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(name):
        raise ModelLoadError(f"no folder {name!r}, and it is not a Hugging Face id (owner/name) either")
    from httpx import HTTPError
    from huggingface_hub import snapshot_download  # 0.2 s that a local folder need not pay
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (OSError, HTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelLoadError(f"no folder {name!r}, and the Hugging Face hub did not give it: {reason}") from None
