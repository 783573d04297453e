"""Each row of docs/develop/features.toml and papers.toml names settings, files, metrics and commands that exist."""

import re
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.__main__ import BENCHES
from benchmarks.experiments.main import EXPERIMENTS
from benchmarks.features import FEATURES as BENCHED
from engine.config import OVERLOADS, EngineConfig
from engine.scheduling.policies import find_policy
from gateway.config import ServerConfig
from tidemill.flags import flags_of

ROOT = Path(__file__).parents[1]
PAGE = tomllib.loads((ROOT / "docs" / "develop" / "features.toml").read_text())
FEATURES = {row["name"]: row for row in PAGE["feature"]}
METHODS = tomllib.loads((ROOT / "docs" / "develop" / "papers.toml").read_text())["method"]
SETTINGS = {flag.field for config in (EngineConfig, ServerConfig) for flag in flags_of(config)}


def test_each_setting_is_basic_or_belongs_to_one_feature() -> None:
    named = Counter([*PAGE["basic"], *(flag for row in FEATURES.values() for flag in row["flags"])])
    assert not SETTINGS - named.keys(), "settings without a row: name the feature, or add the setting to `basic`"
    assert not named.keys() - SETTINGS, "rows of settings that no longer exist"
    assert not [name for name, count in named.items() if count > 1]


def test_no_two_features_claim_a_file() -> None:
    files = Counter(name for row in FEATURES.values() for name in row["files"])
    assert not [name for name, count in files.items() if count > 1]


@pytest.mark.parametrize("name", FEATURES)
def test_a_row_is_complete(name: str) -> None:
    row = FEATURES[name]
    assert row.keys() == {"name", "flags", "files", "cap", "command", "figure", "device", "date"}
    assert row["files"] and not [path for path in row["files"] if not (ROOT / path).is_file()]
    assert re.search(r"\d|method", row["figure"]) and row["device"]
    assert date(2026, 11, 20) <= date.fromisoformat(row["date"])


@pytest.mark.parametrize("name", FEATURES)
def test_the_command_exists(name: str) -> None:
    assert command_exists(FEATURES[name]["command"])


def command_exists(command: str) -> bool:
    """Return whether a benchmark, a target of the Makefile or a file of tests exists."""
    match command.split():
        case ["python", "-m", "benchmarks", "experiments", name, *_]:
            return name in EXPERIMENTS
        case ["python", "-m", "benchmarks", "features", name, *_]:
            return name in BENCHED
        case ["python", "-m", "benchmarks", name, *_]:
            return name in BENCHES
        case ["make", target, *_]:
            return re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
        case ["pytest", *_, path]:
            return (ROOT / path).is_file()
    return False


def test_commands_that_do_not_exist_are_found() -> None:
    missing = ("experiments nothing", "features nothing", "nothing")
    assert not any(command_exists(f"python -m benchmarks {name}") for name in missing)
    assert not command_exists("make nothing") and not command_exists("pytest tests/test_nothing.py")
    assert not command_exists("nothing")


@pytest.mark.parametrize("row", METHODS, ids=[f"{row['paper']}, {row['method']}" for row in METHODS])
def test_a_method_is_live_as_its_row_says(row: dict[str, Any]) -> None:
    keys = {"paper", "method", "live", "settings", "metrics", "file", "test", "command", "differs"}
    assert row.keys() == keys and row["paper"] and row["method"] and row["differs"]
    assert (ROOT / row["file"]).is_file() and (ROOT / row["test"]).is_file()
    assert Path(row["test"]).name.startswith("test_")
    assert command_exists(row["command"])
    shown = re.findall(r"^\| `(\w+)", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.MULTILINE)
    assert not set(row["metrics"]) - set(shown)
    differing = [setting for setting in row["settings"] if not is_default(setting)]
    match row["live"]:
        case "default":
            assert not differing
        case "option":
            assert row["settings"] and differing == row["settings"]
        case other:
            assert other == "simulated" and not row["settings"] and not row["metrics"]


def is_default(setting: str) -> bool:
    """Return whether `name=value` is the default of a setting; a name alone stands for any other value.

    Raises KeyError for an unknown setting, and ConfigError for a value that it does not take.
    """
    name, equals, value = setting.partition("=")
    default = str({flag.field: flag for flag in flags_of(EngineConfig) + flags_of(ServerConfig)}[name].default)
    if equals and value != default:
        config = EngineConfig(**cast(dict[str, Any], {name: value}))
        find_policy(config.online_policy)
        assert name != "overload" or value in OVERLOADS
    return bool(equals) and value == default
