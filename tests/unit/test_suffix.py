from __future__ import annotations

import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import dice
from paceline.drafting.suffix import MAX_DEPTH, NUM_CELLS, SuffixForest, prior_calibration
from paceline.errors import ConfigError, RequestError
from paceline.types import DraftBatch, DraftQuery

GRID = np.array([1.0, math.inf], dtype=np.float32)
SURE = np.full(NUM_CELLS, 0.9, dtype=np.float32)


def ask(groups: list[int], responses: list[int], limits: list[int], temperature: float = 0.0) -> DraftQuery:
    n = len(groups)
    return DraftQuery(
        groups=np.array(groups, np.int64),
        responses=np.array(responses, np.int64),
        keys=np.arange(n, dtype=np.uint64),
        positions=np.full(n, 10, np.int64),
        temperatures=np.full(n, temperature, np.float32),
        max_tokens=np.array(limits, np.int32),
    )


def draft(
    forest: SuffixForest, query: DraftQuery, floor: float = 0.0, calibration: np.ndarray = SURE
) -> DraftBatch:
    return forest.draft(query, sharpness=math.inf, sharpness_grid=GRID, calibration=calibration, floor=floor)


def first(batch: DraftBatch, r: int = 0) -> list[int]:
    return batch.tokens[r, : batch.num_tokens[r]].tolist()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_sibling_is_drafted_after_the_prompt() -> None:
    forest = SuffixForest()
    forest.open_group(1, [5, 6, 7])
    forest.append(1, 10, [20, 21, 22, 23])
    batch = draft(forest, ask([1, 1, 2], [11, 10, 11], [3, 3, 3]))
    assert first(batch, 0) == [20, 21, 22]
    assert batch.probes[0].tolist() == [20, 20]
    assert batch.num_tokens.tolist() == [3, 0, 0]
    assert batch.probes[1:].tolist() == [[-1, -1], [-1, -1]]


def test_the_prompt_is_drafted_when_a_response_quotes_it() -> None:
    forest = SuffixForest()
    forest.open_group(1, [5, 6, 7, 8, 9])
    forest.append(1, 0, [6, 7])
    assert first(draft(forest, ask([1], [0], [2]))) == [8, 9]


def test_a_cursor_stays_right_while_siblings_append() -> None:
    forest = SuffixForest()
    forest.append(1, 0, [1, 2, 3])
    assert first(draft(forest, ask([1], [0], [4]))) == []
    forest.append(1, 1, [2, 3, 4, 5])
    assert first(draft(forest, ask([1], [0], [2]))) == [4, 5]


def test_a_draft_ends_at_the_floor_and_at_the_limit() -> None:
    forest = SuffixForest()
    forest.append(1, 0, [1, 2, 3, 4, 5, 6, 7])
    forest.append(1, 1, [1])
    assert len(first(draft(forest, ask([1], [1], [6]), floor=0.9**3 - 1e-3))) == 3
    assert len(first(draft(forest, ask([1], [1], [2]), floor=0.0))) == 2
    assert first(draft(forest, ask([1], [1], [0]))) == []


def test_the_opened_group_takes_no_second_prompt() -> None:
    forest = SuffixForest()
    forest.open_group(3, [1, 2, 3])
    forest.open_group(3, [1, 2, 3])
    assert forest.num_tokens == 3
    with pytest.raises(RequestError, match="group 3: the group already has another prompt"):
        forest.open_group(3, [1, 2])


def test_groups_stay_apart_without_shared_counts() -> None:
    apart, together = SuffixForest(shared_depth=0), SuffixForest()
    for forest in (apart, together):
        forest.append(1, 0, [1, 2, 3, 4])
        forest.append(2, 1, [1, 2])
    assert first(draft(apart, ask([2], [1], [2]))) == []
    assert first(draft(together, ask([2], [1], [2]))) == [3, 4]


def test_a_dropped_group_is_forgotten_and_can_come_back() -> None:
    forest = SuffixForest(shared_depth=0)
    forest.open_group(1, [1, 2])
    forest.append(1, 0, [3, 4, 5])
    forest.drop_group(1)
    forest.drop_group(1)
    assert (forest.num_groups, forest.num_tokens, forest.count(1, [3])) == (0, 0, 0)
    forest.append(1, 0, [4, 5, 6])
    forest.append(1, 9, [4])
    assert first(draft(forest, ask([1], [9], [2]))) == [5, 6]


