"""The serving benchmark's own pieces: requests sent at once through the load generator, and the machine's limits."""

from pathlib import Path

import pytest
import torch
from fake_engine import serve

from benchmarks import limits, serving
from benchmarks.live import PACKAGED
from engine.build import build_engine, plan_launch
from engine.config import EngineConfig
from engine.models.spec import load_spec
from engine.text.tokenizer import Tokenizer


async def test_requests_at_once_are_answered_in_full(tmp_path: Path) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=40,
        max_model_len=128,
        profile_seconds=0.0,
        slo="ttft_p99=100s,tbt_p99=10s",
    )
    plan = plan_launch(config)
    tokenizer = Tokenizer.load(plan.folder, probe=False)
    async with serve(build_engine(config, plan), tokenizer, None, served_model_name=("model",)) as served:
        found = await serving.at_once(served.url, 3, 20, 8, seed=1)
        with pytest.raises(serving.Failed, match="asked for 500 tokens"):
            await serving.at_once(served.url, 1, 20, 500, seed=2)  # more than the context
    assert len(found) == 3 and {record.input_tokens for record in found} == {20}
    assert all(sum(record.chunk_tokens) == record.output_tokens == 8 for record in found)
    assert all(record.tpot and record.ttft_sent for record in found)


def test_the_limits_are_those_of_the_model_s_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_bandwidth", lambda _device: 1e9)
    monkeypatch.setattr(limits, "matmul_rate", lambda _device, _dtype: 1e9)
    spec = load_spec(PACKAGED)
    found = limits.measure(spec, [1, 2], torch.float32)
    weights = sum(count * out * width for count, out, width in limits.linear_shapes(spec))
    assert found["linear_bytes"] == 4 * weights and found["linear_flops_per_token"] == 2 * weights
    stack = found["linear_stack_seconds"]
    assert isinstance(stack, dict) and set(stack) == {"1", "2"} and all(seconds > 0 for seconds in stack.values())
