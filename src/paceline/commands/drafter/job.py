"""What `paceline drafter` does once its arguments are known to be sound: loads models, trains, measures, prints."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import typer
from rich.console import Console
from torch import Tensor

from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.distillation.checkpoints import CheckpointWriter
from paceline.distillation.measuring import Dice, Worth
from paceline.distillation.measuring import measure as measure_worth
from paceline.distillation.methods import METHODS, MethodName, build_network
from paceline.distillation.networks import LENGTH_BOUND, Network, Shared
from paceline.distillation.offline import Progress, Schedule, train_offline
from paceline.distillation.packing import Sample
from paceline.distillation.responses import Response, read_responses
from paceline.distillation.target import check_packs, choose_layers, load_model, read_samples, share
from paceline.distillation.trainer import Trainer
from paceline.distillation.training_folder import (
    FILE_NAME,
    Description,
    describe,
    find_newest,
    is_training_folder,
    names_in,
    read_folder,
    rebuild_network,
)
from paceline.drafting.drafter import is_draft_head
from paceline.errors import CheckpointError, ConfigError, RecordError, TrainingError
from paceline.terminal.screen import Screen
from paceline.terminal.tables import make_table

SAVE_EVERY_S = 5.0
TELL_EVERY_S = 10.0
READ_TOKENS = 4096
"""Of one forward pass of the target."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What `drafter train` was asked for; fields as its options."""

    target: Path
    responses: Path
    out: Path
    method: MethodName
    loss: str | None
    core_s: float
    rate: float
    small_model: Path | None
    max_memory_gib: float
    seed: int
    threads: int


def run_training(job: TrainingJob, *, resume: bool, overwrite: bool) -> None:
    """Train until the time is used up, saving as it goes."""
    with _owned(job.out):
        _train(job, resume=resume, overwrite=overwrite)
    typer.echo(f"trained: {job.out}")


def _train(job: TrainingJob, *, resume: bool, overwrite: bool) -> None:
    _set_threads(job.threads)
    found = None if overwrite else _find(job.out, resume)
    method = METHODS[job.method] if job.loss is None else METHODS[job.method].with_loss(job.loss)
    rows = read_responses(job.responses)
    temperature = _temperature(rows)
    method = method.at_temperature(temperature)
    model = load_model(job.target)
    check_packs(model)
    shared = share(model)
    torch.manual_seed(job.seed)
    network = build_network(method, shared, job.small_model)
    _check_ids(rows, job.responses, network, shared)
    layers = choose_layers(shared.config.num_hidden_layers) if network.num_fused else ()
    samples = _read(model, rows, layers, job.max_memory_gib)
    trainer = Trainer(network, shared, method.objective)
    made = describe(network, job.method, method.objective.loss, temperature, layers)
    if found is not None:
        made = _continue(found[1], made)
        trainer.load(found[0])
    for name in names_in(job.out) if overwrite else ():
        if name != FILE_NAME:  # which the first save replaces
            (job.out / name).unlink()
    with CheckpointWriter(job.out / FILE_NAME) as writer:
        told = _Telling(trainer, made, writer, job.core_s)
        begun = Progress(made.trained_s, made.trained_tokens, 0.0)
        try:
            train_offline(trainer, samples, Schedule(job.core_s, job.rate), begun, job.seed, told.after_step)
        except TrainingError:
            raise  # the weights may be no numbers either
        except BaseException:
            told.save()
            raise
        told.save()


class _Telling:
    """Saves and reports every few seconds."""

    def __init__(self, trainer: Trainer, made: Description, writer: CheckpointWriter, core_s: float) -> None:
        self._trainer, self._made, self._writer, self._core_s = trainer, made, writer, core_s
        self._saved_s = self._told_s = time.monotonic()

    def after_step(self, progress: Progress) -> None:
        self._made = msgspec.structs.replace(
            self._made, trained_s=progress.core_s, trained_tokens=progress.num_tokens
        )
        now = time.monotonic()
        if now - self._saved_s >= SAVE_EVERY_S:
            self._saved_s = now
            self.save()
        if now - self._told_s >= TELL_EVERY_S:
            self._told_s = now
            Screen(sys.stderr).write(
                f"{progress.core_s:.0f} of {self._core_s:.0f} s, loss {progress.loss:.4f}, "
                f"{progress.num_tokens / progress.core_s:.0f} tokens/s\n"
            )

    def save(self) -> None:
        self._writer.save(self._trainer.tensors(), self._made.note())


def run_measuring(
    target: Path, responses: Path, drafter: Path, depth: int, sharpness: float, threads: int
) -> None:
    """Measure a drafter and print what its drafts are worth."""
    _set_threads(threads)
    rows = read_responses(responses)
    thrown = [_dice_of(row, responses) for row in rows]
    model = load_model(target)
    check_packs(model)
    shared = share(model)
    network, layers = _load_drafter(drafter, shared)
    _check_ids(rows, responses, network, shared)
    samples = read_samples(model, map(_as_pair, rows), layers, READ_TOKENS)
    _show(measure_worth(network, shared, zip(samples, thrown, strict=True), depth, sharpness))


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


