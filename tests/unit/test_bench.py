"""`paceline bench` without engines: methods, the tail, every token compared."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path

import pytest

from paceline.commands.bench.command import choose_methods, compare
from paceline.commands.bench.contender import Contender, Measurement, summarise
from paceline.errors import EngineError
from paceline.types import Response, RolloutRequest


def test_methods_bring_their_reference() -> None:
    assert choose_methods(None, None) == ["plain", "none", "suffix"]
    assert choose_methods(None, Path("d")) == ["plain", "none", "suffix", "suffix+model"]
    assert choose_methods("lookup", None) == ["none", "lookup"]
    assert choose_methods("plain, lookup,lookup", None) == ["plain", "none", "lookup"]
    assert choose_methods("plain", None) == ["plain"]


def response(tokens: tuple[int, ...]) -> Response:
    return Response(RolloutRequest((1,), 9), tokens, (), "stop", 0, 0, 0, 4, 2, len(tokens))


def test_the_tail_begins_when_nine_in_ten_have_finished() -> None:
    result = summarise([response((1, 2))] * 10, [float(t) for t in (1, 2, 3, 4, 5, 6, 7, 8, 9, 20)])
    assert (result.wall_s, result.tail_s) == (20.0, 11.0)
    assert (result.num_tokens, result.num_draft_tokens, result.num_accepted_tokens, result.num_steps) == (
        20,
        40,
        20,
        20,
    )
    assert summarise([response((1,))], [3.0]).tail_s == 0.0


def measurement(wall_s: float, *tokens: tuple[int, ...]) -> Measurement:
    return Measurement(wall_s, 0.5, tokens, 10, 5, 4, (wall_s / 2, wall_s))


def test_every_token_is_compared_with_the_reference() -> None:
    measured = {
        "plain": [measurement(2.0, (9, 9), (9, 9))],
        "none": [measurement(2.0, (1, 2, 3), (4,))],
        "suffix": [measurement(1.0, (1, 2, 3), (4,))],
        "lookup": [measurement(1.0, (1, 5, 3, 8), (4,))],
    }
    rows = {name: compare(name, measured) for name in measured}
    assert rows["suffix"]["compared_tokens"] == 4
    assert rows["suffix"]["diverged_tokens"] == 0
    assert rows["suffix"]["ratio"] == 2.0
    assert rows["lookup"]["diverged_tokens"] == 2
    assert rows["lookup"]["diverged_responses"] == 1
    assert rows["plain"]["compared_tokens"] == rows["none"]["compared_tokens"] == 0
    assert rows["suffix"]["acceptance_length"] == 1.0
    assert rows["suffix"]["acceptance_rate"] == 0.5


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_engine_that_dies_is_named_whether_it_rests_or_works(tmp_path: Path, is_busy: bool) -> None:
    log = tmp_path / "log"
    log.write_text("out of memory\n")
    ours, theirs = multiprocessing.Pipe()
    dead = multiprocessing.get_context("spawn").Process(target=os._exit, args=(9,))
    dead.start()
    dead.join()
    contender = Contender.__new__(Contender)
    contender.name, contender._pipe, contender._process, contender._log = "suffix", ours, dead, log
    if is_busy:  # it takes the requests with it: the pipe is reset, not at its end
        ours.send(())
    theirs.close()
    ask = contender.wait_until_ready if is_busy else partial(contender.measure, [RolloutRequest((1,), 4)])
    with pytest.raises(EngineError, match=r"(?s)method 'suffix' died \(exit code 9\).*out of memory"):
        ask()
