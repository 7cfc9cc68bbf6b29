"""The draft worker without a process: what it is told, how far it drafts ahead, what a rejection wastes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.draft_worker import DraftWorker
from paceline.drafting.proposal import NUM_CELLS, prior_calibration
from paceline.drafting.worker_wire import Begin, Drafts, Open, Step
from paceline.types import DraftBatch, DraftGrowth, DraftQuery, Float32Array, Int32Array

PROMPT, LIMIT = [1, 2, 3], 60


class FakeModel:
    """Drafts 100 + position; remembers which of the tokens that it was given as context it may keep."""

    max_model_len = 1000
    prior_calibration = staticmethod(prior_calibration)

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}
        self.is_broken = False

    def draft(
        self, contexts: Sequence[Int32Array], query: DraftQuery, depth: int, **options: Any
    ) -> tuple[DraftBatch, DraftGrowth]:
        for row, context in zip(query.responses.tolist(), contexts, strict=True):
            kept = self.kept.get(row, [])
            assert context[: len(kept)].tolist() == kept, "the model still has what was rejected"
            self.kept[row] = context.tolist()
        count = len(contexts)
        tokens = 100 + query.positions[:, None] + np.arange(depth)
        grid: Float32Array = options["sharpness_grid"]
        batch = DraftBatch(
            tokens.astype(np.int32),
            np.minimum(query.max_tokens, 0 if self.is_broken else depth).astype(np.int32),
            np.full((count, depth), 0.9, np.float32),
            np.full((count, depth), NUM_CELLS - 1, np.int32),
            np.tile(tokens[:, :1].astype(np.int32), (1, len(grid))),
        )
        return batch, DraftGrowth(depth, depth * count, 0.001 * depth)

    def rewind(self, row: int, num_tokens: int) -> None:
        self.kept[row] = self.kept.get(row, [])[:num_tokens]

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.kept.pop(row, None)


class Engine:
    """The other end: tells a worker what responses grow by."""

    def __init__(self, window: int, floor: float = 0.0) -> None:
        self.model, self.window = FakeModel(), window
        self.worker = DraftWorker(self.model, floor)  # type: ignore[arg-type]
        self.worker.hear(Begin(1, "", 0, ()))
        self.texts: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)

    def tell(
        self,
        growth: Mapping[int, list[int]] = MappingProxyType({}),
        *,
        ended: Sequence[int] = (),
        opened: Sequence[Open] = (),
        allowed: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        lists = list(growth.values())
        self.worker.hear(
            Step(
                next(self.numbers),
                packed(ended, np.int64),
                packed(growth, np.int64),
                packed(np.cumsum([0, *map(len, lists)]), np.int32),
                packed(list(itertools.chain(*lists)), np.int32),
                tuple(opened),
                packed(allowed, np.int64),
                packed(list(allowed.values()), np.int32),
            )
        )
        for name, tokens in growth.items():
            self.texts[name] += tokens

    def open(self, response: int, limit: int = LIMIT) -> None:
        self.texts[response] = list(PROMPT)
        self.tell(opened=[self.opening(response, limit)])

    def opening(self, response: int, limit: int = LIMIT) -> Open:
        return Open(response, 7, 1.0, limit, 2 * self.window, packed(self.texts[response], np.int32))

    def grow(self, growth: dict[int, list[int]]) -> None:
        self.tell(growth)

    def ahead(self) -> dict[int, list[int]]:
        """Let the worker draft until it stops; what it then has ahead of each response."""
        while self.worker.draft():
            pass
        return read(self.worker.say())


def packed(numbers: Iterable[int], kind: type) -> bytes:
    return np.array(list(numbers), kind).tobytes()


def read(drafts: Drafts) -> dict[int, list[int]]:
    """Tokens ahead of each response, which follow each other."""
    found, data = {}, drafts.trees
    while data:
        response, _, count = np.frombuffer(data[:24], np.int64).tolist()
        tokens, parents, _ = np.frombuffer(data[24 : 24 + 12 * count], np.int32).reshape(3, count).tolist()
        assert parents == list(range(-1, count - 1))
        found[response], data = tokens, data[24 + 12 * count :]
    return found


def test_it_drafts_two_windows_ahead_and_stops() -> None:
    engine = Engine(window=3)
    engine.open(5)
    assert engine.ahead() == {5: [103, 104, 105, 106, 107, 108]}
    assert not engine.worker.draft()
    engine.grow({5: [103, 104]})
    assert engine.ahead() == {5: [105, 106, 107, 108, 109, 110]}
    assert engine.worker.num_wasted == 0


def test_behind_a_rejection_it_begins_anew() -> None:
    engine = Engine(window=3)
    engine.open(5)
    engine.ahead()
    engine.grow({5: [103, 9]})
    assert engine.worker.num_wasted == 4
    assert engine.ahead() == {5: [105, 106, 107, 108, 109, 110]}
    engine.grow({5: [9]})
    assert engine.worker.num_wasted == 4 + 5


def test_it_does_not_draft_beyond_the_responses_end_nor_where_nothing_will_be_accepted() -> None:
    engine = Engine(window=30)
    engine.open(5, limit=10)
    assert engine.ahead() == {5: list(range(103, 110))}
    engine.grow({5: [103, 104, 105, 106, 107, 108, 109, 8, 8]})
    assert engine.ahead() == {}
    doubtful = Engine(window=30, floor=0.5)
    doubtful.open(5)
    assert len(doubtful.ahead()[5]) in (7, 8)  # 0.9 ** 7 < 0.5, and two tokens a call


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.booleans()), max_size=25),
)
def test_a_rejection_wastes_less_than_two_windows(window: int, events: list[tuple[int, int, bool]]) -> None:
    """(drafting calls, right tokens, whether the token behind them is right) of each step."""
    engine = Engine(window)
    engine.open(5, limit=400)
    worker = engine.worker
    for calls, num_right, follows in events:
        for _ in range(calls):
            if worker.draft():
                ahead = read(worker.say())[5]
                assert len(ahead) <= 2 * window
                position = len(engine.texts[5])
                assert ahead == list(range(100 + position, 100 + position + len(ahead)))
        before, position = worker.num_wasted, len(engine.texts[5])
        right = list(range(100 + position, 100 + position + num_right + follows))
        engine.grow({5: right if follows else [*right, 9]})
        assert worker.num_wasted - before <= 2 * window - 1
        assert follows <= (worker.num_wasted == before)


def test_it_learns_how_sure_its_drafts_are_and_how_sharply_to_draw() -> None:
    engine = Engine(window=4)
    engine.open(5, limit=900)
    before = engine.worker._learned.calibration[NUM_CELLS - 1]
    for _ in range(40):
        engine.ahead()
        engine.grow({5: [100 + len(engine.texts[5]), 9]})
    told = engine.worker._learned
    assert told.calibration[NUM_CELLS - 1] == pytest.approx(0.5, abs=0.08)
    assert told.calibration[NUM_CELLS - 1] < before
    assert engine.worker.say().mean_acceptance == pytest.approx(0.5, abs=0.05)
    assert told._sharpness.wins.sum() == 0, "all sharpnesses have drawn the same"


def test_what_is_lost_is_asked_for() -> None:
    engine = Engine(window=2)
    assert DraftWorker(FakeModel()).is_lost  # type: ignore[arg-type]
    engine.open(5)
    next(engine.numbers)  # a message that does not arrive
    engine.grow({5: [103]})
    assert engine.worker.is_lost
    assert not engine.worker.draft()
    engine.grow({5: [104]})  # not heard
    engine.worker.hear(Begin(2, "", 3, (engine.opening(5),)))
    engine.numbers = itertools.count(4)
    assert engine.ahead() == {5: [105, 106, 107, 108]}
    assert engine.worker.say().begun == 2
    engine.grow({5: [105, 106]})
    assert not engine.worker.is_lost
    assert engine.worker.say().number == 4


def test_it_drafts_as_far_ahead_as_each_response_is_allowed() -> None:
    engine = Engine(window=3)
    for response in (5, 6, 7):
        engine.open(response)
    engine.tell(allowed={5: 2, 6: 0, 99: 4})
    assert {name: len(tokens) for name, tokens in engine.ahead().items()} == {5: 2, 7: 6}
    engine.tell(allowed={6: 1})
    assert engine.ahead()[6] == [103]


def test_what_has_ended_is_forgotten() -> None:
    engine = Engine(window=2)
    engine.open(5)
    engine.open(6)
    assert set(engine.ahead()) == {5, 6}
    engine.tell({6: [103]}, ended=[5, 77])
    assert set(engine.ahead()) == {6}
    assert len(engine.model.kept) == 1


def test_what_the_model_does_not_draft_for_is_tried_again_when_it_has_grown() -> None:
    engine = Engine(window=2)
    engine.model.is_broken = True
    engine.open(5)
    assert engine.ahead() == {}
    engine.model.is_broken = False
    assert not engine.worker.draft()
    engine.grow({5: [103]})
    assert engine.ahead() == {5: [104, 105, 106, 107]}
