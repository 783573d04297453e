"""The steps that docs/concepts/scheduling.md works through in numbers."""

import re
from pathlib import Path

from driver import Driver, make_request
from fakes.runner import FakeRunner

from engine.api import RequestClass
from engine.limits import SchedulerConfig
from engine.scheduling.objective import StepObjective
from predictor.budget import BudgetParams
from predictor.model import LatencyModel

PAGE = Path(__file__).resolve().parents[1] / "docs" / "concepts" / "scheduling.md"


def test_the_steps_of_the_page_are_those_of_the_scheduler() -> None:
    model = LatencyModel(intercept=0.010, decodes=0.001, prefill_tokens=0.0005, token_limit=256)
    objective = StepObjective(budget=BudgetParams("hygen", 0.040), tbt=0.061)
    config = SchedulerConfig(800, 400, block_size=4, max_num_seqs=8, max_num_batched_tokens=256, min_prefill_chunk=16)
    driver = Driver(FakeRunner(block_size=4, vocab_size=40), config, model=model, objective=objective)
    driver.add(*(make_request(f"chat {number}", [number] * 6, 60) for number in range(4)))
    for _ in range(3):
        driver.step()
    driver.add(make_request("new", [10] * 100, 10))
    driver.add(*(make_request(f"line {n}", [20 + n] * 200, 10, request_class=RequestClass.OFFLINE) for n in range(4)))
    rows = []
    for _ in range(3):
        assert driver.launch()
        (flight,) = driver.core.state.in_flight
        lengths = {
            request.request_id: chunk.length
            for request, chunk in zip(flight.requests, flight.output.chunks, strict=True)
        }
        tokens = [
            sum(lengths.get(name, 0) for name in names) for names in ([*map("chat {}".format, range(4))], ["new"])
        ]
        offline = sum(length for name, length in lengths.items() if name.startswith("line"))
        assert flight.output.predicted_latency is not None
        rows.append([*tokens, offline, round(1000 * flight.output.predicted_latency, 1)])
        driver.complete()
    table = re.findall(r"^\| [ABC] \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) ms \|", PAGE.read_text(), re.MULTILINE)
    assert [[int(a), int(b), int(c), float(d)] for a, b, c, d in table] == rows
