"""The report: complete from any record, self-contained, harmless whatever the texts, bounded on long runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import closing
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from recorded_run import MACHINE, VERSIONS, SimulatedRun

from paceline.errors import RecordError
from paceline.record import (
    FILE_NAME,
    Comparison,
    DrafterSession,
    DrafterStep,
    EngineStepSample,
    Evaluation,
    Event,
    Failure,
    Header,
    Note,
    Phases,
    RecordWriter,
    ResponseDone,
    Resumed,
    RunEnd,
    TrainStep,
    measure_tail,
)
from paceline.report import build_report
from paceline.report.bins import Bins, coarsen
from paceline.report.figures import (
    FIGURES,
    Choice,
    Figure,
    acceptance_figure,
    drafter_figure,
    duration,
    length_figure,
    number,
    percent,
    phase_figure,
    quantile,
    reward_figure,
    running_figure,
)
from paceline.report.headline import headline, missing, saving_of, verdict
from paceline.report.history import MAX_POINTS, MAX_ROLLOUTS, RunHistory, collect, read_history
from paceline.report.page import SECTIONS, render

GOLDEN = Path(__file__).parents[1] / "golden" / "run"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEADER = Header(
    machine=MACHINE, versions=VERSIONS, started_unix_s=1.76e9, task="Countdown", num_steps_planned=4
)
HOSTILE = "</script></title><img src=x onerror=alert(1)>&amp;\"'\u2028"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SimulatedRun().build(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    return build_report(run_dir).read_text()


@pytest.fixture(scope="module")
def history(run_dir: Path) -> RunHistory:
    return read_history(run_dir)


def lines_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / FILE_NAME).read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def tile(history: RunHistory, label: str) -> tuple[str, str]:
    return next((unspaced(t.value), unspaced(t.note)) for t in headline(history) if t.label == label)


def unspaced(text: str) -> str:
    return re.sub("[\u202f\u00a0]", " ", text)


def train_step(step: int, **fields: Any) -> TrainStep:
    return TrainStep(
        step=step, t_start_s=10.0 * step, phases=Phases(rollout_s=6.0, train_s=2.0), tokens=600, **fields
    )


def response(step: int, end_s: float, **fields: Any) -> ResponseDone:
    common = {"group": 1, "sample": 0, "prompt_tokens": 5, "response_tokens": 100, "num_steps": 50}
    return ResponseDone(t_start_s=10.0 * step, t_end_s=end_s, step=step, **common | fields)


def test_sections_stand_in_order(page: str) -> None:
    titles = [unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page)]
    assert titles == [
        *SECTIONS.values(),
        "Trainer metrics",
        "Steps",
        "Notes and failures",
        "Settings and versions",
    ]
    assert list(SECTIONS) == list(FIGURES)
    assert page.index('class="tiles"') < page.index(f"<h2>{SECTIONS['reward']}</h2>")


def test_an_adaptive_drafter_has_a_figure_of_its_own(tmp_path: Path) -> None:
    """Its acceptance over steps; and its sessions, where the requests of a rollout are drawn."""
    writer = RecordWriter.create(tmp_path / "run", HEADER)
    with closing(writer):
        for step, right in ((1, 0), (2, 30), (3, 60)):
            writer.write(response(step, 10.0 * step + 5))
            writer.write(
                DrafterSession(t_start_s=10.0 * step + 4, t_end_s=10.0 * step + 5, step=step, core_s=0.25)
            )
            writer.write(
                DrafterStep(
                    t_s=10.0 * step + 5, step=step, version=step - 1, tried=100 * (step > 1), right=right,
                    agreement=0.5, first_agreement=0.25, trained_s=2.5, trained_tokens=7000,
                )
            )  # fmt: skip
            writer.write(train_step(step))
    history = read_history(tmp_path / "run")
    figure = drafter_figure(history)
    assert isinstance(figure, Figure)
    assert figure.series[0].y == [None, 0.3, 0.6]
    assert [(one.name, one.y) for one in figure.series[1:]] == [
        ("expected by its trainer", [0.5] * 3),
        ("as it was at first, by its trainer", [0.25] * 3),
    ]
    assert "60" in figure.summary
    assert "in sessions of 3" in figure.summary
    assert "together (0.8 core-seconds)" in figure.summary
    assert "<h2>Adaptive drafter</h2>" in render(history)
    rollouts = running_figure(history)
    assert isinstance(rollouts, Choice)
    assert [(mark.x, mark.until) for mark in rollouts.figures[0].marks][-1] == (4.0, 5.0)


def test_an_adaptive_drafter_of_which_nothing_is_known_yet_is_told_in_words(tmp_path: Path) -> None:
    """An empty picture would look like one that is never right."""
    writer = RecordWriter.create(tmp_path / "run", HEADER)
    with closing(writer):
        writer.write(response(1, 15.0))
        writer.write(
            DrafterStep(t_s=15.0, step=1, version=0, tried=0, right=0, trained_s=0.0, trained_tokens=0)
        )
        writer.write(train_step(1))
    drawn = drafter_figure(read_history(tmp_path / "run"))
    assert isinstance(drawn, str)
    assert drawn.startswith("The engine has not used it yet.")


def test_the_page_is_self_contained(page: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", page))
    assert addresses == {"http://www.w3.org"}  # the name of SVG, never fetched
    assert not re.findall(r"\bsrc=|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")", page)
    assert "default-src 'none'" in page


def test_prepared_corrections_are_told(run_dir: Path) -> None:
    history = read_history(run_dir)
    assert "corrections" not in tile(history, "Acceptance length")[1]
    sample = EngineStepSample(
        t_s=99.0, num_steps=2, step_s=0.1, num_running=1.0, num_branches=40, num_branch_hits=9, step=3
    )
    history.add(sample)
    assert tile(history, "Acceptance length")[1].endswith(unspaced("; 40 corrections prepared, 9 came"))


def test_what_each_of_several_drafters_has_supplied_is_told() -> None:
    history = RunHistory(HEADER)
    sample = EngineStepSample(
        t_s=99.0,
        num_steps=2,
        step_s=0.1,
        num_running=50.0,
        num_draft_tokens=200,
        num_accepted_tokens=100,
        num_model_tokens=80,
        further_tokens=(20, 10),
        num_adopted_tokens=5,
        wait_s=0.02,
        num_wasted_tokens=9,
        further_wasted_tokens=(4, 0),
        step=3,
    )
    history.add(sample)
    told = tile(history, "Acceptance length")[1]
    assert (
        "80 % of these from the model drafter (50 % + 20 % + 10 % by drafter), 5 % from the other worker"
        in told
    )
    assert "9 drafted ahead in vain (5 + 4 + 0 by drafter)" in told
    assert "; 20.0 % of the steps' time for drafts made elsewhere" in told
    engine = {"model_drafter": "models/small", "further_drafters": ["models/tiny", "models/wee"]}
    history.header = replace(history.header, config={"engine": engine})
    named = tile(history, "Acceptance length")[1]
    assert "80 % of these from the model drafter (small 50 %, tiny 20 %, wee 10 %)" in named
    assert "9 drafted ahead in vain (small 5, tiny 4, wee 0)" in named


def test_what_the_model_free_drafter_gives_stands_beside_the_whole() -> None:
    history = RunHistory(HEADER)
    common = {"num_steps": 2, "step_s": 0.1, "num_running": 50.0, "num_draft_tokens": 200}
    for step, num_model in ((1, 0), (2, 80)):
        accepted = {"num_accepted_tokens": 100, "num_model_tokens": num_model, "num_adopted_tokens": 5}
        history.add(EngineStepSample(t_s=step, step=step, **common | accepted))  # type: ignore[arg-type]
        figure = acceptance_figure(history)
        assert isinstance(figure, Figure)
        assert len(figure.series) == step, "nothing else drafts in the first"
    assert [one.y for one in figure.series] == [[2.0, 2.0], [1.95, 1.15]]


def test_headline_numbers_are_those_of_the_record(run_dir: Path, history: RunHistory) -> None:
    engine, trains, responses = (lines_of(run_dir, kind) for kind in ("engine", "train_step", "response"))
    accepted = sum(e.get("num_accepted_tokens", 0) for e in engine)
    drafted = sum(e.get("num_draft_tokens", 0) for e in engine)
    request_steps = sum(e["num_running"] * e["num_steps"] for e in engine)
    assert tile(history, "Acceptance length")[0] == f"{1 + accepted / request_steps:.2f}"
    assert f"{100 * accepted / drafted:.0f} % of drafts" in tile(history, "Acceptance length")[1]
    tokens = sum(t["tokens"] for t in trains)
    assert tokens == sum(r["response_tokens"] for r in responses)
    assert tile(history, "Tokens")[0] == f"{tokens:,}".replace(",", " ")
    assert tile(history, "Rollout speed-up")[0] == "1.45×"
    assert tile(history, "Train steps")[0] == "30 of 30"
    assert (
        tile(history, "Solve rate")[0] == f"{100 * lines_of(run_dir, 'evaluation')[-1]['solve_rate']:.1f} %"
    )
    tails = [measure_tail([r["t_end_s"] for r in responses if r["step"] == t["step"]]) for t in trains]
    assert tile(history, "Tail")[0] == unspaced(duration(float(np.median(tails))))
    assert missing(history) == []


def test_the_table_has_a_row_for_each_step(page: str, run_dir: Path) -> None:
    body = unspaced(page[page.index("<tbody>") : page.index("</tbody>")])
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
    trains = lines_of(run_dir, "train_step")
    assert [row[0] for row in rows] == [str(t["step"]) for t in trains]
    assert [row[1] for row in rows] == [f"{t['reward_mean']:.3f}" for t in trains]
    assert [row[4].replace(" ", "") for row in rows] == [str(t["tokens"]) for t in trains]
    assert [row[9] for row in rows] == [f"{t['tail_s']:.2f}" for t in trains]


def test_speed_up_is_measured_or_left_open() -> None:
    assert saving_of(collect(HEADER, [train_step(1)])) is None
    runs = [
        Comparison(
            t_s=1.0, step=1, responses=8, tokens=500, plain_s=4.0, accelerated_s=2.5, diverged_tokens=0
        ),
        Comparison(
            t_s=2.0, step=2, responses=8, tokens=500, plain_s=6.0, accelerated_s=2.5, diverged_tokens=3
        ),
    ]
    measured = saving_of(collect(HEADER, [train_step(1), *runs]))
    assert measured is not None
    assert measured.ratio == 2.0
    assert "saved about 6 s of rollout" in unspaced(verdict(collect(HEADER, [train_step(1), *runs])))
    assert "All 500 tokens" in verdict(collect(HEADER, runs[:1]))
    assert "3 of 1 000 tokens differ" in unspaced(verdict(collect(HEADER, runs)))
    assert "3 000 per million" in unspaced(verdict(collect(HEADER, runs)))


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    RecordWriter.create(tmp_path, HEADER).close()
    page = build_report(tmp_path).read_text()
    empty = collect(HEADER, [])
    assert all(isinstance(draw(empty), str) for draw in FIGURES.values())
    assert page.count('class="none"') == len(FIGURES) + 2  # the table of steps and the settings
    assert "No train step ended." in page
    assert "The record has no end" in page


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    run = SimulatedRun(num_steps=2, num_steps_planned=5, compared=False, end=None).build(tmp_path)
    with RecordWriter.resume(run) as writer:
        writer.write(EngineStepSample(t_s=30.0, num_steps=2, step_s=0.1, num_running=3.0, step=3))
        writer.write(RunEnd(t_s=31.0, reason="interrupted"))
    with open(run / FILE_NAME, "ab") as file:
        file.write(b'{"event":"no')
    text = " ".join(missing(read_history(run)))
    for part in (
        "ended early (interrupted)",
        "2 of 5 train steps",
        "Step 3 had begun",
        "last line of the record is torn",
    ):
        assert part in text
    assert text in re.sub("</li><li>", " ", build_report(run).read_text())


def test_a_step_that_was_done_again_after_a_resumption_counts_once() -> None:
    resumed = Resumed(t_s=20.0, resumed_unix_s=0.0, machine=MACHINE, versions={"paceline": "0.2.0"})
    first = [response(1, 12.0), train_step(1, reward_mean=0.1), response(2, 22.0), response(2, 23.0)]
    again = [
        response(1, 32.0),
        response(1, 36.0),
        train_step(1, reward_mean=0.2),
        RunEnd(t_s=40.0, reason="finished"),
    ]
    history = collect(HEADER, [*first, resumed, *again])
    assert [row.step for row in history.rows] == [1]
    assert history.rows[0].num_responses == 2
    assert history.rows[0].train is not None
    assert history.rows[0].train.reward_mean == 0.2
    assert list(history.rollouts[1].ends_s) == [22.0, 26.0]
    assert history.versions == {"paceline": "0.2.0"}


def test_no_sum_counts_what_was_done_again_after_a_resumption() -> None:
    def step(number: int, begin_s: float, accepted: int, plain_s: float, reason: str) -> list[Event]:
        done = replace(response(number, begin_s + 1.0), finish_reason=reason)
        sample = EngineStepSample(
            t_s=begin_s,
            num_steps=10,
            step_s=1.0,
            num_running=2.0,
            num_draft_tokens=20,
            num_accepted_tokens=accepted,
            step=number,
        )
        compared = Comparison(
            t_s=begin_s, step=number, responses=1, tokens=5, plain_s=plain_s, accelerated_s=1.0
        )
        return [sample, done, compared]

    resumed = Resumed(t_s=20.0, resumed_unix_s=0.0, machine=MACHINE, versions={})
    kept = [*step(1, 10.0, 10, 2.0, "stop"), train_step(1)]
    ended, begun = [*step(2, 12.0, 0, 9.0, "length"), train_step(2)], step(3, 14.0, 0, 9.0, "length")
    again = [*step(2, 20.0, 10, 2.0, "stop"), train_step(2)]
    history = collect(HEADER, [*kept, *ended, *begun, resumed, *again])
    alone = collect(HEADER, [*kept, *again])
    assert history.total == alone.total
    assert history.by_batch == alone.by_batch
    assert history.total.acceptance_length == 1.5
    assert history.num_responses == 2
    assert history.response_tokens == alone.response_tokens > 0
    assert history.lengths.used().tolist() == alone.lengths.used().tolist()
    assert history.lengths.used().sum(axis=0).tolist() == [2.0, 0.0]
    measured = saving_of(history)
    assert measured is not None
    assert measured.ratio == 2.0


def test_rollouts_outside_of_training_only_count_in_the_throughput() -> None:
    sample = EngineStepSample(t_s=1.0, num_steps=1, step_s=0.5, num_running=2.0, num_generated_tokens=7)
    history = collect(HEADER, [sample, response(0, 5.0)])
    assert history.rows == []
    assert history.num_responses == 0
    assert history.throughput.used().sum(axis=0).tolist() == pytest.approx([7.0, 0.5])


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    header = Header(
        machine=MACHINE,
        versions={HOSTILE: HOSTILE},
        started_unix_s=0.0,
        task=HOSTILE,
        model=HOSTILE,
        config={HOSTILE: {"a": HOSTILE}},
    )
    with RecordWriter.create(tmp_path, header) as writer:
        writer.write(Note(t_s=0.0, text=HOSTILE))
        writer.write(Failure(t_s=0.0, text=HOSTILE))
        for step in (1, 2):
            writer.write(train_step(step, metrics={HOSTILE: float(step)}))
        writer.write(RunEnd(t_s=1.0, reason=HOSTILE))
    page = build_report(tmp_path).read_text()
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert page.count(escape(HOSTILE)) == 12
    assert data_of(page)["metric-0"]["series"][0]["name"] == HOSTILE


def test_long_runs_are_thinned() -> None:
    events: list[Any] = []
    for step in range(1, 5001):
        t_s = 8.0 * step
        events += [
            EngineStepSample(t_s=t_s + 0.1 * i, num_steps=4, step_s=0.1, num_running=9.0, step=step)
            for i in range(3)
        ]
        events += [
            response(step, t_s + 1 + step % 7, response_tokens=step * 40),
            Evaluation(t_s=t_s, step=step, solve_rate=0.5, n=4),
        ]
        events.append(train_step(step, reward_mean=step / 5000, reward_std=0.1))
    history = collect(HEADER, events)
    for draw in FIGURES.values():
        drawing = draw(history)
        assert not isinstance(drawing, str)
        figures = drawing.figures if isinstance(drawing, Choice) else [drawing]
        assert 1 <= len(figures) <= MAX_ROLLOUTS
        for figure in figures:
            limit = 120 if figure.edges else MAX_POINTS
            assert all(1 <= len(series.y) <= limit for series in figure.series)
            assert all(len(series.x) == len(series.y) for series in figure.series if series.style != "bars")
    running = running_figure(history)
    assert isinstance(running, Choice)
    assert running.names[-1] == "5000"
    page = render(history)
    assert page.count("<tr>") < 460
    assert len(page) < 1_500_000


def paused_steps(worker: str = "") -> list[EngineStepSample]:
    """Pairs of steps of 0.044 s, one pair in 0.110 s, with 256 requests; 10 s later one request alone."""
    busy = [
        EngineStepSample(
            t_s=0.11 * i,
            num_steps=2,
            step_s=0.088,
            num_running=256.0,
            num_generated_tokens=512,
            step=1,
            worker=worker,
        )
        for i in range(200)
    ]
    alone = EngineStepSample(t_s=32.0, num_steps=2, step_s=0.088, num_running=1.0, step=1, worker=worker)
    return [*busy, alone]


def drawn_running(events: list[EngineStepSample]) -> tuple[list[float], list[float]]:
    """x and y of the first picture."""
    choice = running_figure(collect(HEADER, events))
    assert isinstance(choice, Choice)
    series = choice.figures[0].series[0]
    return series.x, [value or 0.0 for value in series.y]


def test_requests_go_on_running_between_two_steps() -> None:
    x, y = drawn_running(paused_steps()[:-1])
    assert x[-1] == pytest.approx(0.11 * 200, abs=0.1)
    assert y == pytest.approx([256.0] * len(y), rel=1e-3)


def test_a_slow_reader_does_not_end_the_requests_of_an_engine() -> None:
    x, y = drawn_running(paused_steps())
    assert min(y[:-1]) == pytest.approx(256.0, rel=1e-3)
    assert x[-1] == pytest.approx(32.0, abs=0.1)


def test_a_worker_of_a_fleet_that_has_nothing_to_do_runs_nothing() -> None:
    x, y = drawn_running(paused_steps("w1"))
    idle = [value for at, value in zip(x, y, strict=True) if 22.5 < at < 31.5]
    assert max(idle) == 0.0
    assert [value for at, value in zip(x, y, strict=True) if at < 21.5] == pytest.approx(
        [256.0] * sum(at < 21.5 for at in x), rel=1e-3
    )


def test_the_momentary_throughput_is_that_of_the_rollout() -> None:
    history = collect(HEADER, paused_steps()[:-1])
    used = history.throughput.used()
    assert used[:, 0].sum() / used[:, 1].sum() == pytest.approx(512 / 0.11, rel=1e-2)


def test_thinning_keeps_the_course_of_a_line() -> None:
    history = collect(HEADER, [train_step(i, reward_mean=i / 6000) for i in range(1, 6001)])
    figure = reward_figure(history)
    assert isinstance(figure, Figure)
    line = figure.series[0]
    assert [line.y[0], line.y[-1]] == pytest.approx([0.0, 1.0], abs=1e-3)
    assert line.x == sorted(line.x)
    assert np.allclose(np.array(line.y, dtype=float), np.array(line.x) / 6000, atol=1e-4)


def test_the_tail_is_marked_from_ninety_percent_to_the_end() -> None:
    history = collect(HEADER, [response(1, 10.0 + i) for i in range(1, 21)])
    running = running_figure(history)
    assert isinstance(running, Choice)
    (figure,) = running.figures
    (mark,) = figure.marks
    assert (mark.x, mark.until) == (18.0, 20.0)
    assert figure.series[0].name == "in flight"
    assert figure.series[0].y[0] == 20
    assert figure.series[0].y[-1] == 0


def test_requests_running_are_averaged_over_time() -> None:
    samples = [
        EngineStepSample(t_s=5.0 + 0.02 * i, num_steps=1, step_s=0.02, num_running=float(20 - i), step=1)
        for i in range(20)
    ]
    running = running_figure(collect(HEADER, samples))
    assert isinstance(running, Choice)
    line = running.figures[0].series[0]
    expected = [20 - x / 0.02 + 0.5 for x in line.x]
    assert np.allclose(np.array(line.y, dtype=float), expected, atol=0.7)


def test_length_percentiles_and_the_cut_share() -> None:
    lengths = [*range(1, 100), 500]
    events = [
        response(1, 11.0, response_tokens=n, finish_reason="length" if n == 500 else "stop") for n in lengths
    ]
    history = collect(HEADER, events)
    assert [quantile(history.lengths, q) for q in (0.5, 0.9, 0.99)] == [50.0, 90.0, 99.0]
    figure = length_figure(history)
    assert isinstance(figure, Figure)
    assert sum(v or 0 for series in figure.series for v in series.y) == 100
    assert figure.series[1].name == "cut at the limit"
    assert sum(v or 0 for v in figure.series[1].y) == 1
    assert "1.0 % were cut" in unspaced(figure.summary)
    assert all(a < b for a, b in zip(figure.edges, figure.edges[1:], strict=False))


def test_phases_are_averaged_not_dropped_when_many() -> None:
    steps = [
        TrainStep(step=i, t_start_s=0.0, phases=Phases(rollout_s=float(i), other_s=1.0), tokens=1)
        for i in range(1, 241)
    ]
    figure = phase_figure(collect(HEADER, steps))
    assert isinstance(figure, Figure)
    assert [series.name for series in figure.series] == ["rollout", "other"]
    assert figure.series[0].y[:2] == [1.5, 3.5]
    assert figure.names[0] == "steps 1 to 2, mean"
    assert len(figure.edges) == len(figure.names) + 1 == 121


SPANS = st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 300), st.integers(0, 100)), max_size=40)


@given(spans=SPANS, width=st.sampled_from([0.05, 1.0]))
def test_bins_lose_nothing(spans: list[tuple[float, float, int]], width: float) -> None:
    bins = Bins(2, width=width, capacity=64)
    for begin, length, amount in spans:
        bins.spread(begin, begin + length, amount, 1)
        bins.add(begin, 0, 1)
    assert bins.used().sum(axis=0) == pytest.approx([sum(s[2] for s in spans), 2 * len(spans)])
    assert bins.num_used <= 64
    if spans:
        assert bins.num_used * bins.width >= max(begin + length for begin, length, _ in spans)


@given(rows=st.lists(st.floats(-1e3, 1e3), max_size=50), num_bins=st.integers(1, 12))
def test_coarsening_keeps_sums_and_order(rows: list[float], num_bins: int) -> None:
    merged = coarsen(np.array(rows).reshape(-1, 1), num_bins)
    assert len(merged) <= num_bins
    assert merged.sum() == pytest.approx(sum(rows), abs=1e-6)


def test_a_span_is_shared_by_its_bins_in_proportion() -> None:
    bins = Bins(1, width=1.0, capacity=8)
    bins.spread(0.5, 2.5, 8.0)
    assert bins.used()[:, 0].tolist() == [2.0, 4.0, 2.0]
    bins.add(15.0, 1.0)
    assert bins.width == 2.0
    assert bins.used()[:, 0].tolist() == [6.0, 2.0, 0, 0, 0, 0, 0, 1.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.50"),
        (0.01234, "0.0123"),
        (12.34, "12.3"),
        (1234567.0, "1 234 567"),
        (float("nan"), "–"),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert unspaced(number(value)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.75, "0.75 s"), (59.94, "59.9 s"), (200.4, "3 min 20 s"), (18720, "5 h 12 min"), (273600, "3 d 4 h")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert unspaced(duration(seconds)) == text
    assert unspaced(percent(0.735, 1)) == "73.5 %"


def test_a_missing_or_unwritable_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist"):
        build_report(tmp_path / "nowhere")
    RecordWriter.create(tmp_path, HEADER).close()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RecordError, match="cannot write"):
        build_report(tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_the_recorded_golden_run_still_reads_the_same(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / FILE_NAME, tmp_path)
    history = read_history(tmp_path)
    seen = {tile.label: [tile.value, tile.note] for tile in headline(history)}
    seen |= {name: [getattr(draw(history), "summary", "")] for name, draw in FIGURES.items()}
    assert seen == json.loads((GOLDEN / "headline.json").read_text(encoding="utf-8"))
    assert "Countdown, 3 numbers" in build_report(tmp_path).read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("kind", ["whole", "empty"])
def test_a_browser_draws_every_figure_without_a_script_error(
    tmp_path: Path, run_dir: Path, width: int, kind: str
) -> None:
    if kind == "empty":
        run_dir = tmp_path / "run"
        RecordWriter.create(run_dir, HEADER).close()
    report = build_report(run_dir)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
        "--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom", report.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr
    drawn = result.stdout.count('role="img"')
    assert drawn == len(data_of(report.read_text()))
    assert drawn == (0 if kind == "empty" else len(FIGURES) + 3)
    assert "NaN" not in result.stdout
