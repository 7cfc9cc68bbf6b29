"""Countdown: problems, traces, tokenizer, rows and the strict scorer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.tasks import load_task
from paceline.tasks.alphabet import BOS_ID, EOS_ID, build_tokenizer, encode_prompt, encode_trace
from paceline.tasks.countdown import FORMAT_REWARD, SOLVED_REWARD, parse_answer, score
from paceline.tasks.traces import (
    ANSWER_MARK,
    LARGEST_VALUE,
    Problem,
    ProblemRange,
    draw_problem,
    list_equations,
    stream_examples,
    write_trace,
)

ROW = {"numbers": [24, 3, 29], "target": 21}
SOLVED = "24/3=8|29,8;29-8=21>ans24/3=8,29-8=21"


def examples(count: int, **ranges: int) -> list[tuple[Problem, str]]:
    return list(islice(stream_examples(7, ProblemRange(**ranges), 640), count))


# --- scoring ----------------------------------------------------------------------------------------------


def test_right_answer_scores_one():
    assert score(SOLVED, ROW) == SOLVED_REWARD


@pytest.mark.parametrize(
    "answer",
    [
        "24/3=8,29-8=22",  # does not hold
        "24/3=8,8+29=37",  # another target
        "24/3=8,24-3=21",  # numbers twice
        "7*3=21,24-3=21",  # a number that is not there
        "29-8=21,24/3=8",  # wrong order
        "24/0=8,29-8=21",
    ],
)
def test_well_formed_wrong_answer_scores_format_reward(answer):
    assert score("ans" + answer, ROW) == FORMAT_REWARD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ans",
        "24/3=8,29-8=21",  # no mark
        "ans24/3=8",  # too few
        "ans24/3=8,29-8=21,21*1=21",  # too many
        "ans24/3=8,29-8=21 ",  # a blank
        "ans24/3=8,29-8=21\n",
        "ans24/3=8,29-8=+21",
        "ans24/3=8,29--8=21",
        "ans24/3=8,2٩-8=21",  # an Arabic digit
        "ans24/3=8,__import__('os')=21",
        "ans(24/3)=8,29-8=21",
        SOLVED + "x",
        "ans24/3=8,29-8=0000000021",  # ten digits
    ],
)
def test_ill_formed_answer_scores_zero(text):
    assert score(text, ROW) == 0.0


def test_last_mark_counts():
    assert score("ans1+1=3," + SOLVED, ROW) == SOLVED_REWARD
    assert score(SOLVED + "ans", ROW) == 0.0


def test_division_must_be_exact():
    row = {"numbers": [7, 2, 3], "target": 9}
    assert score("ans7/2=3,3*3=9", row) == FORMAT_REWARD


@given(st.text(), st.sampled_from(["", "ans", "ans24/3=8,", "ans24/3=8,29-8=21"]))
def test_any_text_scores_without_raising(text, head):
    assert score(head + text, ROW) in (0.0, FORMAT_REWARD, SOLVED_REWARD)


@given(st.text(alphabet="0123456789+-*/=,ans<>x|;", max_size=60))
def test_alphabet_soup_scores_without_raising(text):
    assert score("ans" + text, ROW) in (0.0, FORMAT_REWARD, SOLVED_REWARD)


def test_time_is_linear_in_the_response():
    def seconds(text: str) -> float:
        started = time.perf_counter()
        score(text, ROW)
        return time.perf_counter() - started

    for piece in ("ans", "ans1+1=2,", "9", "a", "ans" + "1" * 50):
        assert min(seconds(piece * (2_000_000 // len(piece))) for _ in range(3)) < 0.1


def write_expression(equations: list[tuple[int, str, int, int]], numbers: list[int]) -> str:
    """One nested expression over the original numbers, for reasoning-gym."""
    known = [(n, str(n)) for n in numbers]

    def take(value: int) -> str:
        entry = next(e for e in reversed(known) if e[0] == value)
        known.remove(entry)
        return entry[1]

    for a, operator, b, result in equations:
        left, right = take(a), take(b)
        known.append((result, f"({left}{operator}{right})"))
    return known[-1][1]


@pytest.mark.parametrize("count", [3, 4])
def test_agrees_with_reasoning_gym(count):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("countdown", size=1, seed=0)
    for problem, trace in examples(40, min_numbers=count, max_numbers=count):
        for shift in (0, 1):
            row = {"numbers": list(problem.numbers), "target": problem.target + shift}
            equations = parse_answer(trace, count - 1)
            assert equations is not None
            expression = write_expression(equations, list(problem.numbers))
            assert re.fullmatch(r"[0-9+\-*/()]{1,60}", expression)  # their scorer evaluates what it is given
            theirs = dataset.score_answer(expression, {"metadata": row})
            assert (score(trace, row) == SOLVED_REWARD) == (theirs == 1.0) == (shift == 0)


# --- traces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4])
def test_every_trace_is_a_true_search_that_ends_in_the_solution(count):
    for problem, trace in examples(100, min_numbers=count, max_numbers=count):
        search, _, answer = trace.partition(ANSWER_MARK)
        for a, operator, b, result in re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", search):
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            assert int(result) == (int(a) // int(b) if operator == "/" else value[operator]) <= LARGEST_VALUE
        assert search.endswith(answer.rsplit(",", 1)[-1] + ">")
        assert score(trace, {"numbers": problem.numbers, "target": problem.target}) == SOLVED_REWARD
        assert len(encode_trace(trace)) <= 640 + 1


def test_lengths_have_a_long_tail():
    lengths = sorted(len(encode_trace(trace)) for _, trace in examples(2000))
    assert 80 <= lengths[1000] <= 130
    assert 370 <= lengths[1980] <= 512


def test_trace_respects_its_limit_exactly():
    problem = Problem((24, 3, 29), 21)
    for seed in range(50):
        trace = write_trace(problem, Random(seed), 10_000)
        assert trace is not None
        tokens = len(encode_trace(trace)) - 1
        assert write_trace(problem, Random(seed), tokens) == trace
        assert write_trace(problem, Random(seed), tokens - 1) is None


def test_unsolvable_problem_has_no_trace():
    assert write_trace(Problem((1, 1, 1), 200), Random(0), 10_000) is None


@given(st.integers(0, 999), st.integers(0, 999))
def test_equations_hold_and_stay_in_bounds(a, b):
    for value, text in list_equations(a, b):
        left, result = text.split("=")
        x, operator, y = re.fullmatch(r"(\d+)(\D)(\d+)", left).groups()
        assert int(result) == value <= LARGEST_VALUE
        if operator == "/":
            assert int(y) * value == int(x)
        assert sorted((int(x), int(y))) == sorted((a, b))


def test_problems_follow_reasoning_gyms_distribution():
    """Two-sample chi-square over binned targets, 9 degrees of freedom; 33.7 is the 0.01 % point."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    limits = {"min_numbers": 3, "max_numbers": 4, "max_value": 30, "min_target": 10, "max_target": 200}
    size = 1500
    dataset = reasoning_gym.create_dataset("countdown", size=size, seed=11, **limits)
    rng = Random(5)
    theirs = Counter(min(dataset[i]["metadata"]["target"] // 15, 9) for i in range(size))
    ours = Counter(min(draw_problem(rng, ProblemRange(**limits)).target // 15, 9) for _ in range(size))
    bins = theirs.keys() | ours.keys()
    assert sum((theirs[k] - ours[k]) ** 2 / (theirs[k] + ours[k]) for k in bins) < 33.7


# --- rows -------------------------------------------------------------------------------------------------


def test_train_and_held_out_never_meet():
    pytest.importorskip("reasoning_gym")
    task = load_task("countdown")

    def contents(rows):
        return {(tuple(sorted(row["numbers"])), row["target"]) for row in rows}

    train = contents(task.train_rows(300, 0)) | contents(task.train_rows(300, 1))
    held_out = contents(task.held_out_rows(100, 0)) | contents(task.held_out_rows(100, 1))
    pretraining = {(tuple(sorted(p.numbers)), p.target) for p, _ in examples(2000)}
    assert not held_out & (train | pretraining)
    assert len(train) > 550
    assert len(held_out) > 180


def test_rows_are_repeatable_and_scored_by_the_task():
    pytest.importorskip("reasoning_gym")
    task = load_task("countdown", max_numbers=4)
    rows = task.train_rows(20, 3)
    assert rows == task.train_rows(20, 3) != task.train_rows(20, 4)
    assert {len(row["numbers"]) for row in rows} == {3, 4}
    for row in rows[:5]:
        assert row["prompt"] == f"{','.join(map(str, row['numbers']))}:{row['target']} "
        trace = write_trace(Problem(tuple(row["numbers"]), row["target"]), Random(0), 100_000)
        assert task.reward(trace, row) == SOLVED_REWARD


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cuntdown", {}, "unknown task 'cuntdown': choose one of countdown, gsm8k"),
        ("countdown", {"max_nums": 4}, "no option 'max_nums'"),
        ("countdown", {"max_value": 1000}, "'max_value' = 1000"),
        ("countdown", {"min_numbers": 4}, "min_numbers = 4 is above max_numbers = 3"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_task(name, **options)


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 0, "size must be at least 1"),
        ({"max_value": 1, "min_target": 1, "max_target": 3}, 50, "found only"),
        ({"max_value": 1, "min_target": 100}, 5, "no problem fits"),
    ],
)
def test_rows_that_do_not_exist_are_refused(options, size, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        load_task("countdown", **options).train_rows(size, 0)


def test_loading_a_task_is_light():
    code = (
        "import sys; from paceline.tasks import load_task; load_task('countdown'); "
        "print([m for m in ('torch', 'reasoning_gym', 'sympy', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- tokenizer --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(4096).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_tokenizer_agrees_with_the_plain_encoder(tokenizer):
    for problem, trace in examples(50):
        assert tokenizer(problem.prompt)["input_ids"] == encode_prompt(problem.prompt)
        ids = tokenizer(trace, add_special_tokens=False)["input_ids"]
        assert [*ids, EOS_ID] == encode_trace(trace)


@given(text=st.text(alphabet="0123456789+-*/=,:;|x<> ans".replace("a", "").replace("n", "").replace("s", "")))
def test_tokenizer_round_trip(tokenizer, text):
    for whole in (text, text + ANSWER_MARK + text):
        ids = tokenizer(whole)["input_ids"]
        assert ids[0] == BOS_ID
        assert tokenizer.decode(ids, skip_special_tokens=True) == whole


def test_streaming_decoder_gives_the_same_text(tokenizer):
    from tokenizers.decoders import DecodeStream

    problem, trace = examples(1)[0]
    ids = tokenizer(problem.prompt + trace)["input_ids"]
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer._tokenizer, token) or "" for token in ids]
    assert "".join(pieces) == problem.prompt + trace


# --- shipped checkpoints ------------------------------------------------------------------------------------

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.mark.parametrize(("name", "nats"), [("countdown-policy", 0.35), ("countdown-drafter", 0.6)])
def test_shipped_checkpoint_models_the_traces(name, nats):
    """Mean cross entropy over held-out problems' traces; an untrained model has 3.3 nats."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / name)
    rng, losses, count = Random(99), 0.0, 0
    while count < 4000:
        problem = draw_problem(rng, ProblemRange())
        trace = write_trace(problem, rng, 640)
        if not problem.held_out or trace is None:
            continue
        prompt = tokenizer(problem.prompt)["input_ids"]
        assert prompt == encode_prompt(problem.prompt)
        ids = torch.tensor([prompt + encode_trace(trace)])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += ids.shape[1] - len(prompt)
    assert losses / count < nats


def test_shipped_checkpoints_stay_small():
    folders = ("countdown-policy", "countdown-drafter")
    assert sum(f.stat().st_size for name in folders for f in (ASSETS / name).iterdir()) < 10_000_000


# --- pretraining ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pretraining_script_makes_a_policy_and_a_drafter(tmp_path):
    pytest.importorskip("transformers")
    script = Path(__file__).parents[2] / "scripts" / "pretrain_countdown.py"
    policy, drafter = tmp_path / "policy", tmp_path / "drafter"

    def run(*words: object) -> str:
        command = [sys.executable, str(script), *map(str, words), "--threads", "1"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    losses = re.findall(r"loss ([\d.]+)", run("policy", "--out", policy, "--quick", "--print-every", 10))
    assert float(losses[-1]) < float(losses[0])
    first, prompts, responses = (tmp_path / name for name in ("first", "prompts.jsonl", "responses.jsonl"))
    run("drafter", "--teacher", policy, "--out", first, "--quick")
    script_only = [
        sys.executable,
        str(script),
        "prompts",
        "--problems",
        "3",
        "--seed",
        "5",
        "--out",
        str(prompts),
    ]
    subprocess.run(script_only, check=True)
    asked = [encode_prompt(json.loads(line)["prompt"]) for line in prompts.read_text().splitlines()]
    assert len(asked) == 3
    rows = [{"prompt_ids": prompt, "tokens": [*prompt[1:], EOS_ID]} for prompt in asked]
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = ("--responses", responses, "--start", first, "--out", drafter, "--print-every", 5)
    losses = re.findall(r"loss ([\d.]+)", run("drafter", "--teacher", policy, *again, "--quick"))
    assert float(losses[-1]) < float(losses[0])
    words = ("--policy", policy, "--drafter", drafter, "--problems", 4, "--max-new-tokens", 8)
    measured = run("measure", *words)
    assert '"finish_rate"' in measured
    from transformers import AutoTokenizer

    for folder in (
        policy,
        drafter,
    ):  # AutoTokenizer also reads config.json, and may put another class in its place
        assert AutoTokenizer.from_pretrained(folder)("24,3,29:21 ")["input_ids"] == encode_prompt(
            "24,3,29:21 "
        )
