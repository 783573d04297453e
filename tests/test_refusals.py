"""Combinations of flags that are refused: every pair of the table, and nothing without both."""

import itertools
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.refusals import REFUSALS, SELECTING, Feature, RefusedCombination, check_combinations
from engine.scheduling.policies import ONLINE_POLICIES
from gateway.config import ServerConfig

ASKED: dict[str, dict[str, Any]] = {
    "--overload hidden": {"overload": "hidden"},
    "--quantization": {"quantization": "int8"},
    "--quantization fp8": {"quantization": "fp8"},
    "--dtype": {"dtype": "float16"},
    "--kv-cache-dtype": {"kv_cache_dtype": "int8"},
    "--lora": {"lora": ("a=/a",)},
    "--online-policy": {"online_policy": "larry:0.5"},
    "--offload-weights": {"offload_weights": "1.5"},
    "--model-impl transformers": {"model_impl": "transformers"},
    "--swap-space": {"swap_space": 1.0},
    "--overload drop": {"overload": "drop"},
    "--engines 1": {"engines": 1},
    "--ray": {"ray": "auto"},
    "--max-num-batched-tokens": {"max_num_batched_tokens": 8},
    "--max-num-seqs": {"max_num_seqs": 9},
    "--revision": {"revision": "main"},
    "MODEL": {"model": ""},
    "--host": {"host": "0.0.0.0"},
    "--api-key": {"api_key": ()},
}
"""Values that ask for each feature of the table."""
PAIRS = [(refusal, other) for refusal in REFUSALS for other in refusal.others]
PLAIN = {"engines": 2, "model": "folder"}


def check(**values: Any) -> None:
    """Run the checks of a start, without those for single values."""
    engine, server = EngineConfig(), ServerConfig()
    for config in (engine, server):
        for name, value in (PLAIN | values).items():
            if hasattr(config, name):
                object.__setattr__(config, name, value)
    check_combinations(engine, server)


@pytest.mark.parametrize(("refusal", "other"), PAIRS, ids=[f"{r.feature.flag} {o.flag}" for r, o in PAIRS])
def test_every_pair_is_refused_and_says_what_to_do(refusal: RefusedCombination, other: Feature) -> None:
    one, two = ASKED[refusal.feature.flag], ASKED[other.flag]
    with pytest.raises(ConfigError) as refused:
        check(**one | two)
    assert refusal.feature.flag in str(refused.value) and other.flag in str(refused.value)
    assert str(refused.value).count("; ") == 1, "what happened; what to do"


def test_pairs_that_are_not_in_the_table_pass() -> None:
    refused = {frozenset((refusal.feature.flag, other.flag)) for refusal, other in PAIRS}
    apart = {"MODEL", "--api-key", "--engines 1", "--max-num-seqs", "--quantization fp8"}  # ask with others, or alone
    for one, two in itertools.combinations(sorted(ASKED.keys() - apart), 2):
        if frozenset((one, two)) not in refused and not ASKED[one].keys() & ASKED[two].keys():
            alone = {"api_key": ("k",)} if "--host" in (one, two) else {}
            check(**alone | ASKED[one] | ASKED[two])


def test_several_others_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="--overload drop cannot be combined with --lora and --ray"):
        check(overload="drop", lora=("a=/a",), ray="auto")


def test_configs_refuse_what_they_know_by_themselves() -> None:
    with pytest.raises(ConfigError, match="--overload drop cannot be combined with --lora"):
        EngineConfig(overload="drop", lora=("a=/a",))
    with pytest.raises(ConfigError, match="--host is reachable from other machines; set --api-key"):
        ServerConfig(host="0.0.0.0")
    ServerConfig(host="0.0.0.0", api_key_file="keys")
    EngineConfig(overload="drop")  # how many engines there are, it does not know


def test_the_table_stays_small_and_knows_the_policies() -> None:
    assert len(REFUSALS) <= 10
    assert set(SELECTING) == {name for name, policy in ONLINE_POLICIES.items() if policy.select is not None}
