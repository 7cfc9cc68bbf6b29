"""When the question whether drafts pay is put off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.pause import LONGEST, PATIENCE, REQUESTS_PER_STEP, Pause, after_question, after_rest


def gaps(batch: int, num_questions: int) -> list[int]:
    """Steps without a question behind each one that was asked in vain."""
    pause, found = Pause(), []
    for _ in range(num_questions):
        pause = after_question(pause, batch, 0)
        found.append(0)
        while pause.holds(batch):
            pause = after_rest(pause)
            found[-1] += 1
    return found


def test_after_some_questions_in_vain_each_pause_is_twice_as_long() -> None:
    assert gaps(128, PATIENCE + 6) == [0] * (PATIENCE - 1) + [1, 2, 4, 8, 16, 16, 16]


@given(st.integers(1, 1024))
def test_no_pause_is_longer_than_the_batch_allows(batch: int) -> None:
    assert max(gaps(batch, PATIENCE + 8)) == min(batch // REQUESTS_PER_STEP, LONGEST)


def test_verified_drafts_end_it() -> None:
    pause = Pause()
    for _ in range(PATIENCE + 3):
        pause = after_question(pause, 64, 0)
    assert pause.holds(64)
    assert after_question(pause, 64, 5) == Pause()


def test_a_batch_of_another_size_is_asked_about() -> None:
    pause = Pause(num_in_vain=9, left=16, batch=64)
    assert pause.holds(64)
    assert pause.holds(33)
    assert pause.holds(127)
    assert not pause.holds(32)
    assert not pause.holds(128)
