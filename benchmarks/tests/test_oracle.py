"""The oracle knows what the simulated device takes."""

import pytest

from benchmarks.experiments.machine import TrueLatency
from engine.scheduling.output import Chunk, SchedulerOutput
from loadgen.simulation.gpu import SimulatedDevice, SimulatedRunner
from predictor.features import BatchFeatures


def step(*chunks: Chunk) -> SchedulerOutput:
    return SchedulerOutput(0, chunks)


def test_the_oracle_knows_decodes_and_one_chunk_exactly() -> None:
    simulated = SimulatedDevice.named("llama-3-8b", "a100-40gb")
    oracle, runner = TrueLatency(simulated), SimulatedRunner(simulated, noise=0.0)
    chunks = [Chunk(row, 99 + row, 1, True) for row in range(5)] + [Chunk(9, 640, 100, True)]
    features = BatchFeatures()
    for chunk in chunks:
        features.add_chunk(chunk.start, chunk.length)
    assert oracle.predict(features) == pytest.approx(runner.launch(step(*chunks))().latency, rel=1e-9)


def test_the_oracle_sizes_chunks_by_its_own_marginals() -> None:
    oracle = TrueLatency(SimulatedDevice.named("llama-2-7b", "a100-40gb"))
    features = BatchFeatures()
    features.add_decodes(8, 8 * 500)
    length = oracle.max_prefill(features, 0.02, 2048, 256)
    assert 0 < length < 2048
    assert oracle.marginal(features, 256, length) <= 0.02 < oracle.marginal(features, 256, length + 1)
    both = features.copy()
    both.add_decodes(2, 300)
    assert oracle.marginal_decodes(features, 2, 300) == pytest.approx(oracle.predict(both) - oracle.predict(features))
