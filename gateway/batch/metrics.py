"""Prometheus metrics of batches, their lines and the state folder."""

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
"""Maximum number of batches with their own series: those that are expected to end first."""


class BatchCollector(Collector):
    """Metrics of one worker, read at each scrape. Batches in terminal states are not counted."""

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
        text = "Estimated prompt and output tokens left in batches in progress."
        yield GaugeMetricFamily("tidemill_batch_remaining_tokens", text, value=sum(o.tokens for o in outlooks))
        text = "Recent prompt and output tokens of finished batch lines per second of batch work."
        yield GaugeMetricFamily("tidemill_batch_tokens_per_second", text, value=forecast.pace.tokens_per_second)
        text = "Expected end of the last batch in progress, in Unix time (0: none in progress, or unknown)."
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
        text = "1 while the state folder cannot be written and batches pause, else 0."
        yield GaugeMetricFamily("tidemill_storage_fault", text, value=int(self._worker.storage_fault() is not None))
        text = "Tenants with files or unfinished batches but without a key, as of the start or the last SIGHUP."
        yield GaugeMetricFamily("tidemill_unreachable_tenants", text, value=len(self._ownership.unreachable))


def _each(outlooks: Mapping[str, Outlook]) -> Iterator[Metric]:
    """Yield the expected end of each batch. Batch ids are not secret: reading a batch needs its tenant's key."""
    text = "Expected end of a batch in progress in Unix time, for the first hundred to end."
    etas = GaugeMetricFamily("tidemill_batch_job_eta_timestamp_seconds", text, labels=["batch"])
    known = ((outlook.eta, batch) for batch, outlook in outlooks.items() if outlook.eta is not None)
    for eta, batch in nsmallest(MAX_SHOWN, known):
        etas.add_metric([batch], eta)
    yield etas
