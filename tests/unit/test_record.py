"""The record: what is written can be read, a crash costs at most one line, errors say what to do."""

from __future__ import annotations

import json
import math
import resource
import threading
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import RecordConfig
from paceline.errors import RecordError
from paceline.record import (
    FILE_NAME,
    SCHEMA_VERSION,
    EngineStepSample,
    Evaluation,
    Event,
    Failure,
    Header,
    Machine,
    Note,
    Phases,
    RecordReader,
    RecordWriter,
    Resumed,
    RunEnd,
    TrainStep,
    describe_machine,
    describe_versions,
    end_of,
    measure_tail,
)
from paceline.types import StepObservation

MACHINE = Machine(cpu="Example", cores=2, memory_bytes=1 << 30)
HEADER = Header(machine=MACHINE, versions={"paceline": "0.1.0"}, started_unix_s=1.5)
UNDECODABLE = (
    b'{"schema":1,"t_s":1.0,"text":"caf\xe9","event":"note\xe9"}',
    b'{"schema":1,"t_s":1.0,"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"event":"note"}',
)
EVERY_STEP = RecordConfig(bucket_ms=0.0)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    Any: JSON_VALUES,
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**63), 2**64 - 1),
    str: st.text(),
    Machine: st.builds(Machine, cpu=st.text(), cores=st.integers(1, 512), memory_bytes=st.integers(0, 2**50)),
    Phases: st.builds(Phases, *[st.floats(0, 1e6)] * 6),
}


def strategy_of(type_: Any) -> st.SearchStrategy[Any]:
    if type_ in BY_TYPE:
        return BY_TYPE[type_]
    parts = get_args(type_)
    if getattr(type_, "__origin__", None) is dict:
        return st.dictionaries(strategy_of(parts[0]), strategy_of(parts[1]), max_size=4)
    if getattr(type_, "__origin__", None) is tuple:
        return st.lists(strategy_of(parts[0]), max_size=4).map(tuple)
    return st.none() | strategy_of(next(part for part in parts if part is not type(None)))


def struct_strategy(struct: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        struct, **{field.name: strategy_of(field.type) for field in msgspec.structs.fields(struct)}
    )


EVENTS = st.one_of(*map(struct_strategy, get_args(Event)))


def observe(
    num_requests: int = 4, step_s: float = 0.01, drafted: int = 8, accepted: int = 5
) -> StepObservation:
    return StepObservation(num_requests, drafted, accepted, 0, step_s)


def read_all(run_dir: Path) -> list[Event]:
    with RecordReader(run_dir) as reader:
        return list(reader)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(EVENTS, max_size=5))
def test_every_event_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with RecordWriter.create(run_dir, HEADER) as writer:
        for event in events:
            writer.write(event)
    with RecordReader(run_dir) as reader:
        assert reader.header == HEADER
        assert list(reader) == events
        assert not reader.torn


