"""DSPy: language models over chat, responses and completions, adapters with typed outputs, a stream."""

from typing import Any, Literal

import dspy
from steps import ASK, DEMO, DEMO_URL, PUPPET, PUPPET_URL, begin, end, plan, step

begin("dspy", "litellm")
OPTIONS: Any = {"api_key": "none", "temperature": 0.0, "max_tokens": 200, "cache": False, "num_retries": 0}
DEMO_LM = dspy.LM(f"openai/{DEMO}", api_base=f"{DEMO_URL}/v1", **OPTIONS)
PUPPET_LM = dspy.LM(f"openai/{PUPPET}", api_base=f"{PUPPET_URL}/v1", **OPTIONS)
FIELDS = "[[ ## answer ## ]]\nParis\n\n[[ ## score ## ]]\n7\n\n[[ ## completed ## ]]"


class Capital(dspy.Signature):  # type: ignore[misc]
    """Answer the question."""

    question: str = dspy.InputField()
    answer: Literal["Paris", "Rome"] = dspy.OutputField()
    score: int = dspy.OutputField()


@step("LM: chat, responses, completions")
def _() -> None:
    for kind, asked in (("chat", ASK), ("responses", ASK), ("text", "The capital of France is")):
        model = dspy.LM(f"openai/{DEMO}", api_base=f"{DEMO_URL}/v1", model_type=kind, **OPTIONS)
        assert model(asked)[0], kind


@step("Predict with ChatAdapter and with JSONAdapter")
def _() -> None:
    for adapter, turn in (
        (dspy.ChatAdapter(), FIELDS),
        (dspy.JSONAdapter(), '{"answer": "Paris", "score": 7}'),
    ):
        with dspy.context(lm=PUPPET_LM, adapter=adapter):
            got = dspy.Predict(Capital)(question=plan(turn))
        assert (got.answer, got.score) == ("Paris", 7), adapter


@step("streamify")
async def _() -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    turn = plan("[[ ## answer ## ]]\nIt is Paris, of course.\n\n[[ ## completed ## ]]")
    with dspy.context(lm=PUPPET_LM, adapter=dspy.ChatAdapter()):
        *parts, last = [part async for part in program(question=turn)]
    assert last.answer == "It is Paris, of course." and len(parts) > 1, (parts, last)


end()
