"""`profile`, `ladder` and `plan` without an engine: the file, the choices, bad input."""

from __future__ import annotations

import itertools
import json
import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
from command_line import CONFIG, Run, make_model, write

from paceline.commands.inputs.lists import read_counts, read_rates
from paceline.errors import ConfigError, RecordError
from paceline.planning.placement import Cluster, place
from paceline.planning.profile_fit import fit_profile
from paceline.record import describe_machine
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried, write_ladder
from paceline.record.profile import (
    PROFILE_VERSION,
    DrafterProfile,
    DraftPoint,
    Profile,
    StepPoint,
    read_profile,
    write_profile,
)
from paceline.report.plan_page import build_ladder_page


def step_s(tokens: int, context: int) -> float:
    return 0.012 + 0.0006 * max(0, tokens - 32) + 1e-6 * context


def make_profile(num_gpus: int = 1) -> Profile:
    shapes = product((1, 4, 16, 64), (128, 512), (1, 2, 4, 8))
    return Profile(
        version=PROFILE_VERSION,
        target="policy",
        dtype="bfloat16",
        num_gpus=num_gpus,
        threads=2,
        machine=describe_machine(),
        versions={"vllm": "0.32"},
        steps=tuple(StepPoint(b, q, c, step_s(b * q, b * c) / num_gpus**0.5, 8) for b, c, q in shapes),
        drafters=(
            DrafterProfile("suffix", tuple(DraftPoint(b, 1e-6 * b) for b in (1, 4, 16))),
            DrafterProfile("small", tuple(DraftPoint(b, 3e-4 + 2e-5 * b) for b in (1, 4, 16))),
        ),
    )


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(make_profile(), path)
    return path


def test_a_profile_comes_back_as_written(profile_file: Path) -> None:
    assert read_profile(profile_file) == make_profile()


def test_another_version_is_refused(profile_file: Path) -> None:
    data = json.loads(profile_file.read_text())
    profile_file.write_text(json.dumps({**data, "version": 99}))
    with pytest.raises(RecordError, match="version 99"):
        read_profile(profile_file)


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[]"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="is not a profile"):
        read_profile(path)


def test_a_missing_profile_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="paceline profile"):
        read_profile(tmp_path / "none.json")


def test_a_profile_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        write_profile(make_profile(), tmp_path / "file" / "profile.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_fit_meets_the_profile() -> None:
    target, drafters = fit_profile(make_profile())
    assert target.r_squared > 0.98
    assert target.model.context_s == pytest.approx(1e-6, rel=0.25)
    assert drafters["small"].model.base_s == pytest.approx(3e-4)


def test_a_drafter_of_one_batch_is_level() -> None:
    made = make_profile()
    alone = DrafterProfile("alone", (DraftPoint(4, 0.001),))
    _, fits = fit_profile(msgspec.structs.replace(made, drafters=(alone,)))
    assert fits["alone"].model.seconds([1, 64]).tolist() == pytest.approx([0.001, 0.001])


def rows(table: str) -> list[list[str]]:
    """Cells of the body rows of a printed table: a cell stands where its heading begins or ends."""
    lines = table.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(("plan ", "drafter ")))
    heads = list(re.finditer(r"\S+(?: \S+)*", lines[first]))
    found = []
    for line in itertools.takewhile(lambda line: ":" not in line, lines[first + 1 :]):
        cells = {head.start(): "" for head in heads}
        for cell in re.finditer(r"\S+", line):
            near = (head for head in heads if cell.start() == head.start() or cell.end() == head.end())
            cells[next(near).start()] = cell.group()
        found.append(list(cells.values()))
    return found


