"""Tables and journals of `tidemill batch run`: a table reads back as it was written, and damage costs its own rows."""

import gzip
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fuzz import fuzz

from engine.errors import ConfigError
from gateway.batch.results import response_row
from tidemill import Batch, BatchResult, tables
from tidemill.client import RefusedError
from tidemill.files import replacing
from tidemill.journal import Journal
from tidemill.recipe import Recipe
from tidemill.tables import cell, clean

ODD_TEXTS = ["\r", "a\rb", "\0", "\ud800", "", '"', "é\u2028", ";"]
TEXT = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(ODD_TEXTS)
NUMBERS = st.integers() | st.integers(-(2**66), 2**66) | st.floats() | st.sampled_from([2**63, -0.0, 1e300])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=5,
)
NAME = st.sampled_from(["a", "b c", "sep=;", "x;y", " z", "", "\ufeffq", "1"]) | TEXT
NAMES = st.lists(NAME, min_size=1, max_size=4, unique=True)


def parquet(values: list[int], kind: Any) -> bytes:
    file = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array(values, kind)}), file)
    return bytes(file.getvalue().to_pybytes())


def plain(value: Any) -> Any:
    """Return a value as files hold it: no lone surrogate, and no number that JSON lacks."""
    if isinstance(value, dict):
        return {plain(name): plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return clean(value) if isinstance(value, str) else value


@fuzz(150)
@given(st.data(), st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".csv.gz", ".parquet"]))
def test_writing_then_reading_is_the_identity(data: st.DataObject, suffix: str) -> None:
    """A cell of CSV is the text of its value. A column of Parquet is text if its values have no common type."""
    names = list({clean(name): None for name in data.draw(NAMES)})
    kinds = [data.draw(st.sampled_from([VALUES, TEXT, st.integers(), NUMBERS, st.none()])) for _ in names]
    rows = data.draw(st.lists(st.tuples(*kinds), max_size=4))
    rows = [dict(zip(names, row, strict=True)) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        path, source = Path(folder) / f"table{suffix}", Path("source.jsonl")
        try:
            tables.check_output(path, names)
        except ConfigError:
            assert "sv" in suffix
            return
        tables.write_rows(path, lambda: rows, dict.fromkeys(names, ""), source)
        found = list(tables.read_rows(path))
    for name in names:
        column, values = [row[name] for row in found], [row[name] for row in rows]
        texts = [None if value is None else cell(value) for value in values]
        if "sv" in suffix:
            assert column == [text or "" for text in texts]
        elif suffix == ".parquet":
            assert column in (texts, values) or repr(column) == repr(values)
        else:
            assert repr(column) == repr([plain(value) for value in values])
    assert len(found) == len(rows)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.csv", b"id;text\n1;a,b\n2;c\n", [{"id": "1", "text": "a,b"}, {"id": "2", "text": "c"}]),
        ("a.csv", b"id\ttext\n1\tx\n", [{"id": "1", "text": "x"}]),
        ("a.csv", b"id|text\n1|x\n", [{"id": "1", "text": "x"}]),
        ("a.csv", b'a,"x;y;z"\n1,"2;3;4"\n', [{"a": "1", "x;y;z": "2;3;4"}]),
        ("a.csv", b'"x;y"\n"a;b"\n;\n', [{"x;y": "a;b"}, {"x;y": ";"}]),
        ("a.csv", b"sep=;\r\na;b\r\n1;2\r\n", [{"a": "1", "b": "2"}]),
        ("a.csv", b"price;n, EUR\n1,5;2,5\n", [{"price": "1,5", "n, EUR": "2,5"}]),
        ("a.csv", b"id, text ,,\n1,x,,\n2,y,,\n", [{"id": "1", "text": "x"}, {"id": "2", "text": "y"}]),
        ("a.csv", b"id,\n1,x\n", [{"id": "1", "column 2": "x"}]),
        ("a.csv", "\ufeffid\né\n".encode(), [{"id": "é"}]),
        ("a.csv", "id,b\né,1\n".encode("utf-16"), [{"id": "é", "b": "1"}]),
        ("a.tsv", b"a, b\tc\n1\t2\n", [{"a, b": "1", "c": "2"}]),
        ("a.csv.gz", gzip.compress(b"a\n1\n", mtime=0), [{"a": "1"}]),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0), [{"a": 1}]),
        ("a.json", b'[{"a": 1},\n {"a": NaN}]', [{"a": 1}, {"a": None}]),
        ("a.json", b'{"a": 1e999}\n{"a": "\\ud800\\ud83d\\ude00"}\n', [{"a": "1e999"}, {"a": "\ufffd\U0001f600"}]),
    ],
)
def test_tables_as_people_have_them(tmp_path: Path, name: str, content: bytes, rows: list[Any]) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(tables.read_rows(tmp_path / name)) == rows


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "a\né\n".encode("latin-1"), "--encoding latin-1"),
        ("a.csv", b"a,b\n1\n", "line 2 has 1 cells, the first line 2$"),
        ("a.csv", b"a,b\n1,2,3\n", "quote cells that hold ','"),
        ("a.csv", b"a, a\n1,2\n", "two columns have the same name, 'a'"),
        ("a.csv.gz", gzip.compress(b"a\n1\n" * 99, mtime=0)[:-12], "the compressed file is damaged"),
        ("a.jsonl", b'{"a":' + b"[" * 9999, "line 1 is not JSON: it is nested too deeply"),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', "an object has a name twice"),
        ("a.json", b"[1]", "value 1 is not a JSON object"),
        ("a.xlsx", b"", "save the sheet as CSV"),
        ("a.csv", b'a,b\n1,"x\n2,y\n', r"the file ends in the cell that begins with 'x\\n2,y\\n'; close its quote"),
        ("a.csv", b'a,"b\n1,x\n', "the file ends in the cell that begins with 'b"),
        ("a.parquet", parquet([2**30], pyarrow.date32()), "a.parquet: days="),
        ("a.parquet", parquet([2**52], pyarrow.timestamp("s")), "a.parquet: "),
        ("a.parquet", parquet([2**62], pyarrow.duration("s")), "a.parquet: "),
    ],
)
def test_tables_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(tables.read_rows(tmp_path / name))


