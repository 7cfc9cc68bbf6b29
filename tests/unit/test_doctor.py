"""`paceline doctor`: what it finds in the environment and how it says so."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.commands.findings import Finding, cpu_quota, fits, look_at_environment


def states(**environment: str) -> dict[str, Finding]:
    return {f.name: f for f in look_at_environment(environment, cores=4, on_cpu=True)}


@pytest.mark.parametrize(
    ("environment", "name", "state"),
    [
        ({}, "OMP_NUM_THREADS", "ok"),
        ({"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS", "ok"),
        ({"OMP_NUM_THREADS": "8"}, "OMP_NUM_THREADS", "warn"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS", "fail"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "VLLM_CPU_OMP_THREADS_BIND", "warn"),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "VLLM_ENABLE_V1_MULTIPROCESSING", "fail"),
        ({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT", "fail"),
    ],
)
def test_variables_that_bite_are_found(environment: dict[str, str], name: str, state: str) -> None:
    found = states(**environment)[name]
    assert found.state == state
    assert bool(found.remedy) == (state != "ok")


def test_settings_in_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PACELINE": "1", "PACELINE_SETTINGS": '{"run_sed": 7}'}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = states(**environment)["PACELINE"]
    assert found.state == "fail"
    assert "run_sed" in str(found.remedy)


def test_findings_turn_into_json() -> None:
    assert json.loads(json.dumps(asdict(states()["OMP_NUM_THREADS"])))["state"] == "ok"


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("odd", None)])
def test_the_quota_of_a_container_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert cpu_quota(path) == quota


@pytest.mark.parametrize(
    ("version", "wanted", "answer"),
    [
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.0+cpu", "==2.13.0+cpu", True),
        ("2.12.0", "==2.13.0", False),
        ("5.19.0", ">=5.16.1,<5.20", True),
    ],
)
def test_versions_are_compared_without_their_label(version: str, wanted: str, answer: bool) -> None:
    assert fits(version, wanted) is answer
