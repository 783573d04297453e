"""Structured output from a grammar to tokens: refusals, draws of every backend, and which requests wait for others."""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from devices import device_of, linear_of
from driver import Driver, make_request, small_config
from fakes.speculation import Oracle

import engine.models.demo
from benchmarks.hostile import BESIDE_CHATS as HOSTILE
from engine.api import FinishReason, RequestClass
from engine.errors import InvalidRequestError
from engine.execution import masks as masks_module
from engine.execution.masks import MAX_FORCED, RowMasks
from engine.execution.runner import Runner
from engine.forms import Grammar
from engine.models.checkpoint import load_weights
from engine.models.spec import ModelSpec, load_spec
from engine.models.weights import ModelWeights
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from engine.text.tokenizer import Tokenizer

FOLDER = Path(engine.models.demo.__file__ or "").parent / "weights"
EOS = 2
pytestmark = pytest.mark.timeout(600)  # the first test may have to build the library

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": -2, "maximum": 2.5}]},
    "recursive": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": []}},
        "$ref": "#/$defs/node",
    },
    "format": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 3}], "items": False},
}


class EagerCompiler(GrammarCompiler):
    """Compiles at the first look, since no engine prepares the requests."""

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        with contextlib.suppress(InvalidRequestError):
            return self.compile(grammar)
        return None


@functools.cache
def compiler() -> GrammarCompiler:
    return EagerCompiler(FOLDER, spec().vocab_size, frozenset({EOS}))


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER, probe=False)


@functools.cache
def spec() -> ModelSpec:
    return load_spec(FOLDER)


@functools.cache
def weights(backend: str) -> ModelWeights:
    return load_weights(spec(), FOLDER, dtype="float32", device="cpu", make=linear_of(backend))


def json_grammar(schema: Any, whitespace: str | None = None) -> Grammar:
    return Grammar("json", json.dumps(schema), whitespace)


def make_driver(
    backend: str, num_blocks: int = 200, patience: float = 60.0, lone_patience: float = 0.0, most: int = MAX_FORCED
) -> Driver:
    """`backend` may be followed by " ahead": steps are scheduled ahead."""
    name, _, ahead = backend.partition(" ")
    limits = {"max_model_len": min(4 * num_blocks, 300), "max_num_seqs": 12, "max_num_batched_tokens": 48}
    depth = int(bool(ahead) or name == "cuda")
    config = small_config(num_blocks, min_prefill_chunk=8, pipeline_depth=depth, **limits)
    runner: Runner[Any] = Runner(device_of(name, spec(), weights(name), config.limits))
    runner.masks = RowMasks(runner.device.rows, compiler(), patience, lone_patience, most)
    return Driver(runner, config)


def ask(name: str, grammar: Grammar | None, max_tokens: int = 120, **options: Any) -> Any:
    prompt = tokenizer().encode(f"Say something about {name}: ")
    sampling = {"temperature": 2.0, "stop_token_ids": frozenset({EOS}), **options}
    return make_request(name, prompt, max_tokens, grammar=grammar, **sampling)


def text_of(driver: Driver, name: str) -> str:
    return tokenizer().decode(driver.outputs[name])


