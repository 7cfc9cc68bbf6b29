"""`paceline simulate`: tables, files, sweeps, and bad input."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from command_line import Run
from test_scenario import write

from paceline.report.timeline import Lane, Stretch, draw_timeline

CLAIM = {
    "text": "Seer is faster",
    "of": "Seer",
    "over": "veRL",
    "paper": 1.5,
    "source": "x",
    "where": ["gpus=8"],
}


def test_presets_are_listed(run: Run) -> None:
    outcome = run("simulate")
    assert outcome.code == 0
    assert "specactor-dapo-32b" in outcome.out


def test_a_scenario_is_shown_as_it_is_written(run: Run) -> None:
    outcome = run("simulate", "tlt-qwen2.5-7b", "--show")
    assert outcome.code == 0
    assert "step_ms" in outcome.out


def test_a_scenario_that_is_no_text_is_not_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(b"title: caf\xe9")
    outcome = run("simulate", tmp_path / "own.yaml", "--show")
    assert outcome.code == 2
    assert "it is not UTF-8 text" in outcome.error


@pytest.mark.parametrize("options", [[], ["--what-if", "gpus=4,8"]])
def test_results_are_written_whole_or_not_at_all(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def refuse(*names: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out.json"
    out.write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    outcome = run("simulate", write(tmp_path), "--json", out, *options)
    assert outcome.code == 6
    assert "No space left" in outcome.error
    assert out.read_text() == "old"


def test_systems_and_claims_are_compared(run: Run, tmp_path: Path) -> None:
    source, page, rows = write(tmp_path, claims=[CLAIM]), tmp_path / "page.html", tmp_path / "rows.json"
    outcome = run("simulate", source, "--html", str(page), "--json", str(rows))
    assert outcome.code == 0, outcome.error
    assert "Seer is faster" in outcome.out
    found = json.loads(rows.read_text())
    assert [one["name"] for one in found["systems"]] == ["veRL", "Seer"]
    assert len(found["systems"][0]["end_s"]) == 24
    (claim,) = found["claims"]
    assert claim["difference"] == pytest.approx(claim["ours"] / 1.5 - 1)
    text = page.read_text()
    assert text.count('class="timeline"') == 2
    assert "Seer is faster" in text


def test_chosen_systems_only(run: Run, tmp_path: Path) -> None:
    outcome = run("simulate", write(tmp_path), "--system", "veRL", "--system", "Paceline")
    assert outcome.code == 0
    assert "Paceline" in outcome.out
    assert "Seer" not in outcome.out


def test_what_was_planned_is_told(run: Run, tmp_path: Path) -> None:
    page, rows = tmp_path / "page.html", tmp_path / "rows.json"
    options = ("--system", "veRL", "--system", "Paceline", "--html", str(page), "--json", str(rows))
    outcome = run("simulate", write(tmp_path, systems=["veRL", "Paceline"]), *options)
    assert outcome.code == 0, outcome.error
    note = json.loads(rows.read_text())["systems"][1]["note"]
    assert "tokens/s per request" in note
    assert note in page.read_text()
    assert " ".join(f"Paceline: {note}".split()) in " ".join(outcome.out.split())


def test_sweeps_cover_all_combinations(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    outcome = run(
        "simulate", write(tmp_path), "--what-if", "gpus=4,8", "--what-if", "groups=4,6,8", "--json", str(rows)
    )
    assert outcome.code == 0, outcome.error
    found = json.loads(rows.read_text())["rows"]
    assert len(found) == 2 * 3 * 2
    by_gpus = {tuple(row["what_if"]): row["rollout_s"] for row in found if row["name"] == "veRL"}
    assert by_gpus["gpus=8", "groups=8"] <= by_gpus["gpus=4", "groups=8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "neither a scenario file nor a preset"),
        (["tlt-qwen2.5-7b", "--system", "Seerr"], "'Seerr'"),
        (["tlt-qwen2.5-7b", "--system", "n-gram"], "needs lookup"),
        (["tlt-qwen2.5-7b", "--set", "gpu=3"], "did you mean gpus"),
        (["tlt-qwen2.5-7b", "--what-if", "gpus"], "key.path=value,value"),
        (["tlt-qwen2.5-7b", "--what-if", "gpus=8", "--html", "page.html"], "--html draws one scenario"),
        (["tlt-qwen2.5-7b", "--html", "/"], "is a folder"),
    ],
)
def test_bad_input_is_refused_before_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("simulate", *arguments)
    assert outcome.code != 0
    assert message in outcome.error


def test_timelines_draw_every_stretch() -> None:
    lanes = [Lane([[Stretch(0.0, 5.0, 1), Stretch(5.0, 10.0, 3)]]), Lane([])]
    drawn = draw_timeline(lanes, 10.0, "a <label>", 9.0)
    assert drawn.count('class="bar') == 2
    assert drawn.count("h500v") == 2
    assert "a &lt;label&gt;" in drawn
