"""`tidemill batch run` and `tidemill.Batch`: rows in, rows with answers out, every row once."""

import asyncio
import csv
import json
import re
import sys
from collections.abc import AsyncIterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fastapi
import pyarrow
import pyarrow.parquet
import pytest
import uvicorn
from batch_tools import FAST, batch_server, client_of, jsonl, line
from fake_engine import MODEL, Served
from fixtures import http_server
from obstore.store import MemoryStore
from support.tables import for_each

import tidemill.run as runs
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.server import bind
from tidemill import Batch, BatchResult, cli
from tidemill import client as client_module
from tidemill.client import ChatError, ChatOptions, ServerClient
from tidemill.recipe import Recipe, is_final

ROWS = [{"id": 1, "text": 'one, "quoted"'}, {"id": 2, "text": "two\nlines\u2028"}, {"id": 3, "text": "drei ü"}]
ANSWER = '{"label": "good", "score": 3}'
SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "score": {"type": "integer"}},
    "required": ["label", "score"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.01)
    for name in ("TIDEMILL_URL", "TIDEMILL_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def served(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Served]:
    async with batch_server(tokenizer, tmp_path / "state", ANSWER) as (served, _):
        yield served


def silent(_batch: dict[str, Any]) -> None:
    pass


async def run(served: Served, source: Any, output: Any = None, **options: Any) -> BatchResult:
    return await Batch(source, output, url=served.url, **{"follow": silent, **options}).run_async()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_bytes(jsonl(rows))
    return path


async def num_batches(served: Served) -> int:
    async with client_of(served) as client:
        return len([batch async for batch in client.batches.list()])


async def num_lines(served: Served) -> int:
    async with client_of(served) as client:
        return sum([batch.request_counts.total async for batch in client.batches.list() if batch.request_counts])


@pytest.mark.parametrize("source", ["in.jsonl", "in.csv", "in.tsv", "in.parquet"])
async def test_every_format(served: Served, tmp_path: Path, source: str) -> None:
    path = write(tmp_path / source, ROWS)
    text = {"jsonl": 1, "parquet": 1}.get(path.suffix[1:], "1")
    for output in ("out.jsonl", "out.csv", "out.tsv", "out.parquet"):
        result = await run(served, path, tmp_path / output, prompt="Rate {id}: {text}", schema=SCHEMA, max_tokens=60)
        rows = list(result)
        assert (result.total, result.failed, result.causes) == (3, 0, {})
        assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
        typed = output in ("out.jsonl", "out.parquet")
        assert rows[0]["id"] == (text if typed else "1") and rows[0]["score"] == (3 if typed else "3")
        assert {(row["label"], row["status"], row["error"] or None) for row in rows} == {("good", "ok", None)}
    if source == "in.parquet":
        assert pyarrow.parquet.read_schema(tmp_path / "out.parquet").field("id").type == pyarrow.int64()


async def test_what_is_sent(served: Served) -> None:
    options: Any = {"system": "Be brief.", "max_tokens": 5, "body": {"temperature": 0.5}}
    result = await run(served, [{"a b": "x", "n": [1]}], prompt="{{{a b}}} {n}", **options)
    assert [row["status"] for row in result] == ["cut off"] and result.output is None
    async with client_of(served) as client:
        batch = (await client.batches.list()).data[0]
        sent = json.loads((await client.files.content(batch.input_file_id)).text)
    assert sent["url"] == "/v1/chat/completions" and sent["body"] == {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{x} [1]"}],
        "max_tokens": 5,
        "temperature": 0.5,
    }


async def test_ready_made_lines(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([line(1), line(2, temperature=9), line(2), line(3, "/v1/chat/completions")]))
    result = await run(served, path, tmp_path / "out.csv", max_tokens=60)
    rows = list(result)
    assert [row["custom_id"] for row in rows] == ["id-1", "id-2", "id-2", "id-3"], (
        "ids may repeat, endpoints may differ"
    )
    assert [row["answer"] for row in rows] == [ANSWER, "", ANSWER, ANSWER] and result.failed == 1
    assert "temperature" in rows[1]["error"] and list(result.causes.values()) == [1]
    assert await num_batches(served) == 2


async def test_a_second_run_sends_what_has_no_result(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_LINES", 2)
    monkeypatch.setattr(runs, "MAX_OPEN", 2)
    source, output = write(tmp_path / "in.csv", ROWS + ROWS), tmp_path / "out.csv"
    ask = partial(run, served, source, output, max_tokens=60)

    def leave(_batch: dict[str, Any]) -> None:
        raise ChatError("the terminal was closed")

    with pytest.raises(ChatError, match="closed"):
        await ask(prompt="{text}", follow=leave)
    assert not output.exists() and await num_batches(served) == 2
    assert (await ask(prompt="{text}")).failed == 0 and await num_batches(served) == 3
    assert (await ask(prompt="{text}")).total == 6 and await num_batches(served) == 3, "nothing is missing"
    write(source, [ROWS[1] | {"text": "new"}, *ROWS[::-1]])
    assert len(list(await ask(prompt="{text}"))) == 4 and await num_lines(served) == 7, "one row is new"
    await ask(prompt="Rate {text}")
    assert await num_lines(served) == 11, "another prompt is another request"


async def test_a_batch_whose_creation_was_not_answered_is_found(served: Served, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    await run(served, ROWS, output, prompt="{text}", max_tokens=60)
    events = tmp_path / "out.jsonl.tidemill" / "batches.jsonl"
    first = events.read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "out.jsonl.tidemill" / "results.jsonl").unlink()
    events.write_bytes(first + b'{"part": "of a killed')
    assert (await run(served, ROWS, output, prompt="{text}", max_tokens=60)).failed == 0
    assert await num_batches(served) == 1, "no line ran twice"
    events.write_bytes(first.replace(b'"part": "', b'"part": "x'))
    (tmp_path / "out.jsonl.tidemill" / "results.jsonl").unlink()
    assert (await run(served, ROWS, output, prompt="{text}", max_tokens=60)).failed == 0
    assert await num_batches(served) == 2, "there was no such batch"


async def test_a_run_waits_for_a_server_that_restarts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    held = batch_server(tokenizer, tmp_path / "state", ANSWER, hold_after=0, limits=FAST)
    async with held as (first, _):
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        follow = lambda _batch: loop.call_soon_threadsafe(begun.set)  # noqa: E731
        task = asyncio.create_task(run(first, ROWS, output, prompt="{text}", max_tokens=60, follow=follow))
        await begun.wait()
        port = first.port
    async with batch_server(tokenizer, tmp_path / "state", ANSWER, port=port):
        assert (await task).failed == 0


async def test_a_cancelled_run_leaves_its_batches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    held = batch_server(tokenizer, tmp_path / "state", ANSWER, hold_after=0, limits=FAST)
    async with held as (served, client):
        (tmp_path / "soft.csv").symlink_to("out.csv")
        (tmp_path.parent / "link").symlink_to(tmp_path)
        task = asyncio.create_task(run(served, ROWS, tmp_path / "out.csv", prompt="{text}"))
        await served.engine.wait_for_event("add")
        for name in ("out.csv", "../link/out.csv", "soft.csv"):
            with pytest.raises(ConfigError, match="another process writes this output"):
                await run(served, ROWS, tmp_path / name, prompt="{text}", force=True)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.batches.list()).data[0].status != "cancelled"


def test_what_is_tried_again() -> None:
    def of(status: int | None) -> bool:
        return is_final({"response": status and {"status_code": status, "body": {}}, "error": None})

    assert [of(status) for status in (200, 400, 404, 429, 503, None)] == [True, True, True, False, False, False]


@for_each(
    ("name", "content", "arguments", "words"),
    [
        ("in.txt", "x", ["--prompt", "{a}"], "must end in one of .jsonl"),
        ("in.csv", "", ["--prompt", "{a}"], "the table has no rows"),
        ("in.csv", "a\n1\n", ["--prompt", "{b}"], "row 1: the prompt names the column 'b'; the row has 'a'"),
        ("in.csv", "a\n1\n", ["--prompt", "{a"], "braces"),
        ("in.csv", "a\n1\n", ["--prompt", "{a!r}"], "the prompt names the column 'a!r'; the row has 'a'"),
        ("in.csv", "a\n1\n", ["--prompt", "{}"], "braces hold the name of a column"),
        (
            "in.csv",
            ",".join(map(str, range(99))) + "\n" + ",".join("x" * 99),
            ["--prompt", "{a}"],
            "'29', 69 more; the first",
        ),
        ("in.csv", "a\n1\n", [], "the row is not a request"),
        ("in.csv", "a\n1\n", ["--system", "x"], "needs a prompt"),
        ("in.csv", "answer\n1\n", ["--prompt", "{answer}"], "already has a column 'answer'"),
        ("in.csv", "a\n1\n", ["--prompt", "{a}", "--schema", "none.json"], "none.json: No such file"),
        ("in.csv", "a\n1\n", ["--prompt", "{a}", "--body", "[1]"], "--body is not a JSON object"),
        ("in.csv", "a\n1\n", ["--prompt", "{a}", "--map-model", "a=b"], "needs ready-made requests"),
        ("in.csv", "a\n1\n", ["--map-model", "a"], "--map-model must look like KEY=VALUE"),
        ("in.jsonl", "{}\nx\n", ["--prompt", "x"], "line 2 is not JSON"),
        ("in.parquet", "x", ["--prompt", "x"], "in.parquet: "),
        ("in.csv", "a\n1\n", ["--prompt", "{a}", "--output", "none/out.csv"], "the folder does not exist"),
        ("in.csv", "a\n1\n", ["--prompt", "{a}", "--output", "ftp://x/out.csv"], "the scheme is unknown"),
        ("in.csv", "a\n1\n", ["--prompt", "{a}", "--output", "https://x/out.csv"], "the output must be a path"),
        ("none.csv", None, ["--prompt", "{a}"], "none.csv: No such file"),
    ],
)
def test_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: Any, arguments: list[str], words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    output = [] if "--output" in arguments else ["-o", str(tmp_path / "out.csv")]
    code = cli.main(["batch", "run", str(path), "--url", "http://127.0.0.1:9", *output, *arguments])
    assert code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("kills", [pytest.param(6, marks=pytest.mark.slow), pytest.param(70, marks=pytest.mark.manual)])
async def test_kills_at_random_instants(served: Served, tmp_path: Path, suffix: str, kills: int) -> None:
    """Each row of each table has its answer once, and few lines run twice."""
    script = str(Path(__file__).with_name("batch_run_killer.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, served.url, str(tmp_path), suffix, str(kills), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    counts = json.loads(out)
    assert counts["kills"] == kills and await num_lines(served) <= counts["lines"] + 15 * kills


async def test_the_command(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.csv", ROWS), tmp_path / "out.csv"
    argv = ["batch", "run", str(source), "-o", str(output), "--url", served.url, "--prompt", "{text}"]
    assert await asyncio.to_thread(cli.main, [*argv, "--max-tokens", "60"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}: 3 rows\n" and "completed: 3/3 lines" in captured.err
    flags = ["--limit", "2", "--max-tokens", "60", "--price-in", "1000", "--price-out", "10000"]
    assert await asyncio.to_thread(cli.main, [*argv, "--dry-run", *flags]) == 0
    request, work = capsys.readouterr().out.split("\n}\n")
    assert json.loads(request + "}")["messages"][0]["content"] == ROWS[0]["text"]
    assert re.match(r"2 rows, about \d\d prompt tokens and at most 120 output tokens\n", work)
    assert re.search(r"price: about 1\.\d\d\n$", work)
    assert await num_batches(served) == 1 and output.stat().st_size > 0, "nothing was sent"
    assert await asyncio.to_thread(cli.main, [*argv, "--model", "gpt-4o-mini"]) == 1
    captured = capsys.readouterr()
    assert "fake-model" in captured.err, "the error names the models of the server"


def test_the_form_of_an_answer_that_is_not_an_object() -> None:
    def result(content: str, reason: str) -> Any:
        body = {"choices": [{"message": {"content": content}, "finish_reason": reason}]}
        return Recipe("x", schema=SCHEMA).result({"response": {"status_code": 200, "body": body}})

    assert result('{"label": "goo', "length")["error"].startswith(
        "the answer was cut off at the token limit; raise it, or bound the schema"
    )
    assert result("[1]", "stop")["status"] == "failed"


# ---- another server


class OtherServer:
    """An OpenAI-compatible server with two models, without any field of its own. A text with "bad" is refused."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.batches: list[dict[str, Any]] = []
        self.app = fastapi.FastAPI()
        for method, path, handler in (
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files/{file_id}/content", lambda file_id: fastapi.Response(self.files[file_id])),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", lambda: {"data": self.batches[::-1], "has_more": False}),
            ("GET", "/v1/batches/{batch_id}", self.retrieve),
        ):
            self.app.add_api_route(path, handler, methods=[method], response_model=None)

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "x"} for name in ("m1", "m2")]}

    def store(self, content: bytes) -> str:
        self.files[f"file-{len(self.files)}"] = content
        return f"file-{len(self.files) - 1}"

    async def upload(self, request: fastapi.Request) -> dict[str, Any]:
        async with request.form() as form:
            assert form["purpose"] == "batch"
            return {"id": self.store(await form["file"].read()), "object": "file"}  # type: ignore[union-attr]

    async def create(self, request: fastapi.Request) -> dict[str, Any]:
        body = await request.json()
        batch = {"id": f"batch-{len(self.batches)}", "object": "batch", "status": "validating", **body}
        self.batches.append({**batch, "request_counts": None, "output_file_id": None, "error_file_id": None})
        return self.batches[-1]

    def retrieve(self, batch_id: str) -> dict[str, Any]:
        """Return a batch after its next state."""
        batch = next(each for each in self.batches if each["id"] == batch_id)
        states = ["validating", "in_progress", "finalizing", "completed"]
        batch["status"] = states[min(states.index(batch["status"]) + 1, 3)]
        if batch["status"] == "completed" and batch["output_file_id"] is None:
            rows = [self.answer(json.loads(text)) for text in self.files[batch["input_file_id"]].splitlines()]
            good = [row for row in rows if row["response"]["status_code"] == 200]
            bad = [row for row in rows if row not in good]
            batch["output_file_id"] = self.store(jsonl(good[::-1])[:-1])  # in any order, without a last line end
            batch["error_file_id"] = self.store(jsonl(bad)) if bad else None
            batch["request_counts"] = {"total": len(rows), "completed": len(good), "failed": len(bad)}
        return batch

    def answer(self, line: dict[str, Any]) -> dict[str, Any]:
        assert line["body"]["model"] in ("m1", "m2")
        text = line["body"]["messages"][-1]["content"]
        choice = {"index": 0, "message": {"role": "assistant", "content": text.upper()}, "finish_reason": "stop"}
        body = {"error": {"message": "refused", "code": None}} if "bad" in text else {"choices": [choice]}
        response = {"status_code": 400 if "bad" in text else 200, "request_id": "x", "body": body}
        return {"id": "x", "custom_id": line["custom_id"], "response": response, "error": None}


@pytest.fixture
async def other() -> AsyncIterator[tuple[OtherServer, str]]:
    other = OtherServer()
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(other.app, log_config=None, lifespan="off"))
    task = asyncio.ensure_future(server._serve([listener]))
    yield other, f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await task


async def test_another_server(other: tuple[OtherServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in three parts, left after the first, and continued: every row has its own answer, and ran once. A batch
    is watched by polls, because there is no event stream."""
    monkeypatch.setattr(runs, "MAX_LINES", 2)
    monkeypatch.setattr(runs, "MAX_OPEN", 1)
    server, url = other
    rows = [{"id": number, "text": text} for number, text in enumerate(["one", "bad", "three", "four", "fünf\u2028"])]
    source, output = write(tmp_path / "in.csv", rows), tmp_path / "out.csv"
    ask = lambda **options: Batch(source, output, url=url, prompt="{text}", **options).run_async()  # noqa: E731
    with pytest.raises(ConfigError, match="the server has 2 models; name one: m1, m2"):
        await ask(follow=silent)

    def leave(_batch: dict[str, Any]) -> None:
        if len(server.batches) == 2:
            raise ChatError("the terminal was closed")

    with pytest.raises(ChatError, match="closed"):
        await ask(model="m2", follow=leave)
    for _ in range(2):
        result = await ask(model="m2", follow=silent)
        assert (result.total, result.causes) == (5, {"refused (400)": 1})
        assert [row["answer"] for row in result] == ["ONE", "", "THREE", "FOUR", "FÜNF\u2028"]
        assert [each["status"] for each in server.batches] == ["completed"] * 3
        assert sum(len(server.files[each["input_file_id"]].splitlines()) for each in server.batches) == 5
    server.batches[-1]["status"] = "validating"
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.0)
    states = await asyncio.to_thread(lambda: list(ServerClient(ChatOptions(url)).changes("batch-2")))
    assert len(states) == 3 and states[-1]["status"] == "completed"


async def test_object_stores_and_the_web(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda url: {"s3://bucket": store}[url])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = write(tmp_path / "in.csv", ROWS).read_bytes()
    store.put("folder/in.csv", content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/in.csv?x=1" else 404)
            self.end_headers()
            self.wfile.write(content)

    with http_server(Handler) as address:
        for source in ("s3://bucket/folder/in.csv", f"{address}/in.csv?x=1"):
            await run(served, source, "s3://bucket/out.csv", prompt="{text}", max_tokens=60)
            assert store.get("out.csv").bytes().to_bytes().count(b"good") == 3
            store.delete("out.csv")
        assert await num_batches(served) == 1, "the rows of both sources are the same"
        for missing in ("s3://bucket/none.csv", f"{address}/none.csv"):
            with pytest.raises(ConfigError, match=r"none\.csv"):
                await run(served, missing, prompt="{text}")
