"""The fleet's metrics endpoint: what Prometheus scrapes is what the board says."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from paceline.config import FleetSettings
from paceline.errors import ConfigError
from paceline.fleet.metrics import COUNTERS, GAUGES, LOCAL_HOST, MetricsServer
from paceline.fleet.status import StatusBoard, WorkerStatus
from paceline.types import DrafterScore

BOARD = StatusBoard(
    {
        "w0": WorkerStatus(
            "w0",
            "up",
            num_running=3,
            num_kv_blocks=10,
            num_kv_used=5,
            num_tokens=70,
            num_losses=1,
            num_accepted=50,
            num_model=30,
            further=(10,),
            num_wasted=5,
            further_wasted=(2,),
            wait_s=0.5,
            drafter_score=DrafterScore(90, 0, 1),
        ),
        "w1": WorkerStatus("w1"),
    },
    drafters=("small", "tiny"),
)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(BOARD, lambda: 17, 0, LOCAL_HOST)
    yield made
    made.close()


def scrape(server: MetricsServer) -> dict[tuple[str, str], float]:
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, " ".join(filter(None, map(sample.labels.get, ("worker", "source"))))): sample.value
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
    assert found["paceline_worker_wait_seconds_total", "w0"] == 0.5
    assert found["paceline_worker_drafter_alarms_total", "w0"] == 1
    sources = {"suffix": 20, "small": 20, "tiny": 10, "lead": 0}
    assert sources == {name: found["paceline_worker_source_tokens_total", f"w0 {name}"] for name in sources}
    wasted = {"small": 3, "tiny": 2}
    assert wasted == {
        name: found["paceline_worker_source_wasted_tokens_total", f"w0 {name}"] for name in wasted
    }
    assert len(found) == 1 + 2 * (len(GAUGES) + len(COUNTERS) + len(sources) + len(wasted))
    BOARD.workers["w1"].num_running = 4
    assert scrape(server)["paceline_worker_running_chunks", "w1"] == 4


def test_a_port_that_is_taken_is_named(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=f"metrics_port {server.port} .*choose another port"):
        MetricsServer(BOARD, lambda: 0, server.port, "127.0.0.1")


def listens_at(server: MetricsServer) -> str:
    [one] = [
        one
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == server.port
    ]
    return str(one.laddr.ip)


def test_nobody_outside_the_machine_reads_them_unless_asked(server: MetricsServer) -> None:
    assert listens_at(server) == "127.0.0.1"
    open_to_all = MetricsServer(BOARD, lambda: 17, 0, "0.0.0.0")
    assert listens_at(open_to_all) == "0.0.0.0"
    open_to_all.close()


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"metrics_host '0\.0\.0\.0' without metrics_port serves nothing"
    ):
        FleetSettings(metrics_host="0.0.0.0")
    assert FleetSettings(metrics_host="0.0.0.0", metrics_port=0).metrics_port == 0


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics_host '192\.0\.2\.1'"):
        MetricsServer(BOARD, lambda: 0, 0, "192.0.2.1")
