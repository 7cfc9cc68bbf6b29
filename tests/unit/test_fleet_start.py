"""A fleet before and after its workers: what is refused, what is taken back, and the draft server's process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import EngineSettings, FleetSettings, KvPoolSettings, Variant
from paceline.control.controller import Controller
from paceline.drafting import child_process
from paceline.drafting.child_process import MAX_FAILED_STARTS
from paceline.drafting.client import DraftClient
from paceline.errors import CheckpointError, ConfigError, EngineError, RequestError, UnsupportedError
from paceline.fleet import cluster, fleet
from paceline.fleet.chunk_log import ChunkLog
from paceline.fleet.draft_process import DraftProcess, start_draft_process
from paceline.fleet.fleet import Fleet
from paceline.fleet.help_log import HelpLog
from paceline.owned_folder import OwnedFolder
from paceline.planning.help import Drafting
from paceline.record.ladder_file import Ladder, LadderFile, Rungs, Tried
from paceline.types import RolloutRequest

PLAIN: dict[str, Any] = {
    "n": 1,
    "prompt_logprobs": None,
    "logprobs": None,
    "stop": [],
    "structured_outputs": None,
    "repetition_detection": None,
}


def idle_fleet(variant: str = "context") -> Fleet:
    """A fleet whose workers have never started."""
    fleet = Fleet.__new__(Fleet)
    fleet._num_rollouts, fleet._is_closed = 0, False
    fleet.settings = FleetSettings.model_validate({"variant": variant})
    fleet.engine_settings = EngineSettings()
    fleet.max_model_len = 100
    fleet._controller = Controller(fleet.settings)
    fleet._actors = SimpleNamespace(vocab_size=50)  # type: ignore[assignment]
    fleet._rewards = fleet._kv_pool = fleet._journal = fleet._decision_log = None
    fleet._variant, fleet.chunks, fleet.helps = fleet.settings.variant, ChunkLog(), HelpLog()
    fleet._finished, fleet._drafter, fleet._drafting = [], 0, ()
    fleet._trainer, fleet._renews_drafter, fleet.drafter_version = None, False, 0
    return fleet


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("structured_outputs", object()),
        ("stop", ["a"]),
        ("repetition_detection", object()),
        ("n", 2),
        ("prompt_logprobs", 1),
        ("logprobs", -1),
    ],
)
def test_what_no_chunk_can_do_is_refused_before_any_work(option: str, value: object) -> None:
    fleet = idle_fleet()
    params: Any = SimpleNamespace(**{**PLAIN, option: value})
    with pytest.raises(UnsupportedError, match=option):
        fleet.submit([RolloutRequest((1, 2), 10)], params)
    assert fleet.num_unfinished == 0
    fleet.submit([RolloutRequest((1, 2), 10)], SimpleNamespace(**PLAIN))  # type: ignore[arg-type]
    assert fleet.num_unfinished == 1


@pytest.mark.parametrize(("variant", "lengths"), [("oracle", ()), ("oracle", (5, 6)), ("context", (5, 6))])
def test_lengths_that_do_not_fit_leave_the_fleet_free(variant: str, lengths: tuple[int, ...]) -> None:
    fleet = idle_fleet(variant)
    with pytest.raises(RequestError, match="true lengths for 1 requests"):
        fleet.submit(
            [RolloutRequest((1, 2), 10)],
            SimpleNamespace(**PLAIN),  # type: ignore[arg-type]
            true_lengths=lengths,
        )
    assert fleet.num_unfinished == 0


@pytest.mark.parametrize(
    ("chosen", "pool", "obstacle", "variant"),
    [
        (None, KvPoolSettings(directory="/dev/shm/x"), None, "even"),
        (None, KvPoolSettings(directory="/dev/shm/x"), "sliding windows", "sticky"),
        (None, None, None, "sticky"),
        ("context", None, None, "context"),
    ],
)
def test_responses_move_by_default_where_their_keys_and_values_do(
    chosen: Variant | None,
    pool: KvPoolSettings | None,
    obstacle: str | None,
    variant: Variant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = idle_fleet()
    made.use_variant(chosen)
    made.engine_settings = EngineSettings(kv_pool=pool)
    made._actors = SimpleNamespace(vocab_size=50, kv_pool_obstacle=obstacle)  # type: ignore[assignment]
    told: list[Any] = []
    monkeypatch.setattr(made, "_tell", told.append)
    made.submit([RolloutRequest((1, 2), 10)], SimpleNamespace(**PLAIN))  # type: ignore[arg-type]
    assert [event.variant for event in told] == [variant]


@pytest.mark.parametrize(
    ("place", "engine"),
    [
        (2, {"model_drafter": "a", "further_drafters": ("b",)}),
        (0, {"model_drafter": "a"}),
        (1, {"model_drafter": "a", "further_drafters": ("b",), "draft_worker": True}),
    ],
)
def test_a_drafter_that_engines_do_not_hold_is_refused(place: int, engine: dict[str, Any]) -> None:
    fleet = idle_fleet()
    fleet.engine_settings = EngineSettings.model_validate(engine)
    with pytest.raises(ConfigError, match=f"drafter {place}: the engines choose from"):
        fleet.use_drafter(place)


def test_what_is_known_of_the_other_drafters_goes_with_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, told = idle_fleet(), []
    fleet.engine_settings = EngineSettings(model_drafter="a", further_drafters=("b", "c", "d"))
    fleet._actors.settle = lambda *_: None  # type: ignore[method-assign]
    monkeypatch.setattr(fleet, "_tell", told.append)
    rungs = tuple(
        Rungs(name, (1.0,), draft_s) for name, draft_s in (("a", 0.1), ("b", 0.2), ("c", 0.3), ("d", 0.0))
    )
    tried = {"a": Tried(1.0, 2.0), "b": Tried(3.0, 4.0), "d": Tried(1.0, 1.0)}
    fleet.use_ladder(LadderFile(ladder=Ladder(8, (0.5,), rungs), tried=tried))
    fleet.use_drafter(1)
    fleet.submit([RolloutRequest((1, 2), 10)], SimpleNamespace(**PLAIN))  # type: ignore[arg-type]
    [event] = told
    assert (event.drafter, event.others) == (1, (Drafting(0.1, 0.5, 0),)), (
        "c was never tried, d's cost is unknown"
    )


def test_without_a_worker_no_ladder_is_measured() -> None:
    params: Any = SimpleNamespace(**PLAIN)
    assert idle_fleet().measure_ladder([], params) is None


def test_a_submission_that_breaks_leaves_the_fleet_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = idle_fleet()
    act = fleet._act

    def break_once(actions: Any) -> None:
        monkeypatch.setattr(fleet, "_act", act)
        raise ConfigError("broken")

    monkeypatch.setattr(fleet, "_act", break_once)
    with pytest.raises(ConfigError, match="broken"):
        fleet.submit([RolloutRequest((1, 2), 10)], SimpleNamespace(**PLAIN))  # type: ignore[arg-type]
    assert fleet.num_unfinished == 0


@pytest.mark.parametrize("breaks", ["connect", "is_one_machine", "open_pool"])
def test_what_was_made_goes_when_the_start_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """Ray and the metrics server; the fault is an error of the next part."""
    ended = []

    class Metrics:
        def __init__(self, *args: object) -> None: ...

        def close(self) -> None:
            ended.append("metrics")

    def fail(*args: object) -> None:
        raise ConfigError("broken")

    ray = SimpleNamespace(shutdown=lambda: ended.append("ray"))
    monkeypatch.setattr(fleet, "MetricsServer", Metrics)
    monkeypatch.setattr(cluster, "import_ray", lambda: ray)
    monkeypatch.setattr(cluster, "connect", lambda *args: True)
    monkeypatch.setattr(cluster, "is_one_machine", lambda settings: True)
    monkeypatch.setattr(fleet if breaks == "open_pool" else cluster, breaks, fail)
    with pytest.raises(ConfigError, match="broken"):
        Fleet(model, FleetSettings(metrics_port=0))
    assert ended == (["metrics"] if breaks == "connect" else ["ray", "metrics"])


# -- the draft server's process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DraftProcess]:
    made = DraftProcess(OwnedFolder(tmp_path, "sockets-"))
    yield made
    made.close()


def wait_for_end(server: DraftProcess) -> None:
    server.child._process.wait(timeout=20)


def test_a_long_folder_for_temporary_files_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = start_draft_process()
    assert made is not None
    try:
        assert len(made.address.removeprefix("ipc://")) <= child_process.MAX_PATH_BYTES
    finally:
        made.close()
    monkeypatch.setattr(child_process, "MAX_PATH_BYTES", 10)
    assert start_draft_process() is None


def test_the_server_has_the_secret_of_its_clients(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"sixteen bytes...!")
    server = DraftProcess(OwnedFolder(tmp_path, "sockets-"), str(secret))
    one, other = (
        DraftClient([server.address], secret=secret.read_bytes(), interval_ms=2.0) for _ in range(2)
    )
    try:
        for key, client in enumerate((one, other)):
            client.watch(5, key)
            client.report(5, key, 0, [key])
        deadline_s = time.monotonic() + 20.0
        while not (heard := one.take(10)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert heard
    finally:
        one.close()
        other.close()
        server.close()


def test_a_killed_server_is_started_again_at_once(server: DraftProcess) -> None:
    for count in range(2, 2 + MAX_FAILED_STARTS):
        server.child.kill()
        wait_for_end(server)
        server.child.check()
        assert server.child.num_starts == count


def test_a_machine_without_room_for_a_process_goes_on_without(
    server: DraftProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Popen` itself fails; it is tried again as one that ends at once."""
    now_s, tries = [time.monotonic()], 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(11, "Resource temporarily unavailable")

    server.child.kill()
    wait_for_end(server)
    monkeypatch.setattr(
        child_process, "time", SimpleNamespace(monotonic=lambda: now_s[0], time_ns=time.time_ns)
    )
    monkeypatch.setattr(child_process.subprocess, "Popen", refuse)
    for _ in range(200):
        server.child.check()
        now_s[0] += 0.25
    assert tries == MAX_FAILED_STARTS


