"""LoRA: rows of several adapters and of none in the same steps, each as a model with merged weights would answer."""

import dataclasses
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import tiny_transformers
import torch
from batch_tools import FAST, jsonl, line, open_folder, results_of, submit, until
from devices import linear_of
from driver import Driver, make_request, small_config
from fake_engine import Served, serve
from fakes.runner import FakeRunner
from lora_adapters import Made, adapter_of, make_adapter
from safetensors.torch import load_file, save_file
from support.lazy import openai
from support.tables import mostly_slow
from tiny_models import FAMILY_CASES, model_folder, reference_model

from engine.api import EngineRequest, RequestClass
from engine.build import build_engine, plan_launch
from engine.config import EngineConfig, NamedFolder
from engine.errors import ConfigError, ModelLoadError
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.execution.cuda import device as slotted
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Device, Runner
from engine.limits import SchedulerConfig
from engine.models.checkpoint import load_weights
from engine.models.lora import Adapters, load_adapter, plan_adapter
from engine.models.spec import load_spec
from engine.models.transformers_model import load_model
from engine.models.transformers_shape import load_shape
from engine.process.launcher import Source
from engine.text.tokenizer import Tokenizer
from engine.triton_kernels import twins
from gateway.models import ModelNames
from tidemill import cli

pytestmark = pytest.mark.timeout(600)  # the first test may have to build the library
BLOCK = 4
TIE = 1e-4
EVERY = ("q", "k", "v", "o", "qkv", "out", "gate", "up", "down", "fc1", "fc2", "query", "dense")


def every(name: str) -> bool:
    return name.split("_")[0] in EVERY


