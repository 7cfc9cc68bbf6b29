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
from paceline.drafting.worker_wire import Begin, DraftCounts, Drafts, Open, Step
from paceline.types import DraftGrowth, DraftQuery, Float32Array, Int32Array, ModelBatch

PROMPT, LIMIT, STEP_S = [1, 2, 3], 60, 100.0


class FakeModel:
    """Drafts 100 + position, rival 500 + position; remembers which tokens given as context it may keep."""

    max_model_len = 1000
    prior_calibration = staticmethod(prior_calibration)

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}
        self.is_broken = False
        self.num_calls = self.num_levels = 0

    def draft(
        self, contexts: Sequence[Int32Array], query: DraftQuery, depth: int, **options: Any
    ) -> tuple[ModelBatch, DraftGrowth]:
        for row, context in zip(query.responses.tolist(), contexts, strict=True):
            kept = self.kept.get(row, [])
            assert context[: len(kept)].tolist() == kept, "the model still has what was rejected"
            self.kept[row] = context.tolist()
        count = len(contexts)
        tokens = 100 + query.positions[:, None] + np.arange(depth)
        grid: Float32Array = options["sharpness_grid"]
        batch = ModelBatch(
            tokens.astype(np.int32),
            np.minimum(query.max_tokens, 0 if self.is_broken else depth).astype(np.int32),
            np.full((count, depth), 0.9, np.float32),
            np.full((count, depth), NUM_CELLS - 1, np.int32),
            np.tile(tokens[:, :1].astype(np.int32), (1, len(grid))),
            (tokens + 400).astype(np.int32),
        )
        self.num_calls += 1
        self.num_levels += depth
        return batch, DraftGrowth(depth, depth * count, 0.001 * depth)

    def fork(self, row: int, branch: int, num_tokens: int) -> None:
        self.kept[branch] = self.kept[row][:num_tokens]

    def rewind(self, row: int, num_tokens: int) -> None:
        self.kept[row] = self.kept.get(row, [])[:num_tokens]

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.kept.pop(row, None)


class Engine:
    """The other end: tells a worker what responses grow by."""

    def __init__(
        self, window: int, floor: float = 0.0, num_branches: int = 0, beside: Engine | None = None
    ) -> None:
        """beside: another engine, whose worker drafts for this one too."""
        self.window, self.address = window, "this" if beside is None else "other"
        if beside is None:
            self.model = FakeModel()
            self.worker = DraftWorker(self.model, floor, num_branches=num_branches)  # type: ignore[arg-type]
            self.worker.begin(["this", "other"])
        else:
            self.model, self.worker = beside.model, beside.worker
        self.worker.hear(self.address, Begin(1, "", 0, ()), 0.0)
        self.texts: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)

    @property
    def served(self) -> Any:
        """What the worker has of this engine."""
        return self.worker._engines[self.address]

    @property
    def counts(self) -> DraftCounts:
        """What the worker has done for it."""
        return self.served.counts

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
            self.address,
            Step(
                next(self.numbers),
                packed(ended, np.int64),
                packed(growth, np.int64),
                packed(np.cumsum([0, *map(len, lists)]), np.int32),
                packed(list(itertools.chain(*lists)), np.int32),
                tuple(opened),
                packed(allowed, np.int64),
                packed(list(allowed.values()), np.int32),
                STEP_S,
            ),
            0.0,
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
        while self.worker.draft(0.0):
            pass
        return read(self.worker.say(self.address))

    def ahead_of_one(self) -> tuple[list[int], dict[int, list[int]]]:
        """The same of the only response, with branches."""
        while self.worker.draft(0.0):
            pass
        return read_tree(self.worker.say(self.address))


def packed(numbers: Iterable[int], kind: type) -> bytes:
    return np.array(list(numbers), kind).tobytes()


def read(drafts: Drafts) -> dict[int, list[int]]:
    """The chain ahead of each response."""
    found, data = {}, drafts.trees
    while data:
        response, _, count = np.frombuffer(data[:24], np.int64).tolist()
        tokens, parents, _ = np.frombuffer(data[24 : 24 + 12 * count], np.int32).reshape(3, count).tolist()
        length = next((place for place in range(count) if parents[place] != place - 1), count)
        found[response], data = tokens[:length], data[24 + 12 * count :]
    return found


def read_tree(drafts: Drafts) -> tuple[list[int], dict[int, list[int]]]:
    """Ahead of the only response: the chain, and branches by the place in it of the token that they replace."""
    count = int(np.frombuffer(drafts.trees[16:24], np.int64)[0])
    tokens, parents, _ = np.frombuffer(drafts.trees[24:], np.int32).reshape(3, count).tolist()
    chain: list[int] = []
    branches: dict[int, list[int]] = {}
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == place - 1 == len(chain) - 1:
            chain.append(token)
        elif parent == place - 1:
            branches[next(reversed(branches))].append(token)
        else:
            branches[parent + 1] = [token]
    return chain, branches


