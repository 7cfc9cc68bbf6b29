"""Of two racing workers the copy and the original are killed by turns, one in a rollout, and only while they race; a
driver is killed only once its engines have generated.
"""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.control.helping import Pair, Place
from paceline.fleet.journal import Journal, _frame
from paceline.planning.help import Help

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import chaos


def make_fleet(kind: Help, copies: list[int]) -> SimpleNamespace:
    """A fleet in which w1 helps w0."""
    pair = Pair(Place("w1", 0), Place("w0", 0), kind)
    controller = SimpleNamespace(
        workers=("w0", "w1"),
        pairs_of=lambda name: [pair] if name == "w1" else [],
        _workers={"w1": SimpleNamespace(copies=copies)},
    )
    return SimpleNamespace(
        _controller=controller, _actors=SimpleNamespace(process={"w0": 100, "w1": 101}.get)
    )


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that were killed."""
    found: list[int] = []

    def kill(process: int, number: int) -> None:
        assert number == signal.SIGKILL
        found.append(process)

    monkeypatch.setattr(chaos.os, "kill", kill)
    monkeypatch.setattr(chaos, "MOST_RACE_S", 0.0)
    return found


def test_the_copy_and_the_original_are_killed_by_turns_one_in_a_rollout(killed: list[int]) -> None:
    evidence: list[dict[str, object]] = []
    for _ in range(3):
        killer = chaos.RacerKiller(make_fleet(Help.COPY, [7]), random.Random(0), evidence)
        for _ in range(5):
            killer.strike()
    assert killed == [101, 100, 101]
    assert [one["member"] for one in evidence] == ["copy", "original", "copy"]


def test_a_race_that_begins_anew_costs_no_second_worker(killed: list[int]) -> None:
    killer = chaos.RacerKiller(make_fleet(Help.COPY, [7]), random.Random(0))
    for race in (True, False, True):
        killer.fleet._controller._workers["w1"].copies = [7] if race else []
        for _ in range(3):
            killer.strike()
    assert killed == [101]


@pytest.mark.parametrize(("kind", "copies"), [(Help.DRAFT, [7]), (Help.COPY, [])])
def test_who_does_not_race_is_not_killed(killed: list[int], kind: Help, copies: list[int]) -> None:
    killer = chaos.RacerKiller(make_fleet(kind, copies), random.Random(0))
    for _ in range(5):
        killer.strike()
    assert not killed
    assert not killer.evidence


class FakeDriver:
    """A driver that does one thing whenever it is looked at, and then ends."""

    def __init__(self, doings: list[bytes | None], journal: Path) -> None:
        self.doings, self.journal = doings, journal
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None and not self.doings:
            self.code = 0
        if self.code is None and (frame := self.doings.pop(0)) is not None:
            with self.journal.open("ab") as file:
                file.write(frame)
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            raise chaos.subprocess.TimeoutExpired("driver", timeout)
        return self.code or 0

    def kill(self) -> None:
        self.code = -signal.SIGKILL


def make_drive(folder: Path, monkeypatch: pytest.MonkeyPatch, doings: list[bytes | None]) -> chaos.Drive:
    driver = FakeDriver(doings, folder / "o.jsonl.progress")
    monkeypatch.setattr(chaos.Drive, "start", lambda self: driver)
    return chaos.Drive(folder, "float32", SimpleNamespace())


HEAD, GROWTH = _frame(b"job"), _frame(b"tokens")


def test_the_head_of_a_journal_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = make_drive(tmp_path, monkeypatch, [])
    assert drive.count_bytes() == 0
    Journal.open(tmp_path / "o.jsonl.progress", "job", resume=True).close()
    assert (tmp_path / "o.jsonl.progress").stat().st_size > 0
    assert drive.count_bytes() == 0


def test_a_driver_is_killed_once_its_journal_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = make_drive(tmp_path, monkeypatch, [None, HEAD, None, GROWTH, None, None])
    found = drive.run(random.Random(0), is_killed=True)
    assert found == {"kept_bytes": 0, "killed_at_bytes": len(GROWTH)}
    drive = make_drive(tmp_path, monkeypatch, [None, None, GROWTH, None, None])
    found = drive.run(random.Random(0), is_killed=True)
    assert found == {"kept_bytes": len(GROWTH), "killed_at_bytes": 2 * len(GROWTH)}


@pytest.mark.parametrize(("doings", "is_killed"), [([HEAD, None], True), ([HEAD, GROWTH], False)])
def test_a_driver_without_progress_or_reason_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doings: list[bytes | None], is_killed: bool
) -> None:
    drive = make_drive(tmp_path, monkeypatch, list(doings))
    assert drive.run(random.Random(0), is_killed=is_killed) is None


def test_responses_that_came_twice_or_not_at_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeFleet:
        num_unfinished = 3

        def submit(self, requests: list[object], params: object) -> None: ...

        def advance(self, wait_s: float) -> list[SimpleNamespace]:
            self.num_unfinished -= 1
            return [SimpleNamespace(index=self.num_unfinished // 2)]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    tally = Counter[str]()
    assert list(chaos.roll_out(FakeFleet(), [None] * 3, None, tally)) == [1, 0]
    assert tally == {"twice": 1, "missing": 1}
    chaos.count_rollout(tally, [(1, 2), (3, 4), (5, 6)], {1: (3, 9), 0: (1, 2)})
    assert (tally["responses"], tally["tokens"], tally["diverged"]) == (2, 4, 1)


def test_bars_ask_for_enough_kills_and_no_mistake() -> None:
    calm = {"dtype": "float32", "twice": 0, "missing": 0, "diverged": 0}
    rows = [
        {**calm, "kind": "parts", "engines": 50, "kills": 60, "rewards": 1},
        {**calm, "kind": "racers", "kills": 24},
        {**calm, "kind": "drivers", "kills": 4},
        chaos.describe_kills("driver", Counter(), [], 4, 0.0) | {"dtype": "float32", "kind": "drivers"},
    ]
    assert [(bar["case"], bar["met"]) for bar in chaos.check_rows(rows)] == [
        ("parts, float32: engines", True),
        ("parts, float32: mistakes", False),
        ("racers, float32: kills", False),
        ("racers, float32: mistakes", True),
        ("drivers, float32: kills", True),
        ("drivers, float32: mistakes", True),
        ("drivers, float32: kills", False),
        ("drivers, float32: mistakes", True),
    ]


@pytest.mark.parametrize(
    ("words", "engines"),
    [
        (["--kills", "60"], 50),
        (["--kills", "40"], 40),
        (["--kills", "120"], 60),
        (["--kills", "10", "--engine-kills", "5"], 5),
    ],
)
def test_half_of_the_killed_or_more_are_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], engines: int
) -> None:
    asked: list[SimpleNamespace] = []

    def run(dtype: str, options: SimpleNamespace) -> list[dict[str, object]]:
        asked.append(options)
        return []

    monkeypatch.setattr(chaos, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["chaos.py", *words, "--dtype", "float32", "--json", str(tmp_path / "found.json")]
    )
    chaos.main()
    assert asked[0].engine_kills == engines >= asked[0].kills / 2


def test_fewer_engines_than_half_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--kills", "10", "--engine-kills", "4"])
    with pytest.raises(SystemExit):
        chaos.main()
    assert "--engine-kills 4: 5 to 10, half of all kills or more" in capsys.readouterr().err
