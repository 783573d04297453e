"""`tidemill.LLM`: a model in this process, without a server."""

import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tidemill import LLM
from tidemill.llm import AnswerError

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_len is not a setting"):
        LLM(max_len=3)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(str(tmp_path))


@pytest.mark.slow
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
        mixed = llm.chat([question, "word " * 20_000, "cut \ud83d", question], temperature=0, max_tokens=30)
        assert mixed[0] == mixed[3] == answers[0], "an error costs no other answer"
        assert isinstance(mixed[1], AnswerError) and "context_length_exceeded" in str(mixed[1])
        assert isinstance(mixed[2], AnswerError) and "JSON" in str(mixed[2])
        for name, value in (("n", 2), ("stream", True), ("best_of", 3)):
            with pytest.raises(ConfigError, match=f"{name}=.*one whole answer"):
                llm.chat([question], **{name: value})
        assert told_by_child(llm) == "this LLM belongs to the process that made it; make an LLM in each process"
        assert llm.generate(["The capital of"], max_tokens=1)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.chat([question])


def told_by_child(llm: LLM) -> str:
    """Use the LLM in a forked process and return the error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.chat(["hi"])
        except ConfigError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode()
