"""Converts rows of a trace to engine requests whose true output lengths are hidden from the scheduler."""

from engine.api import EngineRequest, RequestClass, SamplingParams
from loadgen.simulation.gpu import SIMULATED_TOKEN
from loadgen.traces import Trace

OUTPUT_CAP = 1024
"""`max_tokens` of requests with a shorter true length, as set by a client that does not know the length."""

Row = tuple[float, int, int]
"""(arrival in seconds, prompt tokens, output tokens)."""


def rows_of(trace: Trace, limit: int) -> tuple[Row, ...]:
    """Return a trace as rows, with prompts and answers cut to fit a context of `limit` tokens."""
    rows = []
    for at, prompt, output in zip(trace.arrived_at, trace.input_tokens, trace.output_tokens, strict=True):
        output = max(1, min(int(output), limit // 2))
        rows.append((float(at), max(1, min(int(prompt), limit - output)), output))
    return tuple(rows)


def request_of(
    name: str, row: Row, request_class: RequestClass, limit: int, head: tuple[int, ...] = ()
) -> EngineRequest:
    """Return a request that ends at a stop token, which is masked until the true length. `head`: first tokens of the
    prompt; the rest is padding that all prompts share."""
    _, prompt, output = row
    cap = max(output, min(OUTPUT_CAP, limit - prompt))
    sampling = SamplingParams(max_tokens=cap, min_tokens=output, stop_token_ids=frozenset({SIMULATED_TOKEN}))
    return EngineRequest(name, (*head[:prompt], *((1,) * (prompt - len(head)))), sampling, request_class)
