"""The fast loop without an engine: candidates, matching of late model drafts, learning, and what it may not do."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.worker_wire import DraftCounts
from paceline.engine import model_free
from paceline.engine.draft_ahead import DraftAhead, TargetSizes
from paceline.engine.draft_rows import leading_matches, table_of
from paceline.engine.fast_loop import FastLoop, Proposal
from paceline.engine.model_free import GRID
from paceline.engine.model_steering import ModelSteering
from paceline.engine.sharing import SharedDrafts
from paceline.errors import CheckpointError
from paceline.planning.bandit import select_strategy
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.types import (
    DraftBatch,
    DrafterScore,
    DraftGrowth,
    DraftPaths,
    DraftQuery,
    MetDrafts,
    ModelBatch,
    ModelDrafts,
    StepObservation,
)

FIXED = BudgetSettings(policy="fixed", fixed_tokens=4)

GROWTH = DraftGrowth(num_levels=2, num_rows=6, seconds=0.002)


def query(count: int = 3, position: int = 10, room: int = 8) -> DraftQuery:
    return DraftQuery(
        groups=np.zeros(count, np.int64),
        responses=np.arange(count, dtype=np.int64),
        keys=np.arange(count, dtype=np.uint64),
        positions=np.full(count, position, np.int64),
        temperatures=np.zeros(count, np.float32),
        max_tokens=np.full(count, room, np.int32),
    )


def batch(tokens: list[list[int]], acceptance: float) -> DraftBatch:
    table = np.array(tokens, dtype=np.int32)
    return DraftBatch(
        table,
        np.full(len(table), table.shape[1], np.int32),
        np.full(table.shape, acceptance, np.float32),
        np.zeros(table.shape, np.int32),
        np.repeat(table[:, :1], len(GRID), axis=1),
    )


def step(requests: int, drafts: int, accepted: int, seconds: float = 0.01) -> StepObservation:
    return StepObservation(requests, drafts, accepted, 0, seconds)


def fill(loop: FastLoop, count: int = 3) -> None:
    for response in range(count):
        loop.open(0, response, [1, 2, 3], [])
    loop.append((0, response, [5, 6, 7, 8, 5, 6, 7]) for response in range(count))


def test_responses_of_a_group_draft_from_each_other() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    loop.open(0, 0, [1, 2, 3], [])
    loop.open(0, 1, [1, 2, 3], [])
    loop.append([(0, 0, [5, 6, 7, 8, 9, 10, 11])])
    loop.append([(0, 1, [5, 6])])
    made = loop.propose(query(2), 0)
    assert made.batch.tokens[1, :3].tolist() == [7, 8, 9]
    assert (made.lengths <= 4).all()
    assert made.lengths[1] > 0


def grown(loop: FastLoop, responses: list[int], tokens: list[int], wanted: DraftQuery) -> bool:
    """Each of these responses grows by `tokens`, told with a query for the next step's drafts."""
    count = len(responses)
    arrays = (
        np.zeros(count, np.int64),
        np.array(responses, np.int64),
        np.arange(count + 1, dtype=np.int32) * len(tokens),
        np.array(tokens * count, np.int32),
    )
    is_told = loop.drafts_early
    if is_told:
        loop.draft_early(*arrays, wanted)
    loop.grow(*arrays, drafter_knows=is_told)
    return is_told


def proposed(made: Proposal) -> list[list[int]]:
    return [
        row[:length] for row, length in zip(made.batch.tokens.tolist(), made.lengths.tolist(), strict=True)
    ]


def drafting_loops(count: int = 3) -> list[FastLoop]:
    """Two that have done the same so far, and have drafted."""
    loops = [FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0)) for _ in range(2)]
    for loop in loops:
        fill(loop, count)
        assert loop.propose(query(count), 0).lengths.all()
    return loops


def test_drafts_that_were_begun_early_are_those_of_the_step() -> None:
    early, late = drafting_loops()
    wanted = query(position=12)
    assert grown(early, [0, 1, 2], [8, 5], wanted)
    late.append((0, response, [8, 5]) for response in range(3))
    assert proposed(early.propose(wanted, 0)) == proposed(late.propose(wanted, 0)) != [[], [], []]
    assert early.free.drafter is not None
    assert early.free.drafter.num_tokens == late.free.drafter.num_tokens


def test_early_drafts_are_for_whoever_is_where_they_begin() -> None:
    early, late = drafting_loops()
    assert grown(early, [0, 1, 2], [8, 5], query(position=12))
    late.append((0, response, [8, 5]) for response in range(3))
    early.close(0, 1)
    asked = query(position=12)
    others = {field.name: getattr(asked, field.name)[[2, 0]] for field in fields(asked)}
    here = DraftQuery(**{**others, "positions": np.array([12, 13]), "max_tokens": np.array([2, 8], np.int32)})
    there = early.propose(here, 0)
    assert there.batch.num_tokens.tolist() == [2, 0]
    assert proposed(there) == [proposed(late.propose(here, 0))[0], []]


