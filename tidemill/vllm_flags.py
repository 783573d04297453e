"""The command line of `vllm serve` for `tidemill serve`.

Flags with the same name and meaning stay as they are. Others get the name that they have here, are left out with a
note, or are refused with the action that replaces them (names as of vLLM 0.32).
"""

import re
from collections.abc import Sequence

from engine.errors import ConfigError

RENAMED = {
    "--allowed-origins": "--allowed-origin",
    "--lora-modules": "--lora",
    "--tool-call-parser": "--tool-parser",
    "--uvicorn-log-level": "--log-level",
}
COUNTS = frozenset({"--max-model-len", "--max-num-batched-tokens", "--max-num-seqs"})
"""Flags whose values may end in k (1,000) or K (1,024), as vLLM's may."""
SEVERAL = frozenset({"--served-model-name", "--lora", "--api-key", "--allowed-origin"})
"""Flags that take several values; here the flag is repeated."""
_ALWAYS = "it is always on"
_CHOSEN = "the engine chooses it"
_READ = "it is read from the checkpoint"
SWITCHES = {
    "--async-scheduling": _ALWAYS,
    "--disable-custom-all-reduce": "the engine runs on one GPU",
    "--disable-frontend-multiprocessing": "the engine always has a process of its own",
    "--disable-log-requests": "requests are only logged with --request-log",
    "--disable-log-stats": "figures are at /metrics and on the page",
    "--disable-uvicorn-access-log": "requests are only logged with --request-log",
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-log-requests": "requests are only logged with --request-log",
    "--enable-lora": "--lora NAME=PATH enables it",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-server-load-tracking": "the load is at /metrics",
    "--enforce-eager": "--kernels no-graphs turns CUDA graphs off",
    "--language-model-only": _ALWAYS,
    "--trust-remote-code": "code of checkpoints is never run",
}
"""Flags without a value that have no effect, with the reason; also their forms `--no-...`."""
IGNORED = {
    "--attention-backend": _CHOSEN,
    "--block-size": _CHOSEN,
    "--chat-template-content-format": _CHOSEN,
    "--compilation-config": _CHOSEN,
    "--cuda-graph-sizes": _CHOSEN,
    "--distributed-executor-backend": "--engines and --ray start several engines",
    "--guided-decoding-backend": _CHOSEN,
    "--limit-mm-per-prompt": "the text part of a model is served",
    "--max-log-len": "requests are logged without their text",
    "--max-logprobs": "the limit is that of OpenAI's API",
    "--max-lora-rank": "it is read from the adapters",
    "--max-loras": "all adapters are loaded",
    "--optimization-level": _CHOSEN,
    "--reasoning-parser": _READ,
    "--runner": _READ,
    "--scheduling-policy": "offline requests name themselves: service_tier flex, or a batch",
    "--structured-outputs-config": _CHOSEN,
    "--task": _READ,
    "--tokenizer-mode": _CHOSEN,
}
"""Flags with a value that have no effect, with the reason."""
_ONE_GPU = "an engine runs on one GPU; keep vLLM for larger models and give it the scheduler (docs/guides/vllm.md)"
_PROXY = "put a proxy that speaks TLS in front of the server"
REFUSED = {
    "--chat-template-kwargs": "send chat_template_kwargs in the requests",
    "--cpu-offload-gb": "--offload-weights GIB states the memory that weights may have; the rest streams",
    "--data-parallel-size": "use --engines N",
    "--download-dir": "set the variable HF_HOME",
    "--hf-overrides": "change config.json of the checkpoint",
    "--kv-transfer-config": "--swap-space keeps caches in host memory; prefill and decode run in one engine",
    "--override-generation-config": "change generation_config.json of the checkpoint",
    "--pipeline-parallel-size": _ONE_GPU,
    "--root-path": "let the proxy remove the prefix",
    "--seed": "send seed in the requests",
    "--speculative-config": "use --speculation on; drafts come from the context, not from a second model",
    "--ssl-certfile": _PROXY,
    "--ssl-keyfile": _PROXY,
    "--tensor-parallel-size": _ONE_GPU,
    "--tokenizer": "the checkpoint's tokenizer is used; copy the other one into its folder",
}
"""Flags with a value that cannot be kept, with the action that replaces them."""
NEUTRAL = {"--tensor-parallel-size": "1", "--pipeline-parallel-size": "1", "--data-parallel-size": "1", "--seed": "0"}
"""Values of refused flags that ask for no more than the default."""
VALUES = {
    ("--dtype", "half"): "float16",
    ("--dtype", "float"): "float32",
    ("--generation-config", "vllm"): "none",
    **{("--tool-parser", name): "auto" for name in ("hermes", "openai", "qwen3_coder", "qwen3_xml", "llama3_json")},
    **{("--quantization", name): "none" for name in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")},
}
"""Values of flags that have another name here; formats of calls and of stored weights are read from the checkpoint."""
SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_SUFFIXES = {"": 1, "k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1 << 20}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words behind `serve` with vLLM's flags replaced, and a note for each flag that has no effect.

    Raises ConfigError for a flag that cannot be kept.
    """
    kept, notes, rest = list[str](), list[str](), list(words)
    has_model = bool(rest) and not rest[0].startswith("-")  # then no word behind several values is the model
    while rest:
        word, joint, value = rest.pop(0).partition("=")
        name = SHORT.get(word, word).replace("_", "-") if word.startswith("-") else word
        name = RENAMED.get(name, name)
        if not name.startswith("--") or not _known(name):
            kept.append(word + joint + value)
            continue
        switch = name.replace("--no-", "--", 1)
        if switch in SWITCHES:
            notes.append(f"{word} has no effect: {SWITCHES[switch]}")
            continue
        values = [value] if joint else _values(rest, name in SEVERAL and has_model)
        if name in IGNORED:
            notes.append(f"{word} has no effect: {IGNORED[name]}")
        elif name in REFUSED:
            if values != [NEUTRAL.get(name)]:
                raise ConfigError(f"{word} is a flag of vLLM: {REFUSED[name]}")
        else:
            for one in values:
                kept += [name, _count(one) if name in COUNTS else VALUES.get((name, one), one)]
            kept += [] if values else [name]
    return kept, notes


def _known(name: str) -> bool:
    tables = (IGNORED, REFUSED, COUNTS, SEVERAL, RENAMED.values(), {flag for flag, _ in VALUES})
    return name.replace("--no-", "--", 1) in SWITCHES or any(name in table for table in tables)


def _values(rest: list[str], several: bool) -> list[str]:
    """Take the values of a flag from the words behind it."""
    values = list[str]()
    while rest and not rest[0].startswith("--") and (several or not values):
        values.append(rest.pop(0))
    return values


def _count(text: str) -> str:
    found = _COUNT.fullmatch(text)
    return text if found is None else str(int(float(found[1]) * _SUFFIXES[found[2]]))
