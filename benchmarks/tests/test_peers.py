"""How peers are started, and the weights that llama.cpp gets."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.peers import finders


def test_every_peer_gets_the_same_threads_type_and_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(finders, "version_in", lambda _where, *names: f"{names[0]} 1.0")
    folder = tmp_path / "model"
    for engine in (finders.vllm("/venv", 3, "float32"), finders.tidemill(3, "float32")):
        command = engine.command(folder, 8123)
        assert engine.http and engine.environment["OMP_NUM_THREADS"] == "3"
        assert command[command.index("--port") + 1] == "8123" and command[command.index("--dtype") + 1] == "float32"
    openvino = finders.openvino("/venv", 3, "bfloat16")
    assert openvino.prepare is not None and openvino.prepare(folder)[0] == "/venv/bin/optimum-cli" and not openvino.http
    assert openvino.command(folder, 0)[-4:] == ["--threads", "3", "--dtype", "bfloat16"]
    llama = finders.llama("/", 3, "float32")  # a folder without bin/llama-server: the package's server
    assert llama.strict and llama.command(folder, 8123)[:3] == ["/bin/python", "-m", "llama_cpp.server"]


class Writer:
    """Stand for gguf.GGUFWriter and keep all values."""

    last: "Writer"

    def __init__(self, _file: Path, _architecture: str) -> None:
        self.told: dict[str, Any] = {}
        self.tensors: dict[str, tuple[Any, str]] = {}
        Writer.last = self

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.told.__setitem__(name, values[0] if values else True)

    def add_tensor(self, name: str, array: Any, raw_dtype: str) -> None:
        self.tensors[name] = (array, raw_dtype)


def rotated(rows: Any, *, pairs: bool) -> Any:
    """Turn one head's rows by the rotary embedding: each with its neighbour, or with its half."""
    half = rows.shape[0] // 2
    left, right = (rows[0::2], rows[1::2]) if pairs else (rows[:half], rows[half:])
    angles = 0.7 * 0.5 ** np.arange(half)[:, None]
    return left * np.cos(angles) - right * np.sin(angles) + 1j * (left * np.sin(angles) + right * np.cos(angles))


def test_the_file_for_llama_cpp_has_the_same_weights_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    config = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "intermediate_size": 6, "vocab_size": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    tokenizer = {
        "added_tokens": [{"id": 0, "content": "<end>"}],
        "model": {"vocab": {"<end>": 0, "a": 1, "b": 2}, "merges": [["a", "b"]]},
    }
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {f"{layer}self_attn.q_proj": (8, 8), f"{layer}self_attn.k_proj": (4, 8)}
    shapes |= {f"{layer}mlp.down_proj": (8, 6), "model.embed_tokens": (3, 8), "model.norm": (8,)}
    weights = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["write_gguf", str(tmp_path), str(tmp_path / "model.gguf")])
    module.main()
    written = Writer.last
    assert written.told["add_token_list"] == ["<end>", "a", "b"] and written.told["add_token_merges"] == ["a b"]

    def read(name: str) -> Any:
        array, kind = written.tensors[f"{name}.weight"]
        return array if kind == "F32" else torch.from_numpy(array.copy()).view(torch.bfloat16).float().numpy()

    for theirs, ours in {"token_embd": "model.embed_tokens", "blk.0.ffn_down": f"{layer}mlp.down_proj"}.items():
        np.testing.assert_array_equal(read(theirs), weights[f"{ours}.weight"].float().numpy())
    for name, heads in (("q", 2), ("k", 1)):
        ours = weights[f"{layer}self_attn.{name}_proj.weight"].float().numpy().reshape(heads, 4, 8)
        for head, theirs in enumerate(read(f"blk.0.attn_{name}").reshape(heads, 4, 8)):
            np.testing.assert_array_equal(rotated(theirs, pairs=True), rotated(ours[head], pairs=False))
