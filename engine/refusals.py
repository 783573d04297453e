"""Every combination of flags that is refused, as one table. Torch-free.

Combinations that depend on the model or the device are refused beside these, by `unsupported`. A value that is wrong by
itself is refused where its flag is declared.
"""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from engine.errors import ConfigError

SELECTING = ("apt", "goodput", "goodput-strict")
"""Online policies that choose which requests run from hidden state."""


class Feature(NamedTuple):
    """A flag, or a flag with a value, that is asked for if `holds` is true of the values of `settings`."""

    flag: str
    settings: tuple[str, ...]
    holds: Callable[..., bool]


class RefusedCombination(NamedTuple):
    """`feature` cannot be combined with any of `others`. `message` has a place for the flags that were found."""

    feature: Feature
    others: tuple[Feature, ...]
    message: str


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Any name but localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


HIDDEN_CACHE = Feature("--overload hidden", ("overload",), lambda way: way == "hidden")
QUANTIZATION = Feature("--quantization", ("quantization",), lambda kind: kind != "none")
FLOAT8 = Feature("--quantization fp8", ("quantization",), lambda kind: kind == "fp8")
OTHER_DTYPE = Feature("--dtype", ("dtype",), lambda dtype: dtype not in ("auto", "bfloat16"))
CACHE_DTYPE = Feature("--kv-cache-dtype", ("kv_cache_dtype",), lambda kind: kind != "auto")
ADAPTERS = Feature("--lora", ("lora",), bool)
OTHER_POLICY = Feature("--online-policy", ("online_policy",), lambda name: name.partition(":")[0] not in SELECTING)
STREAMING = Feature("--offload-weights", ("offload_weights",), lambda size: size != "off")
TRANSFORMERS = Feature("--model-impl transformers", ("model_impl",), lambda name: name == "transformers")
SWAP_SPACE = Feature("--swap-space", ("swap_space",), bool)
DROP = Feature("--overload drop", ("overload",), lambda way: way == "drop")
ONE_ENGINE = Feature("--engines 1", ("engines",), lambda engines: engines == 1)
RAY = Feature("--ray", ("ray",), bool)
STEP_TOKENS = Feature("--max-num-batched-tokens", ("max_num_batched_tokens",), lambda tokens: tokens is not None)
MORE_REQUESTS = Feature(
    "--max-num-seqs",
    ("max_num_seqs", "max_num_batched_tokens"),
    lambda requests, tokens: requests is not None and tokens is not None and requests > tokens,
)
REVISION = Feature("--revision", ("revision",), lambda revision: revision is not None)
NO_MODEL = Feature("MODEL", ("model",), lambda model: not model)
OPEN_HOST = Feature("--host", ("host",), lambda host: not is_loopback(host))
NO_KEY = Feature(
    "--api-key",
    ("api_key", "api_key_file", "state_dir"),  # a database may have keys
    lambda keys, file, state: not keys and not file and not (state or "").startswith(("postgresql:", "postgres:")),
)

REFUSALS = (
    RefusedCombination(
        HIDDEN_CACHE,
        (QUANTIZATION, CACHE_DTYPE, ADAPTERS),
        "--overload hidden cannot be combined with {}: restored K and V would differ; remove one",
    ),
    RefusedCombination(
        HIDDEN_CACHE,
        (OTHER_POLICY,),
        "--overload hidden needs a policy that selects requests; set {} to apt or goodput",
    ),
    RefusedCombination(
        DROP,
        (ADAPTERS, SWAP_SPACE, STREAMING, TRANSFORMERS, RAY),
        "--overload drop cannot be combined with {}: engines exchange whole layers and blocks; remove one",
    ),
    RefusedCombination(
        DROP, (ONE_ENGINE,), "--overload drop makes one pipeline of two engines, not of {}; set --engines 2"
    ),
    RefusedCombination(
        FLOAT8,
        (STREAMING, OTHER_DTYPE),
        "--quantization fp8 cannot be combined with {}: it computes with resident bfloat16 layers; remove one",
    ),
    RefusedCombination(
        STEP_TOKENS,
        (MORE_REQUESTS,),
        "--max-num-batched-tokens is below {}, and every decode is one token; lower --max-num-seqs",
    ),
    RefusedCombination(REVISION, (NO_MODEL,), "--revision needs a model from the hub; name a {}"),
    RefusedCombination(
        OPEN_HOST, (NO_KEY,), "--host is reachable from other machines; set {}, or use --host 127.0.0.1"
    ),
)


def check_combinations(*configs: object) -> None:
    """Raise ConfigError if the dataclasses together ask for a refused combination. Rows of absent settings pass."""
    values = {field.name: getattr(config, field.name) for config in configs for field in fields(config)}  # type: ignore[arg-type]
    for refusal in REFUSALS:
        if _asked(refusal.feature, values) and (found := [o.flag for o in refusal.others if _asked(o, values)]):
            raise ConfigError(refusal.message.format(" and ".join(found)))


def _asked(feature: Feature, values: Mapping[str, Any]) -> bool:
    known = all(name in values for name in feature.settings)
    return known and feature.holds(*(values[name] for name in feature.settings))


def unsupported(flag: str, why: str, todo: str = "") -> ConfigError:
    """Return the error for a flag that this model or device cannot do."""
    return ConfigError(f"{flag} is not supported here: {why}; {todo or f'remove {flag}'}")
