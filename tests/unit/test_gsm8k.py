"""GSM8K: reading the file, splitting, cutting out answers, comparing them."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.tasks import load_task
from paceline.tasks.gsm8k import extract_answer, extract_gold, read_questions, score


def write_questions(path, count):
    lines = [
        json.dumps({"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n:,}"})
        for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_are_split_by_content_and_repeatable(tmp_path):
    task = load_task("gsm8k", prompts=write_questions(tmp_path / "q.jsonl", 1000), held_out_share=0.2)
    with pytest.raises(ConfigError, match="5000 train rows wanted") as caught:
        task.train_rows(5000, 0)
    available = int(re.search(r"has (\d+)", str(caught.value))[1])
    assert 750 < available < 850
    train = {row["prompt"] for row in task.train_rows(available, 0)}
    held_out = {row["prompt"] for row in task.held_out_rows(1000 - available, 1)}
    assert len(train) + len(held_out) == len(train | held_out) == 1000
    assert task.train_rows(10, 3) == task.train_rows(10, 3) != task.train_rows(10, 4)


def test_row_carries_template_question_and_gold(tmp_path):
    path = write_questions(tmp_path / "q.jsonl", 600)
    task = load_task("gsm8k", prompts=path, template="Q: {question}\nA: ")
    rows = {row["prompt"]: row["gold"] for row in task.train_rows(500, 0)}
    assert all(re.fullmatch(r"Q: What is (\d+) \+ \1\?\nA: ", prompt) for prompt in rows)
    assert all(int(gold) == 2 * int(prompt.split()[3]) for prompt, gold in rows.items())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[1]", "line 2"),
        ("3", "line 2"),
        ('{"question": "x"}', "'answer'"),
        ('{"question": 5, "answer": "#### 5"}', "question is 5"),
        ('{"question": "x", "answer": 7}', "line 2"),
        ('{"question": "x", "answer": "seven"}', "no number after '####'"),
        ('{"question": "x", "answer": "#### seven"}', "no number after '####'"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_ill_formed_line_is_named(tmp_path, line, message):
    path = write_questions(tmp_path / "q.jsonl", 1)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_task("gsm8k", prompts=path)
    assert str(path) in str(caught.value)
    assert "line 2" in str(caught.value)


def test_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        load_task("gsm8k", prompts=tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no questions"):
        load_task("gsm8k", prompts=tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        load_task("gsm8k", prompts=tmp_path / "binary.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option 'prompts'"),
        ({"held_out_share": 1.0}, "'held_out_share' = 1.0"),
        ({"template": "no place"}, "lacks '{question}'"),
    ],
)
def test_bad_options_are_named(tmp_path, options, message):
    if options:
        options = {"prompts": write_questions(tmp_path / "q.jsonl", 3), **options}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_task("gsm8k", **options)


def test_line_separators_inside_a_question_do_not_split_the_line(tmp_path):
    path = tmp_path / "q.jsonl"
    record = {"question": "a\u2028b\u0085c", "answer": "#### 1"}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_questions(path) == [("a\u2028b\u0085c", "1")]


# --- answers ------------------------------------------------------------------------------------------------


def test_gold_is_the_number_after_the_mark():
    assert extract_gold("2*600=<<2*600=1200>>1200\n#### 1,200") == "1200"
    assert extract_gold("a #### 1 #### -2.50 ") == "-2.50"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3, then\n#### 1,200", "1200"),
        ("#### $18.\nThat is all 5", "18"),
        (r"hence \boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{2} no, \boxed{12\%}", "12"),
        ("first 7, then 40.5.", "40.5"),
        ("#### 9^9^9^9^9", None),
        ("#### twelve", None),
        ("#### 1/0", None),
        ("no number", None),
        ("9" * 100, None),
    ],
)
def test_final_answer_is_cut_out(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("#### 18", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        (r"\boxed{36/2}", "18", 1.0),
        (r"\boxed{\dfrac{1}{2}}", "0.5", 1.0),
        ("the answer is $1,080.00", "1080", 1.0),
        ("#### 19", "18", 0.0),
        ("#### -18", "18", 0.0),
        ("18 is right\n#### 17", "18", 0.0),
    ],
)
def test_reward_compares_values(text, gold, reward):
    pytest.importorskip("math_verify")
    assert score(text, gold) == reward


@given(st.text(), st.sampled_from(["", "####", r"\boxed{", "#### 1"]))
def test_any_text_scores_without_raising(text, head):
    pytest.importorskip("math_verify")
    assert score(head + text, "18") in (0.0, 1.0)


@given(st.text(alphabet=r"0123456789.,/-+$%{}\frac^! ", max_size=80))
def test_number_soup_scores_without_raising(text):
    pytest.importorskip("math_verify")
    assert score("#### " + text, "18") in (0.0, 1.0)


def test_works_in_threads_and_is_bounded():
    pytest.importorskip("math_verify")
    texts = ["#### 6.0", "#### 2^3^4^5^6", "9!" * 100_000, r"\boxed{" * 100_000, "1," * 500_000, "#### 12/2"]
    score("#### 3.0", "3")  # imports
    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        rewards = list(pool.map(lambda text: score(text, "6"), texts * 4))
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0] * 4
    assert time.perf_counter() - started < 5