def test_branches_that_were_drafted_early_are_those_of_the_step() -> None:
    settings = EngineSettings(budget=FIXED, draft_floor=0.0, num_paths=3, max_alternatives=8)
    early, late = (FastLoop(settings) for _ in range(2))
    texts = ([5, 6, 7, 8, 9], [5, 6, 4, 8, 3], [5, 6, 7, 1, 2])
    for loop in (early, late):
        for response, text in enumerate(texts):
            loop.open(0, response, [1, 2, 3], [])
            loop.append([(0, response, [*text, 5])])
    ahead, there = np.full(3, 2, np.int32), query(position=9)
    for loop in (early, late):
        assert loop.propose(query(position=8), 0, ahead=ahead).lengths.any()
    assert grown(early, [0, 1, 2], [6], there)
    late.append((0, response, [6]) for response in range(3))
    found = [loop.propose(there, 0, ahead=ahead).branches for loop in (early, late)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].num_tokens.any()
    assert found[0].num_tokens.tolist() == found[1].num_tokens.tolist()
    inside = np.arange(found[0].tokens.shape[2]) < found[0].num_tokens[..., None]
    assert found[0].tokens[inside].tolist() == found[1].tokens[inside].tolist()
    shrunk = replace(query(1, position=11), groups=np.zeros(1, np.int64), max_tokens=np.full(1, 3, np.int32))
    settings = EngineSettings(budget=FIXED, draft_floor=0.0, num_paths=3, max_alternatives=2)
    narrow = FastLoop(settings)  # branches for one request alone
    for response, text in enumerate(texts):
        narrow.open(0, response, [1, 2, 3], [])
        narrow.append([(0, response, [*text, 5])])
    assert narrow.propose(query(position=9), 0, ahead=ahead).lengths.any()
    assert grown(narrow, [0, 1, 2], [6, 7], query(position=11, room=9))
    assert narrow.propose(shrunk, 0, ahead=ahead[:1]).branches is not None
    wide = replace(query(9, position=9), groups=np.zeros(9, np.int64))
    assert late.propose(wide, 0, ahead=np.full(9, 2, np.int32)).branches is None, "more than max_alternatives"


def left_batch(tokens: list[list[int]], position: int) -> ModelDrafts:
    """What a model has drafted behind a step that is over."""
    made = batch(tokens, 0.9)
    count = len(tokens)
    growth = DraftGrowth(made.tokens.shape[1], made.tokens.size, 0.004)
    return ModelDrafts(np.arange(count), np.full(count, position), made, growth, 0.004)


def overlapping_loop(drafter: str = "none") -> FastLoop:
    fields = {"drafter": drafter, "model_drafter": "somewhere", "budget": FIXED, "draft_floor": 0.0}
    loop = FastLoop(EngineSettings.model_validate(fields))
    loop.overlaps = True
    return loop


def test_drafts_on_the_device_are_counted_on_unseen() -> None:
    loop, ahead = overlapping_loop(), np.full(3, 2, np.int32)
    assert loop.propose(query(room=6), 0, ahead=ahead).lengths.tolist() == [0, 0, 0]
    made = loop.propose(query(room=6), 0, ahead=ahead, num_left=np.array([3, 1, 0], np.int32))
    assert made.lengths.tolist() == [3, 1, 0]
    assert made.left is not None
    assert not made.left.takes_free.any()
    short = loop.propose(query(room=3), 0, ahead=ahead, num_left=np.array([3, 1, 0], np.int32))
    assert short.lengths.tolist() == [1, 1, 0], "behind what is being decided there is room for one"


def test_the_trees_drafts_go_before_those_on_the_device_where_they_are_better() -> None:
    loop, ahead = overlapping_loop("suffix"), np.ones(3, np.int32)
    fill(loop)
    made = loop.propose(query(), 0, ahead=ahead, num_left=np.full(3, 4, np.int32))
    assert made.left is not None
    assert made.left.takes_free.all()
    for _ in range(60):  # the model is always right
        loop.receive_left(
            left_batch([[8, 5, 6, 7]] * 3, 10),
            np.arange(3),
            np.full(3, 10),
            table_of([[8, 5, 6, 7, 9]] * 3),
            12,
        )
    unsure = replace(query(), groups=np.full(3, 1))  # of a group that nothing is known of
    made = loop.propose(unsure, 0, ahead=ahead, num_left=np.full(3, 4, np.int32))
    assert made.left is not None
    assert not made.left.takes_free.any()
    assert made.lengths.tolist() == [4, 4, 4]


def test_drafts_from_the_device_are_judged_whoever_was_verified() -> None:
    loop = overlapping_loop()
    before = loop.model.calibration[0]
    decided = table_of([[7, 8, 9], [4], [5, 6]])
    loop.receive_left(
        left_batch([[7, 8], [9, 9], [5, 1]], 10), np.array([1, 0, 5]), np.full(3, 10), decided, 2
    )
    assert loop.drafter_score().tried == 2, "of the third nothing was drafted"
    assert loop.drafter_score().right == 0
    loop.receive_left(left_batch([[7, 8], [4, 9], [5, 1]], 10), np.arange(3), np.full(3, 10), decided, 2)
    assert loop.drafter_score().right == 3
    assert loop.model.calibration[0] != before
    told = loop.observe(step(3, 6, 3, seconds=0.010))
    assert (told.num_model_tokens, told.step_s) == (2, 0.010)
    curve = dict(zip(*_curve(loop), strict=True))
    assert curve[9.0] == pytest.approx(0.006), "what drafting took is none of the target's time"


def _curve(loop: FastLoop) -> tuple[tuple[float, ...], tuple[float, ...]]:
    model = loop.policy_state.budget.decode_time
    return model.curve_tokens, model.curve_s


def test_all_are_drafted_for_as_deep_as_the_last_drafts_paid() -> None:
    loop = overlapping_loop()
    depths = []
    for right in (True, True, True, False):
        loop.propose(query(), 0, ahead=np.ones(3, np.int32))
        order = loop.order()
        assert order is not None
        assert order.is_exact
        assert order.most_requests is None
        depths.append(order.depth)
        tokens = [[7] * order.depth] * 3
        decided = table_of([[7] * order.depth if right else [1]] * 3)
        loop.receive_left(left_batch(tokens, 10), np.arange(3), np.full(3, 10), decided, 0)
    assert depths == [1, 2, 4, 4], "at most the fixed length"


def test_drafts_of_another_model_teach_nothing() -> None:
    """Those under way when it was exchanged."""
    loop = overlapping_loop()
    loop.renew_model()
    decided = table_of([[7, 8]] * 3)
    for expected in (0, 0, 3):
        loop.receive_left(left_batch([[7, 8]] * 3, 10), np.arange(3), np.full(3, 10), decided, 0)
        assert loop.drafter_score().tried == expected


def test_early_drafts_do_not_outlive_the_tokens_that_they_were_made_from() -> None:
    loop, _ = drafting_loops()
    assert grown(loop, [0, 1, 2], [8, 5], query(position=12))
    loop.forget_tokens()
    assert not loop.propose(query(position=12), 0).lengths.any()


