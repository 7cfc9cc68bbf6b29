"""No benchmark prompt is one that a policy or drafter learned on."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from timed_rollouts import BENCHMARKS

from pairs import PAIRS, draw_lines, make_prompts  # isort: skip
from speed import CASES, SEED, num_prompts, parse_options, split_prompts  # isort: skip

sys.path.insert(0, str(BENCHMARKS.parent / "scripts"))
from pretrain_countdown import parse_arguments, stream_problems

Puzzle = tuple[tuple[int, ...], int]


def puzzle_of(prompt: str) -> Puzzle:
    numbers, target = prompt.strip().split(":")
    return tuple(sorted(map(int, numbers.split(",")))), int(target)


def learned_puzzles(seed: int, count: int) -> set[Puzzle]:
    """Of the first problems that pretraining or distillation draws with this seed."""
    options = parse_arguments(["prompts", "--out", "unused"])
    problems = stream_problems(seed, options.hard_share, options.max_tokens)
    return {(tuple(sorted(p.numbers)), p.target) for p, _ in itertools.islice(problems, count)}


@pytest.fixture(scope="module")
def policy() -> Path:
    return PAIRS["countdown"].policy


def decode(policy: Path, prompts: list[tuple[int, ...]]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    return [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]


def test_no_prompt_was_distilled_on(policy: Path) -> None:
    """docs/countdown.md: the drafter learned from the responses to 5120 prompts of seed 5, and from traces before."""
    count = num_prompts(PAIRS["countdown"].rollouts, parse_options([]).repetitions)
    puzzles = {puzzle_of(text) for text in decode(policy, make_prompts(policy, count, SEED))}
    assert len(puzzles) == count
    assert not puzzles & learned_puzzles(5, 5120)
    for seed in (0, 1):
        assert not puzzles & learned_puzzles(seed, 5000)


def test_prompts_of_training_would_be_found(policy: Path) -> None:
    """The puzzles are compared as they should be: prompts drawn without holding out do meet the drafter's."""
    from paceline.tasks import load_task

    rows = load_task("countdown").train_rows(200, SEED)
    assert {puzzle_of(row["prompt"]) for row in rows} & learned_puzzles(5, 5120)


def test_no_prompt_is_used_twice() -> None:
    drawn = [(number,) for number in range(500)]
    per_case = PAIRS["countdown"].rollouts
    tuning, prompts = split_prompts(drawn, per_case, repetitions=3)
    used = tuning + [prompt for rollouts in prompts.values() for one in rollouts for prompt in one]
    assert len(used) == len(set(used))
    for (case, _), rollouts in prompts.items():
        assert [len(one) for one in rollouts] == [CASES[case][0]] * per_case[case]


def test_lines_are_drawn_once_each(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = [f"{n},{n + 1},{n + 2}:30 " for n in range(1, 20)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    drawn = draw_lines(file, policy, 19, seed=3)
    assert sorted(text.strip() for text in decode(policy, drawn)) == sorted(text.strip() for text in texts)
    assert drawn != draw_lines(file, policy, 19, seed=4)
    with pytest.raises(SystemExit, match="19 prompts, 20 are needed"):
        draw_lines(file, policy, 20, seed=3)