def test_it_drafts_two_windows_ahead_and_stops() -> None:
    engine = Engine(window=3)
    engine.open(5)
    assert engine.ahead() == {5: [103, 104, 105, 106, 107, 108]}
    assert not engine.worker.draft(0.0)
    engine.grow({5: [103, 104]})
    assert engine.ahead() == {5: [105, 106, 107, 108, 109, 110]}
    assert engine.counts.num_wasted == 0


def test_behind_a_rejection_it_begins_anew() -> None:
    engine = Engine(window=3)
    engine.open(5)
    engine.ahead()
    engine.grow({5: [103, 9]})
    assert engine.counts.num_wasted == 4
    assert engine.ahead() == {5: [105, 106, 107, 108, 109, 110]}
    engine.grow({5: [9]})
    assert engine.counts.num_wasted == 4 + 5


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
            if worker.draft(0.0):
                ahead = read(worker.say("this"))[5]
                assert len(ahead) <= 2 * window
                position = len(engine.texts[5])
                assert ahead == list(range(100 + position, 100 + position + len(ahead)))
        before, position = engine.counts.num_wasted, len(engine.texts[5])
        right = list(range(100 + position, 100 + position + num_right + follows))
        engine.grow({5: right if follows else [*right, 9]})
        wasted = engine.counts.num_wasted - before
        assert wasted <= 2 * window - 1
        assert follows <= (wasted == 0)


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
    assert engine.worker.say(engine.address).mean_acceptance == pytest.approx(0.5, abs=0.05)
    assert told._sharpness.wins.sum() == 0, "all sharpnesses have drawn the same"