def test_a_step_of_untypical_time_is_told_and_not_learned_from() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    loop.propose(query(), 0)
    before = loop.policy_state.budget
    assert loop.observe(replace(step(3, 3, 1), is_typical=False)).num_accepted_tokens == 1
    after = loop.policy_state.budget
    assert after.decode_time == before.decode_time
    assert (after.num_steps, after.accepted_tokens) == (before.num_steps + 1, 1.0), "what it accepted is"
    loop.observe(step(3, 3, 1))
    assert loop.policy_state.budget.decode_time.num_observations == 1


def test_early_drafts_for_nobody_are_made_anew() -> None:
    early, late = drafting_loops()
    assert grown(early, [0, 1, 2], [8, 5], query(position=11))
    late.append((0, response, [8, 5]) for response in range(3))
    assert proposed(early.propose(query(position=12), 0)) == proposed(late.propose(query(position=12), 0))


def test_nothing_is_begun_early_where_nothing_was_worth_it() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    assert not grown(loop, [0, 1, 2], [8], query(position=11)), "no step has drafted"
    assert loop.propose(query(position=11), 0).lengths.all()
    loop.free.drafter = None
    assert not grown(loop, [0, 1, 2], [5], query(position=12))


def test_a_group_may_see_another_prompt() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    loop.open(0, 0, [1, 2, 3], [])
    loop.append([(0, 0, [5, 6, 7, 8, 9, 10, 11])])
    loop.open(0, 1, [1, 2, 4], [])
    loop.append([(0, 1, [5, 6])])
    assert loop.propose(query(2), 0).batch.tokens[1, :3].tolist() == [7, 8, 9]


def test_model_drafts_are_used_only_at_their_position() -> None:
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=FIXED))
    late = ModelDrafts(np.array([2, 0]), np.array([10, 9]), batch([[4, 5], [6, 7]], 0.9), GROWTH, 0.002)
    loop.receive(late)
    made = loop.propose(query(), 0)
    assert made.lengths.tolist() == [0, 0, 2]
    assert made.batch.tokens[2, :2].tolist() == [4, 5]
    assert loop.propose(query(), 0).lengths.tolist() == [0, 0, 0], "drafts serve one step only"


def two_drafters(acceptance: float) -> tuple[FastLoop, Proposal]:
    """A loop with suffix trees and a model drafter this sure of itself, and what it proposes."""
    loop = FastLoop(EngineSettings(model_drafter="somewhere", budget=FIXED, draft_floor=0.0))
    fill(loop)
    drafts = batch([list(range(40, 48))] * 3, acceptance)
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), drafts, GROWTH, 0.002))
    return loop, loop.propose(query(), 0)


@pytest.mark.parametrize(("acceptance", "model_wins"), [(0.999, True), (0.0001, False)])
def test_the_better_candidate_wins(acceptance: float, model_wins: bool) -> None:
    made = two_drafters(acceptance)[1]
    assert (made.batch.tokens[:, 0] == 40).tolist() == [model_wins] * 3


def test_a_token_teaches_whoever_drafted_it() -> None:
    loop, made = two_drafters(0.999)
    assert made.candidates[0] is not None
    free = made.candidates[0].tokens
    before = loop.free.learned.table.verified.sum(), loop.model.table.verified.sum()
    loop.learn(made, np.full(3, 4, np.int32), table_of([[40, 41, 9], [int(free[1, 0])], []]))
    # The model is right twice, then wrong; wrong at once; untold. The free drafter wrong at once; right; untold.
    assert loop.model.table.verified.sum() - before[1] == pytest.approx(4, rel=0.01)
    assert loop.free.learned.table.verified.sum() - before[0] == pytest.approx(2, rel=0.01)
    assert loop.free.learned.table.accepted.sum() == pytest.approx(1, rel=0.01)
    told = loop.observe(step(3, 12, 2))
    assert told.num_model_tokens == 2


def test_model_free_drafts_are_believed_by_what_came_of_them_where_the_model_rested() -> None:
    loop = FastLoop(EngineSettings(model_drafter="somewhere", budget=FIXED, draft_floor=0.0))
    fill(loop)

    def free(made: Proposal) -> DraftBatch:
        assert made.candidates[0] is not None
        return made.candidates[0]

    assert loop.free.learned.alone.tolist() == loop.free.learned.calibration.tolist(), (
        "nothing else is known yet"
    )
    resting = loop.propose(query(), 0)
    cell = int(free(resting).cells[0, 0])
    for _ in range(20):
        loop.learn(resting, np.full(3, 4, np.int32), table_of([[60]] * 3))  # always wrong
    assert loop.free.learned.alone[cell] < loop.free.learned.calibration[cell]
    found = free(loop.propose(query(), 0))
    assert found.acceptance[0, 0] == loop.free.learned.alone[found.cells[0, 0]]
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[40, 41]] * 3, 0.5), GROWTH, 0.002))
    beside = loop.propose(query(), 0)
    found, known = free(beside), loop.free.learned.alone.tolist()
    assert found.acceptance[0, 0] == loop.free.learned.calibration[found.cells[0, 0]]
    loop.learn(beside, np.full(3, 4, np.int32), table_of(found.tokens[:, :1].tolist()))
    assert loop.free.learned.table.accepted.sum() > 0
    assert loop.free.learned.alone.tolist() != known, "its prior has learned"


def test_without_a_model_drafter_all_steps_are_alike() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    made = loop.propose(query(), 0)
    for _ in range(20):
        loop.learn(made, np.full(3, 4, np.int32), table_of([[60]] * 3))
    made = loop.propose(query(), 0)
    assert isinstance(made.batch, DraftBatch)
    assert made.batch.acceptance[0, 0] == loop.free.learned.calibration[made.batch.cells[0, 0]]