def test_an_encoding_and_a_source_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("a\né\n".encode("latin-1"))
    assert list(tables.read_rows(tmp_path / "a.csv", "latin-1")) == [{"a": "é"}]
    with pytest.raises(ConfigError, match="unknown encoding"):
        list(tables.read_rows(tmp_path / "a.csv", "none"))
    with pytest.raises(ConfigError, match="--encoding: embedded null"):
        list(tables.read_rows(tmp_path / "a.csv", "a\0"))
    source = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [b"\xff"], "b": [7]}), source)
    with serving(Server()), pytest.raises(ConfigError, match="bytes that are not text"):
        Batch(source, tmp_path / "o.csv", prompt="{b}").run()
    tables.write_rows(tmp_path / "b.parquet", lambda: tables.read_rows(source), {"a": "", "b": ""}, source)
    assert list(tables.read_rows(tmp_path / "b.parquet")) == [{"a": b"\xff", "b": 7}]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    with pytest.raises(ZeroDivisionError), replacing(link) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert target.read_bytes() == b"old"
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, target]
    with pytest.raises(ConfigError, match="this is a folder"), replacing(tmp_path):
        pass


# ---- a server without a network


class Server:
    """Answers a text with its capitals. `change`: applied to each file of results. `bad`: texts that fail a batch."""

    def __init__(self, bad: tuple[str, ...] = ()) -> None:
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.bad = bad
        self.sent: list[str] = []
        self.damage: Any = lambda content: content

    def upload(self, path: Path) -> str:
        self.files[name := f"file-{len(self.files)}"] = path.read_bytes()
        return name

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        batch_id = f"batch-{len(self.batches)}"
        lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines()]
        texts = [line["body"]["messages"][-1]["content"] for line in lines]
        errors = [{"line": i, "message": "bad text"} for i, text in enumerate(texts, 1) if text in self.bad]
        batch = {"id": batch_id, "status": "failed" if errors else "completed", "errors": {"data": errors}, **body}
        if not errors:
            batch["request_counts"] = {"total": len(texts), "completed": len(texts), "failed": 0}
            self.sent += texts
            rows = (
                response_row(line["custom_id"], 200, {"choices": [{"message": {"content": text.upper()}}]})
                for line, text in zip(lines, texts, strict=True)
            )
            self.files[f"{batch_id}-out"] = b"".join(rows)
            batch["output_file_id"] = f"{batch_id}-out"
        self.batches[batch_id] = batch
        return batch

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.batches[batch_id]

    def list_batches(self, _limit: int) -> Iterator[dict[str, Any]]:
        return iter(self.batches.values())

    def download(self, file_id: str, target: Any) -> None:
        if file_id not in self.files:
            raise RefusedError("no such file", 404)
        content = self.files[file_id]
        target.write(self.damage(content) if file_id.startswith("batch") else content)


