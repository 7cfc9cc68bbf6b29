"""The fleet's metrics endpoint: what Prometheus scrapes is what the board says."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.errors import ConfigError
from paceline.fleet.metrics import COUNTERS, GAUGES, MetricsServer
from paceline.fleet.status import StatusBoard, WorkerStatus

BOARD = StatusBoard(
    {
        "w0": WorkerStatus(
            "w0", "up", num_running=3, num_kv_blocks=10, num_kv_used=5, num_tokens=70, num_losses=1
        ),
        "w1": WorkerStatus("w1"),
    }
)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(BOARD, lambda: 17, 0)
    yield made
    made.close()


def scrape(server: MetricsServer) -> dict[tuple[str, str], float]:
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("worker", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_board_is_served_as_it_is_now(server: MetricsServer) -> None:
    found = scrape(server)
    assert found["paceline_unfinished_responses", ""] == 17
    assert found["paceline_worker_up", "w0"] == 1
    assert found["paceline_worker_up", "w1"] == 0
    assert found["paceline_worker_kv_use", "w0"] == 0.5
    assert found["paceline_worker_generated_tokens_total", "w0"] == 70
    assert found["paceline_worker_losses_total", "w0"] == 1
    assert len(found) == 1 + 2 * (len(GAUGES) + len(COUNTERS))
    BOARD.workers["w1"].num_running = 4
    assert scrape(server)["paceline_worker_running_chunks", "w1"] == 4


def test_a_port_that_is_taken_is_named(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=f"metrics_port {server.port} cannot be used"):
        MetricsServer(BOARD, lambda: 0, server.port)
