"""A fitted latency model on disk: one JSON file per model × device × dtype × version.

The caller decides the directory and passes the time of creation; this module knows no clock and no default place.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from predictor.costs import NOT_MEASURED, CacheCosts
from predictor.features import BatchFeatures, FeatureRow
from predictor.model import LINEAR_TERMS, LatencyModel
from predictor.reach import Reach
from predictor.samples import Sample

SCHEMA = 8
"""2: the costs of the cache's representations came in; 3: none of them is zero; 4: the sweep itself, which later fits
stand on; 5: adapters; 6: the contexts of chunks; 7: masks; 8: cache costs of a step. Older files are measured again."""


class ProfileError(Exception):
    """The file cannot serve as this engine's profile; one line that says which file and why."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile holds for: model name, device name, dtype, the version of the code that ran the steps, what steps
    are padded to, and the windows of the model's layers (as a `Reach` writes itself)."""

    model: str
    device: str
    dtype: str
    version: str
    padding: str = ""
    windows: str = ""

    def filename(self) -> str:
        """A file name that is readable, safe on any file system, and distinct for distinct keys."""
        parts = (self.model, self.device, self.dtype, self.version, *filter(None, [self.padding, self.windows]))
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts[:4])).strip("-.")[:100]
        return f"{readable}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """A latency model, what it holds for, when it was made (ISO 8601), and how good it is on steps it has not seen.

    `sweep`: the measured steps, as many as `num_samples` or none; a refit of the model keeps them.
    `core_share`: of their time that busy threads got while it was made; other work of the machine had the rest.
    `cache_costs` are also coefficients of the model where they were measured (see `with_cache_costs`).
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
        """The profile with these costs, and a model that charges them; `unit_bytes`: size of a cache unit."""
        swap = (costs.swap_out or 0.0) + (costs.swap_in or 0.0)
        transferred = swap / 2 / unit_bytes if swap else 0.0
        model = replace(self.model, transferred=transferred, **costs.coefficients())
        return replace(self, model=model, cache_costs=costs)

    def save(self, path: Path) -> None:
        """Write atomically: a reader, or a crash at any moment, meets the old file or the new one, whole.

        Creates the folder. Raises OSError when the place cannot be written.
        """
        coefficients = {name: getattr(self.model, name) for name in LINEAR_TERMS}
        document = {
            "schema": SCHEMA,
            "key": {name: part for name, part in asdict(self.key).items() if part or name != "windows"},
            "created_at": self.created_at,
            "held_out_mape": self.held_out_mape,
            "num_samples": self.num_samples,
            "core_share": self.core_share,
            "feature_set": self.model.feature_set,
            "token_limit": self.model.token_limit,
            "buckets": self.model.buckets,
            "decode_buckets": self.model.decode_buckets,
            "coefficients": coefficients,
            "cache_costs": asdict(self.cache_costs),
            "sweep": [[*features.row(), seconds] for features, seconds in self.sweep],
            "hinges": list(zip(self.model.knots, self.model.hinges, strict=True)),
        }
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: Path, key: ProfileKey) -> "Profile":
        """The profile in `path` if it is whole and was made for `key`; raises ProfileError otherwise."""
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise ProfileError(f"profile {path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError):
            raise ProfileError(f"profile {path}: damaged (not JSON); delete it to measure again") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ProfileError(f"profile {path}: schema {schema!r}, this version reads schema {SCHEMA}")
        try:
            profile = _parse(document)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise ProfileError(f"profile {path}: damaged ({reason}); delete it to measure again") from None
        for name in (field.name for field in fields(ProfileKey)):
            found, wanted = getattr(profile.key, name), getattr(key, name)
            if found != wanted:
                raise ProfileError(f"profile {path}: made for {name} '{found}', not '{wanted}'")
        return profile


def _parse(document: dict[str, Any]) -> Profile:
    """The profile in a parsed document; raises KeyError, TypeError or ValueError when a part is missing or wrong."""
    parts = {"windows": "", **document["key"]}
    key = ProfileKey(**{field.name: _string(parts[field.name]) for field in fields(ProfileKey)})
    mape = _number(document["held_out_mape"])
    if mape < 0:
        raise ValueError("held_out_mape is negative")
    model = LatencyModel(
        _string(document["feature_set"]),
        **{name: _number(document["coefficients"][name]) for name in LINEAR_TERMS},
        knots=tuple(_integer(knot) for knot, _ in document["hinges"]),
        hinges=tuple(_number(hinge) for _, hinge in document["hinges"]),
        token_limit=_integer(document["token_limit"]),
        buckets=tuple(_integer(bucket) for bucket in document["buckets"]),
        decode_buckets=tuple(_integer(bucket) for bucket in document["decode_buckets"]),
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
    return Sample(BatchFeatures.from_row(FeatureRow(*map(_sum, sums))), _number(seconds))


def _sum(value: object) -> int:
    """A sum of features: attention work and bytes can be large."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise TypeError(f"a whole number was expected, not {value!r:.40}")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a string was expected, not {value!r:.40}")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise TypeError(f"a whole number was expected, not {value!r:.40}")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"a finite number was expected, not {value!r:.40}")
    return float(value)


def write_atomically(path: Path, data: bytes) -> None:
    """Temporary file in the same folder, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # whatever it was, nothing half-written stays
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
