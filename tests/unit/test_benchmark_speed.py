"""The speed benchmark from tuning to verdicts, on engines that are only arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from timed_rollouts import plain_rollout

from bounds import Clairvoyant  # isort: skip
import speed  # isort: skip
from rollouts import System, Timed, Work  # isort: skip

SPEED = {
    "plain": 1.0,
    "paceline": 2.0,
    "paceline_suffix": 1.2,
    "draft_model k=5": 1.6,
    "draft_model k=8": 1.5,
}


class FakeEngine:
    """Does a rollout in the time of plain decoding over the speed of the system or of the setting that is tried."""

    alive: ClassVar[list[str]] = []
    most_alive: ClassVar[int] = 0
    works: ClassVar[list[tuple[str, Work]]] = []

    def __init__(self, system: System) -> None:
        self.system = system
        FakeEngine.alive.append(system.name)
        FakeEngine.most_alive = max(FakeEngine.most_alive, len(FakeEngine.alive))

    def call(self, work: Work) -> Timed:
        name = work.rival.name if work.rival is not None else self.system.name
        FakeEngine.works.append((name, work))
        lengths = [
            20 + 17 * ((sample + sum(prompt)) % 5)
            for prompt in work.prompts
            for sample in range(work.samples)
        ]
        run = plain_rollout(work.lengths or lengths)
        factor = SPEED.get(name, 1.1) if work.drafting else 0.95
        return replace(run, ends_s=[end / factor for end in run.ends_s])

    def close(self) -> None:
        FakeEngine.alive.remove(self.system.name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a bench of a command line, with fake engines and numbers for prompts."""
    for name in ("alive", "works"):
        monkeypatch.setattr(FakeEngine, name, [])
    monkeypatch.setattr(FakeEngine, "most_alive", 0)
    monkeypatch.setattr(speed.Bench, "start", lambda self, system: FakeEngine(system))
    monkeypatch.setattr(
        speed,
        "play_clairvoyant",
        lambda off, *_: Clairvoyant(off.wall_s * 0.95 / 2.1, off.wall_s * 0.95 / 2.05, off.tail_s / 3),
    )

    def make(*words: str) -> Any:
        options = speed.parse_options(words)
        per_case = speed.PAIRS[options.pair].rollouts
        drawn = [(number,) for number in range(speed.num_prompts(per_case, options.repetitions))]
        prompts = speed.split_prompts(drawn, per_case, options.repetitions)
        return speed.Bench(options, "target", "drafter", *prompts)

    yield make
    assert FakeEngine.alive == []


def rows_of(saved: list[dict[str, Any]], case: str, mode: str) -> dict[str, Any]:
    return {row["system"]: row for row in saved[-1]["rows"] if (row["case"], row["mode"]) == (case, mode)}


def run(bench: Any) -> list[dict[str, Any]]:
    saved: list[dict[str, Any]] = []
    speed.measure(bench, lambda result: saved.append(json.loads(json.dumps(result))))
    return saved


def test_the_best_two_settings_are_the_rivals_of_a_case(bench: Any) -> None:
    rows = rows_of(run(bench("--repetitions", "2")), "2x4", "compiled")
    assert set(rows) == {
        "plain", "paceline", "paceline_off", "paceline_suffix", "draft_model k=5", "draft_model k=8",
    }  # fmt: skip
    row = rows["paceline"]
    assert row["best_rival"] == "draft_model k=5"
    assert row["ratio"] == pytest.approx(2.0)
    assert row["over_off"] == pytest.approx(2.0 / 0.95)
    assert row["over_best_rival"] == pytest.approx(2.0 / 1.6, rel=0.03)
    assert row["share_of_clairvoyant"] == pytest.approx(2.0 / 2.1)
    assert row["clairvoyant_paid"] == pytest.approx(2.05)
    assert row["clairvoyant_tail"] == pytest.approx(3.0 * 0.95)
    assert rows["paceline_off"]["equal"] is True


def test_every_figure_of_the_table_is_in_some_row(bench: Any) -> None:
    rows = run(bench())[-1]["rows"]
    assert {column for row in rows for column in row} >= set(speed.COLUMNS)


def test_at_most_five_engines_are_alive(bench: Any) -> None:
    run(bench())
    assert FakeEngine.most_alive == 5


def test_all_is_saved_after_tuning_and_after_each_case(bench: Any) -> None:
    saved = run(bench("--repetitions", "1"))
    assert [len({(row["case"], row["mode"]) for row in one["rows"]}) for one in saved] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert set(saved[0]["tuning"]["scores"]) == {"8x16", "2x4", "1x1"}
    assert {bar["case"] for bar in saved[3]["bars"]} == {"8x16", "2x4", "1x1"}


def test_plain_vllm_generates_what_paceline_did(bench: Any) -> None:
    run(bench("--cases", "2x4", "--modes", "compiled", "--repetitions", "2"))
    forced = [work for name, work in FakeEngine.works if name == "plain" and work.lengths is not None]
    own = [work for name, work in FakeEngine.works if name == "paceline" and work.drafting]
    assert [work.prompts for work in forced] == [work.prompts for work in own]
    assert all(len(work.lengths or ()) == 8 for work in forced)


def test_a_tuning_is_taken_over(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps(run(bench("--repetitions", "1"))[0]["tuning"]))
    FakeEngine.works.clear()
    saved = run(bench("--cases", "1x1", "--repetitions", "1", "--reuse-tuning", str(file)))
    assert all(work.rival is None for _, work in FakeEngine.works)
    assert rows_of(saved, "1x1", "compiled")["paceline"]["best_rival"] == "draft_model k=5"


def test_tuning_prompts_are_never_measured(bench: Any) -> None:
    run(bench("--repetitions", "1"))
    tuned = {prompt for name, work in FakeEngine.works if work.rival is not None for prompt in work.prompts}
    measured = {prompt for name, work in FakeEngine.works if name == "paceline" for prompt in work.prompts}
    assert tuned
    assert not tuned & measured


def test_trials_with_other_linear_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "best_linear_kernel", lambda: "paceline")
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"tuning": speed.Tuning(kernels="paceline").write()}))
    speed.check_kernels(speed.parse_options(["--reuse-tuning", str(file), "--rival-kernels", "paceline"]))
    with pytest.raises(SystemExit, match="--rival-kernels paceline, this run has vllm"):
        speed.check_kernels(speed.parse_options(["--reuse-tuning", str(file)]))
    file.write_text(json.dumps({"rivals": {}, "scores": {}}))  # as written before there was a choice
    speed.check_kernels(speed.parse_options(["--complete-tuning", str(file)]))


def test_linear_layers_that_paceline_has_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "best_linear_kernel", lambda: "vllm")
    with pytest.raises(SystemExit, match="Paceline itself uses vLLM's"):
        speed.check_kernels(speed.parse_options(["--rival-kernels", "paceline"]))
