"""`tidemill.LLM`: a model in this process, without a server."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from tidemill import LLM
from tidemill.llm import AnswerError

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_len is not a setting"):
        LLM(max_len=3)


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(str(tmp_path))


def test_generate_chat_and_map() -> None:
    settings = {"dtype": "float32", "profile_seconds": 0.0, "threads": 1}
    with LLM(**settings) as llm:
        question = "What is the capital of France?"
        whole = [{"role": "user", "content": question}]
        answers = llm.chat([question, whole], temperature=0, max_tokens=30)
        assert answers == ["The capital of France is Paris."] * 2
        texts = llm.generate(["The capital of"] * 600, temperature=0, max_tokens=2)
        assert len(texts) == 600 and len(set(texts)) == 1, "more requests than the engine's queue takes"
        rows = llm.map(
            [{"x": "Italy"}, {"x": "Norway"}], "Capital of {x}?", schema=SCHEMA, temperature=0, max_tokens=30
        )
        assert [row["x"] for row in rows] == ["Italy", "Norway"] and {row["city"] for row in rows} <= {"Rome", "Oslo"}
        with pytest.raises(ConfigError, match="already has a column 'city'"):
            llm.map([{"x": "Italy", "city": "mine"}], "{x}", schema=SCHEMA)
        with pytest.raises(AnswerError, match="temperature"):
            llm.chat([question], temperature=-1)
    llm.close()