class serving:
    """Let `Batch` use a server."""

    def __init__(self, server: Server) -> None:
        client = type("Client", (), {})()
        for name in ("upload", "call", "batch", "download"):
            setattr(client, name, getattr(server, name))
        client.batches = server.list_batches
        self._patch = patch("tidemill.batch.ServerClient", lambda _options: client)

    def __enter__(self) -> None:
        self._patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)


def run(server: Server, source: Any, output: Path | None, **options: Any) -> tuple[BatchResult, list[str]]:
    """Run and return the result and the warnings."""
    told: list[str] = []
    values = {"prompt": "{text}", "model": "m", "follow": lambda _: None, "tell": told.append, **options}
    with serving(server):
        return Batch(source, output, **values).run(), told


TEXTS = ["one", "two", "one", "four\u2028"]
ROWS = [{"text": text} for text in TEXTS]


def check_answers(result: BatchResult) -> None:
    assert [(row["text"], row["answer"]) for row in result] == [(text, text.upper()) for text in TEXTS]


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.sampled_from(["batches.jsonl", "results.jsonl"]), st.floats(0, 1), st.integers(0, 255), st.booleans())
@example("results.jsonl", 0.0, 0x7B, False)
def test_a_damaged_journal_costs_its_own_rows(name: str, place: float, flip: int, is_cut: bool) -> None:
    """For every prefix and every changed byte: each row once, and lost results are told."""
    with tempfile.TemporaryDirectory() as folder:
        server, output = Server(), Path(folder) / "out.jsonl"
        with patch("tidemill.run.MAX_LINES", 2):
            run(server, ROWS, output)
            log = Path(folder) / "out.jsonl.tidemill" / name
            content = bytearray(log.read_bytes())
            at = min(int(place * len(content)), len(content) - 1)
            content[at] ^= flip
            log.write_bytes(content[:at] if is_cut else content)
            del server.sent[:]
            result, told = run(server, ROWS, output)
            check_answers(result)
            lost = 4 if name == "batches.jsonl" and is_cut else 2
            assert len(server.sent) <= (4 if is_cut else lost) and (told or not server.sent)
            del server.sent[:]
            check_answers(run(server, ROWS, output)[0])
            assert not server.sent


@fuzz(120)
@given(st.floats(0, 1), st.integers(1, 255), st.booleans(), st.booleans())
def test_a_damaged_download_costs_its_own_rows(place: float, flip: int, is_cut: bool, is_lasting: bool) -> None:
    """A row whose answer did not arrive whole is sent again, also if a server damages every file."""
    server, times = Server(), [0]

    def damage(content: bytes) -> bytes:
        times[0] += 1
        changed = bytearray(content)
        at = min(int(place * len(content)), len(content) - 1)
        changed[at] ^= flip
        return content if times[0] > 1 and not is_lasting else bytes(changed[:at] if is_cut else changed)

    server.damage = damage
    result, told = run(server, ROWS, None)
    rows = list(result)
    assert [row["text"] for row in rows] == TEXTS
    assert all(row["answer"] == row["text"].upper() for row in rows if row["status"] != "failed")
    assert told or len(server.sent) == 4
    if not is_lasting:
        check_answers(result)


