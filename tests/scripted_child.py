"""An engine process without torch that dies, hangs and lies where it is told to: the checking fake runner in the real
child.

    python -P scripted_child.py FOLDER FAULTS DESCRIPTOR

FAULTS: `POINT:NUMBER` or `POINT:NUMBER:FIRST-LAST`, comma-separated; the fault is met when its point is passed for the
NUMBER-th time, warm-up not counted, in each of the processes FIRST to LAST (1-1 if not given). FOLDER counts them. The
points: `nomem` (no memory for the model), `ready` (dies before its first step), `frame` (dies in the middle of a
message with outputs), `before`, `after` (dies before or after a step was computed), `hang` (a step never ends),
`spin` (and computes), `slow` (a step computes for long), `short`, `token` (a step's result is wrong), `oom` (a step
raises MemoryError), `device` (from this step on all fail, and the device says why), `loop` (the engine's loop
breaks), `block` (the event loop stands still), `learner`, `planner` (what learns from steps, or plans offline work,
raises).
Of `poison` NUMBER is a token: the process dies in each step that computes the fourth token of an answer to a prompt
with it; and it dies whenever it prepares the grammar `POISON`. The grammar `ENDLESS` is prepared until the request is
cancelled; then the file `cancelled` lies beside FOLDER.
"""

import asyncio
import errno
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import socket  # noqa: E402

from fakes.staged import LAYER_BYTES, LAYERS, UNIT_LAYER_BYTES, StagedFake  # noqa: E402

from engine.api import EngineRequest, SamplingParams, TokenLogprobs  # noqa: E402
from engine.client import DroppableLayers, EngineInfo  # noqa: E402
from engine.colocation.keeper import Colocation  # noqa: E402
from engine.config import EngineConfig, scheduler_settings  # noqa: E402
from engine.core import EngineCore  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.errors import ConfigError  # noqa: E402
from engine.loop.planner import PlanOffline  # noqa: E402
from engine.loop.watchdog import StepLimits  # noqa: E402
from engine.process import child, frames  # noqa: E402
from engine.process.life import Connection  # noqa: E402
from engine.scheduling.offline import OfflinePlan  # noqa: E402
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput  # noqa: E402

POISON, ENDLESS = "poison", "endless"
VOCAB = 405
CONTEXT = 512
EOS = 402
HUNG_SECONDS = 0.5
SLOW_SECONDS = 2.0 * HUNG_SECONDS
"""Of a step that takes longer than one may sleep, and is not hung: a step may compute for four times as long."""
STEP_SECONDS = 0.002
"""On the fastest machine tests find answers in progress."""


def _compute(seconds: float) -> None:
    """Take a core, and get on for so long by its own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Faults:
    """When to do what; `passes` a point."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, number = folder, len(list(folder.iterdir())) + 1
        (folder / str(number)).touch()
        self._at: dict[str, int] = {}
        for fault in filter(None, script.split(",")):
            point, at, *processes = fault.split(":")
            first, _, last = (processes[0] if processes else "1-1").partition("-")
            if int(first) <= number <= int(last):
                self._at[point] = int(at)
        self._passed: Counter[str] = Counter()
        self.armed = False

    def passes(self, point: str) -> bool:
        """Whether the fault is met here and now."""
        if not self.armed:
            return False
        self._passed[point] += 1
        return self._passed[point] == self._at.get(point)

    def is_meant(self, point: str) -> bool:
        """Whether this process meets the fault at all."""
        return point in self._at

    def is_poison(self, tokens: Sequence[int]) -> bool:
        return self._at.get("poison") in tokens

    def dies(self, point: str) -> None:
        if self.passes(point):
            os.kill(os.getpid(), signal.SIGKILL)


class ScriptedRunner(StagedFake):
    """Its samples depend on everything that a sampler may look at: prefix, seed, position, the tokens given."""

    def __init__(self, faults: Faults, num_units: int) -> None:
        super().__init__(num_units=num_units, block_size=4, vocab_size=VOCAB)
        self._faults = faults
        self._device_is_lost = False

    def lost(self) -> str | None:
        return "an illegal memory access was encountered" if self._device_is_lost else None

    def choose(self, digest: bytes, outputs: Sequence[int], sampling: SamplingParams) -> int:
        facts = (
            sampling.seed if sampling.temperature else 0,
            sampling.repetition_penalty,
            len(outputs),
            sorted(outputs),
        )
        token = int.from_bytes(blake2b(digest + repr(facts).encode(), digest_size=4).digest(), "little") % 256
        enders = sorted(sampling.stop_token_ids)
        if enders and token % 12 == 0 and len(outputs) + 1 >= sampling.min_tokens:
            return enders[0]
        return token

    def prepare_restore(self, num_units: int) -> None:
        super().prepare_restore(num_units)
        (self._faults.folder / "prepared").touch()

    def launch(self, output: SchedulerOutput) -> Collect:
        return partial(self._step, output)

    def _step(self, output: SchedulerOutput) -> ModelRunnerOutput:
        faults = self._faults
        faults.dies("before")
        self._die_of_poison(output)
        if faults.passes("oom"):
            raise MemoryError
        self._device_is_lost = self._device_is_lost or faults.passes("device")
        if self._device_is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        if faults.passes("hang"):
            time.sleep(3600.0)
        if faults.passes("slow"):
            _compute(SLOW_SECONDS)
        if faults.passes("spin"):
            _compute(math.inf)
        result = super().launch(output)()
        time.sleep(STEP_SECONDS)
        rows = [self._rows[chunk.row] for chunk in output.chunks if chunk.sample]
        logprobs = [
            None if row.sampling.logprobs is None else TokenLogprobs(-token / VOCAB, ((token, -token / VOCAB),))
            for row, token in zip(rows, result.token_ids, strict=True)
        ]
        faults.dies("after")
        if result.token_ids and faults.passes("short"):
            return replace(result, token_ids=result.token_ids[:-1])
        if result.token_ids and faults.passes("token"):
            return replace(result, token_ids=[VOCAB, *result.token_ids[1:]])
        return replace(result, logprobs=logprobs if any(logprobs) else None)

    def _die_of_poison(self, output: SchedulerOutput) -> None:
        known = {new.row: (new.token_ids, new.num_prompt_tokens) for new in output.new_requests}
        for row, start, length, _ in output.chunks:
            tokens, num_prompt = known.get(row) or (self._rows[row].token_ids, self._rows[row].num_prompt_tokens)
            if start + length >= num_prompt + 3 and self._faults.is_poison(tokens[:num_prompt]):
                os.kill(os.getpid(), signal.SIGKILL)


