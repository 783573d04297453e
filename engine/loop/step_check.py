"""Whether what a runner returned is an answer to the step that it was given; looked at before any of it is applied."""

from engine.errors import EngineStepError
from engine.scheduling.output import UNMASKED_TOKEN, ModelRunnerOutput, SchedulerOutput


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raises EngineStepError: too few or too many tokens, or one that the vocabulary does not have."""
    expected, tokens = sum(chunk.sample for chunk in output.chunks), result.token_ids
    if result.step_id != output.step_id:
        raise EngineStepError(f"Step {output.step_id} was answered with the result of step {result.step_id}.")
    if len(tokens) != expected or (result.logprobs is not None and len(result.logprobs) != expected):
        raise EngineStepError(f"A step with {expected} samples was answered with {len(tokens)} tokens.")
    if tokens and not (min(tokens) >= UNMASKED_TOKEN and max(tokens) < vocab_size):
        raise EngineStepError("A step was answered with a token outside the vocabulary.")
    if any(not 0 <= number < len(output.chunks) or output.chunks[number].sample for number in result.pooled):
        raise EngineStepError("A step was answered with a vector that nobody wanted.")
    if any(not 0 <= token < vocab_size for run in result.forced.values() for token in run):
        raise EngineStepError("A step was answered with a forced token outside the vocabulary.")
