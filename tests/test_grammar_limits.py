"""No grammar stops, slows or kills the engine: limits of compilations, places, tenants, faults of the system."""

import asyncio
import errno
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers
from batch_tools import eventually
from driver import has_ended
from hostile_grammars import hostile, lark, regex, rules, schema

import engine.models.demo
from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.errors import InvalidRequestError, QueueFullError
from engine.forms import Grammar
from engine.structured.compiler import CompiledGrammar, GrammarCache, GrammarCompiler, Refusals
from engine.structured.prover import WALK_TOKENS, OutOfTime, Proof, ProofFault, ProofLimits, Refusal, Verdict
from engine.structured.ready import Grammars, Prover, Slots

FOLDER = Path(engine.models.demo.__file__ or "").parent / "weights"
VOCAB, EOS = 2560, 2
TOKENIZER = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
LIMITS = ProofLimits(seconds=0.3, memory=160 * 2**20)
QUICK = 0.1
ENDLESS = hostile()["gbnf: new lines"]
STUCK = LIMITS.seconds * 1000


def make_compiler(cache: GrammarCache | None = None) -> GrammarCompiler:
    return GrammarCompiler(FOLDER, VOCAB, frozenset({EOS}), cache)


@functools.cache
def compiled(text: str) -> CompiledGrammar:
    return make_compiler().compile(regex(text))


def ask(grammar: Grammar, tenant: str = "", request_class: RequestClass = RequestClass.ONLINE) -> EngineRequest:
    sampling = SamplingParams(8, grammar=replace(grammar, tenant=tenant))
    return EngineRequest(f"{tenant} {grammar.text[:20]}", (1,), sampling, request_class, tenant=tenant)


def small(number: int) -> Grammar:
    return schema({"type": "object", "properties": {f"p{number}": {"type": "string"}}, "additionalProperties": False})


@asynccontextmanager
async def grammars_of(
    compiler: GrammarCompiler, prover: Any = None, limits: ProofLimits = LIMITS, **options: Any
) -> AsyncIterator[Grammars]:
    options = {"quick_seconds": QUICK, **options}
    grammars = Grammars(compiler, prover or Prover(compiler), limits, **options)
    try:
        yield grammars
    finally:
        await grammars.stop()


