"""`paceline doctor`: what it finds in the environment and how it says so."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.doctor import findings
from paceline.commands.doctor.command import _look
from paceline.commands.doctor.findings import Finding, cpu_quota, fits, look_at_environment
from paceline.commands.doctor.invariance_check import Way


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


def test_a_machine_without_a_compiler_is_checked_eager_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled mode is no need: its want is a warning, and no reason to fail."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    checked: list[bool] = []

    def check(dtype: str, *, compiled: bool) -> list[Way]:
        checked.append(compiled)
        return [Way("together", 5, 0, 0, 0)]

    monkeypatch.setattr("paceline.commands.doctor.invariance_check.check_invariance", check)
    nothing: dict[str, Any] = dict.fromkeys(
        ("look_at_installation", "look_at_machine", "look_at_doors"), lambda: iter(())
    )
    for name, look in nothing.items():
        monkeypatch.setattr(f"paceline.commands.doctor.command.{name}", look)
    compiler = Finding("machine", "compiled mode", "warn", "cannot run")
    monkeypatch.setattr("paceline.commands.doctor.command.look_at_compiler", lambda: compiler)
    findings = list(_look({}, quick=False))
    assert set(checked) == {False}
    assert {finding.state for finding in findings if finding.area == "batch invariance"} == {"ok"}
    monkeypatch.setattr(
        "paceline.commands.doctor.command.look_at_compiler", lambda: replace(compiler, state="ok")
    )
    assert len(list(_look({}, quick=False))) > len(findings)
    assert set(checked) == {False, True}


@pytest.mark.parametrize(
    ("kernel", "built", "state"),
    [
        ("paceline-dot", True, "ok"),
        ("paceline-dot", False, "fail"),
        ("paceline", False, "ok"),
        ("vllm", False, "ok"),
    ],
)
def test_a_kernel_that_was_not_built_is_found(
    kernel: str, built: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "best_linear_kernel", lambda: kernel)
    monkeypatch.setattr("paceline._linear.HAS_DOT", built)
    found = findings._look_at_kernels("machine")
    assert found.state == state
    assert bool(found.remedy) == (state != "ok")
