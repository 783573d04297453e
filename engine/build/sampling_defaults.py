"""Sampling defaults of a checkpoint, for fields that a request does not set."""

from pathlib import Path

from engine.api import SamplingDefaults, SamplingParams
from engine.errors import InvalidRequestError, ModelLoadError
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