def test_a_further_drafter_inside_the_engine_is_counted_as_itself() -> None:
    for free in ("none", "suffix"):  # alone, and in the draft trees
        settings = EngineSettings(drafter=free, model_drafter="m", further_drafters=("n",), budget=FIXED)
        loop = FastLoop(settings)
        fill(loop)
        loop.renew_model(1)
        drafts = batch([[40, 41, 42, 43]] * 3, 0.999)
        loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), drafts, GROWTH, 0.002))
        made = loop.propose(query(), 0)
        loop.learn(made, np.full(3, 4, np.int32), table_of([[40, 41, 9], [40, 9], [9]]))
        told = loop.observe(step(3, 12, 3))
        assert (told.num_model_tokens, told.further_tokens) == (3, (3,))


def test_another_drafter_costs_something_else_and_other_weights_the_same() -> None:
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="m", further_drafters=("n",), budget=FIXED))
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[4, 5]] * 3, 0.9), GROWTH, 0.002))
    assert loop.level_s(3) == pytest.approx(0.001)
    for place in (None, 0):
        loop.renew_model(place)
        assert loop.level_s(3) == pytest.approx(0.001)
    loop.renew_model(1)
    assert loop.level_s(3) == 0.0


@pytest.mark.parametrize(("place", "is_resting"), [(0, True), (1, False)])
def test_the_engines_drafter_rests_only_while_another_worker_has_the_same(
    place: int, is_resting: bool
) -> None:
    loop = FastLoop(EngineSettings(model_drafter="m", further_drafters=("n",), budget=FIXED))
    helped = SimpleNamespace(links=(None, None), is_there=True, has=lambda other: other == 0)
    loop.ahead = helped  # type: ignore[assignment]
    loop.renew_model(place)
    assert (loop.order() is None) == is_resting