class CountedProver:
    """Gives verdicts by the text of a grammar, Proof where none is told, and notes the work in its order. While `shut`
    nothing ends."""

    def __init__(self, **verdicts: Verdict) -> None:
        self._verdicts = verdicts
        self.asked: list[tuple[str, str]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def prove(self, grammar: Grammar, limits: ProofLimits) -> Verdict:
        self.asked.append((grammar.tenant, grammar.text))
        await self.go_on.wait()
        return self._verdicts.get(grammar.text, Proof(0, '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', 2**20))

    async def stop(self) -> None: ...


# Hostile grammars


def follow(grammar: CompiledGrammar) -> str:
    """Return the limit that ends an answer; empty if the answer goes on."""
    matcher, mask = grammar.matcher(), np.zeros(-(-VOCAB // 32), dtype=np.int32)
    for _ in range(WALK_TOKENS):
        matcher.write_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        matcher.advance([int(allowed[-1])])
        matcher.forced()
        if matcher.failed:
            break
    return matcher.failed or ""


@pytest.mark.slow
async def test_every_hostile_grammar_ends_while_another_tenants_are_compiled() -> None:
    compiler = make_compiler(GrammarCache(2**28))
    answers: dict[str, str] = {}
    async with grammars_of(compiler) as grammars:

        async def send(name: str, grammar: Grammar) -> None:
            request = ask(grammar, "hostile", RequestClass.OFFLINE)
            try:
                await grammars.prepare([request])
            except InvalidRequestError as error:
                answers[name] = error.message
                return
            found = compiler.find(request.sampling.grammar)  # type: ignore[arg-type]
            answers[name] = "" if found is None else follow(found)

        cases = hostile()
        work = [asyncio.create_task(send(name, grammar)) for name, grammar in cases.items()]
        for number in range(10):
            await grammars.prepare([ask(small(number), "innocent")])
        assert len(answers) < len(cases), "the chats did not wait for the others"
        await asyncio.gather(*work)
    assert answers.keys() == cases.keys() and all(len(answer) < 600 for answer in answers.values())
    assert {
        name for name in ("lark: terminals doubled", "gbnf: new lines", "json: multipleOf a prime") if not answers[name]
    } == set()
    for name in ("json: of references", "lark: rules", "json: of properties"):
        assert "nested too deeply" in answers[name]
    for name in ("lark: terminals beside each other", "regex: groups of 100", "lark: repetitions"):
        assert answers[name], "neither the trial answer, which slow cores shorten, nor the answer met a limit"
    for name in ("json: a pattern that backtracks", "json: enum", "json: of nested roots"):
        assert not answers[name]


def fed(grammar: Grammar, texts: Sequence[str]) -> int:
    """Return the number of texts, each of one token, that the grammar takes before a limit ends it."""
    matcher, mask = make_compiler().compile(grammar).matcher(), np.zeros(-(-VOCAB // 32), dtype=np.int32)
    ids = {text: TOKENIZER.encode(text, add_special_tokens=False).ids for text in texts}
    for number, text in enumerate(texts):
        matcher.write_mask(mask)
        matcher.advance(ids[text])
        matcher.forced()
        if matcher.failed is not None:
            return number
    return len(texts)


def test_the_items_of_a_step_are_bounded() -> None:
    """An ambiguous grammar whose steps grow ends early: ten times as many items took 0.7 s in a step. Large schemas of
    clients do not reach the limit."""
    cyclic = [f'r{i}: "a" r{(i + 1) % 400} | "a" r{(i * 7 + 3) % 400} | "b"' for i in range(400)]
    assert fed(lark("\n".join(["start: r0", *cyclic])), ["a"] * 60) < 24
    kinds = [{"type": "object", "properties": {f"a{i}": {}}, "required": [f"a{i}"]} for i in range(1500)]
    assert fed(schema({"anyOf": kinds}), list('{"a1377":"x"}')) == len('{"a1377":"x"}')
    optional = schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}})
    text = '{"p0":5,"p31":5,"p299":5}'
    assert fed(optional, list(text)) == len(text)


@pytest.mark.slow
async def test_a_grammar_is_refused_for_the_limit_that_it_met() -> None:
    compiler = make_compiler()
    cases = [
        (hostile()["lark: terminals doubled"], ProofLimits(seconds=30.0, memory=64 * 2**20), "memory"),
        (ENDLESS, ProofLimits(seconds=0.2), "longer than 0.2 s"),
        (rules(2000, "start: r0\n", "r{}: r{}\n", 'r{}: "a"\n'), ProofLimits(stack=2**20), "nested too deeply"),
        (schema({"type": "string"}), ProofLimits(hold_seconds=0.0), "without delaying other requests"),
    ]
    for grammar, limits, reason in cases:
        async with grammars_of(compiler, limits=limits) as grammars:
            with pytest.raises(InvalidRequestError, match=reason):
                await grammars.prepare([ask(grammar)])


async def test_a_refusal_is_remembered_for_its_tenant() -> None:
    prover = CountedProver(bad=Refusal(0, "a reason"), slow=OutOfTime(0))
    async with grammars_of(make_compiler(), prover) as grammars:
        for text, tries in (("bad", 1), ("slow", 2)):
            for _ in range(3):
                with pytest.raises(InvalidRequestError, match=r"a reason|longer than") as caught:
                    await grammars.prepare([ask(replace(regex(text), param="guided_regex"), "a")])
                assert caught.value.param == "guided_regex"
            assert prover.asked == [("a", text)] * tries
            prover.asked.clear()
        with pytest.raises(InvalidRequestError):
            await grammars.prepare([ask(regex("bad"), "b")])
    assert prover.asked == [("b", "bad")]


def test_the_oldest_refusals_are_forgotten() -> None:
    refusals = Refusals(size=2)
    for text in "abc":
        refusals.add(regex(text), text)
    assert [refusals.find(regex(text)) for text in "abc"] == [None, "b", "c"]


async def test_a_lexer_at_its_limit_is_made_anew() -> None:
    compiler = make_compiler()
    async with grammars_of(compiler) as grammars:
        await grammars.prepare([ask(regex("[ab]*"))])
        first = compiler.find(regex("[ab]*"))
        assert first is not None
        first.spoiled = True
        assert compiler.find(regex("[ab]*")) is None
        await grammars.prepare([ask(regex("[ab]*"))])
        assert compiler.find(regex("[ab]*")) not in (None, first)


# Places


async def test_waiting_for_a_place_is_no_fault_of_a_grammar() -> None:
    prover = CountedProver()
    prover.go_on.clear()
    async with grammars_of(make_compiler(), prover, wait_seconds=0.01) as grammars:
        busy = [asyncio.create_task(grammars.prepare([ask(regex(text), "a")])) for text in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as caught:
            await grammars.prepare([ask(regex("c"), "b")])
        assert caught.value.retry_after > 0
        line = asyncio.create_task(grammars.prepare([ask(regex("c"), "b", RequestClass.OFFLINE)]))
        await asyncio.sleep(0.05)
        assert not line.done() and len(prover.asked) == 2
        prover.go_on.set()
        await asyncio.gather(*busy, line)


async def test_slow_grammars_leave_places_to_quick_ones() -> None:
    """Of the same tenant, too: a server without keys has one tenant."""
    compiler = make_compiler()
    async with grammars_of(compiler, limits=ProofLimits(seconds=STUCK)) as grammars:
        slow = [asyncio.create_task(grammars.prepare([ask(lark(ENDLESS.text + "\n" * i))])) for i in range(6)]
        for number in range(5):
            await grammars.prepare([ask(small(number))])
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        await grammars.prepare([ask(small(6))])


async def test_tenants_take_turns_and_chats_go_first() -> None:
    slots, order, opened = Slots(1), [], asyncio.Event()

    async def hold(tenant: str, request_class: RequestClass) -> None:
        async with slots.place(tenant, request_class, None):
            order.append(tenant)
            await opened.wait()

    line, chat = RequestClass.OFFLINE, RequestClass.ONLINE
    asked = [
        ("first", chat),
        *[("many", chat)] * 4,
        *[("lines", line)] * 2,
        ("few", chat),
        ("one", chat),
        ("few", chat),
    ]
    tasks = []
    for each in asked:
        tasks.append(asyncio.create_task(hold(*each)))
        await asyncio.sleep(0)
    tasks[3].cancel()
    opened.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["first", "many", "few", "one", "many", "few", "many", "lines", "lines"]
    async with slots.place("free", chat, 0.0):
        with pytest.raises(TimeoutError):
            async with slots.place("late", chat, 0.0):
                pass
    async with slots.place("free", chat, 1.0):
        pass


async def test_a_request_that_is_cancelled_ends_its_compilation() -> None:
    compiler = make_compiler()
    prover = Prover(compiler)
    async with grammars_of(compiler, prover, ProofLimits(seconds=STUCK), quick_seconds=STUCK) as grammars:
        for _ in range(4):  # more than there are places
            task = asyncio.create_task(grammars.prepare([ask(ENDLESS)]))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
        await grammars.prepare([ask(small(0))])
        await eventually(lambda: not children(prover.pid))


def children(pid: int | None) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Memory


def test_the_cache_is_bounded_by_bytes_and_the_largest_tenant_goes_first() -> None:
    cache = GrammarCache(max_bytes=10)
    for tenant, text, cost in (("small", "s", 2), ("large", "a", 3), ("large", "b", 3)):
        cache.keep(replace(regex(text), tenant=tenant), CompiledGrammar(compiled("a")._matcher, cost))
    assert cache.find(replace(regex("a"), tenant="large"))  # b is older from now on
    cache.keep(replace(regex("c"), tenant="third"), CompiledGrammar(compiled("a")._matcher, 4))
    found = {(tenant, text) for tenant in ("small", "large", "third") for text in "sabc"
             if cache.find(replace(regex(text), tenant=tenant))}  # fmt: skip
    assert found == {("small", "s"), ("large", "a"), ("third", "c")}


def test_no_tenant_finds_another_ones_grammar() -> None:
    cache = GrammarCache()
    kept = replace(regex("a"), tenant="a")
    cache.keep(kept, compiled("a"))
    assert cache.find(replace(kept, param="guided_regex")) is compiled("a")
    others = [replace(kept, tenant="b"), replace(kept, kind="json"), replace(kept, whitespace=""), regex("a")]
    assert not any(cache.find(each) for each in others)


async def test_grammars_of_running_requests_stay_and_count() -> None:
    compiler = make_compiler(GrammarCache(max_bytes=3 * 2**20))
    prover = CountedProver(large=Proof(0, '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', 2 * 2**20))
    async with grammars_of(compiler, prover) as grammars:
        running = [ask(regex(text)) for text in "ab"]
        for request in running:
            await grammars.prepare([request])
            grammars.hold(request)
        with pytest.raises(QueueFullError):
            await grammars.prepare([ask(regex("large"))])
        assert all(compiler.find(regex(text)) for text in "ab"), "evicted, but held"
        with pytest.raises(QueueFullError):
            grammars.hold(ask(regex("large")))
        grammars.release(running[0].request_id)
        await eventually(lambda: compiler.find(regex("a")) is None)  # the thread that compiled it ends
        await grammars.prepare([ask(regex("large"))])
        assert compiler.find(regex("a")) is None and compiler.find(regex("b")) is not None


# Faults of the system


async def test_the_death_of_the_prover_is_survived() -> None:
    compiler = make_compiler()
    prover = Prover(compiler)
    async with grammars_of(compiler, prover) as grammars:
        await grammars.prepare([ask(small(0))])
        first = prover.pid
        assert first is not None
        waiting = asyncio.create_task(grammars.prepare([ask(small(1))]))
        os.kill(first, signal.SIGKILL)
        await waiting
        await eventually(lambda: prover.pid != first)
        await grammars.prepare([ask(small(2))])
        assert prover.pid not in (None, first)


@pytest.mark.parametrize(("place", "fault"), [
    ("asyncio.create_subprocess_exec", OSError(errno.EMFILE, "too many")),
    ("asyncio.create_subprocess_exec", OSError(errno.ENOMEM, "no memory")),
    ("engine.structured.ready.start_thread", RuntimeError("can't start new thread")),
])  # fmt: skip
async def test_a_refusal_of_the_system_is_no_fault_of_the_grammar(
    place: str, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process for the prover, or no thread for the compiler."""
    prover, grammar = (None, small(0)) if "exec" in place else (CountedProver(), regex("a"))
    async with grammars_of(make_compiler(), prover) as grammars:
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=fault))
            with pytest.raises(QueueFullError):
                await grammars.prepare([ask(grammar)])
        await grammars.prepare([ask(grammar)])


async def test_a_fault_is_tried_again_but_not_for_ever() -> None:
    prover = CountedProver(text=ProofFault(0, "killed"))
    async with grammars_of(make_compiler(), prover) as grammars:
        for number in (2, 4):
            with pytest.raises(QueueFullError):
                await grammars.prepare([ask(regex("text"))])
            assert len(prover.asked) == number


async def test_the_prover_ends_with_its_parent_even_if_it_is_stopped() -> None:
    script = (
        "import asyncio, os, sys; sys.path[:0] = [sys.argv[1]]\n"
        "from pathlib import Path\n"
        "from engine.forms import Grammar\n"
        "from engine.structured.compiler import GrammarCompiler\n"
        "from engine.structured.prover import ProofLimits\n"
        "from engine.structured.ready import Prover\n"
        "async def main():\n"
        f"    prover = Prover(GrammarCompiler(Path(sys.argv[2]), {VOCAB}, frozenset({{{EOS}}})))\n"
        "    await prover.prove(Grammar('regex', 'a'), ProofLimits())\n"
        "    print(prover.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[1])

    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", script, root, str(FOLDER), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    await parent.wait()
    await eventually(lambda: has_ended(pid))
