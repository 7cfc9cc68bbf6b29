"""What the fleet's workers are doing, for Prometheus: an HTTP endpoint beside the driver.

Every scrape reads the status board as it is then; nothing is counted twice. Owned by `Fleet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from paceline.errors import ConfigError
from paceline.fleet.status import StatusBoard, WorkerStatus

LOCAL_HOST = "127.0.0.1"
"""Where the metrics are served unless another address is given."""

UP = frozenset({"up", "drafting", "racing", "training"})

GAUGES: dict[str, tuple[str, Callable[[WorkerStatus], float]]] = {
    "up": ("1 while the worker takes chunks", lambda status: float(status.state in UP)),
    "running_chunks": ("Chunks that the worker has", lambda status: status.num_running),
    "waiting_chunks": ("Of these, how many wait in its engine", lambda status: status.num_waiting),
    "kv_use": ("Share of the KV blocks in use", lambda status: status.kv_share),
    "acceptance_length": ("Tokens per request and step so far", lambda status: status.acceptance_length),
}
COUNTERS: dict[str, tuple[str, Callable[[WorkerStatus], float]]] = {
    "generated_tokens": ("Tokens generated", lambda status: status.num_tokens),
    "accepted_tokens": ("Draft tokens accepted", lambda status: status.num_accepted),
    "model_tokens": ("Of these, drafted by the model drafter", lambda status: status.num_model),
    "adopted_tokens": (
        "Likewise, taken over from the other worker of a race",
        lambda status: status.num_adopted,
    ),
    "wasted_tokens": ("Tokens drafted ahead for it in vain", lambda status: status.num_wasted),
    "wait_seconds": ("Time that steps took for drafts made elsewhere", lambda status: status.wait_s),
    "races": ("Copies of responses of others that it generated", lambda status: status.num_races),
    "races_won": ("Of these, those that ended first", lambda status: status.num_won),
    "branches": ("Likely corrections prepared for it", lambda status: status.num_branches),
    "branch_hits": ("Rejections whose correction was prepared", lambda status: status.num_branch_hits),
    "disagreements": ("Races that it left with another token", lambda status: status.num_disagreed),
    "drafter_alarms": (
        "Times that a model drafter of which nothing was accepted was dropped",
        lambda status: status.drafter_score.alarms,
    ),
    "preemptions": ("Requests that lost their KV while they ran", lambda status: status.num_preemptions),
    "kv_loads": ("Chunks that found their KV in the pool", lambda status: status.kv_pool.hits),
    "kv_disk_loads": ("Of these, those that found it on disk", lambda status: status.kv_pool.disk_hits),
    "kv_misses": ("Chunks that looked for their KV in vain", lambda status: status.kv_pool.misses),
    "kv_damaged": ("Damaged entries of the pool", lambda status: status.kv_pool.corrupt),
    "kv_failed_writes": ("Entries that the pool did not take", lambda status: status.kv_pool.failed_writes),
    "draft_told_tokens": ("Tokens told the draft servers", lambda status: status.draft_sharing.told_tokens),
    "draft_heard_tokens": (
        "Tokens of other workers heard from them",
        lambda status: status.draft_sharing.heard_tokens,
    ),
    "draft_held_messages": (
        "Times that a draft server took nothing more",
        lambda status: status.draft_sharing.held_messages,
    ),
    "draft_unanswered_fetches": (
        "Questions that a draft server did not answer within a second",
        lambda status: status.draft_sharing.unanswered_fetches,
    ),
    "draft_lost_tokens": (
        "Tokens that a draft server had to be told again",
        lambda status: status.draft_sharing.lost_tokens,
    ),
    "draft_dropped_tokens": (
        "Tokens that no draft server was ever told",
        lambda status: status.draft_sharing.dropped_tokens,
    ),
    "losses": ("Times that the worker was lost", lambda status: status.num_losses),
}


class MetricsServer:
    """Serves the board at http://host:port/metrics. Close it."""

    def __init__(self, board: StatusBoard, num_unfinished: Callable[[], int], port: int, host: str) -> None:
        """port 0 takes a free one. host: address of this machine to listen on, 0.0.0.0 for all of its addresses. Raises
        ConfigError if the port is taken or the address is not this machine's.
        """
        self._board, self._num_unfinished = board, num_unfinished
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at metrics_host {host!r}, metrics_port {port} ({error.strerror}): choose "
                "another port, or an address of this machine"
            ) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def collect(self) -> Iterator[Any]:
        """All metrics, as they are now (Prometheus' collector interface)."""
        yield GaugeMetricFamily(
            "paceline_unfinished_responses", "Responses of the rollout", self._num_unfinished()
        )
        for kind, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (text, read) in metrics.items():
                family = kind(f"paceline_worker_{name}", text, labels=["worker"])
                for status in list(self._board.workers.values()):
                    family.add_metric([status.name], float(read(status)))
                yield family
        yield self._by_source(
            "source_tokens", "Draft tokens accepted, by who drafted them", self._board.accepted_by_source
        )
        yield self._by_source(
            "source_wasted_tokens",
            "Tokens drafted ahead in vain, by who drafted them",
            self._board.wasted_by_drafter,
        )

    def _by_source(self, name: str, text: str, read: Callable[[WorkerStatus], dict[str, int]]) -> Any:
        family = CounterMetricFamily(f"paceline_worker_{name}", text, labels=["worker", "source"])
        for status in list(self._board.workers.values()):
            for source, count in read(status).items():
                family.add_metric([status.name, source], count)
        return family

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
