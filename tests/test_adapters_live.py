"""LoRA adapters that come and go while the server runs: over HTTP, in an engine that dies, in several engines."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_tools import FAST, client_of, jsonl, line, open_folder, results_of, submit, until
from fake_engine import Served, serve
from lora_adapters import adapter_of
from test_process import collect, engine_process, request, summed

from engine.adapters import AdapterFiles, allowed_folder, stamp_of
from engine.api import EngineRequest, FinishReason, SamplingParams
from engine.build import build_engine, plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailableError, InvalidRequestError
from engine.fleet.client import FleetClient
from engine.process.client import EngineProcess
from engine.process.policy import RestartPolicy
from engine.text.tokenizer import Tokenizer
from gateway import cli

pytestmark = pytest.mark.timeout(600)
MODEL = "tidemill-demo"
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters of the packaged model and one of another model."""
    root = tmp_path_factory.mktemp("adapters")
    spec = plan_launch(EngineConfig(device="cpu")).own
    shapes = {f"model.layers.{n}.self_attn.o_proj": (spec.hidden_size, spec.q_size) for n in range(spec.num_layers)}
    adapter_of(root / "odd", shapes, strength=0.5)
    adapter_of(root / "even", shapes, strength=0.5, seed=7)
    adapter_of(root / "other", {"model.layers.0.self_attn.o_proj": (6, 6)})
    return root


def config_of(tmp_path: Path, adapters: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", dtype="float32", num_gpu_blocks_override=160, max_num_seqs=8, profile_seconds=0.0,
        profile_dir=str(tmp_path), slo="ttft_p99=100s,tbt_p99=10s", threads=1,
        allowed_lora_dir=str(adapters), **changes,
    )  # fmt: skip


@asynccontextmanager
async def served_with(config: EngineConfig, state: Path, engine: Any = None, **options: Any) -> AsyncIterator[Served]:
    launch = plan_launch(config)
    tokenizer = Tokenizer.load(launch.folder, probe=False)
    options |= {"served_model_name": (MODEL,), "folder": await open_folder(state), "batch_limits": FAST}
    async with serve(engine or build_engine(config, launch), tokenizer, None, **options) as served:
        yield served


async def change(served: Served, what: str, name: str, key: str = "none", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60.0) as http:
        url, headers = f"{served.url}/v1/{what}_lora_adapter", {"authorization": f"Bearer {key}"}
        return await http.post(url, json={"lora_name": name, **body}, headers=headers)


