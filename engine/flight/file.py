"""Recordings of the flight recorder on disk: a line of facts, a line an entry, and with their owner's leave a line for
each request that was open, with its tokens. The last `KEEP` of a folder are kept.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.adapters import AdapterFiles
from engine.api import SamplingParams
from engine.errors import ConfigError
from engine.flight.recorder import AnyEntry

KEEP = 8
SUFFIX = ".flight.jsonl"


class Facts(msgspec.Struct, frozen=True, tag=True):
    """What a recording is of. `at`: wall clock; `clock`: the monotonic one, of the entries, at the same time."""

    cause: str
    at: float
    clock: float
    model: str
    dtype: str
    device: str
    version: int = 1


class OpenTokens(msgspec.Struct, frozen=True, tag=True):
    """A request that was open, the tokens it had been given, and its LoRA adapter."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterFiles | None = None


class Recording(msgspec.Struct, frozen=True):
    """A file, read."""

    facts: Facts
    entries: list[AnyEntry]
    requests: list[OpenTokens]


_encoder = msgspec.json.Encoder()
_facts = msgspec.json.Decoder(Facts)
_entries = msgspec.json.Decoder(AnyEntry)
_requests = msgspec.json.Decoder(OpenTokens)


def save(folder: Path, facts: Facts, entries: Sequence[AnyEntry], requests: Sequence[OpenTokens] = ()) -> Path:
    """Write a recording, and remove the oldest ones beyond `KEEP`. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(facts.at))
    path = folder / f"{stamp}-{int(facts.at * 1000) % 1000:03d}-{facts.cause}{SUFFIX}"
    temporary = path.with_suffix(".new")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(_encoder.encode_lines([facts, *entries, *requests]))
    temporary.replace(path)
    for old in sorted(folder.glob(f"*{SUFFIX}"))[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Recording:
    """Read a recording. Raises ConfigError."""
    try:
        first, *lines = path.read_bytes().splitlines()
        entries = [_entries.decode(line) for line in lines if line.startswith(b"[")]
        requests = [_requests.decode(line) for line in lines if line.startswith(b"{")]
        return Recording(_facts.decode(first), entries, requests)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no recording of a flight: {error}") from None
