"""How each peer of the serving benchmark is started; the worker of one without a server, and the file for llama.cpp."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import apart, live, serving
from benchmarks.peers import finders
from benchmarks.peers.engine import Engine, start_all
from loadgen import workers
from loadgen.plan import WordCosts

PEER = Path(__file__).with_name("scripted_peer.py")
WORDS = WordCosts(("time",), (1,), 1)
WORKER = finders.SCRIPTS / "openvino_worker.py"
PLAIN_OPENVINO = """
class Core:
    def get_property(self, device, name):
        return ["FP32", "INT8"]
"""
GENAI = """
from types import SimpleNamespace

class SchedulerConfig: pass
class GenerationConfig:
    def set_eos_token_id(self, number):
        self.eos_token_id = number

class Handle:
    def __init__(self, wanted):
        self.left, self.fresh = wanted, 0
    def can_read(self):
        return self.fresh > 0
    def read(self):
        fresh, self.fresh = self.fresh, 0
        return {0: SimpleNamespace(generated_ids=[7] * fresh)}

class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, settings):
        print("what a library says", folder, settings, vars(scheduler))  # no line of the worker's
        self.handles = []
    def get_tokenizer(self):
        return self
    def encode(self, text):
        if text.startswith("short"):
            raise RuntimeError("no such text")
        return SimpleNamespace(input_ids=SimpleNamespace(shape=(1, 1 + text.count(" "))))
    def add_request(self, number, ids, config):
        assert config.ignore_eos and not config.do_sample and config.eos_token_id >= 0
        self.handles.append(Handle(config.max_new_tokens))
        return self.handles[-1]
    def has_non_finished_requests(self):
        return any(handle.left for handle in self.handles)
    def step(self):
        for handle in self.handles:
            handle.fresh += handle.left > 0
            handle.left -= handle.left > 0
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers, short looks at servers that rest, and runs that begin at once, without a collection of garbage."""
    monkeypatch.setattr(apart, "LEAD", 0.02)
    monkeypatch.setattr(workers, "gc", Mock())
    monkeypatch.setattr(serving, "OUTPUT", 8)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.02)


@pytest.fixture
def found_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """A finder's engine, as if its packages were all there."""
    monkeypatch.setattr(finders, "version_in", lambda _where, *names: f"{names[0]} 1.0")
    return lambda name, where, dtype="bfloat16": finders.FINDERS[name][0](str(where), 3, dtype)