def in_attention(name: str) -> bool:
    return name in ("q_proj", "v_proj", "qkv_proj", "query_key_value", "out_proj")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two adapters of a case: one of all linear modules, one of a few with another rank and rslora."""

    @functools.cache
    def make(case: str) -> tuple[Made, Made]:
        folder, model = tmp_path_factory.mktemp(case), reference_model(case)
        few = make_adapter(folder / "few", model, in_attention, rank=2, alpha=3.0, seed=2, use_rslora=True)
        return make_adapter(folder / "all", model, every, seed=1), few

    return make


def device_of(case: str, adapters: tuple[Made, ...], config: SchedulerConfig, backend: str) -> Device:
    folder = model_folder(case)
    spec = load_spec(folder)
    weights = load_weights(spec, folder, make=linear_of(backend))
    options = {"adapted": True} if backend == "cuda" else {}
    device: Device = devices.device_of(backend, spec, weights, config.limits, **options)
    plans = [plan_adapter(NamedFolder(each.folder.name, each.folder), spec) for each in adapters]
    for number, plan in enumerate(plans, 1):
        device.adapt(number, load_adapter(plan, spec, weights.embedding))
    return device


def make_driver(case: str, adapters: tuple[Made, ...], backend: str = "torch", num_blocks: int = 200) -> Driver:
    config = small_config(
        num_blocks, max_model_len=min(4 * num_blocks, 120), min_prefill_chunk=8, pipeline_depth=int(backend == "cuda")
    )
    return Driver(Runner(device_of(case, adapters, config, backend)), config)


def crowd(count: int) -> list[EngineRequest]:
    """Requests of all adapters and of none, with prompts of many lengths; many begin alike."""
    rng, shared = np.random.default_rng(5), list(range(40, 51))
    requests = []
    for index in range(count):
        prompt = shared[: 11 * (index % 2)] + rng.integers(3, 96, rng.integers(2, 25)).tolist()
        request_class = RequestClass.OFFLINE if index % 4 == 3 else RequestClass.ONLINE
        request = make_request(f"r{index}", prompt, 9, request_class=request_class)
        requests.append(dataclasses.replace(request, adapter=index % 3))
    return requests


def check(model: Any, request: EngineRequest, output: list[int]) -> None:
    """Every token is the best by transformers' `model`, given those before it; after a tie anything goes."""
    assert len(output) == request.sampling.max_tokens
    ids = torch.tensor([[*request.prompt_token_ids, *output]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
    for row, token in zip(logits, output, strict=True):
        if token != int(row.argmax()):
            assert float(row.max() - row[token]) < TIE
            return


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *mostly_slow(((case, "torch") for case in FAMILY_CASES), [("llama-gqa2", "torch"), ("gemma3", "torch")]),
        *((case, "native") for case in ("llama-gqa2", "opt")),
        *((case, "cuda") for case in ("qwen3", "neox")),
    ],
)
def test_rows_answer_as_models_with_merged_weights(
    case: str, backend: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters and none in the same steps, in a pool so small that requests are preempted. "cuda": the GPUs' device
    on this processor."""
    adapters, requests = made(case), crowd(9)
    driver = make_driver(case, adapters, backend, num_blocks=22)
    if backend == "native":
        monkeypatch.setattr(TorchDevice, "forward", lambda *_: pytest.fail("a step left the tape"))
    driver.add(*requests)
    driver.run()
    assert sum(driver.stats().preemptions.values()) > 0
    models = [reference_model(case), *(each.merged(reference_model(case)) for each in adapters)]
    for request in requests:
        check(models[request.adapter], request, driver.outputs[request.request_id])


@pytest.mark.parametrize("num_slots", [2, 1, 0])
def test_decodes_on_a_gpu_find_adapters_by_slots(num_slots: int, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decodes alone, as their graphs do, while there are slots; where there are too few, and in steps with a
    prompt, rows are gathered. The answers are the same."""
    monkeypatch.setattr(slotted, "NUM_SLOTS", num_slots)
    case, gathered, by_slots = "qwen3", list[int](), list[int]()
    gather, add = Adapters.of_step, twins.lora_add
    driver = make_driver(case, adapters := made(case), "cuda")
    monkeypatch.setattr(Adapters, "of_step", lambda *given: gathered.append(len(driver.steps)) or gather(*given))
    monkeypatch.setattr(twins, "lora_add", lambda *given: by_slots.append(len(driver.steps)) or add(*given))
    driver.add(*(requests := crowd(6)))
    driver.run()
    models = [reference_model(case), *(each.merged(reference_model(case)) for each in adapters)]
    for request in requests:
        check(models[request.adapter], request, driver.outputs[request.request_id])
    assert not set(gathered) & set(by_slots), "a step goes by the one or by the other"
    assert bool(by_slots) is (num_slots == 2), "with one slot each step here has rows of both, or of the other"
    assert gathered, "prompts"


def test_adapters_without_a_slot_are_known(made: Any) -> None:
    case = "llama-gqa2"
    device = make_driver(case, made(case), "cuda").runner.device
    assert isinstance(device, CudaDevice) and isinstance(device.adapters, slotted.SlottedAdapters)
    adapters, numbers = device.adapters, np.array([1, 0, 2])
    first = adapters.slots_of(numbers)
    assert first is not None and first[1] == 0 < first[0] != first[2] > 0
    spec = load_spec(model_folder(case))
    plan = plan_adapter(NamedFolder("all", made(case)[0].folder), spec)
    late = 1 + slotted.NUM_SLOTS
    for number in range(3, late + 1):  # one more than there are slots
        device.adapt(number, load_adapter(plan, spec, torch.zeros(1)))
    assert adapters.slots_of(np.array([late])) is None and adapters.slots_of(np.array([late - 1, 2])) is not None


def test_a_prefix_is_shared_under_one_adapter_only(made: Any) -> None:
    case, prompt = "llama-gqa2", list(range(5, 25))
    driver, hits = make_driver(case, made(case)), []
    for index, adapter in enumerate((0, 1, 2, 1, 0, 2)):
        driver.add(dataclasses.replace(make_request(f"r{index}", prompt, 3), adapter=adapter))
        driver.run()
        hits.append(driver.finals[f"r{index}"].num_cached_tokens)
    assert hits == [0, 0, 0, 16, 16, 16]


def test_statistics_count_online_requests_by_adapter() -> None:
    config = small_config(40, max_model_len=20, max_num_seqs=2)
    driver = Driver(FakeRunner(block_size=BLOCK, vocab_size=97), config)
    for index, (adapter, request_class) in enumerate(((2, "online"), (0, "online"), (2, "online"), (1, "offline"))):
        request = make_request(f"r{index}", [5, 6], 3, request_class=RequestClass(request_class))
        driver.add(dataclasses.replace(request, adapter=adapter))
    driver.step()
    stats = driver.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == ({2: 1}, {2: 1})
    driver.run()
    assert not driver.stats().running_adapters and not driver.stats().waiting_adapters


@pytest.mark.parametrize(("name", "native"), [("gemma2", False), ("deepseek_v3", False), ("gemma2", True)])
def test_rows_of_modules_by_transformers(name: str, native: bool, tmp_path: Path) -> None:
    """Windows and soft caps, latent attention with experts shared by all; beside each other as alone."""
    reference = tiny_transformers.save(name, tmp_path / "model")
    shape = load_shape(tmp_path / "model")
    make = linear_of("native" if native else "torch")
    model = load_model(shape, tmp_path / "model", dtype="float32", make=make)
    adapters = [
        make_adapter(tmp_path / "a", reference, lambda last: last.endswith("_proj"), seed=1),
        make_adapter(tmp_path / "b", reference, lambda last: last == "o_proj", rank=2, seed=2),
    ]
    plans = [plan_adapter(NamedFolder(each.folder.name, each.folder), shape) for each in adapters]
    model.take_adapters(plans)
    config = small_config(22, max_model_len=80)
    device = TransformersDevice(model, config.limits)
    for number, each in enumerate(plans, 1):
        device.adapt(number, load_adapter(each, shape, model.like))
    driver, requests = Driver(Runner(device), config), crowd(6)
    driver.add(*requests)
    driver.run()
    models = [reference, *(each.merged(reference) for each in adapters)]
    for request in requests:
        check(models[request.adapter], request, driver.outputs[request.request_id])
    for module, shapes, words in (
        ("lm_head", (97, 64), "each token exactly once"),
        ("model.layers.0.mlp.other", (4, 4), "no such linear layer"),
    ):
        wrong = adapter_of(tmp_path / module, {module: shapes}).folder
        with pytest.raises(ModelLoadError, match=words):
            model.take_adapters([plan_adapter(NamedFolder("mine", wrong), shape)])


# --- reading and refusals ---------------------------------------------------------------------------

LLAMA = "llama-gqa2"
Q = "model.layers.1.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"


def plan(folder: Path) -> Any:
    return plan_adapter(NamedFolder("mine", folder), load_spec(model_folder(LLAMA)))


def change(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    about, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    about.write_text(json.dumps(json.loads(about.read_text()) | config))
    save_file(load_file(file) | tensors, file)


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    shapes = {Q: (64, 64), "model.layers.0.mlp.down_proj": (64, 88)}
    adapter_of(tmp_path, shapes, rank=2, alpha=4.0)
    patterns = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {r"layers\.\d\.self_attn\.q_proj": 20}}
    change(tmp_path, patterns, {A: torch.ones(5, 64), A.replace("lora_A", "lora_B"): torch.ones(64, 5)})
    parts = {part.module: (part.rank, part.scale) for parts in plan(tmp_path).parts.values() for part in parts}
    assert parts == {Q: (5, 4.0), "model.layers.0.mlp.down_proj": (2, 2.0)}


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"use_dora": True}, {}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"bias": "all"}, {}, "bias='all'"),
        ({"lora_bias": True}, {}, "lora_bias"),
        ({"peft_type": "IA3"}, {}, "'IA3'"),
        ({"trainable_token_indices": [1]}, {}, "embeddings"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "pissa"),
        ({"r": 7}, {}, "r = 7"),
        ({"lora_alpha": None}, {}, "lora_alpha"),
        ({}, {A.replace("lora_A.weight", "lora_magnitude_vector"): (64,)}, "lora_magnitude_vector"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": (3, 97)}, "lora_embedding_A"),
        ({}, {"base_model.model.lm_head.lora_A.weight": (3, 64)}, "lm_head"),
        ({}, {A.replace("layers.1", "layers.9"): (3, 64)}, "layers.9"),
        ({}, {A: (3, 32)}, "[3, 32]"),
        ({}, {A.replace("layers.1", "layers.0"): (3, 64)}, "is missing"),
    ],
)
def test_adapters_that_are_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    adapter_of(tmp_path, {Q: (64, 64)})
    change(tmp_path, config, {name: torch.zeros(shape) for name, shape in tensors.items()})
    with pytest.raises(ModelLoadError, match=r"^adapter mine: ") as caught:
        plan(tmp_path)
    assert words in caught.value.message and "\n" not in caught.value.message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no adapter_config\.json"):
        plan(tmp_path)
    adapter_of(tmp_path, {Q: (64, 64)})
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks adapter_model\.safetensors"):
        plan(tmp_path)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    adapter_of(tmp_path, {Q: (64, 64)}, strength=float("nan"))
    with pytest.raises(ModelLoadError, match="not finite"):
        load_adapter(plan(tmp_path), load_spec(model_folder(LLAMA)), torch.zeros(1))


