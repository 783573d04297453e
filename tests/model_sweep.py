"""Every causal language model type of the installed transformers as a tiny random checkpoint, through plan, load,
self-test and engine: equal to `generate` beside others, with chunks, prefix hits and preemptions, or refused with a
reason. `python tests/model_sweep.py [TYPE ...]` writes docs/reference/models.md, or the rows of these types anew.
"""

import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_transformers
import torch
from driver import Driver, make_request

from engine.build import build_runner, plan_launch
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.models.families import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "models.md"
BLOCK, BLOCKS, CONTEXT, OUTPUT = 4, 25, 84, 8
LENGTHS = (30, 40, 9, 33, 17, 47, 5, 60)
LARGEST = 20e6  # parameters

EXACT, REFUSED, WRONG, UNTRIED = "exact", "refused", "WRONG", "not tried"

INTRO = """Written by `make models` with transformers {version}: every causal language model type that it has, as a tiny
random checkpoint in float32 with `--model-impl transformers`, on a CPU. *Exact*: the tokens of {prompts} requests side
by side, in chunks, with prefix hits and preemptions, are those of `generate`. *Refused*: the start says so in a
sentence. *Not tried*: no tiny checkpoint could be made that runs; the self-test still looks at such a model before it
serves. Types with a *recurrent state* start behind a prefix where there is a checkpoint of it; *without prefix hits*
those do whose layers take what goes on behind a state token by token.

With `--model-impl auto`, the default, these types run by layers of our own: {own}; their
sliding windows, too, where a config has them, in all layers or in some.

The native CPU kernels compute linear layers and attention, for heads whose values are of another width than their keys,
too (DeepSeek-V2/V3: 192 and 128). The cache's cells are of one width, that of the wider of the two in the widest layer:
such a model's take 20 % more memory than its K and V. `--kv-cache-dtype` refuses 8 bits for all of these models.

They compute whole decoder layers where they have all that a layer does: norms (RMS and layer norms, in front of a
branch or behind it, on queries and keys before or after they are turned, with a weight or without), linear layers, a
rotation of halves or of pairs, MLPs with a gate or without, branches one after the other or side by side, scaled.
What a layer does is read from a run of a copy of it with random weights, and not from its type's name. A layer of
which anything is left over runs by its modules (mixtures of experts, latent attention, recurrent layers among them),
and so does a step with LoRA adapters. The start says how many are known.

On a GPU their attention is by our Triton kernels, with windows, caps, sinks and unlike widths, where heads have 16 to
256 elements in multiples of 16 bytes; without CUDA graphs. The kernels equal their twins in Triton's interpreter and
compile for seven architectures, and steps wait for nothing on a device that runs nothing; no GPU has run them with
modules.

The self-test runs before a model serves, whoever's layers run it: 36 random tokens of two requests in chunks, beside
what transformers' eager attention gives for each at once. More than rounding (16 units of the type's precision, at
least 1e-4, of the spread of the logits) refuses the start with the figure. Of a family of ours it takes two layers
(one of each kind, where some have a window) and 64 tokens of the vocabulary, so its cost does not grow with the model:
the import of transformers' modules, and a fraction of a second. `--no-self-test` skips it; the packaged model,
`--load-format dummy`, `--quantization int8` and families of ours on a GPU are not tested.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a type, and why or how far."""

    model_type: str
    outcome: str
    detail: str


def examine(model_type: str, folder: Path) -> Finding:
    """Make a tiny checkpoint in `folder` and run it."""
    try:
        tiny_transformers.save_config(model_type, folder)
        plan_launch(_config(folder))
    except ConfigError as error:
        why = error.message.replace(f"{folder}: ", "")
        failed = f"{model_type} by transformers: "  # its code stumbled, maybe over our sizes
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
        model=str(folder), model_impl="transformers", device="cpu", dtype="float32", block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS, profile_seconds=0.0, threads=1,
    )  # fmt: skip


def _run(model_type: str, folder: Path, reference: Any) -> Finding:
    config = _config(folder)
    plan = plan_launch(config)
    runner, plan = build_runner(config, plan)
    context = min(plan.limits.max_model_len, CONTEXT)
    if context <= 2 * OUTPUT:
        return Finding(model_type, REFUSED, f"contexts end at the {plan.spec.limited_by}")
    scheduler = SchedulerConfig(
        num_units=plan.limits.num_units, max_model_len=context, block_size=BLOCK, max_num_seqs=8,
        max_num_batched_tokens=24, state_slots=plan.state_slots, checkpoint_tokens=2 * BLOCK,
        enable_prefix_caching=bool(plan.state_slots or not plan.spec.state_bytes),
    )  # fmt: skip
    driver = Driver(runner, scheduler)
    prompts = [prompt[: context - OUTPUT] for prompt in _prompts(plan.spec.vocab_size)]
    for index, prompt in enumerate(prompts):
        driver.add(make_request(str(index), prompt, OUTPUT))
        driver.step()
    driver.run()
    wrong = [i for i, prompt in enumerate(prompts) if driver.outputs[str(i)] != _generated(reference, prompt)]
    if wrong:
        return Finding(model_type, WRONG, f"{len(wrong)} of {len(prompts)} answers differ")
    stats = driver.core.stats()
    hit = stats.prefix_hit_tokens > 0 or not scheduler.enable_prefix_caching
    met = sum(stats.preemptions.values()) > 0 and hit
    limit = f"contexts end at the {plan.spec.limited_by}" if plan.spec.limited_by else ""
    state = "recurrent state" if plan.spec.state_bytes else ""
    state += "" if scheduler.enable_prefix_caching else ": without prefix hits"
    return Finding(
        model_type, EXACT, "; ".join(filter(None, (state, limit))) if met or limit else "nothing was preempted"
    )


def _prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(3, min(vocab_size, 97), (26,), generator=generator).tolist()
    own = [torch.randint(3, min(vocab_size, 97), (length,), generator=generator).tolist() for length in LENGTHS]
    return [(shared + prompt)[: len(prompt)] if index % 3 == 0 else prompt for index, prompt in enumerate(own)]


def _generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def page(findings: list[Finding], version: str) -> str:
    """docs/reference/models.md."""
    own = ", ".join(f"`{family.name}`" for family in FAMILIES)
    exact = [each for each in findings if each.outcome == EXACT]
    lines = ["<!-- written by tests/model_sweep.py -->", "# Models by transformers' modules", ""]
    lines += [INTRO.format(version=version, prompts=len(LENGTHS), own=own)]
    lines += [f"{len(exact)} of {len(findings)} types are exact, none is wrong." if not _wrong(findings) else "", ""]
    lines += ["| type | outcome | detail |", "|---|---|---|"]
    lines += [f"| `{f.model_type}` | {f.outcome} | {f.detail.replace('|', '/')} |" for f in findings]
    return "\n".join(lines) + "\n"


def _wrong(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.outcome == WRONG]


def read_page() -> list[Finding]:
    """The rows of the page as it is."""
    return [
        Finding(*row) for row in re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    ]


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
