from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.drafting.lookup import ENTRY_BYTES, MAX_NGRAM, NUM_CELLS, LookupDrafter, prior_calibration
from paceline.errors import ConfigError, RequestError
from paceline.types import DraftBatch, DraftQuery

GRID = np.array([1.0, math.inf], dtype=np.float32)


def ask(drafter: LookupDrafter, group: int, response: int, limit: int, floor: float = 0.0) -> DraftBatch:
    query = DraftQuery(
        groups=np.array([group], np.int64),
        responses=np.array([response], np.int64),
        keys=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.int64),
        temperatures=np.ones(1, np.float32),
        max_tokens=np.array([limit], np.int32),
    )
    calibration = np.full(NUM_CELLS, 0.5, np.float32)
    return drafter.draft(query, sharpness=1.0, sharpness_grid=GRID, calibration=calibration, floor=floor)


def drafted(drafter: LookupDrafter, group: int, response: int, limit: int, floor: float = 0.0) -> list[int]:
    batch = ask(drafter, group, response, limit, floor)
    return batch.tokens[0, : batch.num_tokens[0]].tolist()


def test_the_prompt_is_continued() -> None:
    drafter = LookupDrafter()
    drafter.open_group(1, [1, 2, 3, 4, 5])
    drafter.append(1, 0, [2, 3])
    batch = ask(drafter, 1, 0, 2)
    assert batch.tokens[0].tolist() == [4, 5]
    assert batch.probes.tolist() == [[4, 4]]


def test_the_last_occurrence_and_the_longest_ngram_win() -> None:
    drafter = LookupDrafter()
    drafter.append(1, 0, [1, 2, 3, 7, 2, 3, 8, 2, 3, 9, 1, 2, 3])
    assert drafted(drafter, 1, 0, 1) == [7]  # behind 1 2 3
    drafter.append(1, 0, [5, 2, 3])
    assert drafted(drafter, 1, 0, 1) == [5]  # behind the last 2 3


def test_a_loop_is_drafted_on() -> None:
    drafter = LookupDrafter()
    drafter.append(1, 0, [4, 5, 6, 4, 5])
    assert drafted(drafter, 1, 0, 7) == [6, 4, 5, 6, 4, 5, 6]


def test_only_the_own_response_is_read() -> None:
    drafter = LookupDrafter()
    drafter.append(1, 0, [1, 2, 3])
    drafter.append(1, 1, [1, 2])
    assert drafted(drafter, 1, 1, 4) == []
    assert ask(drafter, 1, 1, 4).probes.tolist() == [[-1, -1]]
    assert drafted(drafter, 2, 0, 4) == []


def test_the_floor_and_the_cells() -> None:
    drafter = LookupDrafter()
    drafter.append(1, 0, [1, 2, 3, 4, 5, 6, 1, 2])
    batch = ask(drafter, 1, 0, 6, floor=0.2)
    assert batch.num_tokens.tolist() == [2]
    assert batch.cells[0, :2].tolist() == [8, 9]


def test_closing_and_dropping() -> None:
    drafter = LookupDrafter()
    drafter.open_group(1, [1, 2, 3])
    drafter.append(1, 0, [9, 8])
    drafter.append(1, 1, [])
    drafter.close_response(1, 0)
    drafter.append(1, 0, [9, 2, 3])
    assert drafted(drafter, 1, 0, 2) == [9, 2]  # behind the prompt's 2 3; the closed text is gone
    for response in (0, 1):
        drafter.close_response(1, response)
    drafter.append(1, 0, [1, 2])
    assert drafted(drafter, 1, 0, 1) == []  # with its last response the group went, prompt and all
    drafter.drop_group(1)
    drafter.append(1, 0, [1, 2])
    assert drafted(drafter, 1, 0, 1) == []
    drafter.clear()
    drafter.close_response(1, 0)


def test_append_batch_is_append() -> None:
    drafter = LookupDrafter()
    drafter.append_batch(
        np.array([1, 1]), np.array([0, 1]), np.array([0, 5, 6]), np.array([1, 2, 3, 1, 2, 7])
    )
    assert drafted(drafter, 1, 0, 1) == [3]
    assert drafted(drafter, 1, 1, 1) == []


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"max <= {MAX_NGRAM}"):
        LookupDrafter(3, 2)
    drafter = LookupDrafter()
    with pytest.raises(RequestError, match="one row of integers"):
        drafter.append(1, 0, [[1]])
    with pytest.raises(RequestError, match="offsets"):
        drafter.append_batch(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(0))


def test_priors_are_probabilities() -> None:
    prior = prior_calibration()
    assert prior.shape == (NUM_CELLS,)
    assert ((prior > 0) & (prior < 1)).all()


def test_what_was_noted_longest_ago_is_forgotten_first() -> None:
    drafter = LookupDrafter(memory_bytes=200 * ENTRY_BYTES)
    texts = [np.random.default_rng(seed).integers(0, 5000, 400) for seed in range(2)]
    for response, text in enumerate(texts):
        drafter.append(1, response, text)
    for response, text in enumerate(texts):
        drafter.append(1, response, text[:3])
    assert drafted(drafter, 1, 0, 2) == []
    drafter.append(1, 1, texts[1][-4:-1])
    assert drafted(drafter, 1, 1, 2) == [texts[1][-1], texts[1][0]]


def test_a_response_that_began_before_its_prompt_was_known_drafts_from_itself() -> None:
    drafter = LookupDrafter()
    drafter.open_group(1, [5, 6, 7])
    drafter.clear()  # the prefix cache was reset while the response ran
    drafter.append(1, 0, [5, 6])
    drafter.open_group(1, [1, 2, 3, 4, 5, 6, 7, 8])  # of the next response
    drafter.append(1, 1, [5, 6])
    assert drafted(drafter, 1, 0, 2) == []
    assert drafted(drafter, 1, 1, 2) == [7, 8]
