"""The samples that a drafter learns from, kept over training steps (TLT 4.2, DataBuffer).

While a step's responses are still being generated, those that have finished are the short ones. So the buffer keeps
the step before, and each pass over it begins with that step's long responses, stale by one update (one-step offset).

Every sample is a file of its own, so that a restart finds it; as many as fit stay in memory too. Steps that are too old
go, but for as many tokens as keep a drafter from learning the same few by heart. Where room is short, whole responses
go: older steps before newer ones, and the short ones of a step first. One process owns a folder.

Orders are kept in heaps, and an entry that has left is passed over where it turns up: an operation takes logarithmic
time, but for the first draw after an addition or a new step, which orders anew what is held.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from paceline.distillation.packing import Sample
from paceline.errors import ConfigError, RecordError

SUFFIX = ".sample"
LONG_SHARE = 0.9
"""A response of the step before is long if it is longer than this share of the current step's."""
BLOCK_BYTES = 4096
"""Of the disk: a file takes whole blocks."""


@dataclass(slots=True, eq=False)
class _Entry:
    step: int
    response: int
    num_tokens: int
    path: Path
    file_bytes: int
    """On the disk."""
    num_draws: int
    sample: Sample | None = None
    """None: on disk alone."""

    @property
    def worth(self) -> tuple[int, int, int]:
        """Of two entries the lesser goes first."""
        return self.step, self.num_tokens, self.response


class _Heap:
    """Entries by a key that does not change while they are in it; of equal keys the one that came first."""

    def __init__(self, is_held: Callable[[_Entry], bool]) -> None:
        """is_held: whether an entry still counts; one that does not is passed over."""
        self._is_held = is_held
        self._items: list[tuple[tuple[int, ...], int, _Entry]] = []
        self._ties = itertools.count()

    def push(self, key: tuple[int, ...], entry: _Entry) -> None:
        """Put an entry in."""
        heapq.heappush(self._items, (key, next(self._ties), entry))

    def least(self) -> _Entry | None:
        """The entry with the least key, None where there is none."""
        while self._items and not self._is_held(self._items[0][2]):
            heapq.heappop(self._items)
        return self._items[0][2] if self._items else None

    def pop(self) -> _Entry | None:
        """Take that entry out."""
        if (entry := self.least()) is not None:
            heapq.heappop(self._items)
        return entry


