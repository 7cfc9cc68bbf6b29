"""Help for stragglers against brute force: every worker, every kind, every window and number of responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.help import (
    MAX_WINDOW,
    MIN_GAIN,
    MIN_GAIN_S,
    Drafting,
    Ends,
    Help,
    HelpChoice,
    Helper,
    Load,
    decide_help,
)
from paceline.planning.window import Mode, StepTimes, coupled_tokens, tokens_per_s

draftings = st.builds(
    Drafting, st.floats(1e-5, 0.05), st.floats(0.0, 0.99), st.integers(0, 2), st.floats(0.0, 0.01)
)
helpers = st.builds(
    Helper,
    ahead=st.lists(draftings, max_size=3).map(tuple),
    inside=st.none() | draftings,
    can_copy=st.booleans(),
    can_take=st.booleans(),
    switch_s=st.floats(0.0, 5.0),
    load_token_s=st.floats(0.0, 0.01),
    slowness=st.floats(0.3, 3.0),
)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    steps = sorted(draw(st.lists(st.floats(1.0, 5000.0), min_size=1, max_size=7)), reverse=True)
    tokens_per_step = draw(st.floats(1.0, 4.0))
    return Load(
        np.array(steps),
        np.array(draw(st.lists(st.floats(1.0, 9000.0), min_size=len(steps), max_size=len(steps)))),
        tokens_per_step,
        tokens_per_step + draw(st.floats(0.0, 6.0)),
        draw(st.floats(1e-3, 0.05)),
        draw(st.floats(1e-6, 0.01)),
        draw(st.floats(0.0, 0.01)),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )


def run_to_end(steps: list[float], response_s: float, base_s: float) -> float:
    """Seconds until all have ended, step counts shrinking the batch one response after the other."""
    elapsed_s, done = 0.0, 0.0
    for at, count in enumerate(sorted(steps)):
        elapsed_s += (count - done) * (base_s + response_s * (len(steps) - at))
        done = count
    return elapsed_s


def every_option(load: Load, helper: Helper) -> list[tuple[float, Help]]:
    steps, each_s, base_s = load.steps.tolist(), load.token_s * load.step_tokens, load.base_s + load.inside_s
    found: list[tuple[float, Help]] = []
    for ahead in helper.ahead if not load.is_helped else ():
        mean_batch, is_other = sum(steps) / steps[0], ahead.drafter != load.drafter
        for w in range(1, MAX_WINDOW + 1):
            verify_s = (
                load.base_s + load.token_s * mean_batch * (w + 1) + (load.inside_s if is_other else 0.0)
            )
            draft_s = ahead.draft_s + (mean_batch - 1.0) * ahead.more_s
            times = StepTimes(1, draft_s, np.array(verify_s))
            rate = float(tokens_per_s(ahead.acceptance, w, times, Mode.DECOUPLED))
            if not is_other and load.inside_s:  # promised as much too much as what is measured would be
                q = load.step_tokens - 1.0
                rate *= min(load.tokens_per_step / coupled_tokens(ahead.acceptance, q), 1.0)
            if is_other:  # what the worker's own drafter brings is there too
                rate = max(rate, load.tokens_per_step / max(w * draft_s, verify_s))
            found.append((helper.switch_s + steps[0] * load.tokens_per_step / rate, Help.DRAFT))
    if helper.can_take:
        for k in range(1, len(steps)):
            moved_s = helper.switch_s + helper.load_token_s * float(load.context_tokens[:k].sum())
            there_s = moved_s + helper.slowness * run_to_end(steps[:k], each_s, base_s)
            found.append((max(there_s, run_to_end(steps[k:], each_s, base_s)), Help.TAKE))
    if helper.can_copy and not load.is_helped:
        moved_s = helper.switch_s + helper.load_token_s * float(load.context_tokens[0])
        rest_s = run_to_end([*steps[1:2], *steps[1:]], each_s, base_s)
        alone_s = [run_to_end(steps[:1], each_s, base_s)]
        for w in range(MAX_WINDOW + 1) if helper.inside is not None else ():
            times = StepTimes(1, helper.inside.draft_s, np.array(load.base_s + load.token_s * (w + 1)))
            rate = float(tokens_per_s(helper.inside.acceptance, w, times, Mode.COUPLED))
            alone_s.append(steps[0] * load.tokens_per_step / rate)
        found.append((max(moved_s + helper.slowness * min(alone_s), rest_s), Help.COPY))
    return found


@given(loads())
def test_the_predicted_end_is_that_of_a_shrinking_batch(load: Load) -> None:
    each_s = load.token_s * load.step_tokens
    assert load.end_s == pytest.approx(run_to_end(load.steps.tolist(), each_s, load.base_s + load.inside_s))


@given(loads(), helpers)
def test_the_help_is_the_best_of_all_and_only_where_it_helps(load: Load, helper: Helper) -> None:
    choice = decide_help(load, helper)
    best_s, kind = min(every_option(load, helper), default=(np.inf, Help.NOTHING))
    if choice.kind is Help.NOTHING:
        assert choice == HelpChoice(Help.NOTHING, load.end_s)
        assert best_s >= (load.end_s - max(MIN_GAIN * load.end_s, MIN_GAIN_S)) * (1.0 - 1e-9)
    else:
        assert choice.end_s == pytest.approx(best_s)
        assert choice.end_s <= load.end_s - max(MIN_GAIN * load.end_s, MIN_GAIN_S)
        assert choice.kind is kind or any(
            end_s == pytest.approx(best_s) and other is choice.kind
            for end_s, other in every_option(load, helper)
        )
        assert (choice.kind is Help.DRAFT) == (choice.window > 0)
        assert (choice.kind is Help.TAKE) == (0 < choice.num_taken < len(load.steps))


@given(st.lists(loads(), min_size=1, max_size=5), helpers)
def test_nobody_else_could_be_helped_to_an_earlier_end_of_the_rollout(
    busy: list[Load], helper: Helper
) -> None:
    ends = Ends()
    for at, load in enumerate(busy):
        ends.put(f"w{at}", load.end_s)
    latest = ends.latest()
    assert latest is not None
    helped = int(latest[1:])
    before_s = [load.end_s for load in busy]

    def rollout_s(at: int, end_s: float) -> float:
        return max(end_s, *(other for place, other in enumerate(before_s) if place != at), 0.0)

    after_s = rollout_s(helped, decide_help(busy[helped], helper).end_s)
    anyone_s = [
        rollout_s(at, end_s) for at, load in enumerate(busy) for end_s, _ in every_option(load, helper)
    ]
    best_s = min(anyone_s, default=max(before_s))
    assert after_s <= max(best_s / (1.0 - MIN_GAIN), best_s + MIN_GAIN_S) * (1.0 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 9)), max_size=400))
def test_the_latest_is_always_at_hand(events: list[tuple[int, int | None]]) -> None:
    ends, known = Ends(), dict[str, float]()
    for number, end_s in events:
        worker = f"w{number}"
        if end_s is None:
            ends.remove(worker)
            known.pop(worker, None)
        else:
            ends.put(worker, float(end_s))
            known[worker] = float(end_s)
        wanted = min(known, key=lambda name: (-known[name], name), default=None)
        assert ends.latest() == wanted
        assert len(ends._heap) <= 2 * len(known) + 70 or not known


def test_what_helps_depends_on_what_is_left() -> None:
    ahead, inside = Drafting(0.001, 0.8), Drafting(0.0001, 0.8)
    alone = Load(np.array([1000.0]), np.array([500.0]), 1.0, 1.0, 0.01, 0.0001)
    many = Load(np.full(32, 1000.0), np.full(32, 500.0), 1.0, 1.0, 0.01, 0.001)
    everything = Helper((ahead,), can_copy=True, can_take=True, switch_s=0.1, load_token_s=1e-4)
    assert decide_help(alone, everything).kind is Help.DRAFT
    assert decide_help(many, everything).kind is Help.TAKE
    assert decide_help(alone, Helper(inside=inside, can_copy=True, switch_s=0.1)).kind is Help.COPY
    assert decide_help(alone, Helper(can_copy=True)).kind is Help.NOTHING, "it would be as slow there"
    assert decide_help(alone, Helper(can_copy=True, slowness=0.5)).kind is Help.COPY
    assert decide_help(alone, Helper((ahead,), switch_s=20.0)).kind is Help.NOTHING
    assert decide_help(alone, Helper()).kind is Help.NOTHING
    better, worse = Drafting(0.002, 0.95, 1), Drafting(0.004, 0.6, 2)
    assert decide_help(alone, Helper((ahead, worse, better))).drafter == 1, "dearer, and more often right"
    assert decide_help(alone, Helper((ahead, worse))).drafter == 0
    grows = Drafting(0.001, 0.95, 1, more_s=0.05)
    assert decide_help(alone, Helper((ahead, grows))).drafter == 1, "it is dear for many only"
    eight = replace(alone, steps=np.full(8, 1000.0), context_tokens=np.full(8, 500.0))
    assert decide_help(eight, Helper((ahead, grows))).drafter == 0
    almost = Load(np.array([3.0]), np.array([500.0]), 1.0, 1.0, 0.01, 0.0001)
    assert decide_help(almost, everything).kind is Help.NOTHING, "it ends before anyone could help"


@pytest.mark.parametrize(("draft_s", "kind"), [(0.002, Help.NOTHING), (0.0084, Help.DRAFT)])
def test_a_drafter_that_is_cheap_beside_the_target_stays_inside(draft_s: float, kind: Help) -> None:
    """A twentieth is promised of the first, which sharing memory takes back, a quarter of the second."""
    window = np.arange(1, MAX_WINDOW + 1)
    tokens = coupled_tokens(0.96, window)
    seconds = 0.058 + 0.008 * (window + 1) + draft_s * window
    best = int((tokens / seconds).argmax())
    load = Load(
        steps=np.array([150.0]),
        context_tokens=np.array([500.0]),
        tokens_per_step=float(tokens[best]),
        step_tokens=2.0 + best,
        base_s=0.058,
        token_s=0.008,
        inside_s=draft_s * (1 + best),
    )
    choice = decide_help(load, Helper(ahead=(Drafting(draft_s, 0.96),), switch_s=0.1))
    assert choice.kind is kind
