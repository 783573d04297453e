"""Every program of `benchmarks` in tiny sizes. Programs that start servers run by hand: `pytest -m manual`."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import model_folder, reference_model

from benchmarks import __main__ as bench
from benchmarks import copying_model, live, loads
from benchmarks.copying_tasks import GROUNDED, ticket
from benchmarks.experiments import larry
from benchmarks.experiments import main as experiments
from benchmarks.features import FEATURES
from benchmarks.live import PACKAGED
from benchmarks.quantization import logits_of
from engine.models.checkpoint import load_weights
from engine.models.spec import load_spec

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "intermediate_size": 96, "vocab_size": 2560}  # fmt: skip
SHORT = ["--seconds", "9", "--rate", "2"]
PROGRAMS: dict[str, tuple[list[str], str]] = {
    "colocation": ([*SHORT, "--seeds", "1", "--arms", "online only,tidemill"], "attainment beside offline work"),
    "pressure": (["--requests", "4", "--seeds", "1", "--rate", "4", "--prompt", "32", "--output", "16",
                  "--model", "demo", "--profile-seconds", "1"], "goodput-strict, 16 bits, hidden"),
    "sim-vs-live": (["--seconds", "8", "--rounds", "1"], "offline_throughput"),
    "serving": (["--rounds", "1", "--vllm", ""], "tidemill"),
    "colocation-peers": ([*SHORT, "--seeds", "1", "--layers", "2", "--learning", "2"], "tidemill, batch"),
}  # fmt: skip
SIZES = {
    "turns": ["chats=1", "turns=2", "history=50", "think=2"],
    "recurrent": ["chats=1", "history=100"],
    "overload": ["seconds=3", "burst=3", "prompt=16", "output=8"],
    "routing": ["seconds=4"],
    "larry": ["rate=2", "seconds=4"],
    "hidden": ["requests=4", "prompt=32", "output=8"],
    "offload": ["requests=4", "output=4"],
    "modules": [],
    "structured": ["seconds=6.5"],
    "classes": ["seconds=8", "learning=6", "rate=3"],
    "identity": ["requests=24"],
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve a model of two layers."""
    for name in TINY:
        monkeypatch.setitem(live.CONFIG, name, TINY[name])
    monkeypatch.setattr(loads, "LEARNING", 2.0)
    monkeypatch.setattr(loads, "JOB_TOKENS_PER_SECOND", 100_000)  # the tiny model has 30,000 tokens/s


def run(*words: str) -> None:
    importlib.import_module(bench.BENCHES[words[0]]).main(list(words[1:]))


@pytest.mark.manual
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Sending a large body")  # the lines of a job
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_servers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = PROGRAMS[name]
    run(name, *words)
    assert expected in capsys.readouterr().out


@pytest.mark.manual
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Sending a large body")  # the lines of a job
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for size in SIZES[name] for word in ("--set", size)]
    try:
        run("features", name, "--rounds", "1", "--flag=--profile-seconds=0", *sizes)
    except SystemExit as differing:  # without native kernels, rounding depends on the rows of a step
        assert name == "identity" and "answers are equal" in str(differing)
        return
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-1 - len(FEATURES[name].arms) : -1]] == [
        arm.split()[0] for arm in FEATURES[name].arms
    ]


@pytest.mark.slow
def test_an_experiment_writes_its_table_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = experiments.EXPERIMENTS["larry"]
    tiny = larry.Config(larry.MachineSpec("qwen2.5-0.5b", "a100-40gb", max_num_seqs=32), (("code", 2.0),), (1.0,), 5.0)
    monkeypatch.setitem(experiments.EXPERIMENTS, "larry", spec._replace(config=tiny))
    assert experiments.main(["larry", "--seeds", "2", "--workers", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert {row["seed"] for row in rows} == {0, 1} and len(rows) == 2 * len(larry.arms())
    assert (tmp_path / "larry-code-p50.svg").exists()
    for wrong in (["hygen", "--traces", "no/such/folder"], ["hybridserve", "--window", "5"], ["larry", "--seeds", "0"]):
        assert experiments.main(wrong) == 2


def test_options_belong_to_one_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serving", "colocation", "--steps", "1"], ["nothing"], ["colocation", "--steps", "1,x"]):
        monkeypatch.setattr("sys.argv", ["bench", *words])
        with pytest.raises(SystemExit, match="2"):
            bench.main()
    capsys.readouterr()


@pytest.mark.slow
def test_control_plane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import control_plane

    small: dict[str, Any] = {"RUNNING": 64, "WAITING": 64, "STEPS": 3, "CANDIDATES": (50,)}
    for name, value in small.items():
        monkeypatch.setattr(control_plane, name, value)
    for name in ("predictor_bench", "policies_bench", "drafts_bench"):
        monkeypatch.setattr(control_plane, name, lambda: None)
    control_plane.main()
    assert "of the exact optimum" in capsys.readouterr().out


def test_verdicts_on_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    age = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
    good = [{"valid": True, "data": {"age": 3}}, {"valid": False, "data": {"age": -1}}]
    for tests, code in ((good, 0), ([{"valid": True, "data": {"age": -1}}], 1)):
        lines = [{"name": "age", "schema": age, "tests": tests}, {"name": "not", "schema": {"not": {}}, "tests": []}]
        (tmp_path / "cases.jsonl").write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(SystemExit) as ended:
            run("schemas", str(tmp_path / "cases.jsonl"), "--no-answers")
        assert ended.value.code == code and capsys.readouterr().out.count("WRONG: age: ") == code


@pytest.mark.parametrize("case", ["llama-gqa2", "gemma2"])
def test_the_reference_of_quantization_is_the_model(case: str) -> None:
    spec, ids = load_spec(folder := model_folder(case)), torch.arange(3, 51)
    with torch.inference_mode():
        expected = reference_model(case)(ids[None]).logits[0]
    found = logits_of(spec, load_weights(spec, folder, dtype="float32"), ids.tolist())
    assert (found - expected).abs().max() < 1e-4 * expected.std()


def test_the_wide_copying_model_computes_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 80}
    monkeypatch.setattr(copying_model, "WIDE", sizes)
    monkeypatch.setattr(copying_model, "LAYERS", 4)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, head_dim=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=True, rms_norm_eps=1e-12,
    )  # fmt: skip
    small = LlamaForCausalLM(config).eval()
    torch.manual_seed(0)
    for parameter in small.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 50, (2, 20))
    with torch.inference_mode():
        found, expected = copying_model.widen(small).eval()(input_ids=ids).logits, small(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_training_on_tasks_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from itertools import cycle, islice

    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    monkeypatch.setattr(copying_model, "QUESTIONS", 3)
    model = LlamaForCausalLM.from_pretrained(PACKAGED, dtype=torch.float32)
    dialogues = copying_model.Dialogues(model.eval(), PreTrainedTokenizerFast.from_pretrained(PACKAGED))
    drawn = list(islice(dialogues.draw(), 8))
    with torch.inference_mode():
        before = float(copying_model.loss_of(model, drawn))
    assert copying_model.fit(model, cycle(drawn), 6) < before


def test_grounded_answers_use_the_words_of_the_prompt() -> None:
    import random

    for task in (*GROUNDED.values(), ticket):
        question, answer = task(random.Random(1))
        assert (question, answer) == task(random.Random(1))
        assert sum(word.strip('",:{}') in question for word in answer.split()) > 0.25 * len(answer.split())
