"""What a token of a request costs the machine: the one unit in which service is shared and progress is forecast.

Seconds of a full step, from the latency model; without one every token counts 1. A prompt token of a full prefill step
and an output token of a full batch of decodes differ by a factor of ten on some machines, so neither tokens nor
requests are a fair measure. Knows nothing of queues or jobs.
"""

from collections.abc import Callable

from engine.api import TokenCosts
from engine.config import SchedulerConfig
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor
from predictor.online import OnlineModel
from predictor.reach import Reach

DECODE_CONTEXT = 512
"""Context of the decodes that an output token is priced among, tokens."""


def token_costs(model: LatencyPredictor | None, config: SchedulerConfig) -> TokenCosts:
    """The costs on a machine whose step times `model` predicts, in the fullest steps that `config` allows."""
    return TokenCosts() if model is None else _costs(model.predict, model.reach, config)


def usual_costs(model: LatencyPredictor, config: SchedulerConfig) -> TokenCosts:
    """The same without the margin that guards objectives: a forecast wants what such steps usually take."""
    return _costs(model.usual if isinstance(model, OnlineModel) else model.predict, model.reach, config)


def _costs(seconds: Callable[[BatchFeatures], float], reach: Reach, config: SchedulerConfig) -> TokenCosts:
    prompt, decodes = BatchFeatures(reach), BatchFeatures(reach)
    length = max(2, min(config.max_num_batched_tokens, config.max_model_len))
    prompt.add_chunk(0, length)
    count = config.max_num_seqs
    decodes.add_decodes(count, count * reach.tokens(min(DECODE_CONTEXT, config.max_model_len) - 1, 1))
    return TokenCosts(seconds(prompt) / length, seconds(decodes) / count)