class SampleBuffer:
    """Samples by step and response.

    memory_bytes: of samples in memory. disk_bytes: of files. num_steps: the current step's samples are kept, and those
    of the steps before it, so many together. least_tokens: older ones are kept too while there are fewer tokens. Raises
    ConfigError for a bound that cannot be, RecordError for a folder that cannot be used.
    """

    def __init__(
        self, folder: Path, *, memory_bytes: int, disk_bytes: int, num_steps: int, least_tokens: int = 0
    ) -> None:
        for name, value, least in (
            ("memory_bytes", memory_bytes, 0),
            ("disk_bytes", disk_bytes, 0),
            ("num_steps", num_steps, 1),
            ("least_tokens", least_tokens, 0),
        ):
            if value < least:
                raise ConfigError(f"the sample buffer's {name} is {value}, must be at least {least}")
        self.folder = folder
        self._memory_limit, self._disk_limit, self._num_steps = memory_bytes, disk_bytes, num_steps
        self._least_tokens = least_tokens
        self.memory_bytes = self.disk_bytes = self.num_tokens = 0
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._passes = Counter[int]()  # entries by the number of their draws
        self._by_worth = _Heap(self._is_held)
        self._loaded = _Heap(lambda entry: entry.sample is not None)  # by worth too
        self._order: _Heap | None = None  # in which they are drawn; None: to be made anew
        self._long = 0  # tokens of the step's longest responses, when that was made
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for entry in _scan(folder):
                self._keep(entry)
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
        self.step, self._order = step, None
        self._trim()

    def add(self, response: int, sample: Sample, *, comes_later: bool = False) -> None:
        """Take a sample of the current step, in place of an earlier part of the same response.

        comes_later: drawn after those that were added without this, as if it had been drawn once.

        A sample that is worth less than what fills the buffer is not kept. Raises RecordError if the disk refuses.
        """
        path = self.folder / f"{self.step}-{response}{SUFFIX}"
        size = _write(path, sample)
        if (old := self._entries.get((self.step, response))) is not None:
            self._forget(old)
        entry = _Entry(
            self.step, response, len(sample.ids), path, size, min(self._passes, default=0) + comes_later
        )
        self._keep(entry)
        self._remember(entry, sample)
        self._trim()

    def discard(self, response: int) -> None:
        """Keep no sample of this response of the current step."""
        if (entry := self._entries.get((self.step, response))) is not None:
            self._drop(entry)

    def draw(self, num_tokens: int) -> list[Sample]:
        """The next samples of the pass, no response twice, until they have so many tokens; all there are if fewer.

        Responses that were drawn less often come first; of these the long ones of the step before, longest first, then
        the current step's, then all others, newest first.
        """
        if self._order is None:
            self._order = self._make_order()
        drawn: list[tuple[_Entry, Sample]] = []
        while num_tokens > 0 and (entry := self._order.pop()) is not None:
            sample = entry.sample or _read(entry.path)
            if sample is None:
                self._drop(entry)
                continue
            num_tokens -= len(sample.ids)
            drawn.append((entry, sample))
            if entry.sample is None:
                self._remember(entry, sample)
        for entry, _ in drawn:
            self._count(entry, entry.num_draws + 1)
            self._order.push(self._turn(entry), entry)
        self._trim()
        return [sample for _, sample in drawn]

    def _make_order(self) -> _Heap:
        current = sorted(entry.num_tokens for entry in self._entries.values() if entry.step == self.step)
        self._long = current[int(LONG_SHARE * (len(current) - 1))] if current else 0
        order = _Heap(self._is_held)
        for entry in self._entries.values():
            order.push(self._turn(entry), entry)
        return order

    def _turn(self, entry: _Entry) -> tuple[int, int, int, int, int]:
        """Of two entries the lesser is drawn first."""
        if entry.step == self.step - 1 and entry.num_tokens > self._long:
            return entry.num_draws, 0, 0, -entry.num_tokens, entry.response
        place = 1 if entry.step == self.step else 2
        return entry.num_draws, place, -entry.step, 0, entry.response

    def _is_held(self, entry: _Entry) -> bool:
        return self._entries.get((entry.step, entry.response)) is entry

    def _keep(self, entry: _Entry) -> None:
        self._entries[entry.step, entry.response] = entry
        self.disk_bytes += entry.file_bytes
        self.num_tokens += entry.num_tokens
        self._passes[entry.num_draws] += 1
        self._by_worth.push(entry.worth, entry)
        self._order = None

    def _count(self, entry: _Entry, num_draws: int | None) -> None:
        """It has been drawn so often; None: it has left."""
        self._passes[entry.num_draws] -= 1
        if not self._passes[entry.num_draws]:
            del self._passes[entry.num_draws]
        if num_draws is not None:
            entry.num_draws = num_draws
            self._passes[num_draws] += 1

    def _remember(self, entry: _Entry, sample: Sample) -> None:
        entry.sample = sample
        self.memory_bytes += sample.num_bytes
        self._loaded.push(entry.worth, entry)

    def _forget(self, entry: _Entry) -> None:
        """Take an entry out; its file stays, or is another's by now."""
        del self._entries[entry.step, entry.response]
        self.disk_bytes -= entry.file_bytes
        self.num_tokens -= entry.num_tokens
        self._count(entry, None)
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
        oldest = self.step - self._num_steps + 1
        while (entry := self._by_worth.least()) is not None:
            is_wanted = entry.step >= oldest or self.num_tokens - entry.num_tokens < self._least_tokens
            if is_wanted and self.disk_bytes <= self._disk_limit:
                break
            self._drop(entry)
        while (entry := self._loaded.least()) is not None and self.memory_bytes > self._memory_limit:
            self._loaded.pop()
            self._unload(entry)


def blocks_bytes(num_bytes: int) -> int:
    """What a file of so many bytes takes of the disk."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _write(path: Path, sample: Sample) -> int:
    """Write a sample's file in one move; its bytes on the disk.

    A machine that goes down may leave it damaged, which is noticed.
    """
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
    return blocks_bytes(len(data))


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
        yield _Entry(int(step), int(response), num_tokens, path, blocks_bytes(path.stat().st_size), 0)