def test_every_line_names_its_event_and_the_header_its_version(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(Note(t_s=1.0, text="two\nlines"))
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["header", "note"]
    assert lines[0]["schema"] == SCHEMA_VERSION


def test_a_run_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    RecordWriter.create(tmp_path, HEADER).close()
    with pytest.raises(RecordError, match="--resume"):
        RecordWriter.create(tmp_path, HEADER)
    with RecordWriter.create(tmp_path, HEADER, overwrite=True) as writer:
        writer.write(Note(t_s=0.0, text="new"))
    assert read_all(tmp_path) == [Note(t_s=0.0, text="new")]


def test_what_belongs_to_a_record_is_removed_only_where_nobody_writes_it(tmp_path: Path) -> None:
    """And before the new one begins: no new record ever stands beside old checkpoints."""
    old = tmp_path / "checkpoint"
    old.touch()
    seen: list[bytes] = []

    def clear() -> None:
        seen.append((tmp_path / FILE_NAME).read_bytes())
        old.unlink()

    with (
        RecordWriter.create(tmp_path, HEADER),
        pytest.raises(RecordError, match="being written by another process"),
    ):
        RecordWriter.create(tmp_path, HEADER, overwrite=True, clear=clear)
    assert old.exists()
    with pytest.raises(RecordError, match="already holds a run"):
        RecordWriter.create(tmp_path, HEADER, clear=clear)
    assert old.exists()
    RecordWriter.create(tmp_path, HEADER, overwrite=True, clear=clear).close()
    assert seen == [b""]


def test_one_writer_per_run_folder(tmp_path: Path) -> None:
    with (
        RecordWriter.create(tmp_path, HEADER),
        pytest.raises(RecordError, match="another process"),
    ):
        RecordWriter.resume(tmp_path)
    RecordWriter.resume(tmp_path).close()


@pytest.mark.parametrize("num_kept", range(1, 40, 6))
def test_resume_cuts_a_torn_last_line_off_and_goes_on(tmp_path: Path, num_kept: int) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(Evaluation(t_s=7.0, step=3, solve_rate=0.5, n=10))
    torn = msgspec.json.encode(Failure(t_s=8.0, text="the machine went away"))[:num_kept]
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(torn)
    with RecordReader(tmp_path) as reader:
        assert len(list(reader)) == 1
        assert reader.torn
    with RecordWriter.resume(tmp_path, machine=MACHINE, versions={"paceline": "0.1.1"}) as writer:
        assert 7.0 <= writer.now_s() < 8.0
        writer.write(RunEnd(t_s=9.0, reason="finished"))
    kinds = [type(event) for event in read_all(tmp_path)]
    assert kinds == [Evaluation, Resumed, RunEnd]


def test_the_run_clock_goes_on_from_the_end_of_the_last_event(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(TrainStep(step=1, t_start_s=100.0, phases=Phases(rollout_s=40.0, train_s=2.5), tokens=9))
        writer.write(Note(t_s=60.0, text="earlier"))
    with RecordWriter.resume(tmp_path) as writer:
        assert writer.now_s() >= 142.5
    resumed = read_all(tmp_path)[-1]
    assert isinstance(resumed, Resumed)
    assert end_of(resumed) == 142.5


def write_until_full(writer: RecordWriter, kept: list[Event]) -> None:
    for i in range(1000):
        event = Note(t_s=float(i), text="x" * 90)
        writer.write(event)
        kept.append(event)


def test_a_full_disk_keeps_every_whole_line_and_says_so(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = RecordWriter.create(tmp_path, HEADER)
    kept: list[Event] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(RecordError, match=r"the \d+ events .* are whole. Free some space.*--resume"):
            write_until_full(writer, kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept
    assert read_all(tmp_path) == kept
    assert (tmp_path / FILE_NAME).read_bytes().endswith(b"}\n")
    writer.write(after := Note(t_s=5.0, text="there is space again"))
    writer.close()
    assert read_all(tmp_path) == [*kept, after]


def test_missing_empty_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist"):
        RecordReader(tmp_path)
    path = tmp_path / FILE_NAME
    for content in (b"", b"\x00\xff", b"{}\n", b'{"event": "note", "t_s": 1, "text": ""}\n'):
        path.write_bytes(content)
        with pytest.raises(RecordError, match="line 1"):
            RecordReader(tmp_path)


def test_a_header_torn_before_its_newline_is_no_record(tmp_path: Path) -> None:
    RecordWriter.create(tmp_path, HEADER).close()
    path = tmp_path / FILE_NAME
    path.write_bytes(torn := path.read_bytes()[:-1])
    with pytest.raises(RecordError, match="line 1: no record header"):
        RecordWriter.resume(tmp_path)
    assert path.read_bytes() == torn


@pytest.mark.parametrize("line", UNDECODABLE)
def test_a_first_line_that_no_decoder_takes_is_no_header(tmp_path: Path, line: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(line.replace(b"note", b"header") + b"\n")
    with pytest.raises(RecordError, match="line 1: no"):
        RecordReader(tmp_path)


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    line = msgspec.json.decode(msgspec.json.encode(HEADER)) | {"schema": 99, "machine": "of a later kind"}
    (tmp_path / FILE_NAME).write_bytes(msgspec.json.encode(line) + b"\n")
    with pytest.raises(RecordError, match=r"schema version 99.*version 1"):
        RecordReader(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        b"not json",
        b'{"event":"note"}',
        b'{"t_s":1}',
        b'{"event":1}',
        b"",
        msgspec.json.encode(HEADER),
        *UNDECODABLE,
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, broken: bytes) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(Note(t_s=1.0, text="good"))
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(broken + b"\n")
    with RecordReader(tmp_path) as reader:
        assert next(iter(reader)) == Note(t_s=1.0, text="good")
        with pytest.raises(RecordError, match="line 3"):
            list(reader)
    with pytest.raises(RecordError, match="line 3"):
        RecordWriter.resume(tmp_path)


def test_events_that_a_later_version_has_added_are_passed_over(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(Note(t_s=1.0, text="before"))
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(b'{"event":"dance","t_s":1,"partners":["a"]}\n')
    with RecordWriter.resume(tmp_path, machine=MACHINE, versions={}) as writer:
        writer.write(Note(t_s=2.0, text="after"))
    assert b"dance" in (tmp_path / FILE_NAME).read_bytes()
    before, resumed, after = read_all(tmp_path)
    assert isinstance(resumed, Resumed)
    assert [before, after] == [Note(t_s=1.0, text="before"), Note(t_s=2.0, text="after")]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="Not a directory; choose another place"):
        RecordWriter.create(tmp_path / "file" / "run", HEADER)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(RecordError, match="Is a directory; choose another place"):
        RecordWriter.create(tmp_path, HEADER)


def test_not_a_number_is_null_where_that_is_allowed_and_refused_elsewhere(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER) as writer:
        writer.write(
            TrainStep(
                step=1,
                t_start_s=0.0,
                phases=Phases(),
                tokens=0,
                reward_mean=math.nan,
                metrics={"kl": math.inf},
            )
        )
        with pytest.raises(RecordError, match="Evaluation"):
            writer.write(Evaluation(t_s=0.0, step=1, solve_rate=math.nan, n=0))
        with pytest.raises(RecordError, match="Note"):
            writer.write(Note(t_s=0.0, text=object()))  # type: ignore[arg-type]
    (step,) = read_all(tmp_path)
    assert isinstance(step, TrainStep)
    assert step.reward_mean is None
    assert step.metrics == {"kl": None}


OBSERVATIONS = st.builds(
    StepObservation,
    num_requests=st.integers(0, 256),
    num_draft_tokens=st.integers(0, 999),
    num_accepted_tokens=st.integers(0, 999),
    num_prefill_tokens=st.integers(0, 9999),
    step_s=st.floats(1e-4, 0.2),
    num_waiting=st.just(3),
    further_tokens=st.sampled_from([(), (3,), (1, 4)]),
    further_wasted_tokens=st.sampled_from([(), (5, 0)]),
    num_adopted_tokens=st.integers(0, 99),
    wait_s=st.floats(0.0, 0.1),
    num_branches=st.integers(0, 99),
    num_branch_hits=st.integers(0, 99),
    ahead_tokens=st.sampled_from([(), (7,), (2, 9)]),
    ahead_s=st.sampled_from([(), (0.5,), (0.25, 0.5)]),
)


@settings(max_examples=60)
@given(
    seen=st.lists(st.tuples(OBSERVATIONS, st.integers(0, 2), st.sampled_from(["a", "b"])), max_size=60),
    bucket_ms=st.sampled_from([0.0, 20.0, 500.0]),
)
def test_merging_engine_steps_keeps_every_sum(
    tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[StepObservation, int, str]], bucket_ms: float
) -> None:
    run_dir, t_s = tmp_path_factory.mktemp("run"), 0.0
    with RecordWriter.create(run_dir, HEADER, RecordConfig(bucket_ms=bucket_ms)) as writer:
        for one, step, worker in seen:
            writer.add_step(t_s, one, num_generated_tokens=one.num_requests, step=step, worker=worker)
            t_s += one.step_s
    samples = read_all(run_dir)
    for step, worker in {(step, worker) for _, step, worker in seen}:
        mine = [
            s for s in samples if isinstance(s, EngineStepSample) and (s.step, s.worker) == (step, worker)
        ]
        theirs = [one for one, s, w in seen if (s, w) == (step, worker)]
        assert sum(s.num_steps for s in mine) == len(theirs)
        assert sum(s.num_draft_tokens for s in mine) == sum(o.num_draft_tokens for o in theirs)
        assert sum(s.num_accepted_tokens for s in mine) == sum(o.num_accepted_tokens for o in theirs)
        assert sum(s.num_prefill_tokens for s in mine) == sum(o.num_prefill_tokens for o in theirs)
        for name in ("further_tokens", "further_wasted_tokens", "ahead_tokens", "ahead_s"):
            for place in range(2):
                sums = [sum((*getattr(one, name), 0, 0)[place] for one in ones) for ones in (mine, theirs)]
                assert sums[0] == sums[1]
        assert sum(s.num_adopted_tokens for s in mine) == sum(o.num_adopted_tokens for o in theirs)
        assert sum(s.wait_s for s in mine) == pytest.approx(sum(o.wait_s for o in theirs), abs=1e-4)
        assert sum(s.num_branches for s in mine) == sum(o.num_branches for o in theirs)
        assert sum(s.num_branch_hits for s in mine) == sum(o.num_branch_hits for o in theirs)
        assert sum(s.num_generated_tokens for s in mine) == sum(o.num_requests for o in theirs)
        assert sum(s.num_running * s.num_steps for s in mine) == pytest.approx(
            sum(o.num_requests for o in theirs)
        )
        assert sum(s.step_s for s in mine) == pytest.approx(sum(o.step_s for o in theirs), abs=1e-4)
        assert all(s.num_waiting == 3 for s in mine)
    if bucket_ms == 0.0:
        assert len(samples) == len(seen)


def test_a_bucket_spans_about_its_length(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER, RecordConfig(bucket_ms=50.0)) as writer:
        for i in range(100):
            writer.add_step(i * 0.01, observe(step_s=0.01), num_generated_tokens=9)
    samples = read_all(tmp_path)
    assert 18 <= len(samples) <= 20
    assert isinstance(first := samples[0], EngineStepSample)
    assert first.acceptance_length == pytest.approx(1 + 5 / 4)


def test_steps_in_a_bucket_are_written_before_the_train_step_that_ends_them(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER, RecordConfig(bucket_ms=1000.0)) as writer:
        writer.add_step(0.0, observe(), step=1)
        writer.write(TrainStep(step=1, t_start_s=0.0, phases=Phases(rollout_s=1.0), tokens=4))
        assert [type(event) for event in read_all(tmp_path)] == [EngineStepSample, TrainStep]


def test_the_writer_holds_no_more_memory_the_longer_the_run(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER, EVERY_STEP) as writer:
        for i in range(100):
            writer.add_step(i * 0.01, observe())
        tracemalloc.start()
        try:
            for i in range(5000):
                writer.add_step(i * 0.01, observe(), step=i // 100)
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held_bytes < 20_000


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path, HEADER, EVERY_STEP) as writer:

        def work(name: str) -> None:
            for i in range(200):
                writer.write(Note(t_s=float(i), text=name))
                writer.add_step(float(i), observe(), worker=name)

        threads = [threading.Thread(target=work, args=(f"worker {i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_all(tmp_path)) == 4 * 400


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path, HEADER)
    writer.close()
    writer.close()
    with pytest.raises(RecordError, match="closed"):
        writer.write(Note(t_s=0.0, text=""))


@pytest.mark.parametrize(
    ("ends_s", "tail_s"), [([], 0.0), ([3.0], 0.0), (list(range(1, 11)), 1.0), ([*range(1, 20), 50], 32.0)]
)
def test_the_tail_runs_from_ninety_percent_finished_to_the_end(ends_s: list[float], tail_s: float) -> None:
    assert measure_tail(ends_s) == tail_s


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_at_the_tails_beginning_nine_tenths_have_finished(ends_s: list[float]) -> None:
    tail_s = measure_tail(ends_s)
    begins = [end for end in ends_s if max(ends_s) - end == tail_s]
    finished = max(sum(end <= begin for end in ends_s) for begin in begins)
    assert 10 * finished >= 9 * len(ends_s)


def test_this_machine_is_described() -> None:
    machine, versions = describe_machine(), describe_versions()
    assert machine.cores >= 1
    assert machine.memory_bytes > 2**20
    assert machine.cpu
    assert {"python", "paceline"} <= versions.keys()