# Refusals


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (json_grammar({"type": "string", "not": {"const": "a"}}), '"not"'),
        (json_grammar({"oneOf": [{"type": "string"}, {"minimum": 1}]}), '"oneOf"'),
        (json_grammar({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        (json_grammar({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), '"uniqueItems"'),
        (json_grammar({"type": "string", "format": "url"}), "format: url"),
        (json_grammar({"type": "objekt"}), "objekt"),
        (json_grammar({"$ref": "https://example.com/schema.json"}), "example.com"),
        (json_grammar({"$ref": "#"}), "nothing can satisfy it"),
        (json_grammar({"type": "object", "properties": {"a": False}, "required": ["a"]}), "required property 'a'"),
        (Grammar("json", '{"type": '), "JSON"),
        (Grammar("json", '["' + "x" * 300_000 + '"]'), "256 KiB"),
        (json_grammar({"type": "string", "pattern": "^(?=a)b$"}), 'the keyword "pattern" ^(?=a)b$: look-around'),
        (Grammar("regex", "[a"), "the regular expression [a: unclosed"),
        (Grammar("grammar", "start: unknown_rule"), "unknown_rule"),
        (Grammar("grammar", "start: <no_such_token>"), "no_such_token"),
        (Grammar("choice", "[]"), ""),
    ],
)
def test_what_cannot_be_enforced_is_refused_and_named(grammar: Grammar, word: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler().compile(grammar)
    assert word in caught.value.message and "response_format" in caught.value.message
    assert caught.value.param == "response_format" and "<state>" not in caught.value.message
    assert "\n" not in caught.value.message


def test_json_is_compact_unless_asked_otherwise() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    ids = tokenizer().encode("[1, 2]", add_special_tokens=False)
    for whitespace, accepted in ((None, False), (" ?", True), (r"\n?", False)):
        matcher = compiler().compile(json_grammar(schema, whitespace)).matcher()
        matcher.advance(ids)
        assert (matcher.failed is None and matcher.complete) is accepted


# Draws


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native", "cuda", "torch ahead"])
def test_every_answer_that_ends_is_valid(backend: str) -> None:
    """At temperature 2, in a pool that is too small: preemptions, mixed with requests that may say anything, with and
    without penalties, bias, a minimum length and log-probabilities."""
    driver = make_driver(backend, num_blocks=32)
    options: list[dict[str, Any]] = [
        {"min_tokens": 50},
        {"temperature": 0.0},
        {"frequency_penalty": 2.0, "logit_bias": ((EOS, 100.0),)},
        {"top_p": 0.9, "top_k": 20, "logprobs": 3},
    ]
    kinds = [RequestClass.ONLINE, RequestClass.OFFLINE]
    asked: list[str] = []
    for number, (name, schema) in enumerate([*SCHEMAS.items()] * 2):
        asked.append(f"{name} {number}")
        option = {"seed": number, "request_class": kinds[number % 2], **options[number % len(options)]}
        driver.add(ask(asked[-1], json_grammar(schema), 60, **option))
    driver.add(ask("free", None, 40), ask("free greedy", None, 40, temperature=0.0))
    driver.run()
    ended = [name for name in asked if driver.finals[name].finish_reason is FinishReason.STOP]
    assert all(driver.finals[name].error is None for name in asked) and len(ended) >= len(asked) / 2
    for name in ended:
        schema = SCHEMAS[name.rpartition(" ")[0]]
        jsonschema_rs.validator_for(schema).validate(json.loads(text_of(driver, name)))
    assert sum(driver.stats().preemptions.values()) > 0


@pytest.mark.parametrize("backend", ["native", "cuda"])
def test_backends_draw_what_torch_draws(backend: str) -> None:
    """The same answers at the same seeds, at any depth of the pipeline."""
    texts = []
    for each in ("torch", backend):
        driver = make_driver(each)
        for number, (name, schema) in enumerate(SCHEMAS.items()):
            driver.add(ask(name, json_grammar(schema), 60, seed=number, temperature=0.7))
        driver.add(ask("free", None, 30, seed=5, temperature=0.7))
        driver.run()
        texts.append({name: text_of(driver, name) for name in (*SCHEMAS, "free")})
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native", "cuda", "torch ahead"])
def test_forced_tokens_save_steps_and_change_nothing(backend: str) -> None:
    """Seeds, a short answer that ends in the middle of a run, penalties, a pool that is too small: token for token what
    comes one by one, in fewer steps; also with drafts that are often wrong."""
    answers: list[Any] = []
    steps, forced = [], []
    for most, drafts in ((0, False), (MAX_FORCED, False), (MAX_FORCED, True)):
        driver = make_driver(backend, num_blocks=60, most=most)
        if drafts:
            known, penalties = answers[0][0], backend in ("torch", "native")
            oracle = Oracle(lambda spec, known=known: known[spec.request_id], seed=1, penalties=penalties)
            driver.core.state.speculation = oracle
        for number, (name, schema) in enumerate([*SCHEMAS.items()] * 2):
            limit = (60, 7)[number % 2]
            kind = [RequestClass.ONLINE, RequestClass.OFFLINE][number % 3 == 0]
            options: dict[str, Any] = {"frequency_penalty": -2.0} if number % 4 == 1 else {}
            ask_for = ask(f"{name} {number}", json_grammar(schema), limit, seed=number, request_class=kind, **options)
            driver.add(ask_for)
        driver.add(ask("free", None, 40, seed=3))
        driver.run()
        answers.append((driver.outputs, {name: final.finish_reason for name, final in driver.finals.items()}))
        steps.append(sum(len(step.chunks) for step in driver.steps))
        forced.append(driver.stats().forced_tokens)
    assert answers[0] == answers[1] == answers[2]
    assert forced[0] == 0 < forced[1] and driver.stats().drafted_tokens > sum(oracle.judged) > 50
    assert steps[0] - steps[1] >= forced[1] / 2, "each would have been a chunk of its own"


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_forced_tokens_behind_a_step_in_flight_outlast_late_masks_and_failures(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third mask is late, and steps fail with the one behind them; half of the steps may have drafts. Token for
    token the same answers."""
    run, masks = masks_module._RowMatcher.run, itertools.count()

    def hesitate(*work: Any) -> None:
        if next(masks) % 3 == 0:
            time.sleep(0.002)
        run(*work)

    monkeypatch.setattr(masks_module._RowMatcher, "run", hesitate)
    drivers = make_driver("cuda", most=0), make_driver("cuda", num_blocks=60, patience=1e-3)
    drivers[1].core.state.speculation = Oracle(lambda spec: drivers[0].outputs[spec.request_id], seed=2)
    device, calls = drivers[1].runner.device, 0  # type: ignore[attr-defined]
    forward = device.forward

    def fragile(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        given = forward(*args)
        if fails and calls in (5, 60):  # trials lie between
            raise RuntimeError("the device is gone")
        return given

    device.forward = fragile
    for driver in drivers:
        for number, (name, schema) in enumerate([*SCHEMAS.items()] * 2):
            kind = [RequestClass.ONLINE, RequestClass.OFFLINE][number % 2]
            driver.add(ask(f"{name} {number}", json_grammar(schema), 40, seed=number, request_class=kind))
        driver.run()
    assert drivers[0].outputs == drivers[1].outputs
    stats = drivers[1].stats()
    assert stats.forced_tokens > 0 and stats.accepted_tokens > 0 and (stats.failed_steps > 0) is fails


@pytest.mark.parametrize("backend", ["torch", "cuda", "torch ahead"])
def test_a_run_of_forced_tokens_is_one_chunk_and_as_urgent_as_a_decode(backend: str) -> None:
    """Beside a long prompt, which takes the rest of the steps. Where a step is in flight it computes the first of
    the tokens, and the chunk is in the one behind it."""
    driver = make_driver(backend)
    word = "abcdefgh" * 3
    driver.add(ask("constant", json_grammar({"const": {word: word, "end": 1}}), 60))
    driver.launch()
    driver.complete()
    driver.add(make_request("prompt", list(range(3, 203)), 1))
    driver.run()
    runs = [chunk for step in driver.steps for chunk in step.chunks if chunk.row == driver.steps[0].chunks[0].row]
    longest = max(range(1, len(runs)), key=lambda index: runs[index].length)
    assert runs[longest].length > 8 and runs[longest].sample
    assert json.loads(text_of(driver, "constant")) == {word: word, "end": 1}
    first = driver.steps.index(next(step for step in driver.steps if runs[longest] in step.chunks))
    assert first <= 2, "it did not wait for the prompt"
    most = driver.steps[0].chunks[0].length + len(driver.outputs["constant"]) - 1 + driver.core.config.pipeline_depth
    assert sum(chunk.length for chunk in runs) <= most, "none is computed twice"


def test_choices_regexes_and_grammars() -> None:
    driver = make_driver("torch")
    driver.add(ask("choice", Grammar("choice", json.dumps(['a "quoted" one', "ünïcode", "two\nlines"]))))
    driver.add(ask("regex", Grammar("regex", "(ab|cd)+e"), 200, seed=3))
    driver.add(ask("lark", Grammar("grammar", 'start: "x" number "y"\nnumber: /[0-9]{3}/')))
    driver.add(ask("gbnf", Grammar("grammar", 'root ::= "yes" | "no"')))
    driver.run()
    assert text_of(driver, "choice") in ('a "quoted" one', "ünïcode", "two\nlines")
    assert text_of(driver, "gbnf") in ("yes", "no")
    assert text_of(driver, "lark")[0::4] == "xy" and text_of(driver, "lark")[1:4].isdigit()
    assert set(text_of(driver, "regex")) <= set("abcde")


def test_logprobs_are_of_what_the_model_wanted() -> None:
    """A mask changes the choice of tokens, not the reported logprobs."""
    driver = make_driver("torch")
    driver.add(ask("free", None, 1, logprobs=5, temperature=0.0))
    driver.run()
    free = driver.finals["free"].logprobs
    driver = make_driver("torch")
    driver.add(ask("free", Grammar("regex", "[0-9]{4}"), 1, logprobs=5, temperature=0.0))
    driver.run()
    forced = driver.finals["free"].logprobs
    assert free is not None and forced is not None
    assert free[0].top == forced[0].top and forced[0].logprob < free[0].logprob


def test_an_answer_that_is_complete_ends_however_short() -> None:
    driver = make_driver("torch")
    driver.add(ask("short", Grammar("regex", "ab"), 50, min_tokens=20))
    driver.add(ask("long", Grammar("regex", "a+"), 50, min_tokens=20))
    driver.run()
    assert text_of(driver, "short") == "ab" and driver.finals["short"].finish_reason is FinishReason.STOP
    assert driver.finals["long"].num_output_tokens >= 20 and set(text_of(driver, "long")) == {"a"}


# Which requests wait for others


class SlowGrammar:
    """Masks of one grammar wait until they are let go; how many were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Grammar) -> None:
        self.go_on = threading.Event()
        self.begun = 0
        run = masks_module._RowMatcher.run

        def wait_and_run(matcher: Any, *work: Any) -> None:
            if matcher.params.grammar == slow:
                self.begun += 1
                assert self.go_on.wait(60)
            run(matcher, *work)

        monkeypatch.setattr(masks_module._RowMatcher, "run", wait_and_run)


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_a_slow_grammar_holds_up_nobody_else(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row sits out the steps of the others and then goes on as if nothing had happened."""
    grammar = Grammar("regex", "(ab|cd){10}")
    alone = make_driver(backend)
    alone.add(ask("slow", grammar, seed=1))
    alone.run()
    slow = SlowGrammar(monkeypatch, grammar)
    driver = make_driver(backend, patience=0.0)
    driver.add(ask("slow", grammar, seed=1), ask("quick", None, 30, seed=2, stop_token_ids=frozenset()))
    while "quick" not in driver.finals:
        assert driver.step()
    assert driver.outputs["slow"] == [] and slow.begun == 1
    slow.go_on.set()
    driver.run()
    assert driver.outputs["slow"] == alone.outputs["slow"]
    assert driver.finals["slow"].finish_reason is FinishReason.STOP


def test_hostile_schemas_hold_up_no_step_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat gets a token in every step beside them, and no step waits for masks more than once, for `PATIENCE`."""
    waited: list[float | None] = []

    def wait(work: Any, timeout: float | None = None, **options: Any) -> Any:
        waited.append(timeout)
        return concurrent.futures.wait(work, timeout, **options)

    monkeypatch.setattr(masks_module, "wait", wait)
    driver = make_driver("torch", patience=masks_module.PATIENCE, lone_patience=masks_module.LONE_PATIENCE)
    driver.add(ask("chat", None, 40, stop_token_ids=frozenset()))
    driver.add(*(ask(f"hostile {i}", json_grammar(schema), 3, seed=i) for i, schema in enumerate(HOSTILE)))
    while "chat" not in driver.finals:
        had, waits = len(driver.outputs["chat"]), len(waited)
        assert driver.step()
        assert len(driver.outputs["chat"]) == had + 1 or not had
        assert waited[waits:] in ([], [masks_module.PATIENCE])
    assert waited and masks_module.PATIENCE <= 0.010
    driver.run()
    assert driver.finals["chat"].error is None and len(driver.finals) == 1 + len(HOSTILE)


def test_where_all_wait_the_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is run for nothing."""
    grammar = Grammar("regex", "(ab|cd){10}")
    slow = SlowGrammar(monkeypatch, grammar)
    driver = make_driver("torch", patience=0.0, lone_patience=60.0)
    driver.add(ask("slow", grammar, seed=1))
    timer = threading.Timer(0.05, slow.go_on.set)
    timer.start()
    driver.run()
    timer.join()
    assert driver.outputs["slow"] and len(driver.steps) <= len(driver.outputs["slow"]) + 2


def test_a_grammar_that_fails_later_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler().compile(Grammar("regex", "[ab]{30}"))
    matcher = type(made.matcher())
    write = matcher.write_mask

    def fail(self: Any, target: Any) -> None:
        write(self, target)
        self._seen = getattr(self, "_seen", 0) + 1
        if self._seen == 4:
            self.failed = "a limit"

    driver = make_driver("torch")
    driver.add(ask("well", None, 20))
    monkeypatch.setattr(matcher, "write_mask", fail)
    driver.add(ask("ill", Grammar("regex", "[ab]{30}", param="structured_outputs.regex")))
    driver.run()
    error = driver.finals["ill"].error
    assert error is not None and isinstance(error.to_error(), InvalidRequestError)
    assert error.param == "structured_outputs.regex"
    assert driver.finals["well"].error is None
