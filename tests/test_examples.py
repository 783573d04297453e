"""Every file of examples/ runs against the demo model, or is valid configuration."""

import asyncio
import contextlib
import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from fake_engine import Served
from test_readme import demo

__all__ = ["demo"]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


async def run(demo: Served, *words: str) -> str:
    """Run an example as a program; return its output."""
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, env=os.environ | {"TIDEMILL_URL": demo.url}, stdout=pipe, stderr=both
    )
    try:
        output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


def words_of(folder: Path, notebook: Path) -> str:
    """Write the code cells of a notebook as a program; return its path."""
    cells = json.loads(notebook.read_text())["cells"]
    program = folder / "notebook.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    return str(program)


@pytest.mark.slow
async def test_every_program(demo: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "reviews.csv", tmp_path / "labels.csv"
    source.write_text('id,text\na,"Good, and cheap."\nb,Broken after a day\n')
    shown = {
        "first_batch.py": ["Italy -> The capital of Italy is Rome.", "completed"],
        "embeddings_batch.py": ["'The river rises in spring.' and 'The river rises in March.'"],
        "flex_beside_chat.py": ["chat, ", "background: 40 answers, such as 'The capital of France is Paris.'"],
        "tools.py": ['get_weather({"city": "Seoul"}) = fog, 7 degrees', "The weather in Seoul: fog, 7 degrees."],
        "csv_to_labels.py": ["completed: 2 of 2"],
    }
    assert set(shown) == {path.name for path in EXAMPLES.glob("*.py")}
    for name, promised in shown.items():
        arguments: Sequence[str] = [str(source), str(target)] if name == "csv_to_labels.py" else []
        output = await run(demo, str(EXAMPLES / name), *arguments)
        assert all(words in output for words in promised), output
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["a", "b"]
    assert all(row["sentiment"] in {"positive", "neutral", "negative", "error"} for row in rows)
    assert "Japan -> The capital of Japan is Tokyo." in await run(demo, words_of(tmp_path, EXAMPLES / "batch.ipynb"))


def test_the_configurations() -> None:
    lite = yaml.safe_load((EXAMPLES / "litellm.yaml").read_text())
    assert [model["model_name"] for model in lite["model_list"]] == ["chat", "background"]
    compose = yaml.safe_load((EXAMPLES / "open-webui.yaml").read_text())
    assert compose["services"]["open-webui"]["environment"]["OPENAI_API_BASE_URL"] == "http://tidemill:8000/v1"
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in EXAMPLES.iterdir() if path.name != "README.md")