def test_what_lies_beyond_the_profile_is_said(profile_file: Path, run: Run) -> None:
    done = run("plan", profile_file, "--acceptance", "suffix=0.7", "--devices", 4, "--requests", 256)
    assert "a batch of 128 is extrapolated" in done.error  # of two engines that share a drafter
    assert (
        "a batch of drafter suffix of 128 is extrapolated, the profile of policy (1 per engine)" in done.error
    )
    done = run("plan", profile_file, "--acceptance", 0.7, "--context", 513, "--requests", 16)
    assert "a context of 513 is extrapolated" in done.error
    assert not run("plan", profile_file, "--acceptance", 0.7, "--context", 512, "--requests", 16).error


def test_the_plan_shows_what_it_beat(profile_file: Path, run: Run) -> None:
    told = run("plan", profile_file, "--acceptance", "0.8", "--devices", 8, "--requests", 64)
    assert told.code == 0
    found = rows(told.out)
    assert {row[0] for row in found} == {"plain", "coupled", "decoupled"}
    assert {row[1] for row in found} == {"", "suffix", "small"}
    rates = [float(row[6]) for row in found]
    assert rates == sorted(rates, reverse=True)


def test_a_plan_takes_acceptance_as_measured(profile_file: Path, run: Run, tmp_path: Path) -> None:
    file = LadderFile(ladder=None, tried={"small": Tried(79.0, 99.0)})
    write_ladder(file, tmp_path / "ladder.json")
    told = run("plan", profile_file, "--ladder", tmp_path / "ladder.json")
    assert told.out == run("plan", profile_file, "--acceptance", "small=0.8").out
    both = run("plan", profile_file, "--ladder", tmp_path / "ladder.json", "--acceptance", "small=0.3")
    assert both.out == run("plan", profile_file, "--acceptance", "small=0.3").out, "what is typed counts"
    assert "no drafter has an acceptance rate" in run("plan", profile_file).error


def test_a_ladder_of_other_drafters_is_named(profile_file: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "ladder.json"
    write_ladder(LadderFile(ladder=None, tried={"huge": Tried(1.0, 2.0)}), file)
    told = run("plan", profile_file, "--ladder", file)
    assert told.code == 2
    assert f"--ladder {file} is of drafter huge, the profiles are of suffix, small" in told.error
    assert "--acceptance" not in told.error


def test_a_window_that_no_engine_takes_is_refused(profile_file: Path, run: Run) -> None:
    plan = ("plan", profile_file, "--acceptance", 0.7, "--max-window")
    assert run(*plan, 127).code == 0
    told = run(*plan, 128)
    assert told.code == 2
    assert "--max-window 128: engines draft at most 127 tokens in a row" in told.error


def test_a_plan_is_what_the_placement_says(profile_file: Path, run: Run) -> None:
    """The decoupled row of the table against the planning function itself, context priced per request."""
    told = run(
        *("plan", profile_file, "--acceptance", "small=0.8", "--devices", 8, "--requests", 64),
        *("--context", 300, "--alternatives", 0),
    )
    target, fits = fit_profile(make_profile())
    cluster = Cluster(8, 64, {1: fits["small"].model}, {1: target.model.for_requests_of(300)})
    best = place(cluster, 0.8, 16).best
    (row,) = [row for row in rows(told.out) if row[0] == "decoupled"]
    assert row[1:6] == ["small", "1", "1", str(best.window), str(best.batch)]
    assert float(row[6]) == pytest.approx(best.tokens_per_s, abs=0.06)


def test_a_plan_by_the_papers_formulas(profile_file: Path, run: Run) -> None:
    told = run("plan", profile_file, "--acceptance", "0.8", "--paper")
    assert told.code == 0
    assert any(row[0] == "decoupled" for row in rows(told.out))


def test_a_single_device_has_no_decoupled_plan(profile_file: Path, run: Run) -> None:
    told = run("plan", profile_file, "--acceptance", "0.8", "--devices", 1, "--requests", 8)
    assert "only coupled plans" in told.error
    assert {row[0] for row in rows(told.out)} == {"plain", "coupled"}


def test_engines_of_two_sizes_are_weighed(tmp_path: Path, run: Run) -> None:
    files = []
    for size in (1, 2):
        files.append(tmp_path / f"{size}.json")
        write_profile(make_profile(size), files[-1])
    told = run("plan", *files, "--acceptance", "0.8", "--requests", 64, "--drafter", "small")
    assert told.code == 0
    assert {row[1] for row in rows(told.out)} == {"", "small"}
    assert {row[3] for row in rows(told.out) if row[0] == "plain"} == {"1", "2"}


def test_profiles_of_two_targets_are_not_mixed(tmp_path: Path, run: Run) -> None:
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    write_profile(make_profile(1), files[0])
    write_profile(msgspec.structs.replace(make_profile(2), target="other"), files[1])
    told = run("plan", *files, "--acceptance", "0.8")
    assert told.code == 2
    assert "different targets" in told.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "1.5"], "give a rate from 0 to 1"),
        (["--acceptance", "big=0.5"], "there is no drafter 'big'"),
        (["--acceptance", "0.5", "--alternatives", "-1"], "--alternatives -1"),
        (["--acceptance", "0.5", "--devices", "0"], "--devices 0"),
        (["--acceptance", "small=0.5", "--drafter", "suffix"], "--drafter 'suffix'"),
    ],
)
def test_bad_plans_are_refused(profile_file: Path, run: Run, arguments: list[str], message: str) -> None:
    told = run("plan", profile_file, *arguments)
    assert told.code == 2
    assert message in told.error


