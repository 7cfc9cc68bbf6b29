"""The stragglers of a race lie on one worker, and a variant's row is compared with no help of the same repetition."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from paceline.planning.dispatch import Dispatcher, DispatchSettings
from paceline.types import RolloutRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import racing


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("stragglers", [1, 2, 4])
def test_dispatch_puts_all_stragglers_on_one_worker(stragglers: int, block_tokens: int) -> None:
    found = [
        RolloutRequest((1, 2, 3), 512, key=key, group=key // 4, sample=key % 4) for key in range(stragglers)
    ]
    requests = racing.make_requests(found, Namespace(max_tokens=512), block_tokens, 0)
    assert len({request.group for request in requests}) == len(requests)
    dispatcher = Dispatcher(DispatchSettings("even", 8192, block_tokens))
    for name in ("w0", "w1"):
        dispatcher.worker_up(name, 51_200 // block_tokens, 128)
    for number, request in enumerate(requests):
        dispatcher.submit(number, 1, len(request.prompt), request.max_tokens)
    places = {}
    while (assignment := dispatcher.next_assignment()) is not None:
        places[assignment.group] = assignment.worker
    long = [number for number, request in enumerate(requests) if request.max_tokens == 512]
    assert len(long) == stragglers
    assert {places[number] for number in long} == {"w0"}
    assert {places[number] for number in places if number not in long} == {"w1"}


def result(tail_s: float, **changes: Any) -> dict[str, Any]:
    found = {"wall_s": tail_s + 1, "tail_s": tail_s, "helps": {}, "races_won": 0, "model_share": 0.5}
    found |= {"draft_ms": 2.0, "verify_ms": 20.0, "d_over_v": 0.1}
    return {**found, "leads": 0, "adopted_tokens": 0, "wasted_tokens": 0, "ids": [(1, 2)], **changes}


def test_rows_and_bars() -> None:
    found = {
        "none": [result(4.0), result(6.0), result(5.0)],
        "auto": [result(2.0, helps={"draft": 1}), result(4.0, helps={"draft": 2}), result(5.0)],
    }
    row = racing.summarise("auto", 1, 0.1, found)
    assert (row["tail_ratio"], row["ratio_range"], row["helps"]) == (1.5, [1.0, 2.0], "3 draft")
    assert row["equal"]
    [bar] = racing.check_rows([racing.summarise("none", 1, 0.1, found), row])
    assert (bar["needed"], bar["met"]) == (racing.BAR, True)
    found["auto"][0]["ids"] = [(1, 3)]
    [bar] = racing.check_rows([racing.summarise("auto", 1, 0.1, found)])
    assert not bar["met"]


@pytest.mark.parametrize("kind", racing.HELPS)
def test_no_kind_of_help_may_make_a_tail_longer(kind: str) -> None:
    found = {"none": [result(4.0)], kind: [result(4.2)], racing.SECOND_THREAD: [result(9.0)]}
    rows = [racing.summarise(case, 2, 0.1, found) for case in found]
    [bar] = racing.check_rows(rows)
    assert (bar["needed"], bar["met"]) == (racing.LEAST, False)