@pytest.mark.parametrize("is_drafting", [True, False])
def test_a_drafter_inside_is_judged_unless_a_helper_drafts_in_its_place(
    is_drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that finds nothing worth drafting is heard all the same."""
    judged: list[int] = []
    monkeypatch.setattr(ModelSteering, "judge", lambda *_: judged.append(1))
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="m", draft_floor=0.0))
    for tokens in (3, 6, 12) * 8:
        loop.observe(step(3, tokens - 3, 0, 0.001 * tokens))
    helper = SimpleNamespace(is_there=True, is_drafting=is_drafting, listen=lambda: False, counts=())
    loop.ahead = helper  # type: ignore[assignment]
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[4, 5]] * 3, 0.9), GROWTH, 0.002))
    loop.propose(query(), 0)
    assert bool(judged) == (not is_drafting)


def test_a_loop_that_cannot_start_leaves_no_draft_client(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    client = SimpleNamespace(close=lambda: closed.append(1))
    monkeypatch.setattr(model_free, "_connect", lambda *_: SharedDrafts(client))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        FastLoop(EngineSettings(model_drafter="/no/such/folder", draft_worker=True))
    assert closed == [1]


def test_drafts_are_compared_up_to_what_was_decided() -> None:
    decided = table_of([[1, 2, 3], [], [5]])
    drafts = np.array([[1, 2, 9, 3], [1, 2, 3, 4], [5, -1, -1, -1]], np.int32)
    assert decided.tolist() == [[1, 2, 3], [-1, -1, -1], [5, -1, -1]]
    assert leading_matches(drafts, np.array([4, 4, 1]), decided).tolist() == [2, 0, 1]
    assert leading_matches(drafts, np.array([1, 4, 0]), decided).tolist() == [1, 0, 0]
    assert table_of([]).shape == (0, 1)


def test_behind_a_step_under_way_the_budget_counts_what_is_left_of_a_draft() -> None:
    """It is worth what its path is worth there, and no token of it counts that the step under way decides."""
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    whole = loop.propose(query(), 0)
    ahead = np.array([0, 2, 7], np.int32)
    made = loop.propose(query(), 0, ahead=ahead)
    assert np.array_equal(made.batch.tokens, whole.batch.tokens)
    left = np.maximum(whole.batch.num_tokens - ahead, 0)
    assert made.lengths.tolist() == np.minimum(left, 4).tolist()
    path = whole.batch.path_probability
    expected = sum(
        float(path[row, a : a + n].sum()) for row, (a, n) in enumerate(zip(ahead, made.lengths, strict=True))
    )
    assert made.expected_accepted == pytest.approx(expected, rel=1e-5)


def test_branches_leave_a_draft_where_a_step_under_way_decides() -> None:
    """The budget counts what any of them is worth behind it; no two are alike in what is decided."""
    settings = EngineSettings(budget=FIXED, draft_floor=0.0, num_paths=4)
    loop = FastLoop(settings)
    texts = ([5, 6, 7, 8, 9, 10, 11], [5, 6, 17, 18, 19, 20, 21], [5, 26, 27, 28, 29, 30, 31])
    for response, text in enumerate(texts * 2):
        loop.open(0, response, [1, 2], [], key=response)
        loop.append([(0, response, [3, 4, *text])])
    loop.open(0, 9, [1, 2], [3, 4, 5], key=9)
    asked = DraftQuery(
        groups=np.zeros(1, np.int64),
        responses=np.array([9]),
        keys=np.array([9], np.uint64),
        positions=np.array([5]),
        temperatures=np.ones(1, np.float32),
        max_tokens=np.array([6], np.int32),
    )
    assert loop.propose(asked, 0).branches is None
    for ahead, most in ((2, 3), (1, 2), (0, 1)):
        made = loop.propose(asked, 0, ahead=np.array([ahead], np.int32))
        branches = made.branches
        assert branches is not None
        paths = [made.batch.tokens[0, : made.batch.num_tokens[0]].tolist()]
        paths += [
            tokens[:count].tolist()
            for tokens, count in zip(branches.tokens[0], branches.num_tokens[0].tolist(), strict=True)
            if count
        ]
        starts = [tuple(path[:ahead]) for path in paths]
        assert len(set(starts)) == len(starts) == most
        assert all(path == text[1 : 1 + len(path)] for path in paths for text in texts if path[-1] in text)
        worth = made.batch.path_probability[0, ahead:]
        for acceptance, count in zip(branches.acceptance[0], branches.num_tokens[0].tolist(), strict=True):
            worth = worth + np.where(np.arange(6) < count, np.cumprod(acceptance), 0.0)[ahead:]
        expected = float(np.minimum(worth, 1.0)[: made.lengths[0]].sum())
        assert made.expected_accepted == pytest.approx(expected, rel=1e-5)


def test_many_requests_have_no_branches() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0, num_paths=4, max_alternatives=8))
    fill(loop)
    assert loop.propose(query(), 0, ahead=np.ones(3, np.int32)).branches is None
    assert loop.propose(query(2), 0, ahead=np.ones(2, np.int32)).branches is not None


def test_all_that_a_draft_said_is_learned_from_behind_a_step_under_way() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop, 1)
    made = loop.propose(query(1), 0, ahead=np.array([2], np.int32))
    before = loop.free.learned.table.verified.sum()
    right = made.batch.tokens[0, :4].tolist()
    loop.learn(made, np.array([4], np.int32), table_of([[*right, 60]]))
    assert loop.free.learned.table.verified.sum() - before == pytest.approx(4, rel=0.01)


def test_acceptance_is_learned_from_verified_positions_alone() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    made = loop.propose(query(), 0)
    before = loop.free.learned.table
    verified = made.lengths.copy()
    accepted = np.minimum(verified, 1)
    decided = [[*tokens[:count], 60] for tokens, count in zip(made.batch.tokens, accepted, strict=True)]
    loop.learn(made, verified, table_of(decided))
    told = np.minimum(verified, accepted + 1).sum()
    assert loop.free.learned.table.verified.sum() - before.verified.sum() == pytest.approx(told, rel=0.01)
    assert loop.free.learned.table.accepted.sum() - before.accepted.sum() == pytest.approx(
        accepted.sum(), rel=0.01
    )


def test_who_weighs_more_is_drafted_for_first() -> None:
    settings = BudgetSettings(min_gain=0.0)
    loop = FastLoop(EngineSettings(budget=settings, draft_floor=0.0))
    fill(loop)
    model = StepTimeModel.initial()
    for _ in range(2):
        for size in (3, 4, 6, 9, 16, 32):
            model = update_measured_time(model, size, 0.02 + 0.003 * size)
    loop.budget = replace(loop.budget, decode_time=model)
    alike = loop.propose(query(), 0).lengths
    heavy = loop.propose(query(), 0, weight=np.array([0.5, 0.5, 4.0])).lengths
    assert heavy[2] > alike[2]
    assert heavy[:2].sum() < alike[:2].sum()


def test_a_model_drafters_time_is_not_the_targets() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED))
    for _ in range(8):
        loop.propose(query(), 0)
        loop.observe(step(3, 0, 0, seconds=0.050))
        loop.receive(ModelDrafts(np.arange(3), np.full(3, 11), batch([[4, 5]] * 3, 0.9), GROWTH, 0.030))
    loop.propose(query(), 0)
    from paceline.planning.latency import predict_s

    assert float(predict_s(loop.budget.decode_time, 3)) == pytest.approx(0.020, rel=0.05)


def test_drafting_inside_costs_a_step_what_it_takes_of_the_last_steps() -> None:
    """Where it drafts in one step of four, its last drafts are no measure of what a step costs."""
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=FIXED))
    for number in range(400):
        if number % 4 == 0:
            made = batch([[4, 5]] * 3, 0.9)
            loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), made, GROWTH, 0.002))
        loop.propose(query(), 0)
        loop.observe(step(3, 0, 0, seconds=0.01))
        if number >= 300:
            costs = loop.step_costs()
            assert costs is not None
            assert costs.inside_s == pytest.approx(0.0005, rel=0.1)


def test_a_step_pays_the_bandit_for_the_drafts_that_it_verified() -> None:
    """Drafts are made at the end of the step before; those of the next step are not its own."""
    budget = BudgetSettings(policy="bandit", bandit_strategies=((8, 1, 8),), bandit_batch_sizes=(1,))
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="there", budget=budget))
    for drafting_s in (0.030, 0.010, 0.020):
        loop.propose(query(), 0)
        loop.observe(step(3, 3, 3, seconds=0.050))
        loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[4]] * 3, 0.9), GROWTH, drafting_s))
    loop.propose(query(), 0)
    elapsed_s = (0.050 - 0.030, 0.050 - 0.010 + 0.030, 0.050 - 0.020 + 0.010)
    [[trials]] = loop.budget.bandit.trials
    assert [trial.reward for trial in trials] == pytest.approx([6 / seconds for seconds in elapsed_s])


def test_a_model_drafter_drafts_as_deep_as_the_arm_of_the_step_that_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelSteering, "advance", lambda *_: True)
    arms = ((9, 1, 4), (3, 1, 4), (6, 1, 4))
    budget = BudgetSettings(
        policy="bandit", bandit_strategies=arms, bandit_batch_sizes=(1,), bandit_epsilon=0.5
    )
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="there", budget=budget))
    ordered, played = [], []
    for number in range(30):
        loop.propose(query(), 0)
        played.append(select_strategy(loop.budget.bandit, 3).draft_depth)
        order = loop.order()
        assert order is not None
        ordered.append(order.depth)
        loop.observe(step(3, 3, number % 4))
        loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[4]] * 3, 0.9), GROWTH, 0.01))
    assert ordered[:-1] == played[1:]
    assert set(played) == {9, 3, 6}
    loop.propose(query(count=40), 0)
    assert loop.order() is None, "nothing is drafted for so many"


def test_drafting_can_be_switched_off_and_on() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    loop.set_drafting(False)
    assert loop.propose(query(), 0).lengths.sum() == 0
    loop.set_drafting(True)
    fill(loop)
    assert loop.propose(query(), 0).lengths.sum() > 0


def test_another_budget_keeps_what_it_had_learned() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED))
    loop.propose(query(), 0)
    loop.observe(step(3, 0, 0))
    fixed = loop.policy_state
    loop.use_budget(BudgetSettings(policy="off"))
    assert loop.budget.num_steps == 0
    loop.use_budget(FIXED, fixed)
    assert loop.budget is fixed.budget


def test_tokens_of_the_old_policy_are_forgotten() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0))
    fill(loop)
    assert loop.propose(query(), 0).lengths.sum() > 0
    loop.forget_tokens()
    assert loop.propose(query(), 0).lengths.sum() == 0


def test_the_model_drafter_rests_while_it_does_not_pay() -> None:
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=BudgetSettings()))
    slow = DraftGrowth(num_levels=2, num_rows=6, seconds=1.0)
    worked = []
    for _ in range(40):
        made = loop.propose(query(), 0)
        loop.observe(step(3, int(made.lengths.sum()), 0, seconds=0.050))
        worked.append(loop.order() is not None)
        if worked[-1]:
            loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[4, 5]] * 3, 0.5), slow, 0.0))
    assert worked[:2] == [False, True], "drafts for the second step could not be verified yet"
    assert sum(worked) < 20


def test_the_model_drafter_drafts_while_requests_wait_for_memory() -> None:
    """They are many, and none begins: the coming steps are as large as they were."""
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=BudgetSettings()))
    for response in range(200):
        loop.open(0, response, [1, 2, 3], [])
    worked = []
    for _ in range(20):
        loop.propose(query(), 0)
        loop.observe(step(3, 0, 0, seconds=0.050))
        worked.append(loop.order() is not None)
    assert sum(worked) >= 15


@pytest.mark.parametrize("others", [{}, {"adopt_leads": True}, {"model_drafter": "somewhere"}])
def test_a_drafter_is_not_asked_for_what_cannot_pay(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]
) -> None:
    """Where a token costs as much as a request, no draft pays; where steps get cheaper, or after a rest, some may.

    others: whose drafts could meet those of the drafter, and never come; a racer's come at last.
    """
    settings = EngineSettings(budget=BudgetSettings(refresh_steps=30), draft_floor=0.0, **others)
    loop = FastLoop(settings)
    fill(loop)
    asked: list[int] = []
    assert loop.free.drafter is not None
    made = loop.free.drafter.draft
    monkeypatch.setattr(
        loop.free.drafter, "draft", lambda *args, **more: (asked.append(1), made(*args, **more))[1]
    )

    def run(num_steps: int, per_token_s: float) -> int:
        asked.clear()
        for _ in range(num_steps):
            drafts = int(loop.propose(query(), 0).lengths.sum())
            loop.observe(step(3, drafts, 0, seconds=0.001 + per_token_s * (3 + drafts)))
        return len(asked)

    run(60, 0.01)
    assert run(60, 0.01) <= 4, "twice after refresh_steps"
    assert run(200, 0.0) > 100
    run(60, 0.01)
    loop.adopt(1, 10, [7, 8, 9, 6])
    assert run(8, 0.01) == (8 if settings.adopt_leads else 0)


def test_without_a_lead_an_engine_that_may_race_pays_for_no_trees() -> None:
    """`help` lets every engine of a fleet adopt leads, and few ever do."""
    loop = FastLoop(EngineSettings(adopt_leads=True, budget=FIXED, draft_floor=0.0))
    fill(loop)
    assert loop._trees is not None
    made = loop.propose(query(), 0)
    assert made.lengths.sum() == 12
    assert loop._trees.num_responses == 0
    loop.adopt(1, 10, [70, 80, 90])
    made = loop.propose(query(), 0)
    assert made.batch.tokens[1, :3].tolist() == [70, 80, 90]
    assert made.batch.tokens[0, :3].tolist() != [70, 80, 90]
    loop.learn(made, made.lengths, table_of([[1], [70, 80, 90, 3], [1]]))
    loop.append([(0, 0, [1]), (0, 1, [70, 80, 90, 3]), (0, 2, [1])])
    loop.observe(step(3, int(made.lengths.sum()), 3))
    later = replace(query(), positions=np.array([11, 14, 11]))
    loop.propose(later, 0)  # finds that the lead is spent
    made = loop.propose(later, 0)
    assert not isinstance(made.batch, MetDrafts)


def test_an_engine_that_nobody_helps_only_listens_for_who_comes() -> None:
    loop = FastLoop(EngineSettings(adopt_leads=True, budget=FIXED, draft_floor=0.0))
    taken: list[float] = []
    link = SimpleNamespace(is_there=False, counts=DraftCounts(), take=taken.append, grow=lambda *_: None)
    assert loop._trees is not None
    loop.ahead = DraftAhead([link], loop._trees, loop._log)  # type: ignore[list-item]
    loop._ahead_before = loop.ahead.counts
    fill(loop)
    assert loop._trees.num_responses == 3, "a helper will want to know the texts"
    made = loop.propose(query(), 0)
    assert made.lengths.sum() == 12
    assert not isinstance(made.batch, MetDrafts)
    assert (loop._trees.num_nodes, len(taken)) == (0, 1)
    assert loop.observe(step(3, 12, 0)).ahead_tokens == ()
    link.is_there = True
    met = loop.propose(query(), 0)
    assert isinstance(met.batch, MetDrafts)
    assert met.batch.tokens.tolist() == made.batch.tokens.tolist()
    assert loop.observe(step(3, 12, 0)).ahead_tokens == (0,)


def test_what_draft_workers_have_done_and_waiting_for_them_is_told_apart() -> None:
    """Else the budget would take waits for the target's time, and a further worker's waste for the first one's."""
    loop = FastLoop(EngineSettings(model_drafter="m", further_drafters=("n",), budget=FIXED))
    own = DraftCounts(num_drafted=9, num_wasted=4, num_branches=3, num_hits=1, draft_s=0.5)
    further = DraftCounts(num_drafted=5, num_wasted=2, num_branches=1, num_hits=1, draft_s=0.25)
    ahead = SimpleNamespace(is_there=True, links=(None, None), counts=(own, further), step_wait_s=0.03)
    loop.ahead, loop._ahead_before = ahead, (DraftCounts(), DraftCounts(num_drafted=1))  # type: ignore[assignment]
    told = loop.observe(step(3, 0, 0, seconds=0.05))
    assert (told.step_s, told.wait_s) == (0.05, 0.03)
    assert (told.num_wasted_tokens, told.further_wasted_tokens) == (6, (2,))
    assert (told.num_branches, told.num_branch_hits) == (4, 2)
    assert (told.ahead_tokens, told.ahead_s) == ((9, 4), (0.5, 0.25))
    assert dict(zip(*_curve(loop), strict=True))[3.0] == pytest.approx(0.02)
    assert loop.observe(step(3, 0, 0)).ahead_tokens == (0, 0)


def test_without_a_budget_the_model_drafter_does_nothing() -> None:
    off = BudgetSettings(policy="off")
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=off))
    loop.propose(query(), 0)
    assert loop.order() is None


