"""`rollout --workers`: what is refused before anything starts, and what is shown."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from command_line import Run
from rich.console import Console

from paceline.commands.inputs.launch import build_settings
from paceline.commands.rollout.fleet_job import FleetView, _refuse_other_journal, find_troubles, journal_of
from paceline.config import FleetSettings
from paceline.control.events import Keep, Report, Telemetry, WorkerStep
from paceline.control.packed import Packed
from paceline.errors import ConfigError, InstallError, RecordError
from paceline.fleet import cluster
from paceline.fleet.journal import Journal
from paceline.fleet.status import StatusBoard, WorkerStatus, describe_drafts
from paceline.types import (
    DrafterScore,
    DraftSharingCounters,
    KvPoolCounters,
    KvUse,
    RolloutRequest,
    StepObservation,
)

pytest.importorskip("ray", reason="Ray is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", 0], "fleet: workers=0"),
        (["--workers", 2, "--chunk-tokens", 0], "fleet: chunk_tokens=0"),
        (["--workers", 2, "--plain"], "--plain runs vLLM without Paceline"),
        (["--workers", 4096], "at most"),
        (["--workers", 2, "--variant", "magic"], "'even', 'context'"),
        (["--record", "here"], "give --workers too"),
        (["--workers", 2, "--record", __file__], "is a file: give a folder"),
        (["--workers", 2, "--ray-address", "nowhere"], "write it as HOST:PORT"),
        (["--variant", "group"], "--variant: for a fleet; add --workers N"),
        (["--chunk-tokens", 8192], "--chunk-tokens: for a fleet"),
        (["--ray-address", "a:1", "--metrics-port", 0], "--ray-address, --metrics-port: for a fleet"),
        (["--retry-failed"], "give --resume too"),
        (["--metrics-host", "0.0.0.0"], "--metrics-host: for a fleet"),
        (["--workers", 2, "--metrics-host", "0.0.0.0"], "without metrics_port serves nothing"),
        (["--draft-server", "tcp://a:1", "--plain"], "--draft-server cannot help"),
        (["--draft-server", "tcp://a:1", "--drafter", "none"], "draft_servers need drafter='suffix'"),
        (["--draft-secret-file", "nowhere"], "name the server that it is for"),
        (["--draft-server", "tcp://a:1", "--draft-secret-file", "nowhere"], "secret nowhere"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(
    run: Run, model: Path, prompts: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    out = tmp_path / "o.jsonl"
    done = run("rollout", model, prompts, "--out", out, "--kv-cache-gib", 0.0001, *options)
    assert done.code == 2, done.error
    assert message in done.error.replace("\n", " ")
    assert not out.exists()


def test_a_recorded_run_is_not_replaced_unasked(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("{}")
    out = tmp_path / "o.jsonl"
    done = run("rollout", model, prompts, "--out", out, "--workers", 2, "--record", tmp_path)
    assert done.code != 0
    assert "already holds a run" in done.error.replace("\n", " ")
    assert not out.exists()


def test_paths_reach_engines_that_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret").write_bytes(bytes(range(65, 85)))
    settings = build_settings(
        0, "suffix", Path("small"), ["tcp://a:1"], Path("secret"), compiled=True, draft_worker=True
    )
    assert settings.draft_worker
    assert settings.model_drafter == str(tmp_path / "small")
    assert settings.draft_secret_file == str(tmp_path / "secret")
    assert settings.draft_servers == ("tcp://a:1",)


def test_an_address_where_nobody_listens_is_named(
    run: Run, model: Path, prompts: Path, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = run(
        "rollout", model, prompts, "--out", tmp_path / "o.jsonl", "--workers", 2, "--ray-address", address
    )
    assert done.code == 2
    assert f"no Ray at {address}" in done.error


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InstallError, match=r"pip install 'paceline\[fleet\]'"):
        cluster.check_fleet(FleetSettings(), 2)


def test_a_cluster_that_is_too_small_is_named() -> None:
    settings = FleetSettings(workers=3, resources_per_worker={"fast": 1})
    has = {"CPU": 3, "GPU": 6, "fast": 3}
    cluster._check_size(settings, 2, has, has)
    with pytest.raises(ConfigError, match="3 workers need 6 GPU, the Ray cluster has 4"):
        cluster._check_size(settings, 2, {**has, "GPU": 4}, has)
    with pytest.raises(ConfigError, match="3 workers need 3 fast, the Ray cluster has 0"):
        cluster._check_size(settings, 2, {"CPU": 3, "GPU": 6}, has)


def test_a_cluster_that_others_use_is_told(caplog: pytest.LogCaptureFixture) -> None:
    has = {"CPU": 8.0}
    cluster._check_size(FleetSettings(workers=4), 0, has, has)
    assert not caplog.records
    cluster._check_size(FleetSettings(workers=4), 0, has, {"CPU": 1.0})
    [told] = caplog.messages
    assert "4 workers need 4 CPU, of which the Ray cluster has 1 free" in told


class Ray:
    """A Ray that is connected, with two nodes."""

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": 2.0}

    available_resources = cluster_resources

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True}, {"Alive": True}, {"Alive": False}]


def test_gpus_that_vllm_needs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "import_ray", Ray)
    monkeypatch.setattr(cluster, "is_cpu_build", lambda: False)
    assert not cluster.connect(FleetSettings(workers=2), {})
    with pytest.raises(ConfigError, match="2 workers need 4 GPU, the Ray cluster has 2"):
        cluster.connect(FleetSettings(workers=2), {"tensor_parallel_size": 2})


def test_a_connected_cluster_is_not_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "import_ray", Ray)
    assert not cluster.is_one_machine(FleetSettings())
    monkeypatch.setattr(Ray, "nodes", lambda self: [{"Alive": True}, {"Alive": False}])
    assert cluster.is_one_machine(FleetSettings())
    assert not cluster.is_one_machine(FleetSettings(address="auto"))


class Shown:
    """A fleet to look at."""

    def __init__(self) -> None:
        self.board = StatusBoard({name: WorkerStatus(name) for name in ("w0", "w1")})


def report(num_running: int, preemptions: int) -> Report:
    step = WorkerStep(StepObservation(4, 6, 3, 0, 0.01, num_waiting=2), 7)
    return Report(1, telemetry=Telemetry(KvUse(10, 16, 7, preemptions), num_running, (step, step)))


def test_the_view_shows_every_worker() -> None:
    fleet = Shown()
    view = FleetView(fleet)  # type: ignore[arg-type]
    assert view.look() == 0
    fleet.board.hear("w0", report(5, 1))
    fleet.board.workers["w0"].state = "up"
    assert view.look() == 14
    console = Console(width=100, record=True)
    console.print(view.table())
    lines = console.export_text().splitlines()
    assert lines[1].split()[:5] == ["w0", "up", "5", "2", "70%"]
    assert lines[1].split()[6] == "1.75"
    assert lines[2].split()[:2] == ["w1", "starting"]


def test_the_view_shows_who_helps_whom_and_what_the_model_drafts() -> None:
    fleet = Shown()
    seen = StepObservation(
        4, 6, 4, 0, 0.01, num_model_tokens=3, num_wasted_tokens=17, num_branches=5, num_branch_hits=2
    )
    step = WorkerStep(seen, 8)
    fleet.board.hear("w0", Report(1, telemetry=Telemetry(KvUse(10, 16, 7, 0), 1, (step,))))
    fleet.board.workers["w1"].state, fleet.board.workers["w1"].helps = "racing", "w0"
    console = Console(width=100, record=True)
    console.print(FleetView(fleet).table())  # type: ignore[arg-type]
    lines = console.export_text().splitlines()
    assert lines[1].split()[-2:] == ["75%", "17"]
    assert "racing for w0" in lines[2]
    status = fleet.board.workers["w0"]
    assert (status.num_branches, status.num_branch_hits) == (5, 2)


def test_the_view_tells_whose_drafts_were_accepted_and_what_was_in_vain() -> None:
    board = StatusBoard({name: WorkerStatus(name) for name in ("w0", "w1")}, "lookup", ("small", "tiny"))
    assert describe_drafts(board) is None
    seen = StepObservation(
        4,
        90,
        80,
        0,
        0.01,
        num_model_tokens=40,
        further_tokens=(30,),
        num_adopted_tokens=20,
        num_wasted_tokens=7,
        further_wasted_tokens=(7,),
        wait_s=1.25,
    )
    told = Telemetry(KvUse(10, 16, 7, 0), 1, (WorkerStep(seen, 84),))
    for name in ("w0", "w1"):
        board.hear(name, Report(1, telemetry=told))
    w0, w1 = board.workers.values()
    assert board.accepted_by_source(w0) == {"lookup": 20, "small": 10, "tiny": 30, "lead": 20}
    assert board.wasted_by_drafter(w0) == {"small": 0, "tiny": 7}
    w1.num_races, w1.num_won = 3, 2
    assert describe_drafts(board) == (
        "accepted drafts: lookup 25%, small 12%, tiny 38%, lead 25%; in vain: tiny 14; waited for: 2.5 s; races won by "
        "copies: 2 of 3"
    )


def test_the_model_free_drafter_alone_needs_no_split() -> None:
    board = Shown().board
    board.hear("w0", report(1, 0))
    assert board.accepted_by_source(board.workers["w0"]) == {"suffix": 6, "lead": 0}
    assert describe_drafts(board) is None


def test_the_drafters_score_is_counted_over_all_lives() -> None:
    board = Shown().board

    def hear(score: DrafterScore) -> None:
        board.hear("w0", Report(1, telemetry=Telemetry(KvUse(10, 16, 7, 0), 1, (), drafter_score=score)))

    hear(DrafterScore(10, 4))
    hear(DrafterScore(12, 5))
    board.lose("w0", 0)
    hear(DrafterScore(1, 1))
    assert board.drafter_score == DrafterScore(13, 6)


def test_preemptions_are_counted_over_all_lives() -> None:
    board = Shown().board
    board.hear("w0", report(1, 1))
    board.hear("w0", report(1, 2))
    board.lose("w0", 0)
    board.hear("w0", report(1, 1))
    assert board.num_preemptions == 3
    assert board.workers["w0"].num_losses == 1
    assert len(board.take_steps()) == 6
    assert board.take_steps() == []


def pool_report(hits: int, corrupt: int) -> Report:
    counters = KvPoolCounters(hits=hits, corrupt=corrupt)
    return Report(1, telemetry=Telemetry(KvUse(10, 16, 7, 0), 1, (), counters))


def test_the_kv_pool_is_counted_over_all_lives() -> None:
    board = Shown().board
    board.hear("w0", pool_report(3, 1))
    board.hear("w0", pool_report(5, 1))
    board.lose("w0", 0)
    board.lose("w0", 0)
    assert board.workers["w0"].kv_pool == KvPoolCounters(hits=5, corrupt=1)
    board.hear("w0", pool_report(2, 2))
    assert board.workers["w0"].kv_pool == KvPoolCounters(hits=7, corrupt=3)
    assert board.workers["w1"].kv_pool == KvPoolCounters()


def sharing_report(**counts: int) -> Report:
    shared = DraftSharingCounters(**counts)
    return Report(1, telemetry=Telemetry(KvUse(10, 16, 7, 0), 1, (), draft_sharing=shared))


def test_draft_sharing_is_counted_over_all_lives_and_trouble_is_shown() -> None:
    fleet = Shown()
    view = FleetView(fleet)  # type: ignore[arg-type]
    fleet.board.hear("w0", sharing_report(told_tokens=10))
    fleet.board.hear("w1", sharing_report(told_tokens=1, heard_tokens=4))
    console = Console(width=100, record=True)
    console.print(view.table())
    assert "draft server" not in console.export_text()
    fleet.board.lose("w0", 0)
    fleet.board.hear("w0", sharing_report(told_tokens=2, held_messages=3, lost_tokens=7))
    assert fleet.board.draft_sharing == DraftSharingCounters(13, 4, held_messages=3, lost_tokens=7)
    console.print(view.table())
    assert "the draft server took no message 3 times, lacked 7 tokens" in console.export_text()


class Torn:
    """A journal whose last line was not written, or was."""

    def __init__(self, failure: str | None) -> None:
        self.failure = failure


@pytest.mark.parametrize(
    ("pool", "failure", "told"),
    [
        (KvPoolCounters(hits=9), None, []),
        (KvPoolCounters(hits=9, misses=3), None, []),
        (KvPoolCounters(hits=9, evicted=3), None, []),
        (
            KvPoolCounters(hits=9, misses=3, corrupt=1, evicted=2),
            "the disk is full",
            [
                "the disk is full",
                "3 of 12 chunks were prefilled again: of the KV pool's entries 1 were damaged, 2 dropped for want of "
                "room and 0 not written",
            ],
        ),
    ],
)
def test_what_cost_work_is_told(pool: KvPoolCounters, failure: str | None, told: list[str]) -> None:
    assert find_troubles(pool, DraftSharingCounters(told_tokens=3), Torn(failure)) == told  # type: ignore[arg-type]


def test_a_draft_server_that_did_not_keep_up_is_told() -> None:
    (told,) = find_troubles(KvPoolCounters(), DraftSharingCounters(dropped_tokens=8), Torn(None))  # type: ignore[arg-type]
    assert told == "the draft server was never told 8 tokens: drafts were shorter for a while"


def leave_journal(path: Path, **options: object) -> bytes:
    """What a killed driver leaves before any response has finished."""
    job = {"policy": "abc", "options": options}
    journal = Journal.open(path, json.dumps(job), resume=False)
    journal.find([RolloutRequest((1, 2), 50, key=5)])
    journal.write([Keep(0, 0, Packed.of([4, 5], [-1.0, -1.0]), 2, 0, None)])
    journal.close()
    return path.read_bytes()


def test_unfinished_responses_are_not_thrown_away_unasked(
    run: Run, model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.jsonl"
    kept = leave_journal(journal_of(out), seed=3)
    done = run("rollout", model, prompts, "--out", out, "--workers", 2)
    assert done.code == 6
    assert "has unfinished responses beside it: continue with --resume" in done.error.replace("\n", " ")
    assert journal_of(out).read_bytes() == kept


def test_unfinished_responses_of_other_options_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl.progress"
    leave_journal(path, seed=3, temperature=1.0)
    same = {"policy": "abc", "options": {"seed": 3, "temperature": 1.0}}
    _refuse_other_journal(path, same)
    _refuse_other_journal(tmp_path / "nowhere", same)
    for changed, message in (
        ({"options": {"seed": 3, "temperature": 0.5}}, "made with temperature=1.0, this run has 0.5"),
        ({"policy": "def"}, "of other weights than the model's"),
    ):
        with pytest.raises(RecordError, match=message):
            _refuse_other_journal(path, same | changed)