class ScriptedGrammars:
    """Takes the place of `Grammars`: every grammar is allowed, one kills the process, one is never ready."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def prepare(self, requests: Sequence[EngineRequest]) -> None:
        await asyncio.sleep(0.01)
        texts = {each.sampling.grammar.text for each in requests if each.sampling.grammar is not None}
        if POISON in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        if ENDLESS in texts:
            try:
                await asyncio.Event().wait()
            finally:
                (self._folder.parent / "cancelled").touch()

    def hold(self, request: EngineRequest) -> None: ...

    def release(self, request_id: str) -> None: ...

    async def stop(self) -> None: ...


class ScriptedKeeper:
    """In the place of what learns from steps."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def on_step(self, *_: Any) -> None:
        if self._faults.passes("learner"):
            raise ZeroDivisionError

    def on_other(self, *_: Any) -> None:
        pass

    on_arrival = on_end = on_refused = on_other

    def stats(self, _now: float) -> None:
        return None


def _plan(plan_offline: PlanOffline, faults: Faults, now: float) -> Generator[None, None, OfflinePlan]:
    if faults.passes("planner"):
        raise ZeroDivisionError
    return (yield from plan_offline(now))


class FaultyConnection(Connection[Any]):
    """Dies with half a message sent."""

    faults: Faults

    def send(self, message: frames.Message) -> None:
        if isinstance(message, frames.Outputs) and self.faults.passes("frame"):
            assert self._transport is not None
            data = frames.encode(message)
            os.write(self._transport.get_extra_info("socket").fileno(), data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().send(message)
        self.faults.armed = self.faults.armed or isinstance(message, frames.Started)


def prepare(launch: frames.Launch) -> frames.Planned:
    return frames.Planned("", ()) if launch.spare else _plan_model(launch.config)


def _plan_model(config: EngineConfig) -> frames.Planned:
    if config.model and (Path(config.model) / "broken").exists():
        raise ConfigError("the model is broken")
    return frames.Planned(config.model, ())


def build(faults: Faults, config: EngineConfig, planned: child.Plan) -> Engine:
    planned(_plan_model(config))
    if faults.is_meant("nomem"):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    num_units = 2 * (config.num_gpu_blocks_override or 200)
    settings = scheduler_settings(config, num_units=num_units, max_model_len=CONTEXT)
    settings = replace(settings, block_size=4, unit_bytes=1, pipeline_depth=1, ahead_seconds=0.0)  # as on a CPU
    core = EngineCore(settings)
    info = EngineInfo(CONTEXT, VOCAB, frozenset({EOS}), "scripted", "none", "none", 0, 800, adapters=("sql",))
    info = replace(info, droppable=DroppableLayers(LAYERS, LAYER_BYTES, UNIT_LAYER_BYTES, num_units))
    runner = ScriptedRunner(faults, num_units)
    grammars: Any = ScriptedGrammars(faults.folder)
    limits = StepLimits(floor=HUNG_SECONDS, unknown=HUNG_SECONDS)
    keeper: Any = ScriptedKeeper(faults)
    for name in ("on_step", "on_arrival", "on_end", "on_refused"):
        setattr(Colocation, name, getattr(ScriptedKeeper, name))
    core.plan_offline = partial(_plan, core.plan_offline, faults)  # type: ignore[method-assign]
    engine = Engine(
        core, runner, info, step_limits=limits, device_lost=runner.lost, grammars=grammars, colocation=keeper,
    )  # fmt: skip
    update = core.update

    def watched(*args: Any) -> Any:
        if faults.passes("loop"):
            raise ZeroDivisionError
        if faults.passes("block"):
            time.sleep(3600.0)
        return update(*args)

    core.update = watched  # type: ignore[method-assign]
    if faults.is_meant("ready"):
        os.kill(os.getpid(), signal.SIGKILL)
    return engine


def main(folder: str, script: str, descriptor: str) -> None:
    faults = FaultyConnection.faults = Faults(Path(folder), script)
    child.Connection = FaultyConnection  # type: ignore[misc]
    child.run(socket.socket(fileno=int(descriptor)), partial(build, faults), prepare)


if __name__ == "__main__":
    main(*sys.argv[1:])
