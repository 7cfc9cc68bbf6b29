"""The length estimators."""

import pytest

from paceline.errors import EngineError
from paceline.planning.length import Endings, GroupLengths, NoLengths, TrueLengths


def test_a_group_counts_with_its_limit_while_none_has_finished() -> None:
    lengths = GroupLengths()
    lengths.finish(1, 10)
    assert lengths.estimate(2, 0, max_tokens=100) == 100


def test_a_group_counts_with_its_longest_finished_response() -> None:
    lengths = GroupLengths()
    estimates = []
    for num_tokens in (30, 10, 50):
        lengths.finish(1, num_tokens)
        estimates.append(lengths.estimate(1, 7, max_tokens=100))
    assert estimates == [30, 30, 50]


def test_the_oracle_knows_each_response_and_learns_nothing() -> None:
    lengths = TrueLengths({3: (5, 80)})
    lengths.finish(3, 5)
    assert [lengths.estimate(3, sample, max_tokens=100) for sample in (0, 1)] == [5, 80]


@pytest.mark.parametrize(("group", "sample"), [(3, 2), (4, 0)])
def test_the_oracle_names_a_length_that_it_was_not_given(group: int, sample: int) -> None:
    with pytest.raises(EngineError, match=f"sample {sample} of group {group}.*one length per response"):
        TrueLengths({3: (5, 80)}).estimate(group, sample, max_tokens=100)


def test_without_context_all_are_alike() -> None:
    lengths = NoLengths()
    lengths.finish(1, 10)
    assert lengths.estimate(1, 0, max_tokens=100) == lengths.estimate(2, 0, max_tokens=500)


def test_endings_are_counted_and_old_ones_forgotten() -> None:
    endings = Endings()
    for _ in range(300):
        endings.note(1000, 10)
    assert endings.mean_tokens == pytest.approx(100, rel=0.02)
    for _ in range(2000):
        endings.note(1000, 1)
    assert endings.mean_tokens == pytest.approx(1000, rel=0.2)