def test_clear_frees_everything() -> None:
    forest = SuffixForest()
    empty = forest.memory_bytes
    for group in range(20):
        forest.append(group, 0, np.arange(500))
    assert forest.memory_bytes > empty + 20 * 500 * 32
    forest.clear()
    assert (forest.num_groups, forest.memory_bytes) == (0, empty)


def test_the_least_recently_used_group_is_evicted_whole() -> None:
    forest = SuffixForest(max_bytes=400_000, shared_depth=0)
    rng = np.random.default_rng(0)
    for group in range(3):
        forest.append(group, 0, rng.integers(0, 50, 300))
    assert forest.num_groups == 3
    draft(forest, ask([0], [0], [1]))  # use the oldest
    while forest.count(1, []):
        forest.append(3, 0, rng.integers(0, 50, 20))
    assert [forest.count(group, []) > 0 for group in range(4)] == [True, False, True, True]
    assert forest.memory_bytes <= 400_000
    forest.append(1, 0, [7, 8])  # an append to an evicted group is harmless
    assert forest.count(1, [7, 8]) == 1


def test_the_bound_holds_even_for_one_group_alone() -> None:
    forest = SuffixForest(max_bytes=200_000)
    rng = np.random.default_rng(0)
    for _ in range(50):
        forest.append(1, 0, rng.integers(0, 1000, 200))
        assert forest.memory_bytes <= 200_000


def test_a_closed_response_goes_on_serving_and_may_reopen() -> None:
    forest = SuffixForest()
    forest.append(1, 0, [1, 2, 3])
    forest.close_response(1, 0)
    forest.close_response(1, 5)
    forest.close_response(8, 0)
    assert first(draft(forest, ask([1], [0], [2]))) == []
    forest.append(1, 1, [1, 2])
    assert first(draft(forest, ask([1], [1], [1]))) == [3]
    forest.append(1, 0, [4])
    assert forest.count(1, [2, 3, 4]) == 1


def test_a_restarted_response_drafts_its_own_tokens() -> None:
    forest = SuffixForest()
    forest.open_group(1, [9])
    forest.append(1, 0, [1, 2, 3, 4, 5])
    forest.resync(1, 0, [1, 2])
    assert first(draft(forest, ask([1], [0], [3]))) == [3, 4, 5]
    forest.append(1, 0, [3])
    assert first(draft(forest, ask([1], [0], [3]))) == [4, 5]
    assert forest.count(1, [1, 2, 3]) == 1
    forest.append(1, 0, [7, 8])  # it departs
    assert forest.count(1, [3, 7, 8]) == 1
    assert forest.count(1, [4, 5]) == 1


def test_a_restarted_response_stands_where_it_is_in_the_shared_counts_too() -> None:
    forest = SuffixForest()
    forest.open_group(1, [1])
    forest.open_group(2, [2])
    for response in range(4):
        forest.append(1, response, [50, 51, 52, 53, 54, 60 + response, 70, 71, 72, 73, 74])
    forest.append(2, 0, [50, 51, 52, 9, 9, 9, 9, 70, 71, 72])
    assert first(draft(forest, ask([2], [0], [2]))) == [73, 74]
    forest.resync(2, 0, [50, 51, 52])
    assert first(draft(forest, ask([2], [0], [3]))) == [9, 9, 9]


def test_append_batch_is_append() -> None:
    one, other = SuffixForest(), SuffixForest()
    chunks = [(1, 0, [1, 2, 3]), (2, 5, []), (1, 1, [1, 2])]
    for group, response, tokens in chunks:
        one.append(group, response, tokens)
    other.append_batch(
        np.array([1, 2, 1], np.int64),
        np.array([0, 5, 1], np.int64),
        np.array([0, 3, 3, 5], np.int32),
        np.array([1, 2, 3, 1, 2], np.int32),
    )
    assert (one.num_tokens, one.num_groups) == (other.num_tokens, other.num_groups) == (5, 2)
    assert first(draft(one, ask([1], [1], [2]))) == first(draft(other, ask([1], [1], [2]))) == [3]


