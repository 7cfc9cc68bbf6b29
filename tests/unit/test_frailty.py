"""Each response's own factor on the hazard of its draft tokens."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.planning.frailty import HIGHEST, LOWEST, Frailties

RESPONSES = np.array([7, 9], dtype=np.int64)


def opened() -> Frailties:
    frailties = Frailties()
    for response in RESPONSES.tolist():
        frailties.open(response)
    return frailties


def steps(frailties: Frailties, acceptance: float, accepted: tuple[int, int], count: int) -> None:
    estimates = np.full((2, 8), acceptance, dtype=np.float32)
    for _ in range(count):
        frailties.learn(RESPONSES, estimates, np.array([8, 8], np.int32), np.array(accepted, dtype=np.int32))


def test_a_new_response_is_as_frail_as_the_table_says() -> None:
    assert Frailties().of(RESPONSES).tolist() == [1.0, 1.0]


def test_a_lost_response_is_told_from_its_easy_neighbour() -> None:
    frailties = opened()
    steps(frailties, 0.97, (0, 8), 12)
    lost, easy = frailties.of(RESPONSES)
    assert lost > 5.0
    assert easy < 0.6
    assert 0.97**lost < 0.85
    assert frailties.snapshot() == {7: pytest.approx(lost), 9: pytest.approx(easy)}


def test_it_recovers_the_true_hazard() -> None:
    rng = np.random.default_rng(3)
    frailties = opened()
    values = []
    for _ in range(600):
        runs = np.minimum(rng.geometric(1 - 0.9**2, size=2) - 1, 8).astype(np.int32)
        estimates = np.full((2, 8), 0.9, dtype=np.float32)
        frailties.learn(RESPONSES, estimates, np.array([8, 8], np.int32), runs)
        values.append(frailties.of(RESPONSES).mean())
    assert np.mean(values[50:]) == pytest.approx(2.0, rel=0.2)


def test_it_is_bounded_and_forgotten() -> None:
    frailties = opened()
    steps(frailties, 1.0, (0, 8), 200)
    lost, easy = frailties.of(RESPONSES)
    assert LOWEST <= easy < 1.0 < lost <= HIGHEST
    frailties.close(7)
    assert frailties.of(RESPONSES)[0] == 1.0
    frailties.forget()
    assert frailties.snapshot() == {9: 1.0}


def test_a_step_does_not_open_a_closed_response_again() -> None:
    frailties = opened()
    frailties.close(7)
    steps(frailties, 0.9, (0, 8), 3)
    assert list(frailties.snapshot()) == [9]


def test_unverified_drafts_say_nothing() -> None:
    frailties = opened()
    nothing = np.zeros(2, dtype=np.int32)
    frailties.learn(RESPONSES, np.full((2, 8), 0.9, np.float32), nothing, nothing)
    assert frailties.snapshot() == {7: 1.0, 9: 1.0}
