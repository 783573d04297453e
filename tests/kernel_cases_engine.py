"""The whole engine over the kernels themselves, with graphs where there is a GPU: tokens as the dense model gives them.

Run by test_kernels.py in a process of its own.
"""

import numpy as np
import pytest
from cuda_engine import make_driver
from driver import make_request
from kernel_pool import DEVICE
from test_runner import POISON, check_greedy
from tiny_models import model_folder

from engine.execution.cuda.kernels import triton_kernels
from engine.models.decoder import Decoder
from engine.models.loader import load_weights
from engine.models.spec import load_spec


def check_engine(name: str, num_blocks: int, lengths: list[int], max_tokens: int) -> dict[str, int]:
    """Requests with a shared first block, steps launched ahead; returns the number of preemptions and prefix hits."""
    folder = model_folder(name)
    spec = load_spec(folder)
    reference = Decoder(spec, load_weights(spec, folder), max_model_len=200)
    weights = load_weights(spec, folder, device=DEVICE)
    driver = make_driver(spec, weights, kernels=triton_kernels(), num_blocks=num_blocks, seqs=3, tokens=16)
    rng = np.random.default_rng(5)
    shared = rng.integers(0, POISON, 4).tolist()
    requests = [
        make_request(f"r{index}", shared + rng.integers(0, POISON, length).tolist(), max_tokens)
        for index, length in enumerate(lengths)
    ]
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        check_greedy(reference, request, driver.outputs[request.request_id])
    stats = driver.core.stats()
    return {"preemptions": sum(stats.preemptions.values()), "hits": stats.prefix_hit_tokens}


def test_llama_with_preemptions_and_prefix_hits() -> None:
    seen = check_engine("llama-gqa2", 6, [2, 1, 3], 10)
    assert seen["preemptions"] > 0 and seen["hits"] > 0


@pytest.mark.parametrize("name", ["qwen3", "neox", "opt"])
def test_families(name: str) -> None:
    check_engine(name, 40, [2, 9], 3)
