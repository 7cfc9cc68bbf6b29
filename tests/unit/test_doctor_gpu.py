"""`paceline doctor --gpu`: what it says on a machine without a GPU, and how its report judges what was measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from paceline.commands.doctor import gpu_parts, gpu_report
from paceline.commands.doctor.findings import Finding
from paceline.commands.doctor.gpu_report import Answer, Part, examine, write_report
from paceline.commands.doctor.invariance_check import INVARIANT, Way
from paceline.engine.installed import is_cpu_build
from paceline.errors import EngineError, RecordError


@pytest.mark.skipif(not is_cpu_build(), reason="vLLM is built for GPUs here")
def test_without_a_gpu_the_remedy_is_named_and_nothing_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("doctor", "--gpu")
    assert done.code
    assert "built for the CPU" in done.error
    assert "pip install 'paceline[engine]'" in done.error
    assert not list(tmp_path.iterdir())


def way(name: str = "with a draft model", diverged: int = 0, logprobs: int = 0, drafted: int = 9) -> Way:
    return Way(name, 100, diverged, logprobs, drafted)


def thrown(different: int, lead: float) -> Any:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from paceline.engine.v2.checks import ThrownDice

    return ThrownDice(64, different, lead)


@pytest.mark.parametrize(
    ("different", "lead", "state"), [(0, 0.0, "ok"), (1, 3e-7, "note"), (60, 2.0, "fail")]
)
def test_dice_may_differ_in_the_last_bits_alone(different: int, lead: float, state: str) -> None:
    assert gpu_report.judge_dice(thrown(different, lead))[0] == state


@pytest.mark.parametrize(
    ("ways", "state"),
    [
        ([way(), way("without drafts", drafted=0)], "ok"),
        ([way(logprobs=5)], "ok"),  # plain vLLM's own may differ in the last bits where its batches do
        ([way(), way("without drafts", diverged=1)], "fail"),
        ([way(drafted=0)], "fail"),
    ],
)
def test_exactness_fails_with_one_token_or_with_nothing_verified(ways: list[Way], state: str) -> None:
    assert gpu_report.judge_exactness(ways)[0] == state


def test_batches_that_matter_are_no_failure() -> None:
    assert gpu_report.judge_batches(True, [way()])[0] == "ok"
    assert gpu_report.judge_batches(True, [way(logprobs=1)])[0] == "warn"
    state, found, remedy = gpu_report.judge_batches(False, [way(), way("one at a time", 3, 7)])
    assert state == "note"
    assert found == "one at a time: 3 of 100 tokens and 7 log-probabilities differ"
    assert INVARIANT in str(remedy)


def break_down() -> None:
    raise EngineError("the engine's process died")


def test_a_part_that_fails_is_told_and_the_others_are_measured() -> None:
    parts = [
        Part("first", break_down, lambda made: ("ok", "", None)),
        Part("second", lambda: [way()], lambda made: ("ok", f"{made[0].compared} tokens", None)),
    ]
    first, second = examine(parts)
    assert (first.finding.state, first.finding.found) == ("fail", "the engine's process died")
    assert first.measured is None
    assert second.finding.found == "100 tokens"
    assert second.measured[0]["compared"] == 100


def test_speed_says_how_many_tokens_differ() -> None:
    rows = [
        {"method": "plain", "tokens_per_s": 100.0, "ratio": 1.0, "diverged_tokens": 0},
        {"method": "suffix", "tokens_per_s": 150.0, "ratio": 1.5, "diverged_tokens": 2},
    ]
    _, found, _ = gpu_report.judge_speed(rows)
    assert found == (
        "plain 100 tokens/s (1.00 x plain), suffix 150 tokens/s (1.50 x plain); "
        "2 tokens differ from those without drafts"
    )


def test_the_report_holds_findings_and_measurements(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    answer = Answer(Finding("gpu", "dice", "ok", "64 tokens"), {"num_rows": 64}, 1.5)
    write_report(
        path, Path("/models/policy"), {"name": "a GPU"}, [Finding("doors", "vllm", "ok", "fit")], [answer]
    )
    report = json.loads(path.read_text())
    assert report["model"] == "policy"
    assert report["device"] == {"name": "a GPU"}
    assert [finding["name"] for finding in report["findings"]] == ["vllm", "dice"]
    assert report["parts"]["dice"] == {"seconds": 1.5, "measured": {"num_rows": 64}}
    assert report["versions"]["python"]
    with pytest.raises(RecordError, match="--out"):
        write_report(tmp_path, None, {}, [], [])


def test_the_switch_for_batch_invariance_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INVARIANT, raising=False)
    with gpu_parts.batch_invariance(True):
        assert os.environ[INVARIANT] == "1"
    assert INVARIANT not in os.environ
