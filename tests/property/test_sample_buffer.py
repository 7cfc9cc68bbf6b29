"""The buffer of samples against a plain list: what it keeps, in which order it gives it out, and over restarts."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.distillation.packing import Sample
from paceline.distillation.sample_buffer import BLOCK_BYTES, SUFFIX, SampleBuffer
from paceline.errors import ConfigError, RecordError

WIDTH = 60
LIMITS = {"memory_bytes": 1 << 20, "disk_bytes": 1 << 20, "num_steps": 3}


def make_sample(num_tokens: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (num_tokens,), generator=generator, dtype=torch.int32)
    return Sample(ids, 1, torch.randn(num_tokens, WIDTH, generator=generator))


def file_size(sample: Sample) -> int:
    note = {"num_prompt_tokens": str(sample.num_prompt_tokens)}
    return blocks(len(safetensors.torch.save({"ids": sample.ids, "states": sample.states}, note)))


def blocks(num_bytes: int) -> int:
    return (num_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def is_same(first: Sample, second: Sample) -> bool:
    return (
        torch.equal(first.ids, second.ids)
        and torch.equal(first.states, second.states)
        and first.num_prompt_tokens == second.num_prompt_tokens
    )


class BufferMachine(RuleBasedStateMachine):
    """Adds, draws, begins steps and restarts, beside a dictionary that holds everything worth keeping, and is sorted
    for every draw.
    """

    @initialize(
        memory=st.integers(0, 40_000),
        disk=st.integers(0, 24 * BLOCK_BYTES),
        steps=st.integers(1, 5),
        least=st.just(0) | st.integers(1, 200),
    )
    def start(self, memory: int, disk: int, steps: int, least: int) -> None:
        self.folder = Path(mkdtemp(prefix="samples-"))
        self.limits = {
            "memory_bytes": memory,
            "disk_bytes": disk,
            "num_steps": steps,
            "least_tokens": least,
        }
        self.buffer = SampleBuffer(self.folder, **self.limits)
        self.model: dict[tuple[int, int], Sample] = {}
        self.draws: dict[tuple[int, int], int] = {}
        self.seed = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def worth(self, name: tuple[int, int]) -> tuple[int, int, int]:
        return name[0], len(self.model[name].ids), name[1]

    def file_bytes(self) -> int:
        return sum(blocks(path.stat().st_size) for path in self.folder.iterdir())

    @rule(response=st.integers(0, 12), num_tokens=st.integers(2, 40))
    def add(self, response: int, num_tokens: int) -> None:
        self.seed += 1
        sample, name = make_sample(num_tokens, self.seed), (self.buffer.step, response)
        self.buffer.add(response, sample)
        self.model.pop(name, None)
        self.draws.pop(name, None)
        self.draws[name] = min(self.draws.values(), default=0)
        self.model[name] = sample
        self.forget_old_steps()
        gone = sorted(set(self.model) - self.buffer.held, key=self.worth)
        assert gone == sorted(self.model, key=self.worth)[: len(gone)]  # the least worth
        if gone:  # and no more than had to go
            assert self.file_bytes() + file_size(self.model[gone[-1]]) > self.limits["disk_bytes"]
        for evicted in gone:
            del self.model[evicted], self.draws[evicted]

    @rule(ahead=st.integers(0, 2))
    def begin_step(self, ahead: int) -> None:
        self.buffer.begin_step(self.buffer.step + ahead)
        self.forget_old_steps()

    def forget_old_steps(self) -> None:
        old = [one for one in self.model if one[0] <= self.buffer.step - self.limits["num_steps"]]
        num_tokens = sum(len(sample.ids) for sample in self.model.values())
        for name in sorted(old, key=self.worth):
            num_tokens -= len(self.model[name].ids)
            if num_tokens < self.limits["least_tokens"]:
                break
            del self.model[name], self.draws[name]

    @rule(num_tokens=st.integers(1, 90))
    def draw(self, num_tokens: int) -> None:
        drawn = self.buffer.draw(num_tokens)
        names = [next(n for n, own in self.model.items() if is_same(own, one)) for one in drawn]
        assert len(set(names)) == len(names)
        left = set(self.model) - set(names)
        total = sum(len(one.ids) for one in drawn)
        assert not left or (total >= num_tokens and total - len(drawn[-1].ids) < num_tokens)
        step = self.buffer.step
        lengths = sorted(len(s.ids) for (at, _), s in self.model.items() if at == step)
        long = lengths[int(0.9 * (len(lengths) - 1))] if lengths else 0

        def place(name: tuple[int, int]) -> tuple[int, int]:
            if name[0] == step - 1 and len(self.model[name].ids) > long:
                return self.draws[name], 0
            return self.draws[name], 1 if name[0] == step else 2

        places = [place(name) for name in names]
        assert places == sorted(places)
        assert all(place(other) >= places[-1] for other in left)

        def turn(name: tuple[int, int]) -> tuple[int, int, int, int, int]:
            draws, at = place(name)
            longest_first = (0, -len(self.model[name].ids))
            return draws, at, *((-name[0], 0) if at else longest_first), name[1]

        assert names == sorted(self.model, key=turn)[: len(names)]
        firsts = [len(one.ids) for one, at in zip(drawn, places, strict=True) if at == (places[0][0], 0)]
        assert firsts == sorted(firsts, reverse=True)
        for name in names:
            self.draws[name] += 1

    @rule()
    def restart(self) -> None:
        (self.folder / "3-4.new").write_bytes(b"torn")
        step = self.buffer.step
        self.buffer = SampleBuffer(self.folder, **self.limits)
        self.buffer.begin_step(step)
        self.draws = dict.fromkeys(self.model, 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A file that the machine's end has cut short; seen at a restart."""
        step, response = name = data.draw(st.sampled_from(sorted(self.model)))
        path = self.folder / f"{step}-{response}{SUFFIX}"
        path.write_bytes(path.read_bytes()[:-5])
        del self.model[name], self.draws[name]
        self.restart()

    @invariant()
    def keeps_what_it_should(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.held == set(self.model)
        assert len(self.buffer) == len(self.model)
        assert self.buffer.memory_bytes <= self.limits["memory_bytes"]
        assert self.buffer.disk_bytes == self.file_bytes() <= self.limits["disk_bytes"]


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_long_responses_of_the_step_before_come_first_then_the_current_ones(tmp_path: Path) -> None:
    buffer = SampleBuffer(tmp_path, **LIMITS)
    for step, lengths in enumerate([(50, 60), (5, 70, 30, 90), (10, 20)]):
        buffer.begin_step(step)
        for response, length in enumerate(lengths):
            buffer.add(response, make_sample(length))
    assert [len(one.ids) for one in buffer.draw(1000)] == [90, 70, 30, 10, 20, 5, 50, 60]
    assert [len(one.ids) for one in buffer.draw(100)] == [90, 70]
    buffer.add(7, make_sample(8))  # one that comes late is not drawn again and again to catch up
    assert [len(one.ids) for one in buffer.draw(50)] == [30, 10, 20]


def test_steps_that_are_too_old_go_with_their_files(tmp_path: Path) -> None:
    buffer = SampleBuffer(tmp_path, **LIMITS)
    for step in range(1, 6):
        buffer.begin_step(step)
        for response in range(4):
            buffer.add(response, make_sample(5))
    assert {step for step, _ in buffer.held} == {3, 4, 5}
    assert len(list(tmp_path.iterdir())) == len(buffer) == 12
    assert buffer.disk_bytes == 12 * BLOCK_BYTES, "a small file takes a block"
    buffer.begin_step(40)
    assert not buffer.held
    assert not list(tmp_path.iterdir())


def test_a_draw_touches_what_it_draws_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = SampleBuffer(tmp_path, **LIMITS)
    for response in range(60):
        buffer.add(response, make_sample(5))
    buffer.draw(1)
    placed: list[Any] = []
    turn = SampleBuffer._turn

    def note(self: SampleBuffer, entry: Any) -> tuple[int, int, int, int, int]:
        placed.append(entry)
        return turn(self, entry)

    monkeypatch.setattr(SampleBuffer, "_turn", note)
    for _ in range(150):
        assert len(buffer.draw(1)) == 1
    assert len(placed) == 150


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_bytes is -1"):
        SampleBuffer(tmp_path, memory_bytes=0, disk_bytes=-1, num_steps=1)
    with pytest.raises(ConfigError, match="num_steps is 0, must be at least 1"):
        SampleBuffer(tmp_path, memory_bytes=0, disk_bytes=0, num_steps=0)
    buffer = SampleBuffer(tmp_path, **LIMITS)
    buffer.begin_step(4)
    with pytest.raises(ConfigError, match="step 3 comes after step 4"):
        buffer.begin_step(3)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="choose another place"):
        SampleBuffer(tmp_path / "file", **LIMITS)
