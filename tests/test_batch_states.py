"""The states of a batch: the table against OpenAI's, and the store against a plain dictionary in random runs."""

import asyncio
import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
from batch_tools import open_store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from support.lazy import openai

from gateway.store.objects import (
    TERMINAL,
    TRANSITIONS,
    UNFINISHED,
    BatchJob,
    BatchStatus,
    FileInUse,
    FileObject,
    IllegalTransition,
    InputError,
    LineRef,
    LineResult,
    NoSuchFile,
    Page,
    Usage,
    check_transition,
    new_batch_id,
    new_file_id,
)

S = BatchStatus
NOW = 1_000_000


def test_the_table_is_the_contract() -> None:
    """As `docs` and OpenAI have it, spelled out once more: a change must be made twice."""
    legal = {
        ("validating", "failed"), ("validating", "in_progress"),
        ("validating", "cancelling"), ("validating", "expired"),
        ("in_progress", "finalizing"), ("in_progress", "cancelling"), ("in_progress", "expired"),
        ("finalizing", "completed"), ("finalizing", "failed"), ("finalizing", "in_progress"),
        ("cancelling", "cancelled"),
    }  # fmt: skip
    assert {(a.value, b.value) for a, after in TRANSITIONS.items() for b in after} == legal
    assert {s.value for s in S} == set(get_args(openai.types.Batch.model_fields["status"].annotation))
    assert {S.FAILED, S.COMPLETED, S.EXPIRED, S.CANCELLED} == TERMINAL and set(S) - TERMINAL == UNFINISHED


def test_only_what_is_in_the_table_is_legal() -> None:
    for before, after in itertools.product(S, S):
        with contextlib.nullcontext() if after in TRANSITIONS[before] else pytest.raises(IllegalTransition):
            check_transition(before, after)


def test_every_state_has_a_timestamp_of_the_api() -> None:
    assert {status for status in S if f"{status.value}_at" not in openai.types.Batch.model_fields} == {S.VALIDATING}


