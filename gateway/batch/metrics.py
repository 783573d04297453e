"""Batch jobs in /metrics: how many are in which state, how many lines have ended, whether the disk takes data."""

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import nsmallest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.batch.causes import Cause
from gateway.batch.forecast import Outlook
from gateway.batch.tenants import Ownership
from gateway.batch.worker import BatchWorker
from gateway.store.states import UNFINISHED

MAX_SHOWN = 100
"""Batches of which each has series of its own: those that will be done first."""


class BatchCollector(Collector):
    """Figures of one worker, read at each scrape. The worker does not hold batches in terminal states, so there is no
    figure of these."""

    def __init__(self, worker: BatchWorker, ownership: Ownership) -> None:
        self._worker = worker
        self._ownership = ownership

    def collect(self) -> Iterator[Metric]:
        states = Counter(self._worker.states.values())
        jobs = GaugeMetricFamily("tidemill_batch_jobs", "Batches that have not ended, by state.", labels=["state"])
        for state in sorted(UNFINISHED):
            jobs.add_metric([state.value], states[state])
        yield jobs
        forecast = self._worker.forecast
        outlooks = list(forecast.outlooks.values())
        at_risk = sum(outlook.at_risk for outlook in outlooks)
        text = "Batches that may miss their completion window."
        yield GaugeMetricFamily("tidemill_batch_jobs_at_risk", text, value=at_risk)
        text = "Estimate of the prompt and output tokens that batches in progress have left."
        yield GaugeMetricFamily("tidemill_batch_remaining_tokens", text, value=sum(o.tokens for o in outlooks))
        text = "Prompt and output tokens of batch lines that ended, per second of batch work, lately."
        yield GaugeMetricFamily("tidemill_batch_tokens_per_second", text, value=forecast.pace.tokens_per_second)
        text = "When the last batch in progress is expected to end, Unix time (0: none is, or nobody can tell)."
        end = max((outlook.eta or 0.0 for outlook in outlooks), default=0.0)
        yield GaugeMetricFamily("tidemill_batch_eta_timestamp_seconds", text, value=end)
        yield from _each(forecast.outlooks)
        lines = CounterMetricFamily("tidemill_batch_lines", "Batch lines that ended, by outcome.", labels=["outcome"])
        for succeeded, outcome in ((True, "completed"), (False, "failed")):
            lines.add_metric([outcome], self._worker.lines_ended[succeeded])
        yield lines
        text = "Failures of batch lines after which the line runs again, by cause."
        retries = CounterMetricFamily("tidemill_batch_line_retries", text, labels=["cause"])
        for cause in (Cause.BUSY, Cause.SYSTEM, Cause.UNKNOWN):
            retries.add_metric([cause.value], self._worker.feeder.retries[cause])
        yield retries
        text = "Batches that pause because their lines fail with the same unexpected error."
        yield GaugeMetricFamily("tidemill_batch_jobs_pausing", text, value=self._worker.feeder.num_paused)
        text = "1 while the disk takes no data or the state folder is lost, and batch jobs pause."
        yield GaugeMetricFamily("tidemill_storage_fault", text, value=int(self._worker.storage_fault() is not None))
        text = "Tenants that own files or unfinished batches but have no key, as of the start or the last SIGHUP."
        yield GaugeMetricFamily("tidemill_unreachable_tenants", text, value=len(self._ownership.unreachable))


def _each(outlooks: Mapping[str, Outlook]) -> Iterator[Metric]:
    """Who may read /metrics sees ids; what a batch holds takes the key of its tenant."""
    text = "When a batch in progress is expected to end, Unix time, by its id; the first hundred to end."
    etas = GaugeMetricFamily("tidemill_batch_job_eta_timestamp_seconds", text, labels=["batch"])
    known = ((outlook.eta, batch) for batch, outlook in outlooks.items() if outlook.eta is not None)
    for eta, batch in nsmallest(MAX_SHOWN, known):
        etas.add_metric([batch], eta)
    yield etas