def test_every_peer_gets_the_same_threads_type_and_place(found_in: Callable[..., Engine], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for name, threads in (("vllm", "OMP_NUM_THREADS"), ("transformers", "OMP_NUM_THREADS")):
        engine = found_in(name, "/venv", "float32")
        command = engine.command(folder, 8123)
        assert engine.http and engine.environment[threads] == "3"
        assert command[command.index("--port") + 1] == "8123" and command[command.index("--dtype") + 1] == "float32"
        assert str(folder) in command or folder.name in command


def test_openvino_is_exported_and_runs_as_a_worker(found_in: Callable[..., Engine], tmp_path: Path) -> None:
    engine = found_in("openvino", "/venv")
    assert not engine.http and "in process" in engine.name and engine.version == "openvino-genai 1.0"
    assert engine.prepare is not None
    prepare, command = engine.prepare(tmp_path / "model"), engine.command(tmp_path / "model", 0)
    assert prepare[0] == "/venv/bin/optimum-cli" and prepare[prepare.index("--model") + 1] == str(tmp_path / "model")
    assert command == ["/venv/bin/python", "-I", str(WORKER), prepare[-1], "--threads", "3", "--dtype", "bfloat16"]
    assert WORKER.exists() and Path(prepare[-1]).parent == tmp_path


def test_llama_is_a_binary_or_the_one_of_an_environment(found_in: Callable[..., Engine], tmp_path: Path) -> None:
    binary = tmp_path / "bin" / "llama-server"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\necho 'version: 0.5.0 (build 77, commit abc)' >&2\n")
    binary.chmod(0o755)
    folder = tmp_path / "model"
    for where, python in ((binary, sys.executable), (tmp_path, str(tmp_path / "bin" / "python"))):
        engine = found_in("llama", where)
        assert (engine.name, engine.version, engine.strict) == ("llama.cpp", "0.5.0 (build 77, commit abc)", False)
        assert engine.prepare is not None
        prepare, command = engine.prepare(folder), engine.command(folder, 8123)
        assert prepare == [python, "-I", str(finders.SCRIPTS / "write_gguf.py"), str(folder), prepare[-1]]
        assert command[:3] == [str(binary), "--model", prepare[-1]] and "--cache-type-k" not in command
        assert command[command.index("--threads") + 1] == command[command.index("--threads-batch") + 1] == "3"
        assert int(command[-1]) == finders.CONTEXT * int(command[command.index("--parallel") + 1])
    assert "--cache-type-k" in found_in("llama", binary, "float32").command(folder, 1)
    binary.write_text("no program")
    assert not found_in("llama", binary).version


def test_without_its_own_server_llama_is_that_of_the_python_package(found_in: Callable[..., Engine]) -> None:
    engine = found_in("llama", "/")  # a folder without bin/llama-server
    command = engine.command(Path("/tmp/model"), 8123)
    assert (engine.name, engine.version, engine.ready) == ("llama-cpp-python", "llama-cpp-python 1.0", "/v1/models")
    assert engine.strict and command[:3] == ["/bin/python", "-m", "llama_cpp.server"]
    assert command[command.index("--n_threads") + 1] == command[command.index("--n_threads_batch") + 1] == "3"


def worker(folder: Path, **settings: Any) -> Engine:
    """OpenVINO's worker beside a library of the same names that gives a token a step."""
    (folder / "openvino.py").write_text(PLAIN_OPENVINO)
    (folder / "openvino_genai.py").write_text(GENAI)
    command = [sys.executable, str(WORKER), "exported", "--threads", "3", "--dtype", "bfloat16"]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return Engine("worker", "1.0", lambda _folder, _port: command, {"PYTHONPATH": path}, http=False, **settings)


def server() -> Engine:
    return Engine("ours", "1.0", lambda _folder, port: [sys.executable, str(PEER), str(port)])


def test_a_worker_takes_turns_with_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; open(sys.argv[1] + '.written', 'w')"
    with ExitStack() as stack:
        engines = [server(), worker(tmp_path, prepare=lambda folder: [sys.executable, "-c", code, str(folder)])]
        arms = [serving.Arm(*pair) for pair in start_all(engines, tmp_path / "model", stack)]
        assert (tmp_path / "model.written").exists(), "before it starts"
        process = arms[1].served.group
        serving.alternate(arms, 2, source=WORDS)
        serving.report(arms, None, None, "x")
    said = capsys.readouterr().out.splitlines()
    assert "in process" in said[0] and "f32" in said[0], "this processor has no bfloat16"
    assert [line.split(": ")[1].split()[0] for line in said[1:7]] == [
        "ours",
        "worker",
        "worker",
        "ours",
        "ours",
        "worker",
    ]
    assert [len(arm.rounds) for arm in arms] == [2, 2] and len(arms[1].gaps) == 2 * 16 * 7
    assert all(min(found.columns()) > 0 for found in arms[1].rounds)
    assert any(line.startswith("tidemill / worker") for line in said)
    log = (tmp_path / "worker.log").read_text()
    assert "what a library says exported" in log and "'INFERENCE_NUM_THREADS': '3'" in log
    assert "'KV_CACHE_PRECISION': 'f32'" in log and "'enable_prefix_caching': False" in log
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


async def test_a_worker_tells_what_a_server_would(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ((_, served),) = start_all([worker(tmp_path)], tmp_path / "model", stack)
        found = await serving.at_once(served.url, 3, 20, 8, 1, answers=served.answers, source=WORDS)
    assert [record.input_tokens for record in found] == [20, 20, 20]
    for record in found:
        assert record.chunk_tokens == [1] * 8 and record.chunk_at == sorted(record.chunk_at)
        assert record.ttft_sent == record.chunk_at[0] > 0


def test_a_worker_that_ends_loses_its_rounds_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        arms = [serving.Arm(*pair) for pair in start_all([server(), worker(tmp_path)], tmp_path / "model", stack)]
        with monkeypatch.context() as patch:
            patch.setattr("loadgen.plan.ANCHOR", "short")
            serving.alternate(arms[1:], 1, source=WORDS)
        serving.alternate(arms, 1, source=WORDS)
        serving.report(arms, None, None, "x")
    said = capsys.readouterr().out
    assert "round 0 of worker failed" in said and "the worker: it has ended" in said
    assert not arms[1].rounds and len(arms[0].rounds) == 1 and "worker answered no round in full" in said
    assert "no such text" in (tmp_path / "worker.log").read_text()


def test_a_worker_that_does_not_come_up_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(name: str, step: str) -> Engine:
        code = f"import sys; print('{step} says no', file=sys.stderr); sys.exit(4)"
        fails, works = [sys.executable, "-c", code], [sys.executable, "-c", ""]
        prepare, command = (fails, works) if step == "export" else (works, fails)
        return Engine(name, "1", lambda _folder, _port: command, prepare=lambda _folder: prepare, http=False)

    engines = [server(), failing("first", "export"), failing("second", "start")]
    with ExitStack() as stack:
        assert [engine.name for engine, _ in start_all(engines, tmp_path / "model", stack)] == ["ours"]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "first is left out: its form of the checkpoint could not be written; its last lines:",
        "  export says no",
        "second is left out: the worker did not start: it has ended; its last lines:",
        "  start says no",
    ]


class Writer:
    """Stands for gguf.GGUFWriter: what it was told."""

    last: "Writer"

    def __init__(self, file: Path, architecture: str) -> None:
        self.told: dict[str, Any] = {"file": file, "architecture": architecture}
        self.tensors: dict[str, tuple[Any, str]] = {}
        Writer.last = self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.told.__setitem__(name, values[0] if values else True)

    def add_tensor(self, name: str, array: Any, raw_dtype: str) -> None:
        self.tensors[name] = (array, raw_dtype)


@pytest.fixture
def write_gguf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, beside a library that notes what is written."""
    library = ModuleType("gguf")
    vars(library).update(
        GGUFWriter=Writer,
        GGMLQuantizationType=SimpleNamespace(F32="F32", BF16="BF16"),
        LlamaFileType=SimpleNamespace(ALL_F32=0, MOSTLY_BF16=32),
        TokenType=SimpleNamespace(NORMAL=1, CONTROL=3),
    )
    monkeypatch.setitem(sys.modules, "gguf", library)
    spec = importlib.util.spec_from_file_location("write_gguf", finders.SCRIPTS / "write_gguf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rotated(rows: Any, angle: float, *, pairs: bool) -> Any:
    """One head's rows turned by angles of the rotary embedding: each with its half, or with its neighbour."""
    half = rows.shape[0] // 2
    left, right = (rows[0::2], rows[1::2]) if pairs else (rows[:half], rows[half:])
    angles = angle * 0.5 ** np.arange(half)[:, None]
    turned = left * np.cos(angles) - right * np.sin(angles), left * np.sin(angles) + right * np.cos(angles)
    return turned[0] + 1j * turned[1]


def test_the_file_for_llama_cpp_has_the_same_weights_in_its_order(
    write_gguf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {**sizes, "head_dim": 4, "intermediate_size": 6, "vocab_size": 3, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 64, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    layer, attention, mlp = "model.layers.0.", {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}, {}
    mlp = {"gate": (6, 8), "up": (6, 8), "down": (8, 6)}
    shapes = {f"{layer}self_attn.{name}_proj": shape for name, shape in attention.items()}
    shapes |= {f"{layer}mlp.{name}_proj": shape for name, shape in mlp.items()}
    shapes |= {f"{layer}input_layernorm": (8,), f"{layer}post_attention_layernorm": (8,)}  # type: ignore[dict-item]
    shapes |= {"model.embed_tokens": (3, 8), "model.norm": (8,)}  # type: ignore[dict-item]
    random = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    tokenizer = {
        "added_tokens": [{"id": 0, "content": "<end>"}],
        "model": {"vocab": {"<end>": 0, "a": 1, "b": 2}, "merges": [["a", "b"]]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_torch(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["write_gguf", str(tmp_path), str(tmp_path / "model.gguf")])
    write_gguf.main()

    written = Writer.last
    assert len(written.tensors) == len(weights) and written.told["add_file_type"] == 32
    assert written.told["add_token_list"] == ["<end>", "a", "b"] and written.told["add_token_types"] == [3, 1, 1]
    assert written.told["add_token_merges"] == ["a b"] and written.told["add_eos_token_id"] == 0
    assert written.told["add_head_count"] == 2 and written.told["add_head_count_kv"] == 1
    assert written.told["close"]

    def read(name: str) -> Any:
        array, kind = written.tensors[f"{name}.weight"]
        return array if kind == "F32" else torch.from_numpy(array.copy()).view(torch.bfloat16).float().numpy()

    same = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk.0.attn_v": f"{layer}self_attn.v_proj"}
    same |= {"blk.0.ffn_down": f"{layer}mlp.down_proj", "blk.0.ffn_norm": f"{layer}post_attention_layernorm"}
    for theirs, ours in same.items():
        np.testing.assert_array_equal(read(theirs), weights[f"{ours}.weight"].float().numpy())
    assert written.tensors["output_norm.weight"][1] == "F32" and written.tensors["token_embd.weight"][1] == "BF16"
    for name, heads in (("q", 2), ("k", 1)):
        ours = weights[f"{layer}self_attn.{name}_proj.weight"].float().numpy().reshape(heads, 4, 8)
        theirs = read(f"blk.0.attn_{name}").reshape(heads, 4, 8)
        for head in range(heads):
            np.testing.assert_array_equal(rotated(theirs[head], 0.7, pairs=True), rotated(ours[head], 0.7, pairs=False))


def test_the_file_of_a_float32_model_keeps_it(write_gguf: ModuleType, tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.ones(4, np.float32), "model.embed_tokens.weight": np.eye(4, dtype=np.float32)},
              tmp_path / "model.safetensors")  # fmt: skip
    config = {"num_attention_heads": 1, "num_key_value_heads": 1}
    found = {name: (array, kind) for name, array, kind in write_gguf.tensors(tmp_path, config)}
    assert {kind for _, kind in found.values()} == {"F32"}
    np.testing.assert_array_equal(found["token_embd.weight"][0], np.eye(4, dtype=np.float32))