class BatchMachine(RuleBasedStateMachine):
    """Every operation of the store in any order, two tenants; the model is a dictionary per batch."""

    batches: Bundle[str] = Bundle("batches")
    files: Bundle[str] = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.store = open_store(Path(self.folder.name) / "s.db")
        self.model: dict[str, dict[str, Any]] = {}
        self.file_model: dict[str, str] = {}
        self.clock = NOW

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.store.close_now()
        self.loop.close()
        self.folder.cleanup()

    @rule(target=files, tenant=st.sampled_from("ab"))
    def upload(self, tenant: str) -> str:
        file = FileObject(new_file_id(), tenant, 1, NOW, "f", "batch")
        self.run(self.store.add_file(file))
        self.file_model[file.id] = tenant
        return file.id

    @rule(target=batches, file=files, tenant=st.sampled_from("ab"))
    def create(self, file: str, tenant: str) -> Any:
        batch = BatchJob(new_batch_id(), tenant, "e", file, "24h", NOW, NOW + 9)
        if self.file_model.get(file) != tenant:
            with pytest.raises(NoSuchFile):
                self.run(self.store.create_batch(batch))
            return multiple()
        self.run(self.store.create_batch(batch))
        self.model[batch.id] = {
            "tenant": tenant, "file": file, "status": S.VALIDATING,
            "lines": {}, "times": {}, "total": 0, "counts": None,
        }  # fmt: skip
        return batch.id

    @rule(file=files, tenant=st.sampled_from("ab"))
    def delete(self, file: str, tenant: str) -> None:
        used = any(b["file"] == file and b["status"] in UNFINISHED for b in self.model.values())
        if self.file_model.get(file) != tenant:
            assert not self.run(self.store.delete_file(tenant, file, NOW))
        elif used:
            with pytest.raises(FileInUse):
                self.run(self.store.delete_file(tenant, file, NOW))
        else:
            assert self.run(self.store.delete_file(tenant, file, NOW))
            del self.file_model[file]

    @rule(batch=batches, size=st.integers(1, 5))
    def validate(self, batch: str, size: int) -> None:
        known = self.model[batch]
        if known["total"] or known["status"] not in (S.VALIDATING, S.CANCELLING):
            return
        self.run(self.store.add_lines(batch, [LineRef(i, i + 1, i, 1) for i in range(size)], first=True))
        self.clock += 1
        self.run(self.store.start_batch(batch, size, "m", self.clock))
        known["total"], known["lines"] = size, dict.fromkeys(range(size))
        if known["status"] is S.VALIDATING:
            self._moved(batch, S.IN_PROGRESS)

    @rule(batch=batches, tenant=st.sampled_from("ab"))
    def cancel(self, batch: str, tenant: str) -> None:
        known = self.model[batch]
        self.clock += 1
        found = self.run(self.store.cancel_batch(tenant, batch, self.clock))
        if known["tenant"] != tenant:
            assert found is None
            return
        if S.CANCELLING in TRANSITIONS[known["status"]]:
            self._moved(batch, S.CANCELLING)
        assert found.status is known["status"]

    @rule(batch=batches, rank=st.integers(0, 4), succeeded=st.booleans())
    def result(self, batch: str, rank: int, succeeded: bool) -> None:
        known = self.model[batch]
        if known["counts"] is not None:
            return
        self.run(self.store.add_results(batch, [LineResult(rank, succeeded, 0, 1, Usage(1, 0, 1))]))
        if rank in known["lines"] and known["lines"][rank] is None:
            known["lines"][rank] = succeeded

    @rule(batch=batches, ranks=st.sets(st.integers(0, 4)))
    def run_again(self, batch: str, ranks: set[int]) -> None:
        known = self.model[batch]
        if known["status"] not in (S.IN_PROGRESS, S.FINALIZING):
            if S.IN_PROGRESS not in TRANSITIONS[known["status"]]:
                with pytest.raises(IllegalTransition):
                    self.run(self.store.run_again(batch, sorted(ranks), None))
            return
        found = self.run(self.store.run_again(batch, sorted(ranks), Usage(9)))
        known["lines"] |= dict.fromkeys(ranks & known["lines"].keys())
        known["status"] = S.IN_PROGRESS
        known["times"].pop("finalizing_at", None)
        assert found.usage == Usage(9)

    @rule(batch=batches, status=st.sampled_from([S.FAILED, S.FINALIZING, S.IN_PROGRESS, S.VALIDATING]))
    def move(self, batch: str, status: BatchStatus) -> None:
        known = self.model[batch]
        if status is S.IN_PROGRESS and not known["total"]:
            return
        self.clock += 1
        errors = (InputError("c", "m", 1),) if status is S.FAILED else ()
        is_early = status is S.FINALIZING and None in known["lines"].values()
        if status in TRANSITIONS[known["status"]] and not is_early:
            self.run(self.store.move_batch(batch, status, self.clock, errors))
            self._moved(batch, status)
            if status is S.FAILED:  # whenever it fails, it ends without files and counts
                known["total"], known["counts"], known["lines"] = 0, (0, 0), {}
        else:
            with pytest.raises(IllegalTransition):
                self.run(self.store.move_batch(batch, status, self.clock, errors))

    @rule(batch=batches, status=st.sampled_from([S.COMPLETED, S.EXPIRED, S.CANCELLED, S.IN_PROGRESS]))
    def finish(self, batch: str, status: BatchStatus) -> None:
        known = self.model[batch]
        if status is S.IN_PROGRESS and known["status"] is S.VALIDATING:
            return
        self.clock += 1
        output = FileObject(new_file_id(), known["tenant"], 1, NOW, "o", "batch_output")
        if status not in TRANSITIONS[known["status"]]:
            with pytest.raises(IllegalTransition):
                self.run(self.store.finish_batch(batch, status, self.clock, output, None))
            assert self.run(self.store.get_file(known["tenant"], output.id, NOW)) is None
            return
        self.run(self.store.finish_batch(batch, status, self.clock, output, None))
        self.file_model[output.id] = known["tenant"]
        values = list(known["lines"].values())
        known["counts"], known["lines"] = (values.count(True), values.count(False)), {}
        self._moved(batch, status)

    @rule()
    def restart(self) -> None:
        self.store.close_now()
        self.store = open_store(Path(self.folder.name) / "s.db")

    def _moved(self, batch: str, status: BatchStatus) -> None:
        self.model[batch]["status"] = status
        self.model[batch]["times"][f"{status.value}_at"] = self.clock

    @invariant()
    def agrees(self) -> None:
        for batch_id, known in self.model.items():
            found = self.run(self.store.load_batch(batch_id))
            lines = known["lines"].values()
            counts = known["counts"] or (sum(v is True for v in lines), sum(v is False for v in lines))
            assert (found.status, found.times, found.total) == (known["status"], known["times"], known["total"])
            assert (found.completed, found.failed) == counts
            assert found.completed + found.failed <= found.total
            pending = {ref.rank for ref in self.run(self.store.lines_at(batch_id, range(99)))}
            assert pending == {rank for rank, value in known["lines"].items() if value is None}
        unfinished = {b.id for b in self.run(self.store.unfinished_batches())}
        assert unfinished == {b for b, known in self.model.items() if known["status"] in UNFINISHED}
        for tenant in "ab":
            seen, _ = self.run(self.store.list_batches(tenant, Page(100)))
            assert {b.id for b in seen} == {b for b, known in self.model.items() if known["tenant"] == tenant}
            files, _ = self.run(self.store.list_files(tenant, Page(100), None, NOW))
            assert {f.id for f in files} == {f for f, owner in self.file_model.items() if owner == tenant}


TestBatchMachine = pytest.mark.slow(BatchMachine.TestCase)
TestBatchMachine.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
