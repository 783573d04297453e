"""Sampling defaults read from a checkpoint's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.build.join import read_sampling_defaults
from engine.client import SamplingDefaults

READ: list[tuple[dict[str, Any], SamplingDefaults, list[str]]] = [
    (
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "do_sample": True},
        SamplingDefaults(0.6, 0.95, 20, 1.05),
        ["temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1.05", "--generation-config none"],
    ),
    ({"temperature": 0, "eos_token_id": 2}, SamplingDefaults(temperature=0), ["temperature 0"]),
    (
        {"temperature": 9, "top_p": "0.9", "top_k": 2.5, "repetition_penalty": True},
        SamplingDefaults(),
        ["defaults: none", "temperature 9", "top_p '0.9'", "top_k 2.5", "repetition_penalty True"],
    ),
]


@pytest.mark.parametrize(("values", "expected", "words"), READ)
def test_defaults_are_read(
    tmp_path: Path, values: dict[str, Any], expected: SamplingDefaults, words: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found, line = read_sampling_defaults(tmp_path)
    assert found == expected and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, ""),
        ('{"do_sample": false, "temperature": null}', ""),
        ("[1]", "defaults: none, "),
        ("{", "defaults: none, "),
    ],
)
def test_a_missing_empty_or_broken_file_gives_none(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    found, line = read_sampling_defaults(tmp_path)
    assert found == SamplingDefaults() and told in line and bool(line) is bool(told)