def test_sockets_of_a_killed_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "from paceline.drafting.child_process import make_socket_folder\n"
        "folder = make_socket_folder('x')\n"
        "print(folder.path, flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    made = child_process.make_socket_folder("x")
    assert made is not None
    assert left.parent == made.path.parent
    assert left.exists(), "its owner lives"
    made.close()
    owner.kill()
    owner.communicate()
    made = child_process.make_socket_folder("x")
    assert made is not None
    assert not left.exists()
    made.close()
    made.close()


def test_a_server_that_cannot_start_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process.sys, "executable", "/bin/false")
    now_s = [0.0]
    monkeypatch.setattr(
        child_process, "time", SimpleNamespace(monotonic=lambda: now_s[0], time_ns=time.time_ns)
    )
    server = DraftProcess(OwnedFolder(tmp_path, "sockets-"))
    starts_s = []
    for _ in range(200):
        wait_for_end(server)
        server.child.check()
        if len(starts_s) < server.child.num_starts - 1:
            starts_s.append(now_s[0])
        now_s[0] += 0.25
    assert server.child.num_starts == MAX_FAILED_STARTS
    assert starts_s == sorted(starts_s)
    pauses = [later - earlier for earlier, later in zip([0.0, *starts_s], starts_s, strict=False)]
    assert pauses == sorted(pauses), pauses
    assert pauses[-1] >= 4.0
    server.close()


