"""Prometheus metrics of batches, their lines and the state folder."""

from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.batch.failures import Cause
from gateway.batch.notices import OUTCOMES, Notifier
from gateway.batch.tenants import TenantExchange
from gateway.batch.worker import BatchWorker
from gateway.store.objects import UNFINISHED
from gateway.telemetry.engine_metrics import gauge, gauges, totals

MAX_SHOWN = 100
"""Maximum number of batches with their own series: those that are expected to end first."""


class BatchCollector(Collector):
    """Metrics of one worker, read at each scrape. Batches in terminal states are not counted."""

    def __init__(self, worker: BatchWorker, tenants: TenantExchange, notifier: Notifier) -> None:
        self._worker = worker
        self._tenants = tenants
        self._notifier = notifier

    def collect(self) -> Iterator[Metric]:
        worker, forecast = self._worker, self._worker.forecast
        states = Counter(worker.states.values())
        jobs = {state.value: states[state] for state in sorted(UNFINISHED)}
        yield gauges("batch_jobs", "Batches that have not ended, by state.", "state", jobs)
        outlooks = list(forecast.outlooks.values())
        at_risk = sum(outlook.at_risk for outlook in outlooks)
        yield gauge("batch_jobs_at_risk", "Batches that may miss their completion window.", at_risk)
        text = "Factor on the present pace at which all batches would end within their windows (above 1: add servers)."
        yield gauge("batch_pace_needed", text, max((outlook.pace for outlook in outlooks), default=0.0))
        text = "Estimated prompt and output tokens left in batches in progress."
        yield gauge("batch_remaining_tokens", text, sum(outlook.tokens for outlook in outlooks))
        text = "Recent prompt and output tokens of finished batch lines per second of batch work."
        yield gauge("batch_tokens_per_second", text, forecast.pace.tokens_per_second)
        text = "Expected end of the last batch in progress, in Unix time (0: none in progress, or unknown)."
        ends = [outlook.eta for outlook in outlooks if outlook.eta is not None]
        bounds = {
            "earliest": max((low for low, _ in ends), default=0.0),
            "latest": max((high for _, high in ends), default=0.0),
        }
        yield gauges("batch_eta_timestamp_seconds", text, "bound", bounds)
        # Batch ids are not secret: reading a batch needs its tenant's key.
        text = "Latest expected end of a batch in progress in Unix time, for the first hundred to end."
        known = ((outlook.eta[1], batch) for batch, outlook in forecast.outlooks.items() if outlook.eta is not None)
        etas = {batch: eta for eta, batch in nsmallest(MAX_SHOWN, known)}
        yield gauges("batch_job_eta_timestamp_seconds", text, "batch", etas)
        lines = {"completed": worker.lines_ended[True], "failed": worker.lines_ended[False]}
        yield totals("batch_lines", "Batch lines that ended, by outcome.", "outcome", lines)
        text = "Failures of batch lines after which the line runs again, by cause."
        retries = {cause.value: worker.feeder.retries[cause] for cause in (Cause.BUSY, Cause.SYSTEM, Cause.UNKNOWN)}
        yield totals("batch_line_retries", text, "cause", retries)
        text = "Batches that pause because their lines fail with the same unexpected error."
        yield gauge("batch_jobs_pausing", text, worker.feeder.num_paused)
        reports = {outcome: self._notifier.attempts[outcome] for outcome in OUTCOMES}
        yield totals("batch_reports", "Attempts to report the end of a batch, by outcome.", "outcome", reports)
        text = "1 while the state folder cannot be written and batches pause, else 0."
        yield gauge("storage_fault", text, int(worker.storage_fault() is not None))
        text = "Tenants with files or unfinished batches but without a key, as of the start or the last SIGHUP."
        yield gauge("unreachable_tenants", text, len(self._tenants.unreachable))