def test_odd_lines_of_a_download_are_told() -> None:
    server = Server()
    foreign = response_row("x-1", 200, {}) + b'{"id": "y", "custom_id": null, "error": {"message": "damaged"}}\n'
    server.damage = lambda content: content + foreign + content.splitlines(keepends=True)[0]
    result, told = run(server, ROWS, None)
    check_answers(result)
    assert sorted(text.partition(": ")[2] for text in told) == [
        "lines that are damaged: 1; their rows are sent again",
        "lines that name no row: 1; they are left out",
        "lines that repeat a row: 1; the last one of each row counts",
    ]


def test_a_refused_line_is_a_failed_row() -> None:
    server = Server(bad=("two",))
    result, _ = run(server, ROWS, None)
    assert [row["answer"] for row in result] == ["ONE", None, "ONE", "FOUR\u2028"] and result.failed == 1
    assert list(result.causes) == ["bad text (400)"] and len(server.batches) == 2
    rows = [*ROWS, {"other": 1}]
    assert [row["status"] for row in run(Server(), rows, None)[0]].count("failed") == 1, "a row lacks the column"


def test_a_full_server_gets_the_next_part_later() -> None:
    """The server refuses the second of three parts with 429 once; its file is not uploaded again."""

    class Full(Server):
        refused = 0

        def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
            if len(self.batches) == 1 and not self.refused:
                self.refused = 1
                raise RefusedError("the tenant has no room", 429)
            return super().call(method, path, body)

    server, rows = Full(), [{"text": text} for text in "abc"]
    with patch("tidemill.run.MAX_LINES", 1), patch("tidemill.run.POLL_SECONDS", 0.01):
        result, _ = run(server, rows, None)
    assert [row["answer"] for row in result] == ["A", "B", "C"] and server.refused
    assert len(server.batches) == len([name for name in server.files if name.startswith("file-")]) == 3


def test_a_lost_result_file_is_computed_again() -> None:
    server = Server()
    real, lost = server.download, ["batch-0-out"]

    def download(file_id: str, target: Any) -> None:
        if file_id in lost:
            raise RefusedError("no such file", 404)
        real(file_id, target)

    server.download = download  # type: ignore[method-assign]
    result, told = run(server, ROWS, None)
    check_answers(result)
    assert len(server.batches) == 2 and "has lost: 1" in told[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schema": {"properties": {"status": {}}}}, "the schema has a property 'status'"),
        ({"schema": {"properties": {}}}, "must be an object with properties"),
        ({"answer": "error"}, "the answer cannot be the column 'error'"),
        ({"answer": "text"}, "the input already has a column 'text'.*--prefix"),
        ({"prefix": "te", "answer": "xt"}, "the input already has a column 'text'"),
        ({"body": {"stream": True}}, "leave `stream` out"),
        ({"limit": 0}, "at least 1"),
        ({"output": "in.jsonl"}, "the output is the input"),
        ({"output": "link.jsonl"}, "the output is the input"),
        ({"output": "hard.jsonl"}, "the output is the input"),
        ({"output": "folder.csv"}, "this is a folder"),
        ({"output": "old.csv"}, "not the work of this command; --force"),
        ({"output": "none/o.csv"}, "the folder does not exist"),
        ({"output": "o.csv", "answer": " x"}, "a CSV file cannot hold the column ' x'"),
    ],
)
def test_refused_before_anything_is_sent(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(source)
    (tmp_path / "hard.jsonl").hardlink_to(source)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "old.csv").write_text("precious")
    before = sorted(tmp_path.iterdir())
    server = Server()
    with pytest.raises(ConfigError, match=words):
        run(server, source, tmp_path / options.pop("output", "out.jsonl"), **options)
    assert sorted(tmp_path.iterdir()) == before and not server.files
    assert source.read_text() == '{"text": "a"}\n'


