"""Properties of planning/coupling.py: what it costs to find out which mode is faster, and that it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning.coupling import (
    FIRST_STEPS,
    MOST_AWAY_STEPS,
    MOST_READING_STEPS,
    PUT_OFF_STEPS,
    SETTLING_STEPS,
    TRIAL_STEPS,
    Coupling,
    Rate,
    Size,
)
from paceline.types import StepObservation

World = Callable[[int, bool, int], tuple[int, float]]
"""Tokens and seconds of a step, by its number, mode and batch."""


def step_of(batch: int, tokens: int, seconds: float, **more: object) -> StepObservation:
    fields = {
        "num_requests": batch,
        "num_draft_tokens": 0,
        "num_accepted_tokens": tokens - batch,
        "num_prefill_tokens": 0,
        "step_s": seconds,
        **more,
    }
    return StepObservation(**fields)  # type: ignore[arg-type]


def run(
    world: World, batches: Sequence[int], coupling: Coupling | None = None, reading: int = 0
) -> tuple[Coupling, list[bool]]:
    """Where an engine stands in the end, and how each step drafted.

    reading: steps ahead, after a change, until the worker drafts.
    """
    modes, coupling = [], coupling or Coupling()
    for number, batch in enumerate(batches):
        modes.append(coupling.is_ahead)
        ahead_tokens = (1,) if modes[-1] and all(modes[-1 - reading :]) else ()
        step = step_of(batch, *world(number, modes[-1], batch), ahead_tokens=ahead_tokens)
        coupling.after_step(step)
    return coupling, modes


def steady(ahead: float, seed: int = 0, spread: float = 0.5) -> World:
    """`ahead` times as many tokens per second ahead as coupled, every step with a noise of its own."""
    rng = np.random.default_rng(seed)

    def world(number: int, is_ahead: bool, batch: int) -> tuple[int, float]:
        tokens = batch + int(rng.binomial(8 * batch, spread))
        return tokens, 0.01 * tokens / (1.0 + 8 * spread) / (ahead if is_ahead else 1.0) * rng.uniform(
            0.5, 1.5
        )

    return world


@given(st.floats(0.3, 3.0), st.integers(0, 1000), st.sampled_from([1, 3, 16, 128]))
@settings(max_examples=40)
def test_the_better_mode_has_nearly_all_steps(ahead: float, seed: int, batch: int) -> None:
    count = 6000
    _, modes = run(steady(ahead, seed), [batch] * count)
    share = np.mean(modes[count // 6 :])
    loss = max(ahead, 1 / ahead) - 1.0
    wrong = share if ahead < 1.0 else 1.0 - share
    # what the wrong steps cost: trials are paid, near ties may go either way
    assert wrong * loss / (1.0 + loss) < 0.03
    if loss > 0.25:
        assert wrong < 0.08


def test_a_change_of_the_machine_is_noticed() -> None:
    before, after = steady(0.7, 1), steady(1.5, 2)
    _, modes = run(lambda at, *mode: (before if at < 3000 else after)(at, *mode), [4] * 9000)
    assert np.mean(modes[1000:3000]) < 0.1
    assert np.mean(modes[-3000:]) > 0.9


def test_each_size_has_its_home() -> None:
    single, many = steady(1.5, 3), steady(0.6, 4)
    batches = ([1] * 400 + [16] * 400) * 6
    coupling, modes = run(
        lambda at, ahead, batch: (single if batch == 1 else many)(at, ahead, batch), batches
    )
    late = np.array(modes).reshape(-1, 400)[-4:]
    assert late[0::2].mean() > 0.9
    assert late[1::2].mean() < 0.1
    assert [coupling.sizes[at].is_ahead for at in (0, 4)] == [True, False]


@given(st.lists(st.integers(1, 20), min_size=50, max_size=100), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=40)
def test_sizes_that_do_not_last_cost_little(sizes: list[int], length: int, seed: int) -> None:
    """Ahead is half as fast. Of each size's steps few are on trial, or settle behind it, however it comes and goes."""
    batches = [size for size in sizes * (6000 // (len(sizes) * length) + 1) for _ in range(length)]
    _, modes = run(steady(0.5, seed), batches)
    used = {size.bit_length() for size in sizes}
    first = FIRST_STEPS + 3 * (SETTLING_STEPS + TRIAL_STEPS) * len(used)
    assert sum(modes) < first + 0.06 * len(batches)


def test_a_trial_far_behind_ends_early() -> None:
    coupling, modes = run(steady(0.3, 5), [2] * 400)
    tried = sum(modes)
    assert 0 < tried < FIRST_STEPS + SETTLING_STEPS + 2 * (TRIAL_STEPS // 2 + 1)
    assert coupling.size.until_trial > 0


def test_an_interrupted_trial_goes_on_later() -> None:
    begins = FIRST_STEPS + TRIAL_STEPS
    batches = [2] * (begins + 1 + FIRST_STEPS + 10) + [9] * 3 + [2] * PUT_OFF_STEPS
    coupling, modes = run(steady(0.9, 6), batches)
    tried = 1 + FIRST_STEPS + 10
    assert modes == [False] * begins + [True] * (tried + 1) + [False] * (PUT_OFF_STEPS + 2)
    size = coupling.sizes[1]
    assert size.is_ahead is None
    assert (size.tried, size.interruptions) == (10, 1)
    coupling, modes = run(steady(0.9, 6), [2] * 2 * begins, coupling)
    assert coupling.sizes[1].is_ahead is False
    assert sum(modes) < SETTLING_STEPS + TRIAL_STEPS


def test_a_trial_goes_on_in_a_size_that_is_due_for_one() -> None:
    known = [2] * (FIRST_STEPS + TRIAL_STEPS - 2) + [5] * TRIAL_STEPS  # at home
    batches = [*known, *[5] * (1 + FIRST_STEPS + 10), *[2] * 30, *[5] * TRIAL_STEPS, *[2] * 11]
    coupling, modes = run(steady(1.3, 6), batches)
    assert modes == [False] * len(known) + [True] * (len(batches) - len(known)), (
        "no size sends the engine back"
    )
    assert coupling.sizes[2].is_ahead
    assert coupling.sizes[1].tried == 30
    assert coupling.sizes[1].is_ahead is None
    coupling, modes = run(steady(1.3, 6), [2] * (TRIAL_STEPS - 30 + 2 * SETTLING_STEPS), coupling)
    assert not all(modes), (
        "others' home is its own for now, so the other mode is tried: what was found counts"
    )
    assert coupling.sizes[1].is_ahead


def shared(ahead: float, exponent: float, seed: int) -> World:
    """As `steady`, but a step of n requests takes about n ** (1 - exponent): 1 where it is bound by memory."""
    rng = np.random.default_rng(seed)

    def world(number: int, is_ahead: bool, batch: int) -> tuple[int, float]:
        tokens = batch + int(rng.binomial(4 * batch, 0.5))
        seconds = 0.01 * batch ** (1.0 - exponent) / (ahead if is_ahead else 1.0)
        return tokens, seconds * rng.uniform(0.9, 1.1)

    return world


@given(
    st.sampled_from([0.8, 1.25]),
    st.floats(0.0, 1.0),
    st.sampled_from([1, -1]),
    st.integers(10, 96),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_a_batch_that_shrinks_or_grows_does_not_decide(
    ahead: float, exponent: float, direction: int, length: int, seed: int
) -> None:
    """All rollouts have the same tail, of one size: what is compared are steps of the same number of requests."""
    rollout = [batch for batch in (7, 6, 5, 4)[::direction] for _ in range(length)]
    _, modes = run(shared(ahead, exponent, seed), rollout * (6000 // len(rollout)))
    assert np.mean(modes[len(modes) // 2 :]) == pytest.approx(float(ahead > 1.0), abs=0.1)


@given(st.integers(3, 40), st.integers(0, 99))
@settings(max_examples=40)
def test_two_homes_at_a_border_do_not_take_turns_for_ever(length: int, seed: int) -> None:
    """A batch goes back and forth between two sizes of other homes: few changes of mode where neither lasts."""
    world = steady(0.6, seed)
    begin, _ = run(world, [7] * 1000 + [8] * 1000)
    begin.sizes[3].is_ahead, begin.sizes[3].until_trial = True, 0  # was wrong, or has become so
    coupling, modes = run(world, ([7] * length + [8] * length) * (6000 // length), begin)
    assert not coupling.sizes[3].is_ahead or length < SETTLING_STEPS
    assert np.mean(modes[len(modes) // 2 :]) < 0.2
    assert sum(np.diff(modes)) < 0.1 * len(modes)


@pytest.mark.parametrize("ahead", [0.77, 1.3])
def test_moments_in_which_the_machine_stands_still_decide_nothing(ahead: float) -> None:
    shares = []
    for seed in range(20):
        world, rng = steady(ahead, seed), np.random.default_rng(seed)

        def halting(*of: int, world: World = world, rng: np.random.Generator = rng) -> tuple[int, float]:
            tokens, seconds = world(*of)
            return tokens, seconds + 0.5 * (rng.random() < 1 / 200)

        shares.append(np.mean(run(halting, [4] * 4000)[1]))
    assert np.mean(shares) == pytest.approx(float(ahead > 1.0), abs=0.1)


@pytest.mark.parametrize("reading", [0, 24, 60, 110])
def test_what_the_worker_has_to_read_first_is_not_its_speed(reading: int) -> None:
    """Until it drafts a step decodes one token of each request, on fewer cores."""
    steps_ahead, fast = 0, steady(1.3, 3)

    def world(number: int, is_ahead: bool, batch: int) -> tuple[int, float]:
        nonlocal steps_ahead
        steps_ahead = steps_ahead + 1 if is_ahead else 0
        return (batch, 0.01) if 0 < steps_ahead <= reading else fast(number, is_ahead, batch)

    _, modes = run(world, [4] * 2000, reading=reading)
    assert np.mean(modes[1000:]) > 0.85


@dataclass
class Rollouts:
    """Rollouts, one token of each response a step; what the worker rests through it has to read."""

    ahead: Callable[[int], float]
    """As `steady`, by batch."""
    read_s: float
    """What the worker takes to read a token; steps take twice as long meanwhile."""
    batches: Sequence[int]
    """Of a rollout's steps."""
    between: Callable[[Coupling], None] = lambda _: None
    """What happens before each rollout."""
    step_s: float = 0.05
    prompt: int = 50
    begins: list[int] = field(default_factory=list)
    """Places in the rollouts where ahead began."""
    coupling: Coupling = field(default_factory=Coupling)
    _unread_s: float = 0.0
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, count: int) -> float:
        """Seconds of so many rollouts over those in the better modes."""
        coupling, seconds = self.coupling, 0.0
        best_s = count * sum(self.step_s / max(self.ahead(batch), 1.0) for batch in self.batches)
        for _ in range(count):
            prompts = self.batches[0] * self.prompt
            self.between(coupling)
            coupling.after_step(step_of(0, 0, self.step_s, num_prefill_tokens=prompts))
            self._unread_s = prompts * self.read_s
            for place, batch in enumerate(self.batches):
                was_ahead = coupling.is_ahead
                step = self._step(was_ahead, batch, batch * (self.prompt + place))
                coupling.after_step(step)
                seconds += step.step_s + step.draft_s
                if coupling.is_ahead and not was_ahead:
                    self.begins.append(place)
        return seconds / best_s

    def _step(self, is_ahead: bool, batch: int, context: int) -> StepObservation:
        self._unread_s = min(self._unread_s, context * self.read_s)
        is_reading = is_ahead and self._unread_s > 0.0
        seconds = self.step_s * (2.0 if is_reading else 1.0 / self.ahead(batch) if is_ahead else 1.0)
        seconds *= self._rng.uniform(0.9, 1.1)
        self._unread_s += -seconds if is_reading else 0.0 if is_ahead else batch * self.read_s
        draft_s = 0.0 if is_ahead else min(batch * self.read_s, 0.5 * seconds)
        return step_of(
            batch,
            batch,
            seconds - draft_s,
            num_context_tokens=context,
            ahead_tokens=(batch,) if is_ahead and not is_reading else (),
            num_draft_tokens=batch if draft_s else 0,
            draft_s=draft_s,
        )


@pytest.mark.parametrize("ahead", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("read_s", [1e-4, 1e-3])
@pytest.mark.parametrize(("batch", "length"), [(16, 300), (4, 2000), (64, 600)])
def test_reading_costs_little_where_ahead_is_slower(
    ahead: float, read_s: float, batch: int, length: int
) -> None:
    """Even where all that a rollout has would take longer to read than a few trials."""
    rollouts = Rollouts(lambda _: ahead, read_s, [batch] * length)
    assert rollouts.run(12) < 1.06
    assert rollouts.begins
    if read_s == 1e-3:
        assert max(rollouts.begins) < length // 5, "trials begin where there is little to be read"


@pytest.mark.parametrize("read_s", [1e-4, 1e-3])
def test_reading_is_worth_it_where_ahead_is_faster(read_s: float) -> None:
    assert Rollouts(lambda _: 1.3, read_s, [16] * 300).run(12) < 1.12  # 1.3 without the worker


def test_a_tail_that_is_drafted_ahead_does_not_keep_larger_sizes_from_trials() -> None:
    """The worker reads in each rollout, if only to go home to ahead: that is no trial of the large size."""
    rollouts = Rollouts(lambda batch: 1.5 if batch < 4 else 0.8, 5e-4, [64] * 200 + [2] * 100)
    rollouts.run(40)
    small, large = rollouts.coupling.sizes[1], rollouts.coupling.sizes[6]
    assert (small.is_ahead, large.is_ahead) == (True, False)
    assert large.confirmations >= 1
    assert sum(place >= 200 for place in rollouts.begins) >= 25


def test_an_engine_that_drafts_in_every_other_rollout_finds_out_as_well() -> None:
    """`begin_again` keeps the time since the last trial."""
    rollouts = Rollouts(lambda _: 0.8, 1e-4, [16] * 120, between=Coupling.begin_again, prompt=100)
    rollouts.run(20)
    assert rollouts.begins


def reading(num_steps: int, drafts_after: int | None = None, seconds: float = 0.06) -> Coupling:
    """After so many steps ahead of a worker that has to read 4,000 tokens, at a home of 100 tokens/s."""
    known = [Size(is_ahead=False, until_trial=0 if at == 2 else 999, since_s=1e9) for at in range(12)]
    home = Rate(100.0, 400.0, 4.0)
    coupling = Coupling(settling=0, at=2, lasted=99, unread=9999, priced=4000.0, priced_s=4.0, sizes=known)
    coupling.rates = [(home, Rate())] * len(coupling.rates)
    coupling.after_step(step_of(4, 4, 0.04, num_context_tokens=4000))
    assert coupling.is_ahead
    for number in range(num_steps):
        has_drafted = drafts_after is not None and number >= drafts_after
        tokens = (4,) if has_drafted else ()
        coupling.after_step(step_of(4, 4, seconds, num_context_tokens=4000, ahead_tokens=tokens))
    return coupling


def test_what_reading_costs_is_learned() -> None:
    """100 steps lose 0.02 s each: half a millisecond for each of 4,000 tokens."""
    coupling = reading(101, drafts_after=100)
    assert coupling.token_s == pytest.approx((0.5 * 4.0 + 100 * 0.02) / (0.5 * 4000 + 4000), rel=0.01)
    assert (coupling.unread, coupling.read, coupling.lost_s, coupling.reading) == (0, 0, 0.0, 0)
    still = reading(101, drafts_after=100, seconds=60.0)
    assert still.token_s == pytest.approx((0.5 * 4.0 + 100 * 0.08) / 6000, rel=0.02), (
        "a machine that stands still"
    )


def test_reading_that_outlasts_its_steps_is_priced_all_the_same() -> None:
    coupling = reading(MOST_READING_STEPS + 10, drafts_after=MOST_READING_STEPS + 5)
    assert (coupling.unread, coupling.read, coupling.lost_s) == (0, 0, 0.0)
    assert coupling.token_s == 1e-3, "it was not measured to its end"
    lost = reading(MOST_READING_STEPS + SETTLING_STEPS + TRIAL_STEPS, seconds=0.2)
    assert not lost.is_ahead
    assert (lost.read, lost.lost_s) == (0, 0.0)
    assert lost.unread > 4000, "it has not read"
    assert lost.token_s > 2e-3, "it is known to cost no less"


def test_reading_that_was_interrupted_costs_no_less_than_before() -> None:
    coupling = reading(10)
    coupling.after_step(step_of(64, 64, 0.1, num_context_tokens=4000))
    assert not coupling.is_ahead
    assert coupling.token_s == 1e-3
    short, long = reading(10), reading(100, seconds=0.2)
    short.begin_again()
    long.begin_again()
    assert short.token_s == 1e-3
    assert long.token_s > 1.5e-3


def test_a_worker_that_comes_anew_has_to_read_everything() -> None:
    coupling = Coupling.without_worker(reading(10).at)
    assert coupling.unread > 1 << 30
    assert coupling.at == 2


def test_a_trial_ends_where_nothing_can_be_told() -> None:
    coupling, _ = run(steady(1.3, 4), [4] * (FIRST_STEPS + TRIAL_STEPS + 5))
    assert coupling.is_trial
    for _ in range(MOST_AWAY_STEPS):
        coupling.after_step(step_of(4, 8, 0.01, num_prefill_tokens=3))
    assert not coupling.is_trial
    assert not coupling.is_ahead


@given(st.integers(0, 50), st.sampled_from([0.6, 1.6]))
@settings(max_examples=40)
def test_sizes_that_come_and_go_are_found_out(seed: int, ahead: float) -> None:
    """A rollout's tails: batches of four, of which one after the other ends."""
    _, modes = run(steady(ahead, seed), ([4] * 25 + [3] * 10 + [2] * 10 + [1] * 15) * 60)
    assert np.mean(modes[len(modes) // 2 :]) == pytest.approx(float(ahead > 1.0), abs=0.15)


def test_prefill_and_odd_steps_tell_nothing() -> None:
    for odd in ({"num_prefill_tokens": 5}, {"is_typical": False}):
        told = Coupling()
        told.after_step(step_of(2, 4, 0.1, **odd))
        assert told == Coupling(unread=4 + odd.get("num_prefill_tokens", 0))
    told = Coupling()
    told.after_step(step_of(0, 0, 0.1))
    assert told == Coupling()


def test_drafting_by_the_engine_counts_as_time() -> None:
    world = steady(1.3, 7)
    coupling = Coupling()
    for number in range(3000):
        is_ahead = coupling.is_ahead
        tokens, seconds = world(number, is_ahead, 1)
        draft_s = 0.0 if is_ahead else 0.4 * seconds
        step = step_of(1, tokens, seconds - draft_s, draft_s=draft_s, ahead_tokens=(1,) if is_ahead else ())
        coupling.after_step(step)
    assert coupling.sizes[0].is_ahead


def test_a_slow_beginning_is_not_believed_for_long() -> None:
    """The machine is busy until the first trial begins, which then looks good."""
    later = steady(0.6, 10)

    def world(number: int, is_ahead: bool, batch: int) -> tuple[int, float]:
        tokens, seconds = later(number, is_ahead, batch)
        return tokens, seconds * (3.0 if number < FIRST_STEPS + TRIAL_STEPS else 1.0)

    _, modes = run(world, [1] * 2000)
    assert modes[2 * (FIRST_STEPS + TRIAL_STEPS) + SETTLING_STEPS], "it is believed at first"
    assert np.mean(modes[:600]) < 0.75
    assert np.mean(modes[600:]) < 0.2


@pytest.mark.parametrize("is_gone", [True, False])
def test_without_a_worker_the_engine_drafts(is_gone: bool) -> None:
    coupling, _ = run(steady(2.0, 8), [1] * 1000)
    assert coupling.is_ahead
    if is_gone:
        coupling = Coupling.without_worker(coupling.at)
    else:
        coupling.begin_again()
    assert not coupling.is_ahead
    assert coupling.settling == (FIRST_STEPS if is_gone else SETTLING_STEPS)
    assert (coupling.sizes[0].is_ahead is None) == is_gone
    assert run(steady(2.0, 9), [1] * 200, coupling)[0].is_ahead


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_a_rollouts_short_contexts_speak_for_no_mode(batch: int) -> None:
    """What is tried where a rollout begins is faster than the last one's end, with long contexts: not by itself."""

    coupling = Coupling()

    def rollout(steps: int) -> None:
        for place in range(steps):
            context = batch * (50 + place)
            seconds = (0.03 + 8e-6 * context * 8 / batch) / (0.6 if coupling.is_ahead else 1.0)
            told = {"ahead_tokens": (batch,) if coupling.is_ahead else ()}
            coupling.after_step(step_of(batch, batch, seconds, num_context_tokens=context, **told))

    rollout(1000)
    assert coupling.size.is_ahead is False
    for size in coupling.sizes:
        size.until_trial = 0
    rollout(150)
    assert coupling.size.confirmations > 0, "it was tried"
    assert coupling.size.is_ahead is False