@pytest.mark.parametrize("words", ["sql", "=x", "a b=x", "sql=", "a:b=x"])
def test_flags_that_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="NAME=PATH"):
        EngineConfig(lora=(words,))
    with pytest.raises(ConfigError, match="twice"):
        EngineConfig(lora=("a=x", "a=y"))
    with pytest.raises(ConfigError, match="--overload hidden"):
        EngineConfig(lora=("a=x",), overload="hidden")


def test_names() -> None:
    names = ModelNames(("m", "alias"), ("sql", "poet"))
    found = {name: names.find(name) for name in ("m", "sql", "alias:poet", "m:sql:flex", "sql:flex", "m:flex")}
    assert {name: (each.adapter, each.tier) for name, each in found.items() if each is not None} == {
        "m": (0, None), "sql": (1, None), "alias:poet": (2, None), "m:sql:flex": (1, "flex"), "sql:flex": (1, "flex"),
        "m:flex": (0, "flex"),
    }  # fmt: skip
    assert not any(map(names.find, ("other", "m:other", "sql:m", "m:sql:other", "")))
    for taken in ("m", "flex"):
        with pytest.raises(ConfigError, match="the name belongs to"):
            ModelNames(("m",), (taken,))


def test_another_process_may_take_over_with_other_adapters(tmp_path: Path) -> None:
    """`tidemill fleet restart` goes on with what lies there."""
    adapter, model = adapter_of(tmp_path / "a", {Q: (64, 64)}).folder, model_folder(LLAMA)
    before = Source.of(model, [adapter])
    assert before == Source.of(model, [adapter])
    adapter_of(adapter, {Q: (64, 64)}, rank=5)
    after = Source.of(model, [adapter])
    assert before != after and before.refusal(after) is None


