"""The samples that a drafter learns from, kept over training steps (TLT 4.2, DataBuffer).

While a step's responses are still being generated, those that have finished are the short ones. So the buffer keeps
the step before, and each pass over it begins with that step's long responses, stale by one update (one-step offset).

Every sample is a file of its own, so that a restart finds it; as many as fit stay in memory too. Where room is short,
whole responses go: older steps before newer ones, and the short ones of a step first. One process owns a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from paceline.distillation.packing import Sample
from paceline.errors import ConfigError, RecordError

SUFFIX = ".sample"
LONG_SHARE = 0.9
"""A response of the step before is long if it is longer than this share of the current step's."""


@dataclass(slots=True)
class _Entry:
    step: int
    response: int
    num_tokens: int
    path: Path
    file_bytes: int
    num_draws: int
    sample: Sample | None = None
    """None: on disk alone."""

    @property
    def worth(self) -> tuple[int, int, int]:
        """Of two entries the lesser goes first."""
        return self.step, self.num_tokens, self.response


class SampleBuffer:
    """Samples by step and response.

    memory_bytes: of samples in memory. disk_bytes: of files. Raises ConfigError for a bound below 0, RecordError for a
    folder that cannot be used.
    """

    def __init__(self, folder: Path, *, memory_bytes: int, disk_bytes: int) -> None:
        for name, value in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
            if value < 0:
                raise ConfigError(f"the sample buffer's {name} is {value}, must be at least 0")
        self.folder = folder
        self._memory_limit, self._disk_limit = memory_bytes, disk_bytes
        self.memory_bytes = self.disk_bytes = 0
        self._entries: dict[tuple[int, int], _Entry] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for entry in _scan(folder):
                self._entries[entry.step, entry.response] = entry
                self.disk_bytes += entry.file_bytes
        except OSError as error:
            raise RecordError(
                f"cannot keep samples in {folder}: {error.strerror}; choose another place"
            ) from error
        self.step = max((step for step, _ in self._entries), default=0)
        """The current training step."""
        self._trim()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held(self) -> set[tuple[int, int]]:
        """(step, response) of all samples."""
        return set(self._entries)

    def begin_step(self, step: int) -> None:
        """What is added from here on belongs to this step. Raises ConfigError for one before the current one."""
        if step < self.step:
            raise ConfigError(
                f"step {step} comes after step {self.step}: begin the run with a folder of its own"
            )
        self.step = step

    def add(self, response: int, sample: Sample) -> None:
        """Take a sample of the current step, in place of an earlier part of the same response.

        A sample that is worth less than what fills the buffer is not kept. Raises RecordError if the disk refuses.
        """
        path = self.folder / f"{self.step}-{response}{SUFFIX}"
        size = _write(path, sample)
        if (old := self._entries.get((self.step, response))) is not None:
            self._forget(old)
        first_pass = min((entry.num_draws for entry in self._entries.values()), default=0)
        entry = _Entry(self.step, response, len(sample.ids), path, size, first_pass)
        self._entries[self.step, response] = entry
        self.disk_bytes += size
        self._remember(entry, sample)
        self._trim()

    def draw(self, num_tokens: int) -> list[Sample]:
        """The next samples of the pass, no response twice, until they have so many tokens; all there are if fewer.

        Responses that were drawn less often come first; of these the long ones of the step before, longest first, then
        the current step's, then all others, newest first.
        """
        drawn: list[Sample] = []
        for entry in self._order():
            if num_tokens <= 0:
                break
            sample = entry.sample or _read(entry.path)
            if sample is None:
                self._drop(entry)
                continue
            entry.num_draws += 1
            num_tokens -= len(sample.ids)
            drawn.append(sample)
            if entry.sample is None:
                self._remember(entry, sample)
        self._trim()
        return drawn

    def _order(self) -> list[_Entry]:
        current = sorted(e.num_tokens for e in self._entries.values() if e.step == self.step)
        long = current[int(LONG_SHARE * (len(current) - 1))] if current else 0

        def key(entry: _Entry) -> tuple[int, int, int, int, int]:
            if entry.step == self.step - 1 and entry.num_tokens > long:
                return entry.num_draws, 0, 0, -entry.num_tokens, entry.response
            place = 1 if entry.step == self.step else 2
            return entry.num_draws, place, -entry.step, 0, entry.response

        return sorted(self._entries.values(), key=key)

    def _remember(self, entry: _Entry, sample: Sample) -> None:
        entry.sample = sample
        self.memory_bytes += sample.num_bytes

    def _forget(self, entry: _Entry) -> None:
        """Take an entry out; its file stays, or is another's by now."""
        del self._entries[entry.step, entry.response]
        self.disk_bytes -= entry.file_bytes
        self._unload(entry)

    def _unload(self, entry: _Entry) -> None:
        if entry.sample is not None:
            self.memory_bytes -= entry.sample.num_bytes
            entry.sample = None

    def _drop(self, entry: _Entry) -> None:
        self._forget(entry)
        entry.path.unlink(missing_ok=True)

    def _trim(self) -> None:
        """Keep to the bounds."""
        if self.disk_bytes <= self._disk_limit and self.memory_bytes <= self._memory_limit:
            return
        for entry in sorted(self._entries.values(), key=lambda entry: entry.worth):
            if self.disk_bytes > self._disk_limit:
                self._drop(entry)
            elif self.memory_bytes > self._memory_limit:
                self._unload(entry)
            else:
                return


def _write(path: Path, sample: Sample) -> int:
    """Write a sample's file in one move; its bytes. A machine that goes down may leave it damaged, which is noticed."""
    data = safetensors.torch.save(
        {"ids": sample.ids, "states": sample.states}, {"num_prompt_tokens": str(sample.num_prompt_tokens)}
    )
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {path}: {error.strerror}; free some space, or lower the buffer's disk_bytes"
        ) from error
    return len(data)


def _read(path: Path) -> Sample | None:
    """A sample from its file, None if that is damaged or gone."""
    try:
        with safe_open(path, framework="pt") as file:
            num_prompt_tokens = int(file.metadata()["num_prompt_tokens"])
            return Sample(file.get_tensor("ids"), num_prompt_tokens, file.get_tensor("states"))
    except (OSError, SafetensorError):
        return None


def _scan(folder: Path) -> Iterator[_Entry]:
    """What a process before has left; what it did not finish is removed."""
    for path in folder.glob("*.new"):
        path.unlink()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        step, _, response = path.stem.partition("-")
        try:
            with safe_open(path, framework="pt") as file:
                num_tokens = file.get_slice("ids").get_shape()[0]
        except (OSError, SafetensorError):
            path.unlink()
            continue
        yield _Entry(int(step), int(response), num_tokens, path, os.path.getsize(path), 0)