@pytest.mark.parametrize(
    ("fields", "is_wanted"),
    [
        ({"roles": "1 verifier + 1 drafter", "help": "none"}, True),
        ({"help": "draft"}, True),
        ({"help": "auto"}, True),
        ({"help": "copy"}, False),
        ({"help": "none"}, False),
    ],
)
def test_engines_have_a_door_for_drafters_where_there_may_be_any(
    fields: dict[str, Any], is_wanted: bool
) -> None:
    made = idle_fleet()
    made.settings = FleetSettings(workers=2, **fields)
    made.engine_settings = EngineSettings(model_drafter="somewhere")
    assert made._can_help(is_one_machine=True) == is_wanted
    roles = [worker.is_drafter for worker in Controller(made.settings)._workers.values()]
    assert roles == [False, "roles" in fields]
    reached: dict[str, Any] = {"draft_interface": "eth0", "draft_secret_file": "secret"}
    made.engine_settings = EngineSettings(model_drafter="somewhere", **reached)
    assert made._can_help(is_one_machine=False) == is_wanted
    made.engine_settings = EngineSettings()
    if "roles" in fields or fields["help"] == "draft":
        with pytest.raises(ConfigError, match="drafters need a model_drafter"):
            made._can_help(is_one_machine=True)
    else:
        assert not made._can_help(is_one_machine=True)


def test_a_drafter_is_renewed_where_nobody_drafts_for_others_with_it() -> None:
    fleet = idle_fleet()
    with pytest.raises(UnsupportedError, match="renews_drafter=True"):
        fleet.push_drafter({})
    with pytest.raises(UnsupportedError, match="renews_drafter=True"):
        fleet.drop_drafter()
    fleet.settings = FleetSettings(workers=2, help="draft")
    fleet.engine_settings = EngineSettings(model_drafter="small")
    fleet._renews_drafter = True
    with pytest.raises(ConfigError, match="is not renewed"):
        fleet._can_help(is_one_machine=True)


@pytest.mark.parametrize(
    "engine", [{}, {"model_drafter": "mtp"}, {"model_drafter": "small", "draft_worker": True}]
)
def test_a_drafter_that_takes_no_weights_is_not_renewed(engine: dict[str, Any]) -> None:
    fleet = idle_fleet()
    fleet._renews_drafter, fleet.engine_settings = True, EngineSettings(**engine)
    with pytest.raises(UnsupportedError, match="no drafter that takes weights"):
        fleet.push_drafter({})
    with pytest.raises(UnsupportedError, match="no drafter that takes weights"):
        fleet.drop_drafter()


