"""The report's worker timeline: every chunk drawn or counted, losses marked, one picture for each rollout."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from fleet_record import FleetRun, total_tokens

from paceline.record import ChunkDone, DrafterSession, Header, HelpDone, Machine, RecordReader, ResponseDone
from paceline.report import build_report
from paceline.report.chunks import Piece
from paceline.report.history import MAX_PIECES, RunHistory, collect, read_history
from paceline.report.timeline import Lane, Stretch, draw_timeline
from paceline.report.workers import MAX_BARS, build_lanes, describe_helps, describe_sessions, draw_workers

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEADER = Header(machine=Machine(cpu="x", cores=1, memory_bytes=1), versions={}, started_unix_s=0.0)
BAR = re.compile(r"M[\d.]+ [\d.]+h")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FleetRun().build(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def history(run_dir: Path) -> RunHistory:
    return read_history(run_dir)


def unspaced(text: str) -> str:
    return re.sub("[\u202f\u00a0]", " ", text)


def chunk(step: int, start_s: float, end_s: float, **fields: object) -> ChunkDone:
    common = {"group": 0, "sample": 0, "worker": "w0", "tokens": 4}
    return ChunkDone(t_start_s=start_s, t_end_s=end_s, step=step, **common | fields)  # type: ignore[arg-type]


def response(step: int, start_s: float, end_s: float) -> ResponseDone:
    counts = {"prompt_tokens": 1, "response_tokens": 4, "num_steps": 4}
    return ResponseDone(t_start_s=start_s, t_end_s=end_s, step=step, group=0, sample=0, **counts)


def test_the_simulated_record_is_whole(run_dir: Path) -> None:
    with RecordReader(run_dir) as record:
        events = list(record)
    responses = [event for event in events if isinstance(event, ResponseDone)]
    totals = total_tokens(events)
    assert all(totals[r.step, r.group, r.sample] == r.response_tokens for r in responses)


def test_every_rollout_has_a_timeline_with_all_its_chunks(run_dir: Path, history: RunHistory) -> None:
    with RecordReader(run_dir) as record:
        counts = Counter(event.step for event in record if isinstance(event, ChunkDone))
    drawn = draw_workers(history)
    assert len(drawn) == len(history.drawn_rollouts) == 6
    for step, text in zip(history.drawn_rollouts, drawn, strict=True):
        assert len(BAR.findall(text)) == counts[step]
        assert f"{counts[step]} chunks on 4 workers" in unspaced(text)
        assert [f">w{i}</span>" in text for i in range(4)] == [True] * 4


def test_a_killed_worker_is_marked_and_named(history: RunHistory) -> None:
    drawn = draw_workers(history)
    assert [text.count('class="lost"') for text in drawn] == [0, 0, 0, 1, 0, 0]
    assert re.search(r"w0 lost after 3.00 s with [456] chunks, which went on elsewhere", unspaced(drawn[3]))


def test_it_says_who_helped_whom() -> None:
    def helped(kind: str, outcome: str = "", worker: str = "w1", num_leads: int = 0) -> HelpDone:
        return HelpDone(
            t_start_s=1.0,
            t_end_s=2.0,
            step=1,
            worker=worker,
            helped="w0",
            kind=kind,
            outcome=outcome,
            num_leads=num_leads,
        )

    raced = [helped("copy", "won", num_leads=3)]
    assert unspaced(describe_helps(raced)).endswith("of responses of w0 (the lead was taken 3 times)")
    helps = [helped("copy", "won"), helped("draft"), helped("draft"), helped("copy", "lost"), helped("take")]
    assert unspaced(describe_helps([*helps, helped("take", worker="w2")])) == (
        "w1 won 1 of 2 races with copies of responses of w0; w1 drafted for w0 (2 s); "
        "w1 took over 1 response of w0; w2 took over 1 response of w0"
    )
    assert describe_helps([]) == ""
    history = RunHistory(HEADER)
    for event in (chunk(1, 0.0, 3.0), response(1, 0.0, 3.0), helped("draft")):
        history.add(event)
    [drawn] = draw_workers(history)
    assert "w1 drafted for w0" in drawn
    assert "1 chunk on 1 worker" in unspaced(drawn)
    assert "What 2 workers did" in unspaced(drawn)
    assert all(text in drawn for text in ("w1 drafts for w0", "Grey: drafting"))
    assert len(BAR.findall(drawn)) == 2


def test_a_worker_that_drafts_for_two_has_a_row_for_each() -> None:
    drafting = {"w1": [Stretch(0.0, 2.0, 6, "w1 drafts for w0"), Stretch(1.0, 2.0, 6, "w1 drafts for w2")]}
    lanes = build_lanes([Piece(0.0, 2.0, "w0", 1, 0, 9)], {}, drafting)
    assert [(lane.name, len(lane.rows)) for lane in lanes] == [("w0", 1), ("w1", 2)]


def test_a_response_is_one_shape_wherever_it_ran() -> None:
    pieces = [
        Piece(0.0, 1.0, "w0", 2, 5, 300),
        Piece(1.0, 2.0, "w10", 2, 5, 20),
        Piece(0.0, 2.0, "w9", 1, 0, 9),
    ]
    lanes = build_lanes(pieces, {})
    assert [lane.name for lane in lanes] == ["w0", "w9", "w10"]
    text = draw_timeline(lanes, 2.0, "", 2.0)
    assert text.count("<path") == 2
    assert "group 2, sample 5: 320 tokens in 2 chunks on w0, w10" in text


def test_rows_of_a_lane_lie_below_one_another_and_lanes_apart() -> None:
    rows = [[Stretch(0.0, 1.0, 1, "a")], [Stretch(0.0, 1.0, 2, "b")]]
    text = draw_timeline([Lane(rows, "w0"), Lane(rows[:1], "w1", [(0.5, "gone")])], 1.0, "", 0.9)
    tops = [float(y) for y in re.findall(r"M0 ([\d.]+)h", text)]
    assert len(tops) == 3
    first, third, second = tops  # the one title of two lanes is drawn first
    assert first < second < third
    assert third - second > second - first
    assert "<title>gone</title>" in text


def test_names_are_left_out_where_there_is_no_room() -> None:
    lanes = [Lane([[Stretch(0.0, 1.0, 1)]], f"w{i}") for i in range(300)]
    text = draw_timeline(lanes, 1.0, "", 1.0)
    tops = [int(top) for top in re.findall(r'<span style="top:(-?\d+)px">w', text)]
    assert 20 < len(tops) < 70
    assert all(after - before >= 14 for before, after in pairwise(tops))


def test_large_rollouts_are_thinned_and_say_so() -> None:
    many = 3 * MAX_PIECES
    chunks = [chunk(1, i * 1e-3, i * 1e-3 + 1 + i % 7, group=i, worker=f"w{i % 50}") for i in range(many)]
    [drawn] = draw_workers(collect(HEADER, [*chunks, response(1, 0.0, 20.0)]))
    assert len(BAR.findall(drawn)) == MAX_PIECES
    text = unspaced(drawn).replace(" 000", "000")
    assert f"{many} chunks on 50 workers" in text
    assert f"{many - MAX_PIECES} short ones are left out" in text
    assert "tokens" not in drawn, "what is left out would be missing in the sum"


def test_neighbours_are_joined_before_anything_is_left_out() -> None:
    one_after_another = [chunk(1, float(i), i + 1.0) for i in range(MAX_PIECES + 500)]
    [drawn] = draw_workers(collect(HEADER, [*one_after_another, response(1, 0.0, 20.0)]))
    assert len(BAR.findall(drawn)) == 1
    assert "drawn as one" in drawn
    assert "left out" not in drawn


def test_pages_of_many_rollouts_stay_small() -> None:
    events: list[ChunkDone | ResponseDone] = []
    for step in range(1, 49):
        events += [chunk(step, 10.0 * step, 10.0 * step + 1 + i % 5, group=i) for i in range(1000)]
        events.append(response(step, 10.0 * step, 10.0 * step + 8))
    drawn = draw_workers(collect(HEADER, events))
    bars = [len(BAR.findall(text)) for text in drawn]
    assert bars[-1] == 1000
    assert sum(bars[:-1]) <= MAX_BARS
    assert sum(map(len, drawn)) < 3_000_000


def test_runs_without_a_fleet_have_no_timeline() -> None:
    assert draw_workers(collect(HEADER, [response(1, 0.0, 1.0)])) == []
    drawn = draw_workers(collect(HEADER, [response(1, 0.0, 1.0), chunk(2, 2.0, 3.0), response(2, 2.0, 3.0)]))
    assert "No chunk" in drawn[0]
    assert "<svg" in drawn[1]


def test_a_rollout_of_no_length_can_be_drawn() -> None:
    [drawn] = draw_workers(collect(HEADER, [chunk(1, 5.0, 5.0), response(1, 5.0, 5.0)]))
    assert "1 chunk on 1 worker, coloured" in drawn


def test_the_slider_hides_all_but_the_newest(run_dir: Path) -> None:
    page = build_report(run_dir).read_text()
    cells = page[page.index("data-chosen-by=") :]
    assert cells.count("<div hidden>") == 5
    assert page.count('class="timeline"') == 6


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_the_timeline_without_a_script_error(
    tmp_path: Path, run_dir: Path, width: int
) -> None:
    report = build_report(run_dir)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
        "--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom", report.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr
    cells = re.findall(r'<div hidden="">', result.stdout[result.stdout.index("data-chosen-by") :])
    assert len(cells) == 5


def test_free_workers_that_trained_are_named() -> None:
    sessions = [
        DrafterSession(t_start_s=begin_s, t_end_s=begin_s + 1.5, step=1, worker=worker)
        for begin_s, worker in ((1.0, "w1"), (3.0, "w1"), (5.0, "w0"))
    ]
    assert (
        unspaced(describe_sessions(sessions))
        == "w0 trained the drafter (1.50 s); w1 trained the drafter (3 s)"
    )
    with_cores = [msgspec.structs.replace(one, core_s=0.25) for one in sessions]
    assert "w1 trained the drafter (3 s, 0.5 core-seconds)" in unspaced(describe_sessions(with_cores))
    assert describe_sessions([]) == ""