def test_a_longer_context_makes_longer_drafts() -> None:
    """Reading the context is paid once per step, so the more there is of it, the more a draft token is worth."""
    settings = EngineSettings(model_drafter="somewhere", budget=BudgetSettings(), draft_floor=0.0)
    loop = FastLoop(settings)
    for turn in range(40):
        for tokens in (3, 6, 12, 24, 48):
            context = 1000 * (turn % 20)
            seconds = 0.002 + 0.001 * tokens + 2e-6 * context
            loop.observe(StepObservation(3, tokens - 3, 0, 0, seconds, num_context_tokens=context))
    verified = []
    for position in (10, 10_000):
        loop.receive(
            ModelDrafts(np.arange(3), np.full(3, position), batch([list(range(8))] * 3, 0.6), GROWTH, 0.002)
        )
        verified.append(int(loop.propose(query(position=position), 0).lengths.sum()))
    assert verified[1] > verified[0]


def test_paths_of_the_model_are_verified_beside_its_drafts_and_told_apart_when_they_win() -> None:
    """Request 0's branch leaves its draft at once, request 1's behind one token; the order asks for more of them."""
    settings = EngineSettings(drafter="none", model_drafter="somewhere", budget=FIXED, num_paths=3)
    loop = FastLoop(settings)
    order = loop.order()
    assert order is not None
    assert order.num_paths == 1, "no step had room for more yet"
    chains = batch([[4, 5, 6], [4, 5, 6], [4, 5, 6]], 0.5)
    model = ModelBatch(
        **{field.name: getattr(chains, field.name) for field in fields(chains)},
        rivals=np.array([[7, 8, 9]] * 3, np.int32),
    )
    paths = DraftPaths(
        np.array([[[4, 5, 6], [7, 1, 2]], [[4, 5, 6], [4, 8, 3]], [[4, 5, 6], [0, 0, 0]]], np.int32),
        np.array([[3, 3], [3, 2], [3, 0]], np.int32),
        np.full((3, 2, 3), 0.5, np.float32),
        np.zeros((3, 2, 3), np.int32),
    )
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), model, GROWTH, 0.002, paths, GROWTH))
    made = loop.propose(query(), 0, 8)
    others = made.alternatives
    assert others is not None
    assert others.owners.tolist() == [0, 1]
    assert [others.tokens[row, :length].tolist() for row, length in enumerate(others.lengths)] == [
        [7, 1, 2],
        [4, 8],
    ]
    assert others.covered.tolist() == [0, 1]
    order = loop.order()
    assert order is not None
    assert order.num_paths == 3
    assert order.rivals is not None
    before = order.rivals[0]
    loop.learn(made, made.lengths, table_of([[7, 1, 9], [4, 8, 11], [4, 5, 6, 2]]))
    order = loop.order()
    assert order is not None
    assert order.rivals is not None
    # Runners-up: right; not asked, right; thrice not asked. Of all of these the tokens were told.
    strength = loop.model.table.prior_strength
    assert order.rivals[0] == pytest.approx((before * strength + 2) / (strength + 6), rel=1e-3)
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 9), model, GROWTH, 0.002, paths, GROWTH))
    assert loop.propose(query(), 0, 8).alternatives is None, "for another position they are void"
    loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), model, GROWTH, 0.002, paths, GROWTH))
    assert loop.propose(query(), 0, 0).alternatives is None
    order = loop.order()
    assert order is not None
    assert order.num_paths == 1, "nothing is drafted that there is no room for"


