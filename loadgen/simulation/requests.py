"""Rows of a trace as the engine's requests: their true lengths are hidden from the scheduler."""

from engine.api import EngineRequest, RequestClass, SamplingParams
from loadgen.simulation.gpu import SIMULATED_TOKEN
from loadgen.traces import Trace

OUTPUT_CAP = 1024
"""`max_tokens` of every request whose true length is shorter: what a client would ask for, not knowing it."""

Row = tuple[float, int, int]
"""(arrival in seconds, prompt tokens, output tokens)."""


def rows_of(trace: Trace, limit: int) -> tuple[Row, ...]:
    """A trace as rows; prompts and answers are cut so that both fit a context of `limit` tokens."""
    rows = []
    for at, prompt, output in zip(trace.arrived_at, trace.input_tokens, trace.output_tokens, strict=True):
        output = max(1, min(int(output), limit // 2))
        rows.append((float(at), max(1, min(int(prompt), limit - output)), output))
    return tuple(rows)


def request_of(
    name: str, row: Row, request_class: RequestClass, limit: int, head: tuple[int, ...] = ()
) -> EngineRequest:
    """A request that ends at a stop token, masked until its true length. `head`: what its prompt begins with, the rest
    is padding that all prompts share."""
    _, prompt, output = row
    cap = max(output, min(OUTPUT_CAP, limit - prompt))
    sampling = SamplingParams(max_tokens=cap, min_tokens=output, stop_token_ids=frozenset({SIMULATED_TOKEN}))
    return EngineRequest(name, (*head[:prompt], *((1,) * (prompt - len(head)))), sampling, request_class)
