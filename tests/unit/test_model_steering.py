"""Whether a model drafter reads what responses have written before it drafts for them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config import BudgetSettings
from paceline.engine.model_steering import ModelSteering
from paceline.planning.budget import BudgetSnapshot, BudgetState, update
from paceline.planning.drafter_worth import TRIAL_STEPS, update_worth
from paceline.types import DraftGrowth, StepObservation

BATCH = 8
SETTINGS = BudgetSettings()
READ_S = 1e-4
"""What the drafter takes to read a token."""


@pytest.fixture
def known() -> BudgetState:
    """A target that takes 20 ms and half a millisecond more for each token."""
    state = BudgetState.initial(SETTINGS)
    for tokens in (8, 16, 32, 64) * 4:
        seconds = 0.02 + 0.0005 * tokens
        state = update(state, StepObservation(BATCH, tokens - BATCH, 0, 0, seconds), SETTINGS)
    return state


def draft(steering: ModelSteering, state: BudgetState, accepted: float, reading_s: float = 0.0) -> None:
    """A step with four drafted tokens each, of which so many are promised, of a drafter that takes 2 ms for them."""
    steering.receive(DraftGrowth(4, 4 * BATCH, 0.002), BATCH, reading_s)
    path = np.full((BATCH, 4), accepted / 4, np.float32)
    lengths = np.full(BATCH, 4, np.int32)
    steering.judge(BudgetSnapshot(BATCH, 0, path, 1 << 20), lengths, None, (state, state), SETTINGS)


def steer(state: BudgetState, accepted: float, prompt: int) -> ModelSteering:
    """A drafter that has read prompts of 100 tokens, drafted for some steps, and has new ones before it."""
    steering = ModelSteering()
    for _ in range(BATCH):
        steering.open(100)
    draft(steering, state, accepted, reading_s=BATCH * 100 * READ_S)
    for _ in range(8):
        steering.grow(BATCH)
        draft(steering, state, accepted)
    for _ in range(BATCH):
        steering.close()
    for _ in range(BATCH):
        steering.open(prompt)
    return steering


def test_new_prompts_are_read_where_their_responses_are_long_enough(known: BudgetState) -> None:
    """Drafts save 31 ms of each step, reading takes 0.8 s: more than 26 steps have to be left."""
    for steps_left, reads in ((300.0, True), (20.0, False)):
        steering = steer(known, accepted=3.0, prompt=1000)
        steering.outlook.steps_left = steps_left
        assert steering.advance(BATCH, known.decode_time) is reads


def test_a_drafter_that_gains_nothing_reads_nothing(known: BudgetState) -> None:
    steering = steer(known, accepted=0.1, prompt=1000)
    steering.outlook.steps_left = 1e6
    assert not steering.advance(BATCH, known.decode_time)


def test_a_drafter_that_was_never_tried_reads(known: BudgetState) -> None:
    steering = ModelSteering()
    steering.open(1)
    steering.receive(DraftGrowth(1, 1, 0.001), 1, 0.001)
    steering.outlook.backlog, steering.outlook.steps_left = 1e6, 1.0
    assert steering.advance(1, known.decode_time)


def test_what_has_been_read_is_read_once(known: BudgetState) -> None:
    steering = ModelSteering()
    for _ in range(BATCH):
        steering.open(100)
    assert steering.outlook.backlog == BATCH * 100
    steering.receive(DraftGrowth(1, 2, 0.001), BATCH // 4, 0.02)  # a sample has been read
    assert steering.outlook.backlog == pytest.approx(BATCH * 75)
    steering.close()
    assert steering.outlook.backlog == pytest.approx((BATCH - 1) * 75)
    steering.receive(DraftGrowth(1, BATCH - 1, 0.001), BATCH - 1, 0.06)
    assert steering.outlook.backlog == 0.0


def test_each_batch_size_rests_for_itself(known: BudgetState) -> None:
    """A tail, in which the drafter is not known to lose, does not make the next rollout try it anew."""
    steering, modes = ModelSteering(), []
    for _ in range(10):  # rollouts
        steering.outlook.num_open = BATCH
        for _ in range(40):
            if not modes or modes[-1]:
                draft(steering, known, accepted=0.1)
            modes.append(steering.advance(BATCH, known.decode_time))
        assert steering.advance(2, known.decode_time), "the tail"
    drafted = np.array(modes).reshape(10, 40).sum(axis=1)
    assert drafted[0] > TRIAL_STEPS
    assert drafted[3:].sum() <= 3 * TRIAL_STEPS * 2, "a trial after at most 128 steps of rest"


def test_a_size_that_loses_too_does_not_draft(known: BudgetState) -> None:
    steering = ModelSteering()
    for _ in range(3 * TRIAL_STEPS):
        draft(steering, known, accepted=0.1)
    assert not steering.advance(BATCH, known.decode_time)
    assert not steering.advance(BATCH + 4, known.decode_time), "the same size"
    assert steering.advance(2, known.decode_time), "nothing is known of it"
    assert not steering.advance(BATCH, known.decode_time)


def test_a_drafter_is_judged_beside_others_too(known: BudgetState) -> None:
    """Some request decodes in every step and may not draft, or prompts come in every one."""
    for seconds in (0.03, 0.031) * 8:
        known = update(known, StepObservation(BATCH, 0, 0, 20, seconds), SETTINGS)
    steering = ModelSteering()
    drafting = 0
    for _ in range(200):
        if steering.advance(BATCH, known.decode_time):
            drafting += 1
            steering.receive(DraftGrowth(4, 4 * BATCH, 0.5), BATCH, 0.0)
            snapshot = BudgetSnapshot(BATCH, 20, np.full((BATCH, 4), 0.1, np.float32), 1 << 20)
            steering.judge(snapshot, np.full(BATCH, 4, np.int32), None, (known, known), SETTINGS)
    assert drafting < 40


def test_a_drafter_that_nobody_judges_any_more_rests_on_and_ends_no_engine(known: BudgetState) -> None:
    """Another worker drafts; what was known fades with each rest."""
    for batch in (1, 4, 64):
        steering = ModelSteering()
        for _ in range(6):
            steering._worth = update_worth(steering._worth, batch, (1.2 * batch, 0.025), (1.1 * batch, 0.016))
        assert steering._worth.gain(batch) < 0.0
        drafting = sum(steering.advance(batch, known.decode_time) for _ in range(20_000))
        assert steering._worth.gain(batch) < 0.0
        assert drafting < 2_000


def test_what_prompts_take_hides_no_loss(known: BudgetState) -> None:
    """A step with a prompt of 2,000 tokens takes a second, beside which half a second of drafting looks small."""
    for seconds in (1.0, 1.02) * 8:
        known = update(known, StepObservation(BATCH, 0, 0, 2000, seconds), SETTINGS)
    steering = ModelSteering()
    for others in (0, 0, 0, 2000) * 8:
        steering.receive(DraftGrowth(4, 4 * BATCH, 0.03), BATCH, 0.0)
        snapshot = BudgetSnapshot(BATCH, others, np.full((BATCH, 4), 0.2, np.float32), 1 << 20)
        steering.judge(snapshot, np.full(BATCH, 4, np.int32), None, (known, known), SETTINGS)
    assert steering._worth.gain(BATCH) < -0.05


def test_a_response_of_one_token_speaks_for_no_other(known: BudgetState) -> None:
    steering = ModelSteering()
    steering._read_s, steering._num_read = 0.001, 100.0
    steering.outlook.steps_left = 0.0
    assert steering.advance(4, known.decode_time), "it was never tried"
