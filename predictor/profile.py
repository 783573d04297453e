"""A fitted latency model on disk: one JSON file per model × device × dtype × version; the caller gives the time.

A profile holds the costs of the cache representations, measured once with the model (Apt-Serve §4, its ρ). Work on
hidden state has a part that does not depend on the number of tokens: reading the weights of K and V and launching
operators in every layer. It is therefore measured at two sizes, on live engines and simulated devices, and both parts
are taken from the line through the two points.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from predictor.features import SUMS, BatchFeatures, Reach
from predictor.model import LINEAR_TERMS, LatencyModel, Sample

FEW_TOKENS, MANY_TOKENS = 128, 1024
"""Token counts, run or restored from hidden state, of the two measured steps."""

MEMORY_RATE = 1e13
"""Bytes per second, an upper bound of device memory bandwidth."""


class Affine(NamedTuple):
    """Cost in seconds: `fixed` once per step with such tokens, plus `token` per token."""

    fixed: float
    token: float

    def per_token(self, tokens: int) -> float:
        """Return the cost per token in a step with that many tokens."""
        return self.token + self.fixed / tokens


def affine(few: tuple[int, float], many: tuple[int, float], floor: float = 0.0) -> Affine:
    """Fit a nonnegative line with slope of at least `floor` to two measurements (tokens, seconds).

    With equal token counts, the whole cost is attributed to the tokens.
    """
    (fewer, at_few), (more, at_many) = few, many
    if more <= fewer:
        return Affine(0.0, max(at_many / more, floor))
    token = max((at_many - at_few) / (more - fewer), floor)
    fixed = (at_few + at_many - token * (fewer + more)) / 2  # exact for both points unless the floor raised the slope
    if fixed < 0.0:
        return Affine(0.0, max((fewer * at_few + more * at_many) / (fewer * fewer + more * more), floor))
    return Affine(fixed, token)


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """Costs in seconds; None if the engine did not offer the representation during the measurement.

    Attributes:
        run_hidden: Per step and past token that is read from hidden state instead of KV; positive.
        restore: Once per token whose K and V are projected from hidden state; positive.
        swap_out: Once per unit copied from the device to the host; positive.
        swap_in: Once per unit copied back; positive.
        run_hidden_step: Per step with any token of `run_hidden`, in addition to it.
        restore_step: Per step with any token of `restore`, in addition to it.
    """

    run_hidden: float | None = None
    restore: float | None = None
    swap_out: float | None = None
    swap_in: float | None = None
    run_hidden_step: float | None = None
    restore_step: float | None = None

    def __post_init__(self) -> None:
        for seconds in (self.run_hidden, self.restore, self.swap_out, self.swap_in):
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ValueError("cache costs must be finite and above zero")
        for seconds in (self.run_hidden_step, self.restore_step):
            if seconds is not None and not 0.0 <= seconds < float("inf"):
                raise ValueError("cache costs of a step must be finite and not below zero")

    def rho(self, tokens: int) -> float:
        """Return the added time per token (ρ) of a step that reads `tokens` from hidden state; 0 if none."""
        if self.run_hidden is None or tokens <= 0:
            return 0.0
        return Affine(self.run_hidden_step or 0.0, self.run_hidden).per_token(tokens)

    def coefficients(self) -> dict[str, Any]:
        """Return the cache coefficients of a latency model by name; 0 for unmeasured costs."""
        return {
            "compact": self.run_hidden or 0.0,
            "compact_step": self.run_hidden_step or 0.0,
            "restored": self.restore or 0.0,
            "restored_step": self.restore_step or 0.0,
        }

    def over(self, older: "CacheCosts") -> "CacheCosts":
        """Return these costs, with unmeasured ones taken from `older`."""
        return CacheCosts(
            *(mine if mine is not None else theirs for mine, theirs in zip(astuple(self), astuple(older), strict=True))
        )

    def covers(self, *, hidden: bool, host: bool) -> bool:
        """Return whether all offered representations were measured."""
        missing = hidden and (self.run_hidden is None or self.restore is None)
        return not (missing or (host and (self.swap_out is None or self.swap_in is None)))


NOT_MEASURED = CacheCosts()


SCHEMA = 9
"""Version of the file format. 2: cache costs; 3: nonzero cache costs; 4: samples of the sweep, for refits; 5: adapters;
6: contexts of chunks; 7: masks; 8: cache costs per step. Profiles of older schemas are measured again."""


class ProfileError(Exception):
    """The file cannot be used as this engine's profile; the message is one line with path and reason."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Identity of a profile: model name, device name, dtype, version of the code that ran the steps, padding sizes, and
    windows of the model's layers (`str` of a `Reach`)."""

    model: str
    device: str
    dtype: str
    version: str
    padding: str = ""
    windows: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether the steps ran on a CPU, whose name includes the number of threads."""
        return " threads" in self.device

    def filename(self) -> str:
        """Return a readable file name that is valid on any file system and unique per key."""
        parts = (self.model, self.device, self.dtype, self.version, *filter(None, [self.padding, self.windows]))
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts[:4])).strip("-.")[:100]
        return f"{readable}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """A latency model and its metadata.

    Attributes:
        key: Identity of the profile.
        created_at: Creation time, ISO 8601.
        model: The fitted model.
        held_out_mape: Mean absolute percentage error on steps that were held out of the fit.
        num_samples: Number of measured steps.
        cache_costs: Costs of cache operations; also coefficients of `model` if measured (see `with_cache_costs`).
        sweep: The measured steps, either all or none; refits use them.
        core_share: Share of CPU time that busy threads got during the sweep; other processes had the rest.
    """

    key: ProfileKey
    created_at: str
    model: LatencyModel
    held_out_mape: float
    num_samples: int
    cache_costs: CacheCosts = NOT_MEASURED
    sweep: tuple[Sample, ...] = ()
    core_share: float = 1.0

    def with_cache_costs(self, costs: CacheCosts, unit_bytes: int) -> "Profile":
        """Return the profile with these costs and a model that charges them; `unit_bytes`: size of a cache unit."""
        swap = (costs.swap_out or 0.0) + (costs.swap_in or 0.0)
        transferred = swap / 2 / unit_bytes if swap else 0.0
        model = replace(self.model, transferred=transferred, **costs.coefficients())
        return replace(self, model=model, cache_costs=costs)

    def save(self, path: Path) -> None:
        """Write the file atomically and create its folder. Raises OSError if the path cannot be written."""
        coefficients = {name: getattr(self.model, name) for name in LINEAR_TERMS}
        document = {
            "schema": SCHEMA,
            "key": {name: part for name, part in asdict(self.key).items() if part or name != "windows"},
            "created_at": self.created_at,
            "held_out_mape": self.held_out_mape,
            "num_samples": self.num_samples,
            "core_share": self.core_share,
            "token_limit": self.model.token_limit,
            "buckets": self.model.buckets,
            "decode_buckets": self.model.decode_buckets,
            "jump_at": self.model.jump_at,
            "coefficients": coefficients,
            "cache_costs": asdict(self.cache_costs),
            "sweep": [[*features.row(), seconds] for features, seconds in self.sweep],
            "hinges": list(zip(self.model.knots, self.model.hinges, strict=True)),
        }
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: Path, key: ProfileKey) -> "Profile":
        """Read the profile in `path`. Raises ProfileError if it is damaged or was made for another key."""
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise ProfileError(f"profile {path} cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError):
            raise ProfileError(f"profile {path} is damaged (not JSON); delete it to measure again") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ProfileError(f"profile {path} has schema {schema!r}; this version reads schema {SCHEMA}")
        try:
            profile = _parse(document)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise ProfileError(f"profile {path} is damaged ({reason}); delete it to measure again") from None
        for name in (field.name for field in fields(ProfileKey)):
            found, wanted = getattr(profile.key, name), getattr(key, name)
            if found != wanted:
                raise ProfileError(f"profile {path} was made for {name} '{found}', not '{wanted}'")
        return profile


def _parse(document: dict[str, Any]) -> Profile:
    """Build the profile from a parsed document; raises KeyError, TypeError or ValueError for missing or wrong parts."""
    parts = {"windows": "", **document["key"]}
    key = ProfileKey(**{field.name: _string(parts[field.name]) for field in fields(ProfileKey)})
    mape = _number(document["held_out_mape"])
    if mape < 0:
        raise ValueError("held_out_mape is negative")
    model = LatencyModel(
        **{name: _number(document["coefficients"][name]) for name in LINEAR_TERMS},
        knots=tuple(_integer(knot) for knot, _ in document["hinges"]),
        hinges=tuple(_number(hinge) for _, hinge in document["hinges"]),
        token_limit=_integer(document["token_limit"]),
        buckets=tuple(_integer(bucket) for bucket in document["buckets"]),
        decode_buckets=tuple(_integer(bucket) for bucket in document["decode_buckets"]),
        jump_at=_integer(document["jump_at"]),
        reach=Reach.parse(key.windows),
    )
    found = {field.name: document["cache_costs"][field.name] for field in fields(CacheCosts)}
    costs = CacheCosts(**{name: None if value is None else _number(value) for name, value in found.items()})
    sweep = tuple(map(_sample, document["sweep"]))
    created, samples = _string(document["created_at"]), _integer(document["num_samples"])
    return Profile(key, created, model, mape, samples, costs, sweep, _number(document.get("core_share", 1.0)))


def _sample(row: list[object]) -> Sample:
    *sums, seconds = row
    if _number(seconds) <= 0.0:
        raise ValueError("a step of the sweep took no time")
    if len(sums) != len(SUMS):
        raise ValueError(f"a step of the sweep has {len(sums)} sums, not {len(SUMS)}")
    return Sample(BatchFeatures.from_row(map(_sum, sums)), _number(seconds))


def _sum(value: object) -> int:
    """Check a sum of features; attention work and bytes exceed 31 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise TypeError(f"expected a whole number, not {value!r:.40}")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, not {value!r:.40}")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise TypeError(f"expected a whole number, not {value!r:.40}")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"expected a finite number, not {value!r:.40}")
    return float(value)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to a temporary file in the same folder, fsync it, rename it, and fsync the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # remove the temporary file after any failure, cancellation included
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
