"""Settings of a checkpoint besides its model: sampling defaults for fields that a request does not set; embeddings."""

import json
from pathlib import Path
from typing import Any

from engine.api import SamplingDefaults, SamplingParams
from engine.errors import InvalidRequestError, ModelLoadError
from engine.forms import EmbeddingSpec, Pooling
from engine.models.spec import read_json

FILE = "generation_config.json"


def read_sampling_defaults(folder: Path) -> tuple[SamplingDefaults, str]:
    """Return the defaults in `generation_config.json`, and a line for the log, empty if it gives none.

    Values out of range are ignored.
    """
    try:
        values = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    except ModelLoadError as error:
        return SamplingDefaults(), f"sampling defaults: none, {error.message}"
    given = {name: values[name] for name in SamplingDefaults._fields if values.get(name) is not None}
    used = {name: value for name, value in given.items() if _is_valid(name, value)}
    if not given:
        return SamplingDefaults(), ""
    told = ", ".join(f"{name} {value}" for name, value in used.items()) or "none"
    ignored = ", ".join(f"{name} {given[name]!r}" for name in given.keys() - used)
    told += f"; ignored: {ignored}" if ignored else ""
    return SamplingDefaults(**used), f"sampling defaults: {told} ({FILE}; --generation-config none turns them off)"


def _is_valid(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
        return False
    try:
        SamplingParams(max_tokens=1, **{name: value})  # type: ignore[arg-type]
    except InvalidRequestError:
        return False
    return True


_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}


def read_embedding_spec(folder: Path, hidden_size: int) -> EmbeddingSpec:
    """Read the sentence-transformers configuration of a checkpoint; default to the last token's state, normalized."""
    config = _read(folder / "1_Pooling" / "config.json")
    if not isinstance(config, dict):
        return EmbeddingSpec(Pooling.LAST, hidden_size, True, "there is no 1_Pooling/config.json")
    modules = _read(folder / "modules.json")
    names = [str(each.get("type", "")) for each in modules if isinstance(each, dict)] if modules else []
    kinds = [name.rpartition(".")[2] for name in names]
    asked = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    unknown = [*(name for name in asked if name not in _MODES), *(kind for kind in kinds if kind == "Dense")]
    if len(asked) != 1 or unknown:
        why = f"1_Pooling/config.json: {', '.join(unknown or asked) or 'no pooling'} is not supported"
        return EmbeddingSpec(None, hidden_size, False, why)
    normalizes = "Normalize" in kinds or not kinds
    return EmbeddingSpec(_MODES[asked[0]], hidden_size, normalizes, "1_Pooling/config.json")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
