"""Order in which the lines of a job are fed.

Lines are ranked by prefix. Runs of neighbours, which share prefixes, follow each other in golden-ratio steps through
the ranks. So at any time the finished lines are a fair sample of the batch: long prompts and long answers mix in the
engine, and lengths and pace measured so far hold for the rest. The last lines are ordered by expected length, longest
first, so that no long answer starts at the end and runs alone. A batch that fits into the window is fed whole before
any length is known. (With all lengths known, 250 lines on 128 rows would end 3 to 7 % earlier.)
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gateway.batch.feed import Job, Window
from gateway.batch.lengths import AnswerLengths
from gateway.batch.results import in_thread
from gateway.generate.threads import at_half_speed
from gateway.store.objects import LineRef
from gateway.store.row_store import RowStore

if TYPE_CHECKING:
    from gateway.batch.cluster import Membership

NUM_RUNS = 128
"""Least number of runs of a batch, as far as runs have RUN_LINES lines."""
RUN_LINES = (8, 64)
"""Minimum and maximum number of lines in a run."""
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
MAX_ASKED = 4096
"""Maximum number of ranks in one query."""
LEAST_STRETCH = 1.5
"""Ratio of the longest to the mean expected answer from which the order of the last lines matters."""
PROBE_LINES = 8
"""Lines in a turn of a batch that pauses for a common cause: half have failed before, half have not run yet."""


class Runs:
    """Runs of ranks of a batch of `num_lines` lines in feeding order; a single run if `in_order`."""

    def __init__(self, num_lines: int, *, in_order: bool) -> None:
        self._num_lines = num_lines
        least, most = RUN_LINES
        self.size = max(1, num_lines) if in_order else min(max(num_lines // NUM_RUNS, least), most)
        self.count = -(-num_lines // self.size)
        self._step = max(1, round(GOLDEN * self.count))
        while math.gcd(self._step, self.count) > 1:
            self._step += 1
        self._inverse = pow(self._step, -1, self.count) if self.count > 1 else 0

    def ranks(self, index: int) -> range:
        """Return the ranks of a run by its index in feeding order."""
        start = index * self._step % self.count * self.size
        return range(start, min(start + self.size, self._num_lines))

    def index(self, rank: int) -> int:
        """Return the index of the run with a rank."""
        return rank // self.size * self._inverse % self.count


class LineOrder:
    """Choose the next lines of jobs. `tail_lines`: maximum number of last lines that are ordered by expected length
    (0: all lines run by rank); `cluster`: leases of runs."""

    def __init__(self, store: RowStore, window: Window, tail_lines: int, cluster: "Membership") -> None:
        self._store = store
        self._window = window
        self._tail_lines = tail_lines
        self._cluster = cluster

    async def take(self, job: Job, most: int) -> list[LineRef]:
        """Take up to `most` lines that fit into the window."""
        probes = job.trials.pauses > 0
        if job.leases is not None:  # lines beyond the window are for other servers
            most = max(1, min(most, self._window.max_lines - self._window.lines))
        most = PROBE_LINES if probes else most
        old = list(islice(job.retry, most // 2 if probes else most))
        new = await self._new(job, most - len(old)) if probes or not old else []
        control = job.trials.control if probes and not new else None
        refs = self._window.fitting([*old, *new, *([] if control is None else [control])])
        for _ in range(min(len(refs), len(old))):
            job.retry.popleft()
        del job.ahead[: min(len(new), len(refs) - len(old))]
        return refs

    async def _new(self, job: Job, most: int) -> list[LineRef]:
        """Return lines that have not run yet. Their ranks are the first ones in `job.ahead`."""
        await self._order_tail(job)
        asked = most
        while await self._look_ahead(job, asked):
            ranks = job.ahead[:asked]
            found = await self._store.lines_at(job.batch.id, ranks)
            job.ahead[:asked] = [ref.rank for ref in found]
            if job.leases is not None:
                job.leases.lines_ended(set(ranks).difference(job.ahead[: len(found)]))
            if found:
                return found[:most]
            asked = min(2 * asked, MAX_ASKED)  # a restarted job: most lines have results
        return []

    async def _look_ahead(self, job: Job, count: int) -> bool:
        """Extend `job.ahead` to at least `count` ranks by further runs; return whether it has any."""
        runs = self._runs(job)
        while len(job.ahead) < count and not job.exhausted:
            wanted = -(-(count - len(job.ahead)) // runs.size)
            if job.leases is None:
                found = list(range(job.next_run, min(job.next_run + wanted, runs.count)))
                job.next_run += len(found)
                job.exhausted = job.next_run >= runs.count
            else:
                found = await self._cluster.take_runs(job.batch, job.leases, wanted)
                job.exhausted = len(found) < wanted
            for index in found:
                job.ahead += runs.ranks(index)
        return bool(job.ahead)

    def _runs(self, job: Job) -> Runs:
        return Runs(job.batch.total, in_order=not self._tail_lines)

    async def _order_tail(self, job: Job) -> None:
        """Order the last lines of a job by expected length; again when twice as many lines have finished."""
        answers, unfed = job.answers, job.batch.remaining - job.num_held - len(job.retry)
        if not answers.is_known or answers.ended < 2 * job.ordered or unfed <= 0:
            return
        if job.leases is not None and not job.exhausted:
            return
        if not job.ordered:
            most = min(self._tail_lines, round(answers.stretch * self._window.max_lines))
            if answers.stretch < LEAST_STRETCH or unfed > most:
                return
        runs, refs = self._runs(job), await self._store.lines_at(job.batch.id, job.ahead)
        first = job.next_run if job.leases is None else runs.count
        rest = (rank for index in range(first, runs.count) for rank in runs.ranks(index))
        while ranks := list(islice(rest, MAX_ASKED)):
            refs += await self._store.lines_at(job.batch.id, ranks)
        job.ahead = await _longest_first(refs, answers)
        job.next_run, job.exhausted, job.ordered = runs.count, True, answers.ended


async def _longest_first(refs: Sequence[LineRef], answers: AnswerLengths) -> list[int]:
    """Return the ranks of lines by expected length; lines of about the same length stay together by rank, because
    they may share prefixes."""
    expected = answers.predictor()

    def order() -> list[int]:
        return [rank for _, rank in sorted((-round(2.0 * math.log2(1.0 + expected(r))), r.rank) for r in refs)]

    return await in_thread(lambda: at_half_speed(order))
