"""The Prometheus metrics of a server."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmlong.model.state_size import state_size
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.session_store import SessionStore

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class HttpMetrics:
    """The metrics of the answers of a server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.responses = Counter(
            "lmlong_http_responses", "Answers by path and status.", ["path", "status"], registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Metrics(HttpMetrics):
    """The metrics of one server and its scheduler."""

    def __init__(self, scheduler: Scheduler, store: SessionStore):
        super().__init__()
        self._scheduler, self._store = scheduler, store
        self._state = state_size(scheduler.trained.model)
        self.first_token = Histogram(
            "lmlong_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.whole = Histogram(
            "lmlong_request_seconds",
            "From the arrival of a request to its last token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """Iterate over the metrics of the scheduler."""
        counts, state, states = self._scheduler.counts, self._state, self._scheduler.states
        gauges = {
            "lmlong_queued_texts": ("Texts that wait for a row.", self._scheduler.queued),
            "lmlong_active_rows": ("Texts that are read or written.", self._scheduler.active),
            "lmlong_rows": ("Texts that may be written at a time.", self._scheduler.rows),
            "lmlong_sessions": ("Sessions.", self._store.folder.count),
            "lmlong_session_file_bytes": ("Files of sessions, and uploaded states.", self._store.folder.bytes),
            "lmlong_state_memory_bytes": ("States in memory.", states.bytes),
            "lmlong_state_disk_bytes": ("States on disk.", states.disk_bytes),
            "lmlong_row_state_bytes": ("State of a row when its text begins.", state.empty.bytes),
            "lmlong_row_state_bytes_per_token": ("What each token adds to it.", state.per_token.bytes),
        }
        counters = {
            "lmlong_texts": ("Texts that were asked for.", counts.requests),
            "lmlong_prompt_tokens": ("Tokens of prompts.", counts.prompt_tokens),
            "lmlong_cached_tokens": ("Tokens of prompts that were read before.", counts.cached_tokens),
            "lmlong_written_tokens": ("Tokens that were written.", counts.written_tokens),
            "lmlong_steps": ("Steps of all rows together.", counts.steps),
            "lmlong_failed_texts": ("Texts that ended by an error.", counts.failed),
            "lmlong_cancelled_texts": ("Texts whose clients went away.", counts.cancelled),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(name, help, value)
        for name, (help, value) in counters.items():
            yield CounterMetricFamily(name, help, value)