def test_lists_are_read_and_refused() -> None:
    assert read_counts("--batches", "16, 4,4,1") == (1, 4, 16)
    for text in ("", "a", "0,1", "1.5"):
        with pytest.raises(ConfigError, match="--batches"):
            read_counts("--batches", text)
    assert read_rates("--acceptance", ["0.5", "b=0.7"], ["a", "b"]) == {"a": 0.5, "b": 0.7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "4", "--tokens", "1"], "steps of one size alone"),
        (["--tokens", "1,200"], "profile 1 to 128"),
        (["--contexts", "0"], "--contexts '0'"),
        (["--contexts", "32"], "need"),
        (["--repetitions", "0"], "--repetitions 0"),
        (["--out", "picture.html"], "the picture goes there"),
        (["--out", "."], "is a folder"),
        (["--contexts", "4", "--tokens", "1,2", "--kv-cache-gib", "0.00001"], "raise it, or lower --batches"),
    ],
)
def test_bad_profiles_are_refused_before_any_work(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run("profile", model, *options)
    assert told.code == 2
    assert message in told.error


def test_a_drafter_may_not_be_named_as_the_suffix_trees(model: Path, run: Run, tmp_path: Path) -> None:
    told = run(
        "profile",
        model,
        "--contexts",
        "8",
        "--tokens",
        "1,2",
        "--drafter",
        make_model(tmp_path / "suffix", CONFIG),
    )
    assert told.code == 2
    assert "'suffix' is taken" in told.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--acceptance", "1.5"], "give a rate from 0 to 1"),
        (["--acceptance", "big=0.5"], "there is no drafter 'big', only small"),
        (["--out", "."], "is a folder"),
        (["--html", "."], "is a folder"),
        (["--drafter", "small"], "name a folder twice"),
    ],
)
def test_bad_ladders_are_refused_before_any_work(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "small", CONFIG)
    write(tmp_path / "prompts.jsonl", {"prompt_ids": [1, 2]})
    told = run("ladder", model, "prompts.jsonl", "--drafter", "small", *options)
    assert told.code == 2
    assert message in told.error


def test_the_page_of_a_ladder_is_self_contained(tmp_path: Path) -> None:
    made = Ladder(8, (0.3, 0.9), (Rungs("small", (0.9, 1.5)), Rungs("tiny", (1.0, 1.4))))
    build_ladder_page(tmp_path / "ladder.html", made, {"small": 0.7, "tiny": 0.5}, {"target": "policy"})
    page = (tmp_path / "ladder.html").read_text()
    assert "https://" not in page
    assert "small" in page
    assert "tiny" in page