def test_a_missing_pyarrow_is_found_before_the_first_row(tmp_path: Path) -> None:
    server = Server()
    with patch.dict("sys.modules", {"pyarrow.parquet": None}), pytest.raises(ConfigError, match="need pyarrow"):
        run(server, ROWS, tmp_path / "o.parquet")
    assert not server.files and not list(tmp_path.iterdir())


def test_an_output_is_locked_by_each_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.csv").hardlink_to(tmp_path / "a.csv")
    held = Journal(tmp_path / "a.csv.tidemill", tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="another process writes this output"):
        run(Server(), ROWS, tmp_path / "b.csv", force=True)
    held.close()


def test_an_output_that_exists_and_a_prefix(tmp_path: Path) -> None:
    output = tmp_path / "o.csv"
    output.write_text("precious")
    rows = [{"text": "a", "status": "open", "error": "none", "answer": "mine"}]
    result, _ = run(Server(), rows, output, force=True, prefix="llm_")
    assert list(result) == [{**rows[0], "llm_answer": "A", "llm_status": "ok", "llm_error": ""}]
    run(Server(), rows, output, prefix="llm_")


def test_a_source_that_changes_is_named(tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "o.csv"
    source.write_text("text\na\nb\nc\n")
    server = Server()
    with pytest.raises(ConfigError, match="the file has changed during the run"):
        run(server, source, output, follow=lambda _: source.write_text("text\nb\nc\n"))
    assert not output.exists()
    assert [row["answer"] for row in run(server, source, output)[0]] == ["B", "C"] and server.sent == ["a", "b", "c"]


def test_rows_that_move_keep_their_answers(tmp_path: Path) -> None:
    server, output = Server(), tmp_path / "o.jsonl"
    run(server, ROWS, output, limit=2)
    run(server, [{"text": "new"}, *ROWS[::-1]], output)
    assert sorted(server.sent) == sorted([*TEXTS, "new"])


def test_rows_that_fail_alike_stop_the_run(tmp_path: Path) -> None:
    rows = [{"text": "bad"}] * 100
    server, output = Server(bad=("bad",)), tmp_path / "o.jsonl"
    with pytest.raises(Exception, match="the first 20 rows failed alike, so no other row was sent: bad text"):
        run(server, rows, output)
    assert len(server.batches) == 1 and not output.exists()
    with pytest.raises(Exception, match="the server refused all rows: bad text"):
        run(server, rows, output)
    server.bad = ()
    assert run(server, rows, output, retry_failed=True)[0].failed == 0 and len(server.sent) == 100


def test_warnings(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("17,good\n18,bad\n")
    _, told = run(Server(), source, None, prompt="same")
    assert ["is the header missing?" in told[0], "names no column" in told[1]] == [True, True]
    with pytest.raises(ConfigError, match=r"row 1: .*names the column 'text'.*the first line must name the columns"):
        run(Server(), source, None)


def test_a_full_disk_is_one_line_and_the_next_run_continues(tmp_path: Path) -> None:
    server, output = Server(), tmp_path / "o.jsonl"

    def full(_descriptor: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with (
        patch("tidemill.journal.os.write", full),
        pytest.raises(ConfigError, match="make room and run the same command"),
    ):
        run(server, ROWS, output)
    real, calls = os.write, [0]

    def later(descriptor: int, data: Any) -> int:
        calls[0] += 1
        return full(descriptor, data) if calls[0] == 3 else int(real(descriptor, data))

    with patch("tidemill.journal.os.write", later), pytest.raises(ConfigError, match="make room"):
        run(server, ROWS, output)
    check_answers(run(server, ROWS, output)[0])
    assert len(server.sent) == 4 and len(server.batches) == 1


def test_an_answer_in_an_unknown_form_is_a_failed_row() -> None:
    for body in (None, [], {"choices": []}, {"choices": [{"message": 1}]}, {"output": [1]}):
        row = Recipe("x").result({"response": {"status_code": 200, "body": body}})
        assert row["status"] == "failed" and "the response is no answer" in row["error"]
    two = {"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}
    assert Recipe("x").result({"response": {"status_code": 200, "body": two}})["answer"] == ["a", "b"]
