"""A whole fleet in bfloat16 whose KV pool is too small and has a disk: prefetched, damaged, full, and its processes
killed. Every response comes once, with the tokens of plain decoding by a single engine.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import KV_BYTES, MAX_LEN, POLICY, Generate, make_score
from saboteurs import Chaos, Saboteur, roll_out
from vllm import SamplingParams

from paceline import cli
from paceline.commands.rollout import fleet_job
from paceline.config import BudgetSettings, EngineSettings, FleetSettings, KvPoolSettings, RewardSettings
from paceline.fleet.fleet import Finished, Fleet
from paceline.fleet.journal import Journal
from paceline.fleet.kv_pool import SHARED_MEMORY, FleetKvPool
from paceline.fleet.prefetch import Prefetcher, Queue
from paceline.types import RolloutRequest

ENGINE = {"dtype": "bfloat16", "max_model_len": MAX_LEN, "block_size": 128}
SLOTS = 4
"""Responses that run at once on a worker: most of them wait, so the pool is in use."""
BLOCK_BYTES = 256 << 10
MEMORY_BYTES, DISK_BYTES, FILE_SYSTEM_BYTES = 4 << 20, 48 << 20, 64 << 20
MAX_TOKENS = 384
PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of its own where mounting one is permitted, a folder elsewhere."""
    folder = tmp_path_factory.mktemp("disk")
    options = ["-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "paceline-test", str(folder)]
    if os.geteuid() == 0:
        subprocess.run(["mount", *options], check=False, capture_output=True)
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-test-", dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small(ray: Any, memory: Path, disk: Path) -> Iterator[Fleet]:
    """Two workers with few slots, whose pool has room for few of the responses that wait."""
    pool = KvPoolSettings(
        directory=str(memory),
        memory_bytes=MEMORY_BYTES,
        disk_directory=str(disk / "kv"),
        disk_bytes=DISK_BYTES,
    )
    settings = FleetSettings(
        workers=2,
        chunk_tokens=64,
        progress_ms=20.0,
        rewards=RewardSettings(workers=2, max_crashes=50, timeout_s=30.0),
    )
    engine = EngineSettings(
        run_seed=3, budget=BudgetSettings(policy="fixed", fixed_tokens=3), kv_pool=pool, batch_invariant=True
    )
    with Fleet(
        POLICY,
        settings,
        engine,
        max_num_seqs=SLOTS,
        kv_cache_bytes=KV_BYTES,
        reward=make_score(),
        **ENGINE,  # type: ignore[arg-type]
    ) as made:
        while any(status.state != "up" for status in made.board.workers.values()):
            made.advance()
        yield made


@pytest.fixture(scope="session")
def plain_bfloat16() -> Iterator[Generate]:
    """A single engine without drafts; to the end, as closing it would end every other engine of this process."""
    from paceline.engine.rollout_engine import RolloutEngine

    settings = EngineSettings(
        run_seed=3, drafter="none", budget=BudgetSettings(policy="off"), batch_invariant=True
    )
    with RolloutEngine(POLICY, settings, kv_cache_bytes=1 << 28, **ENGINE) as engine:  # type: ignore[arg-type]
        yield engine.generate


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[RolloutRequest]:
    """Each a group of its own: all are probes, which run in turns, the one with the fewest tokens first."""
    return [RolloutRequest(prompts[i % 12], MAX_TOKENS, sample=i // 12, group=i) for i in range(24)]


@pytest.fixture(scope="module")
def wanted(plain_bfloat16: Generate, requests: list[RolloutRequest]) -> list[tuple[int, ...]]:
    return [response.tokens for response in plain_bfloat16(requests, PARAMS)]


def assert_right(found: Sequence[Finished], wanted: Sequence[tuple[int, ...]]) -> None:
    assert [one.response.tokens for one in found] == wanted
    for index, one in enumerate(found):
        assert len(one.response.logprobs) == len(one.response.tokens)
        assert one.reward is not None
        assert one.reward.value == make_score()(index, one.response)


class Watch:
    """What was done with the pool since it was made."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._before = fleet, fleet.kv_pool_counters()

    def __getattr__(self, name: str) -> int:
        return int(getattr(self._fleet.kv_pool_counters(), name) - getattr(self._before, name))


def test_what_runs_next_is_in_memory_when_it_runs(
    small: Fleet,
    requests: list[RolloutRequest],
    wanted: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop waits for the thread that brings entries up: how much a busy machine brings in time says nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(FleetKvPool, "look_ahead", lambda pool, queue: None)
        watch = Watch(small)
        assert_right(roll_out(small, requests, PARAMS), wanted)
    assert watch.promoted == 0
    without = watch.disk_hits / watch.hits
    assert without > 0.4, "the control: memory must be too small"

    def bring(prefetcher: Prefetcher, queue: Queue) -> None:
        prefetcher._next_s = 0.0
        look_ahead(prefetcher, queue)
        prefetcher._last.result()

    look_ahead = Prefetcher.look_ahead
    monkeypatch.setattr(Prefetcher, "look_ahead", bring)
    watch = Watch(small)
    assert_right(roll_out(small, requests, PARAMS), wanted)
    assert watch.hits > 60
    assert watch.promoted > 20
    assert watch.disk_hits / watch.hits < 0.2


def test_damaged_entries_cost_work_alone(
    small: Fleet, requests: list[RolloutRequest], wanted: list[tuple[int, ...]], memory: Path, disk: Path
) -> None:
    watch, folders = Watch(small), [memory, disk / "kv"]
    losses = [status.num_losses for status in small.board.workers.values()]
    with Saboteur(folders, random.Random(11), 0.03) as saboteur:
        assert_right(roll_out(small, requests, PARAMS), wanted)
    kinds = {(folder, harm) for folder in folders for harm in ("flip", "cut", "remove")}
    assert kinds == set(saboteur.harms), "every harm must have been done in both"
    assert watch.corrupt > 5
    assert watch.misses > watch.corrupt, "removed entries are missed too"
    assert watch.hits > 5, "and whole ones must have been used"
    assert [status.num_losses for status in small.board.workers.values()] == losses


def test_a_full_file_system_costs_work_alone(
    small: Fleet, requests: list[RolloutRequest], wanted: list[tuple[int, ...]], disk: Path
) -> None:
    """The pool's disk and the journal's, which others fill up as soon as there is a free byte."""
    if not disk.is_mount():
        pytest.skip("mounting a file system is not permitted here")
    watch, filler = Watch(small), disk / "filler"
    journal = Journal.open(disk / "o.progress", "job", resume=False)
    failures: set[str | None] = set()
    empty = journal.path.stat().st_size

    def fill() -> None:
        failures.add(journal.failure)
        if watch.demoted > 5 and journal.path.stat().st_size > empty:
            with filler.open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass

    try:
        assert_right(roll_out(small, requests, PARAMS, fill, journal), wanted)
        told = f"cannot write to {journal.path}: No space left on device; "
        assert any(failure is not None and failure.startswith(told) for failure in failures)
    finally:
        filler.unlink(missing_ok=True)
        journal.close()
    assert watch.evicted + watch.failed_writes > 5
    assert watch.misses > 0
    again = Journal.open(journal.path, "job", resume=True)
    kept = again.find(map(small._resolve, range(len(requests)), requests))
    found = {index: one.packed.unpack()[0] for index, one in kept.items()}
    assert any(found.values())
    assert all(tokens == wanted[index][: len(tokens)] for index, tokens in found.items())
    again.discard()


@contextmanager
def limited(processes: Sequence[int], num_bytes: int) -> Iterator[None]:
    """Files that these processes write may be so long and no longer."""
    before = [resource.prlimit(process, resource.RLIMIT_FSIZE) for process in processes]
    for process, (_, hard) in zip(processes, before, strict=True):
        resource.prlimit(process, resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        for process, limits in zip(processes, before, strict=True):
            resource.prlimit(process, resource.RLIMIT_FSIZE, limits)


def test_entries_that_cannot_be_written_cost_work_alone(
    small: Fleet, requests: list[RolloutRequest], wanted: list[tuple[int, ...]]
) -> None:
    """In neither tier: the operating system refuses files that are as long as a block."""
    processes = [small._actors.process(name) for name in small.board.workers]
    watch = Watch(small)
    with limited([process for process in processes if process is not None], BLOCK_BYTES):
        assert_right(roll_out(small, requests, PARAMS), wanted)
    assert watch.failed_writes > 60
    assert watch.saves == watch.hits == 0


class Lent:
    """The fleet of these tests for a command that would start one, and close it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *exc: object) -> None:
        """It is needed again."""


def test_the_user_is_told_of_a_full_disk(
    small: Fleet,
    plain_bfloat16: Generate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "o.jsonl"
    lines = [json.dumps({"id": i, "prompt": f"{i + 1},{i + 3},3:21 "}) for i in range(8)]
    prompts.write_text("\n".join(lines))
    journal = tmp_path / "o.jsonl.progress"
    journal.symlink_to("/dev/full")
    monkeypatch.setattr(fleet_job, "start_fleet", lambda job, settings: Lent(small))
    monkeypatch.setenv("COLUMNS", "200")
    arguments = [
        "rollout",
        POLICY,
        prompts,
        "--out",
        out,
        "--samples",
        2,
        "--workers",
        2,
        "--max-tokens",
        300,
        "--eager",
    ]
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err.replace("\n", " ")
    assert not ended.value.code, told
    assert f"note: cannot write to {journal}: No space left on device" in told.replace("  ", " ")
    assert "what is missing there would be generated again" in told
    assert not journal.is_symlink()
    assert Path("/dev/full").exists()
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((one["id"], one["sample"]) for one in made) == [(i, s) for i in range(8) for s in (0, 1)]
    asked = [RolloutRequest(tuple(one["prompt_ids"]), 300, key=one["key"]) for one in made]
    responses = plain_bfloat16(asked, SamplingParams(temperature=1.0))
    assert [tuple(one["tokens"]) for one in made] == [response.tokens for response in responses]


def test_a_slow_consumer_costs_no_worker(
    small: Fleet,
    requests: list[RolloutRequest],
    wanted: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes longer over a response than a worker may be silent."""
    settings = small.settings.model_copy(update={"silence_s": 4.0})
    monkeypatch.setattr(small._controller, "_settings", settings)
    losses = [status.num_losses for status in small.board.workers.values()]
    found: dict[int, Finished] = {}
    for finished in small.stream(requests, PARAMS):
        found[finished.index] = finished
        time.sleep(6.0 if len(found) in (1, 9) else 0.0)
    assert [status.num_losses for status in small.board.workers.values()] == losses
    assert_right([found[index] for index in range(len(requests))], wanted)


def test_killed_processes_change_no_token(
    small: Fleet, requests: list[RolloutRequest], wanted: list[tuple[int, ...]]
) -> None:
    """Last of all: nobody has to wait for the engine that comes back."""
    chaos = Chaos(small, random.Random(5), Counter(engine=1, draft=4, reward=5))
    losses = chaos.count_losses()
    num_rounds = 0
    while sum(chaos.left.values()):
        num_rounds += 1
        assert num_rounds < 6, f"{chaos.left} kills were left"
        assert_right(roll_out(small, requests, PARAMS, chaos.strike), wanted)
    chaos.wait_for_losses(losses + 1)
    assert small.board.num_preemptions == 0
