"""A rollout job on a fleet: the counterpart of `run_job` for several engines."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from paceline.commands.inputs.launch import Launch, describe_failure, hush
from paceline.commands.inputs.model_folder import load_tokenizer
from paceline.commands.inputs.sampling import Sampling
from paceline.commands.rollout.job import SOME_FAILED, Job, encode_response, tell_end, tell_plan
from paceline.commands.rollout.responses import ResponseFile, refuse_other
from paceline.config import FleetSettings
from paceline.engine.rollout_engine import prepare_environment
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.fleet.journal import Journal, kept_job
from paceline.terminal.interruption import INTERRUPTED, Interruption
from paceline.terminal.meter import WINDOW_S, RolloutMeter
from paceline.terminal.progress import Progress
from paceline.terminal.tables import make_table

if TYPE_CHECKING:
    from paceline.commands.rollout.rollout_record import RolloutRecord
    from paceline.fleet.fleet import Fleet
    from paceline.record.ladder_file import LadderFile
    from paceline.types import DraftSharingCounters, KvPoolCounters

JOURNAL_SUFFIX = ".progress"
"""Beside the output: what unfinished responses have so far. Removed once all are finished."""


def check_fleet_job(launch: Launch, sampling: Sampling, settings: FleetSettings) -> None:
    """Raise ConfigError or InstallError for a fleet that cannot be, before anything starts."""
    from paceline.fleet.cluster import check_fleet

    if launch.settings is None:
        raise ConfigError(
            "--plain runs vLLM without Paceline, and --workers needs its dice: drop one of them"
        )
    if sampling.stop:
        raise ConfigError(
            "--stop with --workers: a stop text may lie across two chunks of a response; drop one of them"
        )
    check_fleet(settings, len(os.sched_getaffinity(0)))


def run_fleet_job(
    job: Job,
    settings: FleetSettings,
    file: ResponseFile,
    console: Console,
    *,
    resume: bool,
    record: RolloutRecord | None = None,
    ladder: LadderFile | None = None,
) -> None:
    """Make the missing responses on `settings.workers` engines and write each as it finishes.

    record: is told how it goes. ladder: what is known of the engines' drafters, if they have several. Raises as
    `run_job` does.
    """
    tell_plan(job, file.path, console)
    path = journal_of(file.path)
    if resume and not job.num_done:  # else those that are finished tell, and a journal of others is of no use
        _refuse_other_journal(path, _identity(job))
    journal = Journal.open(path, msgspec.json.encode(_identity(job)).decode(), resume=resume)
    num_failed = 0
    try:
        if job.todo:
            num_failed = _run(job, settings, file, journal, console, record, ladder)
        journal.discard()
    finally:
        journal.close()
    if num_failed:
        raise typer.Exit(SOME_FAILED)


def journal_of(out: Path) -> Path:
    """Where a fleet keeps what unfinished responses have, beside those that are finished."""
    return out.with_name(out.name + JOURNAL_SUFFIX)


def has_journal(out: Path) -> bool:
    """Whether a fleet has left there what unfinished responses have."""
    return kept_job(journal_of(out)) is not None


def _identity(job: Job) -> dict[str, Any]:
    """What decides the tokens beside key and prompt."""
    return {"policy": job.fingerprint, "options": dict(job.options)}


def _refuse_other_journal(path: Path, identity: dict[str, Any]) -> None:
    """Raise RecordError for a journal of other options or weights: this run would throw it away."""
    if (text := kept_job(path)) is None:
        return
    kept = msgspec.json.decode(text)
    refuse_other(f"{path} holds unfinished responses", kept["policy"], kept["options"], **identity)


def _run(
    job: Job,
    settings: FleetSettings,
    file: ResponseFile,
    journal: Journal,
    console: Console,
    record: RolloutRecord | None,
    ladder: LadderFile | None,
) -> int:
    """Responses that failed."""
    tokenizer = load_tokenizer(job.checkpoint) if job.checkpoint.has_tokenizer else None
    console.print(f"starting {settings.workers} engines", highlight=False)
    prepare_environment()
    with hush():
        fleet = start_fleet(job, settings)
        params = job.sampling.build()
    if ladder is not None:
        fleet.use_ladder(ladder)
    if fleet.kv_pool_obstacle is not None:
        console.print(f"note: no KV pool between the engines: {fleet.kv_pool_obstacle}", highlight=False)
    if fleet.invariance_gap is not None:
        console.print(f"note: {fleet.invariance_gap}", highlight=False)
    reasons: Counter[str] = Counter()
    num_lost = 0
    view = FleetView(fleet)
    observations = fleet.take_observations if record is None else record.take_observations
    with fleet, Interruption() as interruption, Progress(console, below=view.table) as progress:
        meter = RolloutMeter(len(job.todo))
        if record is not None:
            record.begin(fleet)
        fleet.submit(job.requests(), params, journal=journal)
        while fleet.num_unfinished and not interruption.wanted:
            finished = _advance(fleet, file)
            for one in finished:
                file.append(encode_response(job, one.index, one.response, tokenizer))
                reasons[one.response.finish_reason] += 1
            journal.drop(one.index for one in finished)
            if record is not None:
                record.look(finished)
            meter.count(view.look(), len(finished))
            progress.show_rollout(meter, observations)
            num_lost = _tell_losses(fleet, num_lost, console)
        fleet.abandon()
        meter.observe(observations())
        notes = find_troubles(fleet.kv_pool_counters(), fleet.draft_sharing_counters(), journal)
    for note in notes:
        console.print(f"note: {note}", highlight=False)
    tell_end(job, file, meter, reasons, console)
    if meter.num_finished < len(job.todo):
        raise typer.Exit(INTERRUPTED)
    return reasons["error"]


def _tell_losses(fleet: Fleet, num_told: int, console: Console) -> int:
    """Say that workers were lost since; gives how often so far."""
    num_lost = sum(status.num_losses for status in fleet.board.workers.values())
    if num_lost > num_told:
        states = ", ".join(f"{name} {status.state}" for name, status in fleet.board.workers.items())
        console.print(
            f"note: a worker was lost ({num_lost} so far), what it ran goes on elsewhere; now: {states}",
            highlight=False,
        )
    return num_lost


def find_troubles(pool: KvPoolCounters, shared: DraftSharingCounters, journal: Journal) -> list[str]:
    """What went wrong and cost work, never tokens."""
    from paceline.fleet.status import describe_sharing_trouble

    notes = []
    if (trouble := describe_sharing_trouble(shared)) is not None:
        notes.append(trouble)
    if journal.failure is not None:
        notes.append(journal.failure)
    if pool.misses and (pool.corrupt or pool.evicted or pool.failed_writes):
        notes.append(
            f"{pool.misses} of {pool.misses + pool.hits} chunks were prefilled again: of the KV pool's entries "
            f"{pool.corrupt} were damaged, {pool.evicted} dropped for want of room and {pool.failed_writes} not written"
        )
    return notes


def start_fleet(job: Job, settings: FleetSettings) -> Fleet:
    """Start the fleet of a job. Raises EngineError with vLLM's or Ray's own words when it does not start."""
    launch = job.launch
    try:
        from paceline.fleet.fleet import Fleet

        return Fleet(
            launch.model,
            settings,
            launch.settings,
            dtype=launch.dtype,
            max_model_len=launch.max_model_len,
            max_num_seqs=launch.max_num_seqs,
            kv_cache_bytes=launch.kv_cache_bytes,
            skip_tokenizer_init=launch.skip_tokenizer,
        )
    except PacelineError:
        raise
    except Exception as error:
        raise EngineError(f"the fleet did not start: {describe_failure(error)}") from error


def _advance(fleet: Fleet, file: ResponseFile) -> Any:
    try:
        return fleet.advance()
    except PacelineError:
        raise
    except Exception as error:
        raise EngineError(
            f"the fleet failed: {describe_failure(error)}; the {file.num_written} responses of this run are in "
            f"{file.path}, go on with --resume"
        ) from error


class FleetView:
    """One row per worker. `look` keeps what rates are made of, `table` shows."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: deque[tuple[float, dict[str, int]]] = deque()

    def look(self) -> int:
        """Remember how far everyone is; the tokens generated since the last look."""
        now_s, before = time.monotonic(), self._seen[-1][1] if self._seen else {}
        workers = self._fleet.board.workers.values()
        after = {status.name: status.num_tokens for status in workers}
        self._seen.append((now_s, after))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()
        return sum(after.values()) - sum(before.values())

    def table(self) -> RenderableType:
        """The workers now, and below them whose drafts were accepted, and what is wrong with the draft server."""
        from paceline.fleet.status import describe_drafts, describe_sharing_trouble

        workers = self._fleet.board.workers.values()
        has_model = any(status.num_model or status.num_wasted for status in workers)
        numbers = [
            "running",
            "queued",
            "KV",
            "tokens/s",
            "acceptance",
            "lost",
            *["model", "wasted"] * has_model,
        ]
        table = make_table(("worker", "state"), numbers)
        for status in workers:
            cells = [
                status.name,
                status.state if status.helps is None else f"{status.state} for {status.helps}",
                str(status.num_running),
                str(status.num_waiting),
                f"{status.kv_share:.0%}",
                f"{self._rate(status.name):.0f}",
                f"{status.acceptance_length:.2f}",
                str(status.num_losses or ""),
            ]
            if has_model:
                cells += [f"{status.model_share:.0%}", str(status.num_wasted or "")]
            table.add_row(*cells)
        board = self._fleet.board
        texts = [describe_drafts(board), describe_sharing_trouble(board.draft_sharing)]
        below = [Text(text) for text in texts if text is not None]
        return Group(table, *below) if below else table

    def _rate(self, worker: str) -> float:
        if len(self._seen) < 2:
            return 0.0
        (then_s, before), (now_s, after) = self._seen[0], self._seen[-1]
        return (after[worker] - before[worker]) / (now_s - then_s) if now_s > then_s else 0.0
