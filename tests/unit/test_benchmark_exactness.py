"""A row of the exactness benchmark counts only if its mechanism was at work; help is forced only where it can be."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.planning.help import Drafting, Help, Helper, Load
from paceline.types import RolloutRequest, StepObservation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness
import stragglers


@pytest.mark.parametrize(
    ("case", "found", "counts"),
    [
        ("decoupled", {"tokens": 500, "accepted_drafts": 300, "supplied": 30}, True),
        ("decoupled", {"tokens": 499, "accepted_drafts": 300, "supplied": 300}, False),
        ("enumeration", {"tokens": 500, "accepted_drafts": 300, "supplied": 29}, False),
        ("enumeration", {"tokens": 500, "accepted_drafts": 0, "supplied": 0}, False),
        ("inside or ahead", {"tokens": 500, "accepted_drafts": 300, "supplied": 30, "changes": 10}, True),
        ("inside or ahead", {"tokens": 500, "accepted_drafts": 300, "supplied": 30, "changes": 9}, False),
        ("inside or ahead", {"tokens": 500, "accepted_drafts": 300, "supplied": 29, "changes": 10}, False),
        ("races", {"tokens": 500, "changes": 100}, True),
        ("races", {"tokens": 500, "changes": 99}, False),
        ("role changes", {"tokens": 500, "supplied": 1, "changes": 50}, True),
        ("role changes", {"tokens": 500, "supplied": 1, "changes": 49}, False),
        ("role changes", {"tokens": 500, "accepted_drafts": 300, "changes": 50}, False),
        ("again without drafts", {"tokens": 500}, True),
        ("again without drafts", {"tokens": 500, "draft_tokens": 1}, False),
        ("suffix drafts alone", {"tokens": 500, "draft_tokens": 300, "accepted_drafts": 1}, True),
        ("suffix drafts alone", {"tokens": 499, "draft_tokens": 300, "accepted_drafts": 1}, False),
        ("suffix drafts alone", {"tokens": 500, "draft_tokens": 300}, False),
        ("garbage drafts", {"tokens": 500, "draft_tokens": 300, "accepted_drafts": 59}, True),
        ("garbage drafts", {"tokens": 500, "draft_tokens": 300, "accepted_drafts": 60}, False),
        ("garbage drafts", {"tokens": 500}, False),
    ],
)
def test_a_row_counts_only_with_enough_of_its_mechanism(
    case: str, found: dict[str, int], counts: bool
) -> None:
    assert exactness.is_enough(case, Counter(found), 500) is counts


def test_a_helper_has_drafted_where_it_was_heard() -> None:
    heard = [(), (0,), (5,)]
    steps = [
        StepObservation(1, 4, 3, 0, 0.01, num_model_tokens=3 + at, ahead_tokens=tokens)
        for at, tokens in enumerate(heard)
    ]
    assert exactness.count_helped(steps) == 5


def test_drafts_of_all_chunks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(requests: list[RolloutRequest], params: object) -> list[Namespace]:
        return [
            Namespace(
                tokens=(7,) * one.max_tokens,
                finish_reason="length",
                num_draft_tokens=3,
                num_accepted_tokens=2,
            )
            for one in requests
        ]

    monkeypatch.setitem(sys.modules, "vllm", Namespace(SamplingParams=lambda temperature: None))
    bench = object.__new__(exactness.Bench)
    bench.engine = Namespace(generate=generate, reset_prefix_cache=lambda: None)
    bench.drafts = Counter()
    requests = [
        RolloutRequest((1,), exactness.CHUNK_TOKENS),
        RolloutRequest((2,), 3 * exactness.CHUNK_TOKENS),
    ]
    assert [len(one.tokens) for one in bench.chunked(requests)] == [48, 144]
    assert bench.drafts == {"draft_tokens": 12, "accepted_drafts": 8}


def test_garbage_is_drafted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setitem(sys.modules, "drafters", Namespace(ScriptedDrafter=lambda *_: "garbage"))
    bench = object.__new__(exactness.Bench)
    bench.suffix, free = "suffix", Namespace(drafter="suffix")
    bench.loop = Namespace(free=free)
    bench.engine = Namespace(
        vocab_size=9,
        drop_drafter=lambda: done.append("dropped"),
        use_drafter=lambda place: done.append(place),
    )
    monkeypatch.setattr(bench, "generate", lambda requests: done.append(free.drafter))
    bench.garbage([])
    assert done == ["dropped", "garbage", 0]
    assert free.drafter == "suffix"


def test_bars_ask_for_equal_tokens_enough_of_them_and_the_mechanism() -> None:
    row = {"dtype": "float32", "tokens": 500, "diverged_tokens": 0}
    rows = [
        {**row, "case": "garbage drafts", "invariant": True, "counts": True},
        {**row, "case": "garbage drafts", "invariant": True, "counts": False},
        {**row, "case": "garbage drafts, invariance off", "invariant": False, "diverged_tokens": 9},
        {**row, "case": "decoupled", "share": 0.05, "counts": False},
        {**row, "case": "races", "changes": 100, "counts": True, "diverged_tokens": 1},
        {**row, "case": "inside or ahead", "share": 0.05, "changes": 10, "counts": False},
    ]
    bars = exactness.check_rows(rows)
    assert [(bar["case"].partition(": ")[2], bar["met"]) for bar in bars] == [
        ("diverged tokens", True),
        ("diverged tokens", False),
        ("diverged tokens", False),
        ("share", False),
        ("diverged tokens", False),
        ("changes", True),
        ("diverged tokens", False),
        ("share", False),
        ("changes", True),
    ]


def test_the_control_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        exactness,
        "measure",
        lambda options, dtype, names, invariant: [{"case": name, "invariant": invariant} for name in names],
    )
    built = []

    class InThisProcess:
        def __init__(self, name: str, make: Callable[..., Any], *args: Any) -> None:
            monkeypatch.setenv(exactness.SPLIT_KV, "0")  # as it is inherited
            self.call = make(*args)
            built.append(name)
            assert exactness.SPLIT_KV not in os.environ

        def ready(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(exactness, "Child", InThisProcess)
    monkeypatch.setattr(exactness, "control_options", lambda options: options)
    control = "suffix and model drafts, invariance off"
    options = Namespace(rows=["garbage drafts", control])
    assert list(exactness.compare_batches(options, "float32")) == [
        [{"case": "garbage drafts", "invariant": True}],
        [{"case": control, "invariant": False}],
    ]
    assert built == ["control"]


def test_tokens_behind_the_first_difference_have_diverged() -> None:
    assert exactness.diverged((1, 2, 3, 4), (1, 2, 3, 4)) == 0
    assert exactness.diverged((1, 2, 3, 4), (1, 9, 3, 4)) == 3
    assert exactness.diverged((1, 2), (1, 2, 3)) == 1


@pytest.mark.parametrize("is_helped", [False, True])
def test_help_of_one_kind_is_given_wherever_it_can_be(is_helped: bool) -> None:
    alone = np.ones(1)
    load = Load(alone, alone, 1.0, 1.0, 0.01, 0.0, is_helped=is_helped)
    able = Helper(ahead=(Drafting(0.001, 0.5),), can_copy=True)
    for kind in (Help.DRAFT, Help.COPY):
        assert (stragglers.choose(kind, load, able).kind is kind) is not is_helped
        assert stragglers.choose(kind, load, Helper()).kind is Help.NOTHING
    assert stragglers.choose(Help.NOTHING, load, able).kind is Help.NOTHING
