"""Keys and groups: given, from a seed, or derived; the same on every machine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.dice import derive_key
from paceline.engine.keys import KeyBook, check_options, engine_seed, key_of, prompt_group
from paceline.errors import RequestError, UnsupportedError


def params(seed: int | None = None, min_tokens: int = 0, **extra: object) -> SimpleNamespace:
    return SimpleNamespace(seed=seed, min_tokens=min_tokens, extra_args=extra or None)


def test_equal_prompts_count_their_samples() -> None:
    book = KeyBook(run_seed=3)
    keys = [book.assign(params(), [1, 2, 3], i)[0] for i in range(4)]
    assert keys == [derive_key(3, [1, 2, 3], sample) for sample in range(4)]
    assert book.assign(params(), [1, 2, 4], 9)[0] == derive_key(3, [1, 2, 4], 0)
    assert KeyBook(run_seed=4).assign(params(), [1, 2, 3], 0)[0] != keys[0]


def test_given_beats_seed_beats_derived() -> None:
    book = KeyBook(run_seed=3)
    assert book.assign(params(seed=5, paceline_key=7), [1, 2], 0)[0] == 7
    assert book.assign(params(seed=5), [1, 2], 0)[0] == 5
    assert book.assign(params(paceline_sample=4), [1, 2], 0)[0] == derive_key(3, [1, 2], 4)
    # None of these drew from the count of the prompt's samples.
    assert book.assign(params(), [1, 2], 0)[0] == derive_key(3, [1, 2], 0)


def test_what_is_assigned_is_what_the_worker_reads() -> None:
    wanted = params(seed=5, paceline_key=-1, theirs=2)
    key, group, carried = KeyBook(0).assign(wanted, [1, 2], 11)
    assert key == key_of(wanted) == (1 << 64) - 1
    assert (group, carried) == (prompt_group([1, 2]), 0)
    assert wanted.extra_args["paceline_response"] == 11
    assert wanted.extra_args["theirs"] == 2
    assert wanted.seed is None


@pytest.mark.parametrize("seed", [0, 5, (1 << 63) - 1, -(1 << 63), -1])
def test_a_runner_that_throws_the_dice_gets_the_key_for_a_seed(seed: int) -> None:
    wanted = params(seed=seed)
    assert KeyBook(0, is_seed=True).assign(wanted, [1, 2], 0)[0] == seed % (1 << 64)
    assert wanted.seed == seed


def test_a_resumed_response_keeps_key_and_group() -> None:
    book = KeyBook(0)
    whole = book.assign(params(paceline_sample=1), [1, 2], 0)
    resumed = book.assign(params(paceline_sample=1, paceline_generated=3), [1, 2, 7, 8, 9], 1)
    assert resumed == (whole[0], whole[1], 3)


@pytest.mark.parametrize(("wanted", "left"), [(5, 2), (3, 0), (1, 0)])
def test_what_was_generated_earlier_counts_for_the_least_length(wanted: int, left: int) -> None:
    resumed = params(min_tokens=wanted, paceline_generated=3)
    KeyBook(0).assign(resumed, [1, 2, 7, 8, 9], 1)
    assert resumed.min_tokens == left


@pytest.mark.parametrize("value", [-1, 2, 3, True, "1", 0.5])
def test_impossible_carries_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="paceline_generated"):
        KeyBook(0).assign(params(paceline_generated=value), [1, 2], 0)


@pytest.mark.parametrize(
    ("n", "seed", "extra", "problem"),
    [
        (1, None, {"paceline_key": "7"}, "paceline_key='7' must be an integer"),
        (1, None, {"paceline_group": 0.5}, "paceline_group=0.5 must be an integer"),
        (1, None, {"paceline_sample": -1}, "paceline_sample=-1"),
        (1, None, {"paceline_generated": 1 << 63}, "paceline_generated="),
        (1, 1 << 64, {}, "does not fit in 64 bits"),
        (2, None, {"paceline_key": 0}, "paceline_key with n=2"),
        (2, None, {"paceline_sample": 0}, "paceline_sample with n=2"),
        (1, None, {"paceline_kye": 7}, "paceline_kye is no option of a request: these are paceline_key, "),
    ],
)
def test_wrong_options_are_refused_where_they_are_made(
    n: int, seed: int | None, extra: dict[str, object], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        check_options(SimpleNamespace(n=n, seed=seed, extra_args=extra))


def test_what_looks_back_is_refused_for_resumed_responses() -> None:
    resumed = {"paceline_generated": 3}
    with pytest.raises(UnsupportedError, match="paceline_generated=3 with stop: a stop text"):
        check_options(SimpleNamespace(n=1, seed=None, extra_args=resumed, stop=["x"]))
    check_options(SimpleNamespace(n=1, seed=None, extra_args=resumed, stop=[]))
    check_options(SimpleNamespace(n=1, seed=None, extra_args={"paceline_generated": 0}, stop=["x"]))


def test_right_options_pass() -> None:
    check_options(SimpleNamespace(n=1, seed=None, extra_args={"paceline_key": -1, "paceline_sample": 0}))
    check_options(SimpleNamespace(n=8, seed=3, extra_args={"paceline_group": 4, "theirs": "x"}))
    check_options(SimpleNamespace(n=8, seed=None, extra_args=None))
    sent_again = {"paceline_key": 5, "paceline_response": 3}  # what the scheduler made of them
    check_options(SimpleNamespace(n=1, seed=None, extra_args=sent_again))


def test_engines_of_one_run_derive_keys_of_their_own() -> None:
    def seed_of(seed: int, index: int) -> int:
        parallel = SimpleNamespace(data_parallel_index=index)
        return engine_seed(
            3, SimpleNamespace(model_config=SimpleNamespace(seed=seed), parallel_config=parallel)
        )

    assert seed_of(0, 0) == 3
    assert len({seed_of(seed, index) for seed in range(3) for index in range(3)}) == 9
    assert seed_of(1, 2) == seed_of(1, 2)


def test_groups_are_the_same_in_every_process() -> None:
    code = "from paceline.engine.keys import prompt_group; print(prompt_group([1, 5, 1 << 20]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == prompt_group([1, 5, 1 << 20]) < 1 << 63
