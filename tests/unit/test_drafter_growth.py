"""When a drafter is trained: while it rises, and again when it has fallen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.drafter_growth import FALL, MARGIN, PATIENCE, Growth, may_replace, observe
from paceline.planning.zero_acceptance import HEALTHY


def follow(growth: Growth, *acceptances: float, is_new: bool = True) -> Growth:
    for acceptance in acceptances:
        growth = observe(growth, acceptance, is_new)
    return growth


def test_it_is_trained_while_it_rises_and_rests_on_the_plateau() -> None:
    growth = follow(Growth(), 0.3, 0.4, 0.5, 0.55)
    assert growth == Growth(0.55, 0)
    growth = follow(growth, *[0.555] * (PATIENCE - 1))
    assert growth.pays
    growth = follow(growth, 0.555)
    assert not growth.pays
    assert growth.reached == 0.555


def test_a_slow_rise_is_a_rise() -> None:
    assert follow(Growth(0.5), 0.504, 0.508, 0.512) == Growth(0.512, 0)


def test_a_fall_wakes_it_and_noise_does_not() -> None:
    resting = Growth(0.6, PATIENCE)
    assert follow(resting, 0.59, 0.585, is_new=False) == resting
    assert follow(resting, 0.57, is_new=False) == Growth(0.57, 0)


def test_rollouts_without_a_new_drafter_say_nothing_about_training() -> None:
    assert follow(Growth(0.5), *[0.5] * 20, is_new=False) == Growth(0.5, 0)
    assert observe(Growth(), None, is_new=False) == Growth()


def test_a_policy_that_became_harder_is_no_reason_to_train_for_ever() -> None:
    """Woken by a fall, it counts rises from there."""
    growth = follow(Growth(0.6, PATIENCE), 0.4)
    growth = follow(growth, *[0.4] * PATIENCE)
    assert not growth.pays
    assert growth.reached == 0.4


@pytest.mark.parametrize(
    ("agreement", "present", "wanted"),
    [
        (0.29, None, False),
        (0.3, None, True),
        (0.4, 0.7, False),
        (0.696, 0.7, True),
        (0.8, 0.7, True),
        (0.29, 0.29, False),
        (None, None, False),
        (math.nan, 0.1, False),
    ],
)
def test_what_drafts_is_replaced_by_what_is_no_worse(
    agreement: float | None, present: float | None, wanted: bool
) -> None:
    assert may_replace(agreement, present) == wanted


@given(st.lists(st.floats(0.0, 1.0), max_size=40), st.floats(HEALTHY, 1.0))
def test_small_losses_have_no_time_to_add_up(made: list[float], present: float) -> None:
    """What drafts between two rises has lost `FALL` at most when training rests."""
    growth, first = Growth(present), present
    for agreement in made:
        if not growth.pays:
            break
        present = agreement if may_replace(agreement, present) else present
        growth = observe(growth, present, is_new=True)
        first = present if growth.num_flat == 0 else first
    assert present >= first - FALL - 1e-9
    assert pytest.approx(FALL) == PATIENCE * MARGIN


@pytest.mark.parametrize("rise", [0.03, 0.05, 0.08])
def test_what_rises_again_after_a_fall_is_trained(rise: float) -> None:
    """The policy has jumped while the drafter was being trained: rises count from where it fell to."""
    growth = follow(Growth(0.7), 0.4)
    for _ in range(round(0.3 / rise)):
        growth = observe(growth, min(growth.reached + rise, 0.7), True)
        assert growth.pays
        assert growth.num_flat == 0
