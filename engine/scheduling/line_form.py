"""What a batch line stores of its past while weights stream: K and V, or hidden state (HybridServe §4; our rule).

A step that streams takes at least as long as its stream, however many rows share it. Where the pool holds fewer lines
than there are, those from hidden state take half the room, and more rows share each stream; each of them makes every
step longer by what its past takes to be projected, or read as it is. In a full pool both are linear in how many lines
run from hidden state, so that tokens per second are best with all of them or with none: `_rate` compares the two by the
latency model. Once the lines that are left fit as K and V they start as such. Knows nothing of units and blocks of one
request, and nothing of chats: theirs is `engine.scheduling.selection`.
"""

from engine.api import RequestClass
from engine.cache.blocks import COMPACT, CacheKind
from engine.request import Request
from engine.scheduling.state import SchedulerState
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor


def line_form(state: SchedulerState, request: Request) -> CacheKind | None:
    """What a waiting offline request stores if it starts now; None where there is no choice."""
    config, model = state.config, state.model
    if not (config.stream_seconds and config.scratch_blocks) or model is None or request.spec.pooling is not None:
        return None
    # over its life, if it gives all that it may
    tokens = (len(request.token_ids) + min(request.max_total_tokens, config.max_model_len)) // 2
    line = tokens // config.block_size + 1
    running = len(state.running[RequestClass.OFFLINE])
    starting = min(len(state.waiting_offline), len(state.free_rows))
    if starting * line * CacheKind.KV.form.units <= state.offline_units(request, running + 1):
        return CacheKind.KV
    most = min(config.max_num_seqs, running + len(state.waiting_offline))
    in_kv, compact = (
        _rate(model, min(most, config.num_units // (line * kind.form.units)), tokens, compact=kind.form.compact)
        for kind in (CacheKind.KV, COMPACT)
    )
    return COMPACT if compact > in_kv else CacheKind.KV


def _rate(model: LatencyPredictor, lines: int, tokens: int, *, compact: bool) -> float:
    """Tokens per second of steps in which so many lines decode, each behind as many tokens."""
    step = BatchFeatures(model.reach)
    work = model.cache_work(compact_tokens=lines * tokens, beside=step) if compact else 0.0
    step.add_decodes(lines, lines * step.reach.tokens(tokens - 1, 1))
    return lines / (model.predict(step) + work)