def test_weights_of_a_drafter_that_are_not_finite_reach_no_engine() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("ray", reason="Ray is not installed")
    fleet = idle_fleet()
    fleet._renews_drafter, fleet.engine_settings = True, EngineSettings(model_drafter="small")
    with pytest.raises(CheckpointError, match="weight 'bad' is not finite"):
        fleet.push_drafter({"good": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])})
    assert fleet.drafter_version == 0


@pytest.mark.parametrize(("share", "max_bytes"), [(-0.1, 8), (1.1, 8), (float("nan"), 8), (0.5, 1)])
def test_states_that_no_engine_can_collect_are_refused(share: float, max_bytes: int) -> None:
    told: list[tuple[Any, ...]] = []
    fleet = idle_fleet()
    fleet._actors = SimpleNamespace(settle=lambda *words: told.append(words))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="hidden states of a share"):
        fleet.collect_states(share, max_bytes)
    fleet.collect_states(0.0, 0)
    fleet.collect_states(1.0, 2)
    assert told == [("collect_states", 0.0, 0), ("collect_states", 1.0, 1)]


def test_an_iterator_is_of_one_rollout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, params = idle_fleet(), SimpleNamespace(**PLAIN)
    requests = [RolloutRequest((1, 2), 10), RolloutRequest((1, 3), 10)]
    monkeypatch.setattr(Fleet, "advance", lambda self: [self.num_unfinished])
    old: Any = fleet.stream(requests, params)  # type: ignore[arg-type]
    assert next(old) == 2
    fleet.abandon()
    new: Any = fleet.stream(requests[:1], params)  # type: ignore[arg-type]
    assert next(new) == 1
    with pytest.raises(EngineError, match="another rollout was begun while this one was being read"):
        next(old)
    assert next(new) == fleet.num_unfinished == 1
    refused: Any = fleet.stream(requests, params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 responses are still running"):
        next(refused)
    assert fleet.num_unfinished == 1
    new.close()
    assert fleet.num_unfinished == 0


def test_an_iterator_that_has_all_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another rollout was begun before its reader asked for more; what was abandoned is missed."""
    fleet, params = idle_fleet(), SimpleNamespace(**PLAIN)
    requests = [RolloutRequest((1, 2), 10), RolloutRequest((1, 3), 10)]
    monkeypatch.setattr(Fleet, "advance", lambda self: [0, 1])
    read: Any = fleet.stream(requests, params)  # type: ignore[arg-type]
    assert next(read) == 0
    fleet.abandon()  # all were finished
    fleet.submit(requests, params)  # type: ignore[arg-type]
    assert list(read) == [1]
    fleet.abandon()
    monkeypatch.setattr(Fleet, "advance", lambda self: [0])
    read = fleet.stream(requests, params)  # type: ignore[arg-type]
    assert next(read) == 0
    fleet.abandon()
    with pytest.raises(EngineError, match="abandoned while this one was being read, 1 responses are missing"):
        next(read)


def test_a_submission_that_is_interrupted_leaves_the_fleet_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, act = idle_fleet(), Fleet._act

    def interrupt(self: Fleet, actions: Any) -> None:
        act(self, actions)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Fleet, "_act", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fleet.submit([RolloutRequest((1, 2), 10)], SimpleNamespace(**PLAIN))  # type: ignore[arg-type]
    assert fleet.num_unfinished == 0


def test_a_closed_fleet_says_so() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    fleet, params = idle_fleet(), SimpleNamespace(**PLAIN)
    fleet.submit([RolloutRequest((1, 2), 10)], params)  # type: ignore[arg-type]
    fleet._made = ExitStack()
    fleet.close()
    fleet.abandon()
    assert fleet.num_unfinished == 0
    uses: list[Callable[[], object]] = [
        lambda: fleet.generate([RolloutRequest((1, 2), 10)], params),  # type: ignore[arg-type]
        fleet.advance,
        lambda: fleet.push_weights([]),
        lambda: fleet.push_drafter({}),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="this fleet is closed"):
            use()


def test_fleets_of_one_process_share_a_ray_until_the_last_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    free = {"CPU": 4.0}
    ray = SimpleNamespace(
        init=lambda **options: told.append("init"),
        is_initialized=lambda: "init" in told,
        shutdown=lambda: told.append("shutdown"),
        cluster_resources=lambda: {"CPU": 4.0},
        available_resources=lambda: free,
    )
    monkeypatch.setattr(cluster, "import_ray", lambda: ray)
    settings = FleetSettings(workers=2, gpus_per_worker=0.0)
    assert cluster.connect(settings, {})
    free["CPU"] = 2.0
    assert cluster.connect(settings, {})
    free["CPU"] = 0.0
    with pytest.raises(ConfigError, match="2 workers need 2 CPU, another fleet here has left 0"):
        cluster.connect(settings, {})
    cluster.disconnect()
    assert told == ["init"]
    cluster.disconnect()
    assert told == ["init", "shutdown"]