def wrong(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def complete(client: openai.AsyncOpenAI, model: str, **options: Any) -> str:
    fields = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    return (await client.completions.create(model=model, prompt=PROMPT, **fields)).choices[0].text


async def names_of(client: openai.AsyncOpenAI) -> list[str]:
    return [each.id async for each in client.models.list()]


async def test_an_adapter_comes_and_goes(tmp_path: Path, adapters: Path) -> None:
    """It answers as one that was there from the start, also in a batch, and after the server was started again."""
    config = config_of(tmp_path, adapters)
    async with (
        served_with(replace(config, lora=(f"first={adapters / 'odd'}",)), tmp_path / "state") as served,
        client_of(served) as client,
    ):
        plain, odd = await complete(client, MODEL), await complete(client, "first")
        assert plain != odd and wrong(await change(served, "unload", "first"))[:2] == (404, "adapter_not_found")
        assert wrong(await change(served, "load", "first", lora_path="odd"))[:2] == (400, "invalid_adapter")
        for path, words in (
            ("..", "within --allowed"), ("/etc", "--allowed-lora-dir"), ("other", "imply"), ("none", "no folder"),
            (".", "adapter_config.json"),
        ):  # fmt: skip
            status, code, message = wrong(await change(served, "load", "sql", lora_path=path))
            assert (status, code) == (400, "invalid_adapter") and words in message, message
        assert wrong(await change(served, "load", "a b", lora_path="odd"))[0] == 400
        assert (await change(served, "load", "sql", lora_path="odd")).status_code == 200
        assert (await change(served, "load", "poet", lora_path=str(adapters / "even"))).status_code == 200
        assert wrong(await change(served, "load", "sql", lora_path="even"))[:2] == (400, "invalid_adapter")
        assert await names_of(client) == [MODEL, *(f"{MODEL}:{name}" for name in ("first", "sql", "poet"))]
        assert await complete(client, "sql") == await complete(client, f"{MODEL}:sql:flex") == odd
        assert await complete(client, "poet") not in (plain, odd)

        stream = await client.completions.create(
            model="sql", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            assert wrong(await change(served, "unload", "sql"))[:2] == (409, "adapter_in_use")
            break
        assert await complete(client, "sql") == odd
        await stream.close()
        lines = [line(i, model="sql", prompt=PROMPT, max_tokens=6, temperature=0, ignore_eos=True) for i in (0, 1)]
        batch = await until(client, (await submit(client, jsonl(lines))).id)
        rows, _ = await results_of(client, batch)
        assert [row["response"]["body"]["choices"][0]["text"] for row in rows.values()] == [odd, odd]
        assert (await change(served, "unload", "poet")).status_code == 200
        with pytest.raises(openai.NotFoundError):
            await complete(client, "poet")
        assert wrong(await change(served, "unload", "poet"))[:2] == (404, "adapter_not_found")
    async with served_with(config, tmp_path / "state") as served, client_of(served) as client:
        assert await names_of(client) == [MODEL, f"{MODEL}:sql"] and await complete(client, "sql") == odd


async def test_a_batch_keeps_its_adapter(tmp_path: Path, adapters: Path) -> None:
    """Its lines that come later would have no model."""
    async with (
        served_with(config_of(tmp_path, adapters), tmp_path / "state") as served,
        client_of(served) as client,
    ):
        await change(served, "load", "sql", lora_path="odd")
        lines = [line(i, model="sql", max_tokens=300, ignore_eos=True) for i in range(60)]
        batch = await submit(client, jsonl(lines))
        await until(client, batch.id, "in_progress")
        status, code, message = wrong(await change(served, "unload", "sql"))
        assert (status, code) == (409, "adapter_in_use") and batch.id in message
        await client.batches.cancel(batch.id)
        await until(client, batch.id)
        assert (await change(served, "unload", "sql")).status_code == 200


async def test_who_may_change_adapters(tmp_path: Path, adapters: Path) -> None:
    keys = tmp_path / "keys"
    digest = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # of "key"
    keys.write_text(f"{digest} people\n")
    keys.chmod(0o600)
    engine = build_engine(config_of(tmp_path, adapters))
    options: Any = {"api_key": ("operator",), "api_key_file": str(keys)}
    async with served_with(config_of(tmp_path, adapters), tmp_path / "state", engine, **options) as served:
        assert wrong(await change(served, "load", "sql", lora_path="odd"))[0] == 401
        assert wrong(await change(served, "load", "sql", "key", lora_path="odd"))[:2] == (403, "adapters_forbidden")
        assert (await change(served, "load", "sql", "operator", lora_path="odd")).status_code == 200
        engine.info = replace(engine.info, adapter_dir="")
        assert wrong(await change(served, "load", "sql2", "operator", lora_path="odd"))[:2] == (403, "adapters_fixed")


def test_folders_that_are_not_allowed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    assert allowed_folder(str(root), "a") == allowed_folder(str(root), str(root / "a")) == root / "a"
    for path in ("..", "a/../..", "link", "/", "b", "a\0"):
        with pytest.raises(ConfigError, match="--allowed-lora-dir"):
            allowed_folder(str(root), path)


@pytest.mark.parametrize("flags", [{"hidden_cache": True}, {"overload": "drop"}, {"offload_weights": "1"}])
def test_flags_that_do_not_go_together(flags: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--allowed-lora-dir"):
        EngineConfig(allowed_lora_dir=str(tmp_path), **flags)
    assert cli.main(["serve", "--dry-run", "--allowed-lora-dir", str(tmp_path / "none")]) == 2


# --- engines that die ---------------------------------------------------------------------------------------------


async def test_a_killed_engine_has_its_adapters_again(tmp_path: Path, adapters: Path) -> None:
    """The real process: a stream under an adapter goes on at the same token."""
    engine = EngineProcess(
        config_of(tmp_path, adapters), policy=RestartPolicy(max_delay=0.05), pid_file=tmp_path / "engine.pid"
    )
    await asyncio.to_thread(engine.load, lambda _planned: None)
    config = config_of(tmp_path, adapters)
    async with (
        served_with(config, tmp_path / "state", engine) as served,
        client_of(served, timeout=120) as client,
    ):
        assert (await change(served, "load", "sql", lora_path="odd")).status_code == 200
        whole = await complete(client, "sql", max_tokens=300)
        stream = await client.completions.create(
            model="sql", prompt=PROMPT, max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        parts = [(await anext(stream)).choices[0].text]
        os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGKILL)
        parts += [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert "".join(parts) == whole != await complete(client, MODEL, max_tokens=300)
        assert (await engine.stats()).restarts == {"killed": 1}


def under(number: int, name: str, **sampling: Any) -> EngineRequest:
    return replace(request(name, **sampling), adapter=number)


async def test_an_adapter_that_is_gone_after_a_death(tmp_path: Path) -> None:
    """Its requests end with a reason, others go on."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    async with engine_process(tmp_path / "children") as engine:
        for number in (17, 18):
            await engine.load_adapter(AdapterFiles(number, f"a{number}", str(folder)))
        held = [under(number, f"r{number}", max_tokens=400, seed=3) for number in (0, 17, 18)]
        streams = await engine.submit(held)
        before = [await anext(stream) for stream in streams]
        with pytest.raises(InvalidRequestError, match="use this"):
            await engine.unload_adapter(17)
        engine.abort("r17")
        await engine.unload_adapter(17)
        with pytest.raises(InvalidRequestError, match="not loaded"):
            await collect(engine, under(17, "late"))
        (folder / "broken").touch()
        with pytest.raises(ConfigError, match="broken"):
            await engine.load_adapter(AdapterFiles(19, "a19", str(folder)))
        os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGKILL)
        whole, _, lost = [
            [first, *[output async for output in stream]] for first, stream in zip(before, streams, strict=True)
        ]
        assert summed(whole)[2] is FinishReason.LENGTH and len(summed(whole)[0]) == 400
        assert lost[-1].error is not None and "not loaded" in lost[-1].error.message
        await engine.unload_adapter(18)


async def test_all_engines_have_an_adapter_or_none() -> None:
    class One:
        def __init__(self, number: int) -> None:
            self.held: set[int] = set()
            self.busy = False
            self.number = number

        async def load_adapter(self, adapter: AdapterFiles) -> None:
            if adapter.name == f"fails-{self.number}":
                raise EngineUnavailableError("it is being started")
            self.held.add(adapter.number)

        async def unload_adapter(self, number: int) -> None:
            self.held.discard(number)

        def has_adapter(self, number: int) -> bool:
            return self.busy

    engines: list[Any] = [One(0), One(1)]
    fleet = FleetClient(lambda number, _changed: engines[number], 2)
    await fleet.load_adapter(AdapterFiles(5, "a", ""))
    with pytest.raises(EngineUnavailableError):
        await fleet.load_adapter(AdapterFiles(6, "fails-1", ""))
    assert [engine.held for engine in engines] == [{5}, {5}]
    engines[1].busy = True
    with pytest.raises(InvalidRequestError):
        await fleet.unload_adapter(5)
    assert [engine.held for engine in engines] == [{5}, {5}]
    engines[1].busy = False
    await fleet.unload_adapter(5)
    assert [engine.held for engine in engines] == [set(), set()]


async def test_other_files_than_were_loaded_are_not_taken(tmp_path: Path, adapters: Path) -> None:
    """A request would go on under another adapter."""
    folder = tmp_path / "mine"
    shutil.copytree(adapters / "odd", folder)
    engine = build_engine(config_of(tmp_path, tmp_path))
    await engine.start()
    try:
        files = AdapterFiles(7, "mine", str(folder), stamp_of(folder))
        await engine.load_adapter(files)
        await engine.unload_adapter(7)
        (folder / "adapter_model.safetensors").write_bytes((adapters / "even/adapter_model.safetensors").read_bytes())
        with pytest.raises(ConfigError, match="other files"):
            await engine.load_adapter(files)
        spec = EngineRequest("r", tuple(PROMPT), SamplingParams(max_tokens=2), adapter=7)
        with pytest.raises(InvalidRequestError, match="not loaded"):
            await engine.submit([spec])
    finally:
        await engine.stop()