def test_what_a_level_takes_is_told_whatever_the_depth_of_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D stands in every plan: a shallow call at the end of a window must not make it look dear."""
    engine, level_s = Engine(window=2), 0.0008
    monkeypatch.setattr(
        "paceline.drafting.draft_worker.time.perf_counter", lambda: level_s * engine.model.num_levels
    )
    engine.open(0)
    told = []
    for position in range(3, 20):
        while engine.worker.draft(0.0):
            told.append(engine.worker.say("this"))
        engine.grow({0: [100 + position]})
    assert len({drafts.num_levels for drafts in told}) > 1
    assert [drafts.level_s for drafts in told] == pytest.approx([level_s] * len(told))
    assert [drafts.call_s for drafts in told] == pytest.approx([level_s * one.num_levels for one in told])


def test_what_is_lost_is_asked_for() -> None:
    engine = Engine(window=2)
    engine.open(5)
    next(engine.numbers)  # a message that does not arrive
    engine.grow({5: [103]})
    assert engine.worker.is_lost(engine.address)
    assert not engine.worker.draft(0.0)
    engine.grow({5: [104]})  # not heard
    engine.worker.hear(engine.address, Begin(2, "", 3, (engine.opening(5),)), 0.0)
    engine.numbers = itertools.count(4)
    assert engine.ahead() == {5: [105, 106, 107, 108]}
    assert engine.worker.say(engine.address).begun == 2
    engine.grow({5: [105, 106]})
    assert not engine.worker.is_lost(engine.address)
    assert engine.worker.say(engine.address).number == 4


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
    assert not engine.worker.draft(0.0)
    engine.grow({5: [103]})
    assert engine.ahead() == {5: [104, 105, 106, 107]}


def test_the_window_after_a_likely_correction_is_there_before_the_rejection() -> None:
    engine = Engine(window=3, num_branches=16)
    engine.open(5)
    assert engine.counts.draft_s == 0.0
    chain, branches = engine.ahead_of_one()
    assert engine.counts.draft_s > 0.0
    assert chain == [103, 104, 105, 106, 107, 108]
    assert branches == {place: [503 + place, *range(104 + place, 109)] for place in range(5)}
    assert engine.counts.num_branches == 5
    calls = engine.model.num_calls
    engine.grow({5: [103, 504]})
    assert read_tree(engine.worker.say(engine.address))[0] == [105, 106, 107, 108]
    assert engine.model.num_calls == calls
    counts = engine.counts
    assert (counts.num_hits, counts.num_wasted) == (1, 4)
    chain, branches = engine.ahead_of_one()
    assert chain == [105, 106, 107, 108, 109, 110]
    assert set(branches) == set(range(5))
    engine.grow({5: [105, 9]})  # a correction that was not prepared
    assert engine.counts.num_hits == 1
    assert engine.ahead_of_one()[0] == [107, 108, 109, 110, 111, 112]
    engine.grow({5: [507, 108, 9]})  # prepared, and decided further than that
    assert engine.counts.num_hits == 2
    assert engine.counts.num_branch_tokens == 3, "105, 507 and 108; the last token of a step is no draft"
    assert engine.ahead_of_one()[0] == [110, 111, 112, 113, 114, 115]


def test_branches_go_on_along_accepted_tokens_and_become_likelier() -> None:
    engine = Engine(window=3, num_branches=2)
    engine.open(5)
    engine.ahead_of_one()
    first = engine.counts.num_branches
    assert first == 2, "no more than there are rows for"
    engine.grow({5: [103]})
    branches = engine.ahead_of_one()[1]
    assert branches == {0: [504, *range(105, 110)], 1: [505, *range(106, 110)]}
    assert engine.counts.num_branches == 3, "one has gone, with the token that it was to replace"


def test_nothing_is_prepared_where_the_verifier_leaves_no_time_or_many_run() -> None:
    engine = Engine(window=3, num_branches=1)
    engine.open(5)
    while engine.worker.draft(STEP_S):
        pass
    assert engine.counts.num_branches == 0
    engine.open(6)
    engine.ahead()
    assert engine.counts.num_branches == 0
    engine.tell({5: [103]}, ended=[6])
    engine.ahead_of_one()
    assert engine.counts.num_branches == 1


def test_what_is_prepared_follows_how_often_the_rival_is_right() -> None:
    seldom, often = (Engine(window=2, floor=0.03, num_branches=4) for _ in "ab")
    for engine, correction in ((seldom, 9), (often, None)):
        engine.open(5, limit=900)
        for _ in range(60):
            position = len(engine.texts[5])
            engine.ahead()
            engine.grow({5: [100 + position, correction or 501 + position]})
        engine.ahead()
    assert seldom.counts.num_branches < 0.5 * often.counts.num_branches
    assert seldom.counts.num_hits == 0
    assert often.counts.num_hits > 50


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from((5, 6)), st.integers(0, 9), st.sampled_from("orr")),
        max_size=30,
    ),
)
def test_whatever_is_decided_no_row_is_lost_and_no_context_is_wrong(
    window: int, num_branches: int, events: list[tuple[int, int, int, str]]
) -> None:
    """(drafting calls, response, right tokens, whether the token behind them is the rival) of each step."""
    engine = Engine(window, num_branches=num_branches)
    for response in (5, 6):
        engine.open(response, limit=200)
    for calls, response, num_right, kind in events:
        for _ in range(calls):
            engine.worker.draft(0.0)  # the model checks what it is given as context
        position = len(engine.texts[response])
        wrong = 500 + position + num_right if kind == "r" else 9
        prepared = engine.served.responses[response].branches.get(position + num_right)
        hits = engine.counts.num_hits
        engine.grow({response: [*range(100 + position, 100 + position + num_right), wrong]})
        assert engine.counts.num_hits - hits == (kind == "r" and prepared is not None)
        ahead = engine.served.responses.values()
        rows = [*engine.worker._spare_rows]
        for one in ahead:
            rows += [one.chain.row, *(branch.row for branch in one.branches.values())]
            assert all(branch.end - one.known <= 2 * window for branch in one.branches.values())
            assert all(one.known <= cut < one.chain.end for cut in one.branches)
        assert len(rows) == len(set(rows)) == num_branches + 2
    for response in (5, 6):
        engine.tell(ended=[response])
    assert len(engine.worker._spare_rows) == num_branches


def test_it_drafts_for_several_engines_that_know_nothing_of_each_other() -> None:
    """Their responses have the same names."""
    first = Engine(window=2)
    second = Engine(window=3, beside=first)
    first.open(5)
    second.open(5)
    second.open(6)
    assert first.ahead() == {5: [103, 104, 105, 106]}
    assert second.ahead() == {5: list(range(103, 109)), 6: list(range(103, 109))}
    first.grow({5: [103, 9]})
    assert first.worker.draft(0.0)
    assert (first.worker.has_news("this"), first.worker.has_news("other")) == (True, False)
    assert first.ahead() == {5: [105, 106, 107, 108]}
    assert (first.counts.num_wasted, second.counts.num_wasted) == (2, 0)
    next(second.numbers)  # a message that does not arrive
    second.tell({5: [103]})
    assert (first.worker.is_lost("this"), first.worker.is_lost("other")) == (False, True)
    first.grow({5: [105]})
    assert first.ahead() == {5: [106, 107, 108, 109]}
    first.worker.begin(["other"])
    assert first.worker.is_lost("other")
    assert not first.model.kept.keys() - set(first.worker._spare_rows)


def test_no_branch_delays_an_engine_whose_step_ends_soon() -> None:
    first = Engine(window=2, num_branches=4)
    second = Engine(window=2, beside=first)
    first.open(5)
    second.open(5)
    second.served.step_ends_s = 1.0
    while first.worker.draft(1.0):
        pass
    assert first.counts.num_branches + second.counts.num_branches == 0
    second.tell({5: [103]})
    first.ahead()
    assert first.counts.num_branches + second.counts.num_branches > 0
