"""Sampling defaults read from a checkpoint's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.build.join import read_sampling_defaults
from engine.client import SamplingDefaults

READ: list[tuple[Any, SamplingDefaults, list[str]]] = [
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
    (None, SamplingDefaults(), []),
    ({"do_sample": False, "temperature": None}, SamplingDefaults(), []),
    ([1], SamplingDefaults(), ["defaults: none, "]),
    ("{", SamplingDefaults(), ["defaults: none, "]),
]


@pytest.mark.parametrize(("content", "expected", "words"), READ)
def test_defaults_are_read(tmp_path: Path, content: Any, expected: SamplingDefaults, words: list[str]) -> None:
    """A missing, empty or broken file gives none; the line of the start is empty only where nothing is said."""
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(text)
    found, line = read_sampling_defaults(tmp_path)
    assert found == expected and all(word in line for word in words) and bool(line) is bool(words), line