@contextmanager
def _owned(out: Path) -> Iterator[None]:
    """This process alone trains in the folder. Raises RecordError where another one does, or it cannot be made."""
    with ExitStack() as opened:
        try:
            if not out.exists():
                out.mkdir(parents=True)
                opened.callback(_remove_empty, out)
            folder = os.open(out, os.O_RDONLY)
            opened.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                f"{out}: another process trains a drafter there: wait for it, or choose another --out"
            ) from error
        except OSError as error:
            raise RecordError(f"cannot write to {out}: {error.strerror}; choose another --out") from error
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _find(out: Path, resume: bool) -> tuple[dict[str, Tensor], Description] | None:
    """What `--resume` goes on with. Raises RecordError if it is not given where something is."""
    if not is_training_folder(out):
        return None
    if not resume:
        raise RecordError(
            f"{out} holds a drafter already: go on with --resume, or replace it with --overwrite"
        )
    return read_folder(out, find_newest(out))


def _continue(old: Description, new: Description) -> Description:
    """The old description, with the configuration that is right by now. Raises ConfigError if this run would train
    something else, CheckpointError for a head whose positions were others.
    """
    for field in ("method", "loss", "temperature", "fused_layers"):
        was, wanted = getattr(old, field), getattr(new, field)
        if was != wanted:
            raise ConfigError(f"--resume with another {field}: it began with {was}, and this is {wanted}")
    was, wanted = (one.config.get("rope_parameters") for one in (old, new))
    if was is not None and was.get("rope_type") in LENGTH_BOUND and was != wanted:
        raise CheckpointError(
            f"this head was trained with {was['rope_type']} rotary positions, and heads have plain ones now: "
            "begin anew, with --overwrite"
        )
    return msgspec.structs.replace(old, config=new.config)


def _temperature(rows: Sequence[Response]) -> float:
    found = {float(row.options.get("temperature", 1.0)) for row in rows}
    if len(found) > 1:
        raise ConfigError(
            f"the responses were sampled at {len(found)} temperatures: train on those of one rollout"
        )
    return found.pop()


def _check_ids(rows: Sequence[Response], file: Path, network: Network, shared: Shared) -> None:
    """Raise RecordError for responses in another vocabulary than target's and drafter's."""
    num_ids = min(shared.vocab_size, network.vocab_size)
    if (most := max(int(row.ids.max()) for row in rows)) >= num_ids:
        raise RecordError(
            f"{file} has token id {most}, and target and drafter know {num_ids}: give responses of this target"
        )


def _as_pair(row: Response) -> tuple[Tensor, int]:
    return row.ids, row.num_prompt_tokens


def _read(model: Any, rows: Sequence[Response], layers: Sequence[int], max_gib: float) -> list[Sample]:
    """The responses with the target's states, as many as the memory takes, at least one."""
    room = max_gib * (1 << 30)
    samples: list[Sample] = []
    for sample in read_samples(model, map(_as_pair, rows), layers, READ_TOKENS):
        room -= sample.num_bytes
        if samples and room < 0:
            typer.echo(
                f"states of {len(samples)} of {len(rows)} responses fill {max_gib:g} GiB (--max-memory-gib)",
                err=True,
            )
            break
        samples.append(sample)
    return samples


def _dice_of(row: Response, file: Path) -> Dice:
    if row.key is None:
        raise RecordError(
            f"{file} has no dice keys: measure on responses of 'paceline rollout' without --plain"
        )
    return Dice(row.key, float(row.options.get("temperature", 1.0)))


def _load_drafter(folder: Path, shared: Shared) -> tuple[Network, Sequence[int]]:
    """A network from where it was trained, or a small language model; and the target's layers that it reads."""
    found = read_folder(folder, find_newest(folder))
    if found is None:
        if is_draft_head(folder):
            raise CheckpointError(f"{folder} is an exported draft head: measure the folder it was trained in")
        return build_network(METHODS["osd"], shared, read_checkpoint(folder).folder), ()
    tensors, made = found
    return rebuild_network(made, tensors, shared), made.fused_layers


def _show(worth: Worth) -> None:
    caption = f"acceptance length {worth.acceptance_length:.3f} over {worth.num_tokens:,} tokens"
    table = make_table((), ("draft token", "acceptance", "agreement"), caption=caption)
    for place, (accepted, agreed) in enumerate(zip(worth.acceptance, worth.agreement, strict=True), start=1):
        table.add_row(str(place), f"{accepted:.3f}", f"{agreed:.3f}")
    Console().print(table)
