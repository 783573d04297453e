"""Run every causal language model type of the installed transformers as a tiny random checkpoint.

A type passes plan, load, self-test and engine with chunked prompts, prefix hits and preemptions, and returns the tokens
of `generate`; or the start refuses it with a reason. `python tests/model_sweep.py [TYPE ...]` writes
docs/reference/models.md, or replaces only these types.
"""

import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiny_transformers
import torch
from driver import Driver, make_request
from tiny_models import generated, prompts_of
from tiny_wrappers import WRAPPERS, causal, wrapper

from engine.build import build_runner, plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.limits import SchedulerConfig
from engine.models.families import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "models.md"
BLOCK, BLOCKS, CONTEXT, OUTPUT = 4, 25, 84, 8
LENGTHS = (30, 40, 9, 33, 17, 47, 5, 60)
LARGEST = 20e6  # parameters

EXACT, REFUSED, WRONG, UNTRIED = "exact", "refused", "WRONG", "not tried"

INTRO = """These families run through native layers (`--model-impl auto`): {own}.

All other decoder models run through transformers' modules with tidemill's cache and attention. The
tables list every causal language model type of transformers {version}, tested as a tiny random
checkpoint in float32 with `--model-impl transformers` on a CPU.

| outcome | meaning |
|---|---|
| exact | {prompts} concurrent requests with chunks, prefix hits and preemptions return the tokens of `generate` |
| refused | the server does not start and names the reason |
| not tried | no tiny checkpoint could be created; the self-test decides at start |

## Details

- **CPU**: native kernels compute linear layers, the experts of mixtures and attention; all else runs as modules.
- **GPU**: attention uses the Triton kernels if heads have 16 to 256 elements in multiples of 16 bytes, without CUDA
  graphs. Native layers with CUDA graphs run `qwen3_moe`, `mixtral` and (not tried on a device yet) `gpt_oss` in
  16 bits, unless `--lora`, `--quantization`, `--offload-weights` or `--overload` is set.
- **Multimodal wrappers**: the text part is served, and requests with images are refused. Tiny Gemma 3 and 4, Llama 4,
  Mistral 3, Ministral 3 and Qwen 3.5 give the text answers of the whole model (`tests/test_wrappers.py`).
- **Cache**: `--kv-cache-dtype int8` is refused. If keys and values have different widths (DeepSeek-V2/V3), cells
  have the larger one.
- **Raw prompts** (`/v1/completions`, `/v1/embeddings`) get the special tokens that tokenizer.json adds.
  `add_bos_token` in tokenizer_config.json has no effect, as in transformers 5, so raw prompts of DeepSeek-V3 begin
  without its BOS token: send token ids that begin with it. Its chat template writes the token.
- **Recurrent state**: prefixes are reused at [snapshots](../concepts/cache.md#recurrent-layers).
- **Self-test**: before serving, 36 random tokens of two requests are compared with transformers' eager attention; a
  difference beyond rounding refuses the start. Of native families two layers are tested: on a CPU with the kernels and
  the quantization that serve, on a GPU unquantized by torch on the CPU, which tests how config and tensors are read.
  `--no-self-test` skips it. The demo model and `--load-format dummy` are not tested.

## Context

- **no scaling, `llama3`**: `max_position_embeddings`.
- **`yarn`, `linear`**: `factor` times the original context (`original_max_position_embeddings`, or else
  `max_position_embeddings`), at least `max_position_embeddings`.
- **`longrope`** (Phi-3.5, Phi-4-mini): as `yarn`. A request uses the short factors if its prompt and `max_tokens` fit
  into the original context (4,096 tokens), otherwise the long ones from its first token on, where transformers changes
  them, and computes the cache anew, at the token that crosses the border. Without `max_tokens` an answer may fill the
  context, so the long factors apply: send `max_tokens`, or serve with `--max-model-len` of the original context. The
  sets share no cached blocks. Requests do not run from hidden state (`--overload hidden`).
- **`dynamic`**: `max_position_embeddings`. The angles of longer sequences depend on their length; those of cached keys
  cannot.

`--max-model-len` sets less. Logits are those of transformers below and above the original context. `rope_scaling`
(`type` or `rope_type`) and `rope_parameters` are read; if config.json has both, `rope_scaling` counts, as in
transformers. The number of positions of Gemma 3 is the scaled one.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a type, and its reason or restriction."""

    model_type: str
    outcome: str
    detail: str