def test_alternative_paths_leave_at_the_runner_up() -> None:
    forest = SuffixForest()
    for response, tokens in enumerate(([1, 2, 3], [1, 2, 3], [1, 4, 5])):
        forest.append(1, response, tokens)
    forest.append(1, 9, [1])
    paths = forest.draft_paths(
        ask([1, 77], [9, 0], [2, 2]), num_paths=3, sharpness=math.inf, calibration=SURE, floor=0.0
    )
    assert paths.num_tokens.tolist()[0][:2] == [2, 2]
    assert paths.tokens[0, 0].tolist() == [2, 3]
    assert paths.tokens[0, 1].tolist() == [4, 5]
    assert paths.num_tokens[1].tolist() == [0, 0, 0]


def test_dice_beat_greedy_drafts_and_independent_ones() -> None:
    """On a source of known entropy the shared noise raises the agreement, and the margin predicts it."""
    rng = np.random.default_rng(3)
    vocab, group_size, length = 32, 16, 300
    logits = rng.gumbel(size=(vocab, vocab)).astype(np.float32) * 2.0
    tokens = np.arange(vocab, dtype=np.int32)
    keys = rng.integers(1 << 63, size=group_size, dtype=np.uint64)
    forest, last = SuffixForest(8), np.zeros(group_size, np.int64)
    hits, other_hits, estimated, drafted, correct = np.zeros(2), 0, 0.0, 0, 0
    prior, batch_of = prior_calibration(), np.arange(group_size, dtype=np.int64)
    for position in range(1, length):
        query = DraftQuery(
            groups=np.zeros(group_size, np.int64),
            responses=batch_of,
            keys=keys,
            positions=np.full(group_size, position, np.int64),
            temperatures=np.ones(group_size, np.float32),
            max_tokens=np.ones(group_size, np.int32),
        )
        batch = forest.draft(query, sharpness=1.0, sharpness_grid=GRID, calibration=prior, floor=0.0)
        foreign = DraftQuery(**{name: getattr(query, name) for name in query.__slots__} | {"keys": keys + 1})
        independent = forest.draft(foreign, sharpness=1.0, sharpness_grid=GRID, calibration=prior, floor=0.0)
        noise = dice.gumbel(keys[:, None], np.int64(position), tokens[None, :])
        drawn = np.argmax(logits[last] + noise, axis=1)
        if position > 50:
            hits += (batch.probes == drawn[:, None]).sum(axis=0)
            other_hits += int((independent.probes[:, 0] == drawn).sum())
            told = batch.num_tokens > 0
            estimated += float(batch.acceptance[told, 0].sum())
            drafted += int(told.sum())
            correct += int((batch.tokens[told, 0] == drawn[told]).sum())
        forest.append_batch(
            query.groups, batch_of, np.arange(group_size + 1, dtype=np.int32), drawn.astype(np.int32)
        )
        last = drawn
    coupled, greedy = hits / ((length - 51) * group_size)
    independent_rate = other_hits / ((length - 51) * group_size)
    assert coupled > 1.15 * greedy
    assert coupled > 1.4 * independent_rate
    assert estimated / drafted == pytest.approx(correct / drafted, abs=0.08)


