"""The pages under docs/ and the README: every link leads somewhere, and the generated ones are what the code says."""

import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from support.tables import for_each

from benchmarks import result_tables
from benchmarks.experiments import parts
from loadgen import lengths

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "gateway", "predictor", "loadgen", "tidemill")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@for_each("page", PAGES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"\w+://|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


@for_each("page", PAGES)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    if "lab" not in page.parts:
        rooms = "engine|gateway|predictor|loadgen|tidemill|benchmarks|tests|tools|integrations"
        named = re.findall(rf"`((?:{rooms})/[\w/]+\.\w+)`", page.read_text())
        assert not [path for path in named if not (ROOT / path).exists()]


def test_every_class_that_a_page_names_exists() -> None:
    sources = (path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    defined = {
        name for text in sources for name in re.findall(r"^ *class (\w+)|^(\w+)(?:: [^=\n]+)? =", text, re.MULTILINE)
    }
    known = {one or other for one, other in defined} | {"OpenAI"}  # a client's class
    for page in (page for page in PAGES if "lab" not in page.parts and page.parent.name != "reference"):
        named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*)(?:[.(][^`]*)?`", page.read_text()))
        assert named <= known, (page, named - known)


def test_guides_are_short_and_the_performance_page_has_one_table_for_each_question() -> None:
    docs = ROOT / "docs"
    words = {page.name: len(page.read_text().split()) for page in (docs / "guides").glob("*.md")}
    assert {name: count for name, count in words.items() if count > 800} == {}
    questions = (docs / "benchmarks" / "performance.md").read_text().split("\n## ")[1:]
    tables = [len(re.findall(r"^\|[-:| ]+\|$", question, re.MULTILINE)) for question in questions]
    assert len(tables) == 8 and all(1 <= count <= 2 for count in tables[:-1]) and not tables[-1]


def test_the_tables_of_the_performance_page_are_those_of_the_result_files() -> None:
    page = result_tables.PAGE.read_text()
    assert result_tables.fill(page) == page, "run `python -m benchmarks results`"
    names = {name for _, name in result_tables.TABLE.findall(page)}
    stems = {path.stem for path in result_tables.FOLDER.glob("*.json")}
    assert stems <= names and names - stems <= {"gpu-1", "gpu-2"}, "those of a run on a GPU may be still to come"
    for result in map(result_tables.read, stems):
        for row in result["rows"]:
            assert len(row["cells"]) == len(result["columns"]) and row["command"] and row["machine"]
            assert date.fromisoformat(row["date"]) and re.fullmatch(r"[0-9a-f]{8}|", row["commit"])
            assert row["commit"] or row["date"] < "2026-11-27", "from that date results have commits"


def test_the_list_of_public_traces_has_the_files_that_the_commands_read() -> None:
    page = (ROOT / "docs" / "benchmarks" / "simulator.md").read_text().partition("## Public traces")[2]
    listed = {
        name for row in page.splitlines() if row[:2] == "| " for name in re.findall(r"`([^`/]*)`", row.split("|")[1])
    }
    known = [each for module in (lengths, parts) for each in vars(module).values() if isinstance(each, lengths.Lengths)]
    assert listed == {each.file for each in known} | {"DIR"}


def test_every_page_is_reached_from_the_index() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#\s]+)\)", (docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    assert pages == linked
    site = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"^ +- (\S+\.md)$", site, re.MULTILINE)) == sorted(pages | {"index.md"})


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """A link or an anchor that leads nowhere aborts the build."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Offline budget" in (tmp_path / "build" / "site" / "concepts" / "offline-budget.html").read_text()


def test_the_reference_is_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "tools" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_page_holds_the_traces_of_a_merge() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        lines = page.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("<<<<<<< ", ">>>>>>> "))], page