def examine(model_type: str, folder: Path) -> Finding:
    """Create a tiny checkpoint in `folder` and run it."""
    if model_type in WRAPPERS:
        found = _run(model_type, folder, causal(wrapper(model_type, folder)))
        return replace(found, detail="; ".join(filter(None, ("text part", found.detail))))
    try:
        tiny_transformers.save_config(model_type, folder)
        plan_launch(_config(folder))
    except ConfigError as error:
        why = error.message.replace(f"{folder}: ", "")
        failed = f"{model_type} fails in transformers: "  # its code stumbled, maybe over our sizes
        return Finding(model_type, UNTRIED if why.startswith(failed) else REFUSED, why.removeprefix(failed))
    except Exception as error:  # somebody else's checks of configs
        return Finding(model_type, UNTRIED, f"no tiny config: {type(error).__name__}")
    try:
        if not _is_small(model_type):
            return Finding(model_type, UNTRIED, "its config cannot be made small")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = tiny_transformers.save(model_type, folder)
    except Exception as error:
        return Finding(model_type, UNTRIED, f"no tiny checkpoint: {type(error).__name__}")
    try:
        return _run(model_type, folder, reference)
    except ConfigError as error:
        return Finding(model_type, REFUSED, error.message.replace(f"{folder}: ", ""))
    except Exception as error:
        return Finding(model_type, WRONG, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _is_small(model_type: str) -> bool:
    import transformers

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(tiny_transformers.tiny_config(model_type))
    return sum(parameter.numel() for parameter in model.parameters()) < LARGEST


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), model_impl="transformers", device="cpu", dtype="float32",
        num_gpu_blocks_override=BLOCKS, profile_seconds=0.0, threads=1,
    )  # fmt: skip


def _run(model_type: str, folder: Path, reference: Any) -> Finding:
    config = _config(folder)
    with patch("engine.build.plan.BLOCK_SIZE", BLOCK):
        runner, plan = build_runner(config, plan_launch(config))
    context = min(plan.limits.max_model_len, CONTEXT)
    if context <= 2 * OUTPUT:
        return Finding(model_type, REFUSED, f"contexts end at the {plan.spec.limited_by}")
    scheduler = SchedulerConfig(
        num_units=plan.limits.num_units, max_model_len=context, block_size=BLOCK, max_num_seqs=8,
        max_num_batched_tokens=24, state_slots=plan.state_slots, snapshot_tokens=2 * BLOCK,
        enable_prefix_caching=bool(plan.state_slots or not plan.spec.state_bytes),
    )  # fmt: skip
    driver = Driver(runner, scheduler)
    prompts = [prompt[: context - OUTPUT] for prompt in prompts_of(min(plan.spec.vocab_size, 97), LENGTHS)]
    for index, prompt in enumerate(prompts):
        driver.add(make_request(str(index), prompt, OUTPUT))
        driver.step()
    driver.run()
    wrong = [i for i, prompt in enumerate(prompts) if driver.outputs[str(i)] != generated(reference, prompt, OUTPUT)]
    if wrong:
        return Finding(model_type, WRONG, f"{len(wrong)} of {len(prompts)} answers differ")
    stats = driver.stats()
    hit = stats.prefix_hit_tokens > 0 or not scheduler.enable_prefix_caching
    met = sum(stats.preemptions.values()) > 0 and hit
    limit = f"contexts end at the {plan.spec.limited_by}" if plan.spec.limited_by else ""
    state = "recurrent state" if plan.spec.state_bytes else ""
    state += "" if scheduler.enable_prefix_caching else ": without prefix hits"
    return Finding(
        model_type, EXACT, "; ".join(filter(None, (state, limit))) if met or limit else "nothing was preempted"
    )


def page(findings: list[Finding], version: str) -> str:
    """Return docs/reference/models.md: the types, grouped by outcome and reason."""
    own = ", ".join(f"`{family.name}`" for family in FAMILIES)
    lines = ["<!-- written by tests/model_sweep.py (make models) -->", "# Models", ""]
    lines += [INTRO.format(version=version, prompts=len(LENGTHS), own=own)]
    exact = sum(each.outcome == EXACT for each in findings)
    lines += ["## Types", "", f"{exact} of {len(findings)} types are exact.", ""]
    lines += ["| outcome | reason or restriction | types |", "|---|---|---|"]
    groups: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        groups.setdefault((finding.outcome, _reason(finding)), []).append(finding.model_type)
    for (outcome, reason), types in sorted(groups.items()):
        lines.append(f"| {outcome} | {reason} | {', '.join(f'`{each}`' for each in types)} |")
    return "\n".join(lines) + "\n"


def _reason(finding: Finding) -> str:
    """Return the detail without the name of the type; types that were not tried share a row."""
    if finding.outcome == UNTRIED:
        return ""
    return finding.detail.removeprefix(f"{finding.model_type} ").replace("|", "/")


def _wrong(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.outcome == WRONG]


def read_page() -> list[Finding]:
    """Return the findings that the page lists, by type."""
    rows = re.findall(
        rf"^\| ({EXACT}|{REFUSED}|{WRONG}|{UNTRIED}) \| ([^|]*)\| (.*`) \|$", PAGE.read_text(), re.MULTILINE
    )
    found = [
        Finding(name, outcome, why.strip()) for outcome, why, types in rows for name in re.findall("`([^`]+)`", types)
    ]
    return sorted(found, key=lambda each: each.model_type)


def main(words: list[str]) -> int:
    import transformers

    transformers.utils.logging.set_verbosity(50)
    torch.set_num_threads(1)
    rows = {each.model_type: each for each in read_page()} if words else {}
    for model_type in words or tiny_transformers.causal_types():
        with tempfile.TemporaryDirectory() as folder:
            rows[model_type] = found = examine(model_type, Path(folder))
        print(f"{model_type:24} {found.outcome:10} {found.detail}", flush=True)
    findings = sorted(rows.values(), key=lambda each: each.model_type)
    PAGE.write_text(page(findings, transformers.__version__))
    return int(bool(_wrong(findings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