def test_priors_are_probabilities_that_grow_with_the_lead() -> None:
    prior = prior_calibration().reshape(2, 2, 8, 8)
    assert ((prior > 0) & (prior < 1)).all()
    assert (np.diff(prior[1], axis=-1) > 0).all()
    assert (np.diff(prior[0], axis=1) > 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_depth": 0}, f"depth 0 is out of range: choose 1 to {MAX_DEPTH}"),
        ({"max_depth": MAX_DEPTH + 1}, f"choose 1 to {MAX_DEPTH}"),
        ({"max_bytes": 0}, "memory bound of 0 bytes"),
        ({"shared_depth": -1}, "shared context depth -1"),
        ({"num_threads": 0}, "0 drafting threads"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixForest(**arguments)


def test_bad_input_is_refused() -> None:
    forest = SuffixForest()
    with pytest.raises(RequestError, match="group 1, response 2: a token id is negative"):
        forest.append(1, 2, [3, -4])
    with pytest.raises(RequestError, match="one row of integers"):
        forest.append(1, 2, [0.5])
    with pytest.raises(RequestError, match="offsets must run"):
        forest.append_batch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([0, 2]), np.zeros(1, int))
    with pytest.raises(RequestError, match="offsets must not fall"):
        forest.append_batch(
            np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([0, 5, 1]), np.zeros(1, np.int32)
        )
    with pytest.raises(RequestError, match="NUM_CELLS"):
        draft(forest, ask([1], [2], [3]), calibration=SURE[:-1])
    with pytest.raises(RequestError, match="sharpness must be positive"):
        forest.draft(ask([1], [2], [3]), sharpness=0.0, sharpness_grid=GRID, calibration=SURE, floor=0.0)
    with pytest.raises(ConfigError, match="0 draft paths"):
        forest.draft_paths(ask([1], [2], [3]), num_paths=0, sharpness=1.0, calibration=SURE, floor=0.0)
    assert forest.num_tokens == 0


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_million_tokens() -> None:
    """Groups come, grow, overlap and are dropped or evicted; what is held stays bounded."""
    bound = 48 << 20
    forest = SuffixForest(max_depth=12, max_bytes=bound)
    rng = np.random.default_rng(1)
    phrases = [rng.integers(0, 5000, size) for size in rng.integers(3, 40, 400)]
    offsets = np.arange(9, dtype=np.int32) * 512
    appended, group, baseline = 0, 0, 0
    while appended < 10_000_000:
        forest.open_group(group, np.concatenate([phrases[i] for i in rng.integers(0, 400, 8)]))
        for _ in range(8):
            text = np.concatenate([phrases[i] for i in rng.integers(0, 400, 400)])[: 8 * 512]
            forest.append_batch(np.full(8, group), np.arange(8), offsets, text)
            appended += len(text)
            assert forest.memory_bytes <= bound
        if group % 2:
            forest.drop_group(group)  # the others are left to eviction
        group += 1
        if appended > 2_000_000 and not baseline:
            baseline = resident_bytes()
    assert forest.num_groups > 1
    assert resident_bytes() < baseline + (16 << 20)


NO_GROWTH = np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(1, np.int32), np.empty(0, np.int32)
OPTIONS: dict[str, Any] = {
    "sharpness": math.inf, "sharpness_grid": GRID, "calibration": SURE, "floor": 0.0
}  # fmt: skip


def test_what_is_drafted_later_begins_behind_what_was_told_with_it() -> None:
    forest = SuffixForest()
    forest.open_group(1, [5, 6, 7])
    forest.append(1, 10, [20, 21, 22, 23])
    growth = np.array([1]), np.array([11]), np.array([0, 2], np.int32), np.array([20, 21], np.int32)
    wait = forest.draft_later(*growth, ask([1], [11], [2]), **OPTIONS)
    assert forest.num_tokens == 9  # waits
    batch, paths = wait()
    assert first(batch) == [22, 23]
    assert paths is None
    assert first(wait()[0]) == [22, 23], "asked twice"


def test_drafts_that_nobody_fetches_are_in_nobodys_way() -> None:
    forest = SuffixForest()
    forest.open_group(1, [5, 6, 7])
    forest.append(1, 10, [20, 21, 22, 23])
    for _ in range(3):
        forest.draft_later(*NO_GROWTH, ask([1] * 64, [11] * 64, [3] * 64), **OPTIONS)
    forest.clear()
    forest.draft_later(*NO_GROWTH, ask([1], [11], [3]), **OPTIONS)
    del forest


@pytest.mark.parametrize("does_draft", [False, True])
def test_a_forked_child_is_not_stopped_by_a_thread_of_its_parent(does_draft: bool) -> None:
    """As workers of a data loader are, which inherit an engine."""
    forest = SuffixForest()
    forest.open_group(1, [5, 6, 7])
    forest.append(1, 10, [20, 21, 22, 23])
    later = partial(forest.draft_later, *NO_GROWTH, ask([1], [11], [3]), **OPTIONS)
    expected = first(later()()[0])
    if (child := os.fork()) == 0:
        is_same = not does_draft or first(later()()[0]) == expected
        forest._native = later = None  # type: ignore[assignment]
        os._exit(not is_same)
    until_s = time.monotonic() + 10.0
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until_s:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert first(later()()[0]) == expected


@pytest.mark.parametrize(
    ("growth", "match"),
    [
        ((*NO_GROWTH[:2], np.zeros(2, np.int32), NO_GROWTH[3]), "n \\+ 1 offsets"),
        ((np.array([1]), np.array([1]), np.array([0, 1], np.int32), np.array([-1], np.int32)), "negative"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_begun(growth: Any, match: str) -> None:
    forest = SuffixForest()
    with pytest.raises(RequestError, match=match):
        forest.draft_later(*growth, ask([1], [1], [3]), **OPTIONS)
    assert forest.num_tokens == 0