def test_alternatives_that_were_not_sent_have_promised_nothing() -> None:
    """KV blocks may not last for all of them: who is left out, or cut, is not to blame."""
    loops = [
        FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=FIXED, num_paths=2))
        for _ in range(3)
    ]
    for loop, lengths in zip(loops, ([3, 3], [1, 0], [0, 0]), strict=True):
        loop.order()
        paths = DraftPaths(
            np.array([[[4, 5, 6], [7, 1, 2]], [[4, 5, 6], [8, 1, 2]]], np.int32),
            np.full((2, 2), 3, np.int32),
            np.full((2, 2, 3), 0.5, np.float32),
            np.zeros((2, 2, 3), np.int32),
        )
        chains = batch([[4, 5, 6], [4, 5, 6]], 0.5)
        loop.receive(ModelDrafts(np.arange(2), np.full(2, 10), chains, GROWTH, 0.002, paths, GROWTH))
        made = loop.propose(query(2), 0, 8)
        assert made.alternatives is not None
        assert made.alternatives.lengths.tolist() == [3, 3]
        sent = replace(made.alternatives, lengths=np.array(lengths, np.int32))
        loop.learn(replace(made, alternatives=sent), made.lengths, table_of([[9], [9]]))
    believed = [loop._paths.worth for loop in loops]
    assert believed == pytest.approx([4 / (4 + 2 * 0.875), 4 / (4 + 0.5), 1.0])
    drafts = loops[2]._expected
    assert loops[0]._expected == pytest.approx(drafts + 2 * 0.875)
    assert loops[1]._expected == pytest.approx(drafts + 0.5)


