"""lm-eval with tasks of its own data: a loglikelihood task over completions, generation over completions and chat."""

import json
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from steps import DEMO, DEMO_URL, begin, end, step

begin("lm-eval")
Path("capitals.jsonl").write_text(
    "".join(
        json.dumps({"question": f"The capital of {country} is", "choices": ["Paris", "Rome", "Bern"], "answer": answer})
        + "\n"
        for country, answer in (("France", 0), ("Italy", 1), ("Switzerland", 2))
    )
)
DATA = 'dataset_path: json\ndataset_kwargs: {data_files: {test: "capitals.jsonl"}}\ntest_split: test\n'
Path("choice.yaml").write_text(
    f'task: choice\n{DATA}output_type: multiple_choice\ndoc_to_text: "{{{{question}}}}"\n'
    'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n'
)
Path("writing.yaml").write_text(
    f'task: writing\n{DATA}output_type: generate_until\ndoc_to_text: "{{{{question}}}}"\n'
    'doc_to_target: "{{choices[answer]}}"\nmetric_list: [{metric: exact_match}]\n'
    'generation_kwargs: {until: ["\\n", "Q:", "A:", "<|im_end|>", "##", "Question"], max_gen_toks: 8}\n'
)
TOKENIZER = Path(__file__).resolve().parents[3] / "engine" / "models" / "demo" / "weights"


def evaluate(model: str, path: str, task: str, **options: Any) -> dict[str, Any]:
    facts = {"model": DEMO, "base_url": f"{DEMO_URL}{path}", "num_concurrent": 2, "max_retries": 1, **options}
    manager = TaskManager(include_path=str(Path.cwd()))
    found = lm_eval.simple_evaluate(
        model, model_args=facts, tasks=[task], task_manager=manager, apply_chat_template="chat" in model
    )
    results: dict[str, Any] = found["results"][task]
    return results


LOCAL: Any = {"tokenizer": str(TOKENIZER), "tokenizer_backend": "huggingface", "max_length": 2048}


@step("local-completions: loglikelihoods of a multiple-choice task")
def _() -> None:
    results = evaluate("local-completions", "/v1/completions", "choice", **LOCAL)
    assert 0 <= results["acc,none"] <= 1


@step("local-completions: generation with six stop strings")
def _() -> None:
    assert "exact_match,none" in evaluate("local-completions", "/v1/completions", "writing", **LOCAL)


@step("local-chat-completions: generation")
def _() -> None:
    results = evaluate("local-chat-completions", "/v1/chat/completions", "writing", tokenizer_backend=None)
    assert "exact_match,none" in results


end()
