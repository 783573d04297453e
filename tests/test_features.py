"""Every optional feature has a row in docs/develop/features.toml, and each row is about something that exists."""

import re
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHES
from benchmarks.experiments.main import EXPERIMENTS
from benchmarks.features import FEATURES as BENCHED
from engine.config import EngineConfig
from gateway.config import ServerConfig
from tidemill.flags import flags_of

ROOT = Path(__file__).parents[1]
PAGE = tomllib.loads((ROOT / "docs" / "develop" / "features.toml").read_text())
FEATURES = {row["name"]: row for row in PAGE["feature"]}
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
    words = FEATURES[name]["command"].split()
    if words[:3] == ["python", "-m", "benchmarks"]:
        assert words[3] in BENCHES
        assert words[3] != "experiments" or words[4] in EXPERIMENTS
        assert words[3] != "features" or words[4] in BENCHED
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert words[0] == "pytest" and (ROOT / words[-1]).is_file()