@pytest.mark.parametrize(
    "settings", [EngineSettings(drafter="none"), EngineSettings(budget=BudgetSettings(policy="off"))]
)
def test_what_may_not_draft_learns_and_orders_nothing(settings: EngineSettings) -> None:
    loop = FastLoop(settings)
    assert not loop.may_draft
    loop.observe(step(3, 0, 0))
    assert loop.policy_state.budget.num_steps == 0
    assert loop.order() is None


@pytest.mark.parametrize(("others", "wanted"), [(0, 12), (10, 7), (17, 0), (40, 0)])
def test_drafts_take_what_the_other_tokens_leave_of_a_step(others: int, wanted: int) -> None:
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0), TargetSizes(max_step_tokens=20))
    fill(loop)
    assert loop.propose(query(), others).lengths.sum() == wanted


def test_drafts_leave_room_for_what_vllms_own_draft_model_takes_of_a_step() -> None:
    sizes = TargetSizes(max_step_tokens=20, slots_per_request=2)
    loop = FastLoop(EngineSettings(budget=FIXED, draft_floor=0.0), sizes)
    fill(loop)
    assert loop.propose(query(), 10).lengths.sum() == 1


def test_nothing_is_kept_of_responses_that_have_ended() -> None:
    loop = FastLoop(EngineSettings(budget=FIXED))
    for response, key in enumerate((5, 5, 6)):  # a key that runs twice in its group has a number of its own
        loop.open(0, response, [1, 2, 3], [4], key)
    loop.append([(0, response, [5, 6]) for response in range(3)])
    for response in (1, 0, 2):
        loop.close(0, response)
    assert not loop.free._numbers
    assert not loop.free._running


def test_a_dead_model_drafter_is_dropped_until_it_has_other_weights(caplog: pytest.LogCaptureFixture) -> None:
    """Its drafts say that they are sure; what the target decides says that they are wrong."""
    loop = FastLoop(EngineSettings(model_drafter="m", drafter="none", budget=FIXED))
    for number in range(20):
        is_dropped = not draft(loop, first=9)
        assert is_dropped == (number >= 14)
    assert loop.watch.score == DrafterScore(tried=42, right=0, alarms=1)
    assert (
        sum("accepts nothing from the model drafter m" in line.getMessage() for line in caplog.records) == 1
    )
    assert not loop.may_draft
    loop.renew_model()
    assert loop.may_draft
    assert draft(loop, first=9)


@pytest.mark.parametrize(
    ("what", "cause"),
    [("loaded", "another tokenizer"), ("pushed", "lost in the push"), ("stale", "stale weights")],
)
def test_an_alarm_names_the_likely_cause(what: str, cause: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = FastLoop(EngineSettings(model_drafter="m", drafter="none", budget=FIXED))
    if what == "pushed":
        loop.renew_model()
    elif what == "stale":
        assert all(draft(loop, first=4) for _ in range(10))
        loop.forget_tokens()
    assert not all(draft(loop, first=9) for _ in range(30))
    [line] = [one.getMessage() for one in caplog.records if "accepts nothing" in one.getMessage()]
    causes = ("another tokenizer", "lost in the push", "stale weights")
    assert [one for one in causes if one in line] == [cause]


def test_an_alarm_names_the_drafter_that_is_used(caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(model_drafter="m", further_drafters=("n",), drafter="none", budget=FIXED)
    loop = FastLoop(settings)
    loop.renew_model(1)
    assert not all(draft(loop, first=9) for _ in range(30))
    assert sum("the model drafter n," in line.getMessage() for line in caplog.records) == 1


def test_a_drafter_that_was_alive_may_be_dead_to_other_weights_of_the_target() -> None:
    loop = FastLoop(EngineSettings(model_drafter="m", drafter="none", budget=FIXED))
    assert all(draft(loop, first=4) for _ in range(10))
    assert all(draft(loop, first=9) for _ in range(30)), "it is alive, by these weights"
    loop.forget_tokens()
    assert not all(draft(loop, first=9) for _ in range(30))
    assert loop.watch.score.alarms == 1


def test_a_dead_drafter_that_drafts_seldom_is_found_in_the_end() -> None:
    """Rollouts and comparisons forget tokens; what is known of a drafter that is not decided on stays."""
    loop = FastLoop(EngineSettings(model_drafter="m", drafter="none", budget=FIXED))
    for _ in range(4):
        for _ in range(4):
            draft(loop, first=9)
        loop.forget_tokens()
    assert loop.watch.score.alarms == 1


def draft(loop: FastLoop, first: int) -> bool:
    """A step of three requests, drafts of which begin with 4; returns whether the model drafter is asked for any."""
    if loop.order() is None:
        return False
    asked = query()
    loop.receive(ModelDrafts(asked.responses, asked.positions, batch([[4, 5]] * 3, 0.9), GROWTH, 0.003))
    proposal = loop.propose(asked, 0)
    loop.learn(proposal, proposal.lengths, table_of([[first]] * 3))
    return True


def test_under_a_fixed_budget_a_model_drafts_so_many_tokens_and_never_rests() -> None:
    loop = FastLoop(EngineSettings(drafter="none", model_drafter="somewhere", budget=FIXED))
    for _ in range(200):
        order = loop.order()
        assert order is not None
        assert (order.depth, order.floor, order.most_requests) == (4, 0.0, None)
        loop.receive(ModelDrafts(np.arange(3), np.full(3, 10), batch([[4]] * 3, 0.01), GROWTH, 1.0))
        loop.propose(query(), 0)
        loop.observe(step(3, 3, 0))
    none = EngineSettings(
        drafter="none", model_drafter="somewhere", budget=BudgetSettings(policy="fixed", fixed_tokens=0)
    )
    assert FastLoop(none).order() is None


def test_the_budget_verifies_what_the_engine_may_draft() -> None:
    """Two limits have the same default: with a lower one the other would do nothing."""
    settings = EngineSettings()
    assert settings.budget.max_draft_tokens == settings.max_draft_tokens