# --- the server ---------------------------------------------------------------------------------------------------

MODEL = "tidemill-demo"


@pytest.fixture(scope="module")
def demo_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the packaged model that answers something else."""
    spec = plan_launch(EngineConfig(device="cpu")).own
    shapes = {f"model.layers.{n}.self_attn.o_proj": (spec.hidden_size, spec.q_size) for n in range(spec.num_layers)}
    folder = tmp_path_factory.mktemp("demo")
    return adapter_of(folder, shapes, strength=0.5).folder


@pytest.fixture
async def live(tmp_path: Path, demo_adapter: Path) -> AsyncIterator[Served]:
    config = EngineConfig(
        device="cpu", dtype="float32", num_gpu_blocks_override=160, max_num_seqs=8, profile_seconds=0.0,
        slo="ttft_p99=100s,tbt_p99=10s", lora=(f"odd={demo_adapter}",),
    )  # fmt: skip
    launch = plan_launch(config)
    engine = build_engine(config, launch)
    folder = await open_folder(tmp_path / "state")
    tokenizer = Tokenizer.load(launch.folder, probe=False)
    options: dict[str, Any] = {"served_model_name": (MODEL,), "folder": folder, "batch_limits": FAST}
    async with serve(engine, tokenizer, None, **options) as served:  # type: ignore[arg-type]
        yield served


async def test_an_adapter_is_a_model_of_the_api(live: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120)
    async with client:
        listed = [each.model_dump() async for each in client.models.list()]
        assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
            (MODEL, MODEL, None),
            (f"{MODEL}:odd", "odd", MODEL),
        ]
        assert (await client.models.retrieve("odd")).model_dump()["parent"] == MODEL

        async def complete(model: str) -> str:
            answer = await client.completions.create(
                model=model, prompt=[5, 6, 7, 8, 9], max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.model == model
            return answer.choices[0].text

        plain, odd = await complete(MODEL), await complete(f"{MODEL}:odd")
        assert plain != odd
        assert await complete("odd") == await complete("odd:flex") == odd
        chats = [
            await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hi!"}], max_tokens=6, temperature=0
            )
            for model in (MODEL, "odd")
        ]
        assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
        with pytest.raises(openai.NotFoundError) as caught:
            await complete(f"{MODEL}:other")
        assert caught.value.code == "model_not_found"
        lines = [
            line(i, model="odd", prompt=[5, 6, 7, 8, 9], max_tokens=6, temperature=0, ignore_eos=True) for i in (0, 1)
        ]
        batch = await until(client, (await submit(client, jsonl(lines))).id)
        rows, _ = await results_of(client, batch)
        assert [row["response"]["body"]["choices"][0]["text"] for row in rows.values()] == [odd, odd]


@pytest.mark.slow
def test_dry_run_shows_them(
    demo_adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ["serve", "--dry-run", "--port", "0", "--device", "cpu", "--lora"]
    assert cli.main([*words, f"odd={demo_adapter}"]) == 0
    out = capsys.readouterr().out
    assert f"odd={demo_adapter}" in out and "adapter    odd: rank 3, o_proj" in out
    for word, message in ((f"flex={demo_adapter}", "service tier"), (f"odd={tmp_path}", "adapter_config.json")):
        assert cli.main([*words, word]) != 0
        assert message in capsys.readouterr().err
