"""The speed benchmark tries every setting of a rival that may be its best, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from timed_rollouts import decode_step

from rivals import LENGTHS, OTHERS, Rival, draft_model  # isort: skip
from speed import Tuning  # isort: skip
from tuning import best_settings, next_length, tune_table  # isort: skip


def tried(scores: dict[int, float]) -> list[int]:
    """The lengths that are tried where `scores` say how they would do."""
    found: dict[int, float] = {}
    while (length := next_length(found)) is not None:
        found[length] = scores[length]
    return list(found)


def test_lengths_are_raised_while_they_may_gain() -> None:
    rising = {length: float(length) for length in LENGTHS}
    assert tried(rising) == list(LENGTHS)
    assert tried({2: 1.3, 3: 1.4, 5: 1.3, 8: 1.1, 12: 9.0, 16: 9.0}) == [2, 3, 5, 8]
    assert tried({2: 1.3, 3: 1.2, 5: 1.5, 8: 1.4, 12: 1.6, 16: 1.0}) == list(LENGTHS)


def test_the_best_two_settings() -> None:
    assert best_settings({"a": 1.0, "b": 2.0, "c": 1.5}) == ["b", "c"]
    assert best_settings({"b": 1.0, "a": 1.0, "c": 1.0}) == ["a", "b"]
    assert best_settings({}) == []


def test_a_table_takes_the_fastest_length_at_each_batch_size() -> None:
    steps = {
        2: [decode_step(1, 50, 0.02, gained=2)] * 10 + [decode_step(20, 50, 0.05, gained=45)] * 10,
        8: [decode_step(1, 50, 0.03, gained=6)] * 10 + [decode_step(20, 50, 0.2, gained=90)] * 10,
        16: [decode_step(20, 50, 0.01, gained=90)] * 7,  # too few to count
    }
    assert tune_table(steps) == (
        (1, 1, 8),
        (2, 2, 8),
        (3, 4, 8),
        (5, 8, 8),
        (9, 16, 8),
        (17, 32, 2),
        (33, 64, 2),
        (65, 128, 2),
    )
    assert tune_table({}) is None


def test_a_table_begins_with_the_nearest_known_length() -> None:
    table = tune_table({3: [decode_step(6, 50, 0.03, gained=12)] * 8})
    assert table is not None
    assert {length for _, _, length in table} == {3}


def test_every_setting_has_a_name_of_its_own_and_vllms_options() -> None:
    settings = [*OTHERS, draft_model(5, "greedy"), draft_model(5, "probabilistic"), draft_model(8, "greedy")]
    settings.append(Rival("draft_model", 16, table=((1, 8, 5), (9, 128, 2))))
    assert len({rival.name for rival in settings}) == len(settings)
    assert settings[-1].speculative_config("DIR") == {
        "method": "draft_model",
        "model": "DIR",
        "draft_sample_method": "greedy",
        "num_speculative_tokens": 16,
        "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 128, 2]],
    }
    assert Rival("suffix", 32, spec_factor=4.0).speculative_config("DIR") == {
        "method": "suffix",
        "num_speculative_tokens": 32,
        "suffix_decoding_max_spec_factor": 4.0,
    }


@pytest.mark.parametrize("nested", [True, False])
def test_a_tuning_is_read_back(tmp_path: Path, nested: bool) -> None:
    rivals = [draft_model(5, "probabilistic"), Rival("draft_model", 16, table=((1, 128, 2),)), OTHERS[1]]
    scores = {"1x1": {rival.name: float(at) for at, rival in enumerate(rivals)}}
    written = Tuning({rival.name: rival for rival in rivals}, scores).write()
    file = tmp_path / "speed.json"
    file.write_text(json.dumps({"rows": [], "tuning": written} if nested else written))
    assert Tuning.read(file).best("1x1") == [rivals[2], rivals[1]]
    assert Tuning.read(file).best("8x16") == []
