"""Compositions: the best of all ways to use the devices, and what may never be chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.planning.composition import Candidate, Devices, best_of, describe, rank_options
from paceline.planning.latency_profile import AffineLatency, RequestLatency, verify_s
from paceline.planning.placement import Cluster, place
from paceline.planning.window import Mode, best_window, profiled_times

VERIFY = {4: RequestLatency(AffineLatency(0.012, 3e-5), 5e-5)}
DEVICES = Devices(256, 4096, VERIFY)
SMALL = Candidate("small", 0.87, AffineLatency(0.0075, 1e-5), {1: AffineLatency(0.002, 1e-5)})
TREE = Candidate("tree", 0.41, AffineLatency(0.0, 5e-6))


def test_options_are_those_of_window_and_placement() -> None:
    options = rank_options(DEVICES, [SMALL, TREE], 16)
    assert [one.tokens_per_s for one in options] == sorted((o.tokens_per_s for o in options), reverse=True)
    ahead = best_of(options, Mode.DECOUPLED)
    found = place(Cluster(256, 4096, SMALL.alone, VERIFY), 0.87, 16).best
    assert ahead is not None
    assert (ahead.window, ahead.num_groups, ahead.batch) == (found.window, found.num_groups, found.batch)
    assert ahead.tokens_per_s == found.tokens_per_s
    inside = next(one for one in options if one.mode is Mode.COUPLED and one.drafter == "small")
    assert SMALL.inside is not None
    best = best_window(0.87, profiled_times(SMALL.inside, VERIFY[4], 64, 16), Mode.COUPLED)
    assert (inside.window, inside.tokens_per_s) == (int(best.window), float(best.tokens_per_s))
    plain = best_of(options, None)
    assert plain is not None
    assert plain.tokens_per_s == pytest.approx(1.0 / float(verify_s(VERIFY[4], 64, 0)))


def test_large_batches_keep_all_devices_for_verifying() -> None:
    """The more requests, the less a drafter's devices are worth: they would verify as well."""
    flat = Devices(256, 64, {4: RequestLatency(AffineLatency(0.012, 1e-6), 1e-6)})
    steep = Devices(256, 65536, {4: RequestLatency(AffineLatency(0.012, 1e-4), 1e-4)})
    assert rank_options(flat, [SMALL, TREE], 16)[0].mode is Mode.DECOUPLED
    assert rank_options(steep, [replace(SMALL, acceptance=0.4), TREE], 16)[0].mode is not Mode.DECOUPLED


def test_who_cannot_draft_ahead_never_does() -> None:
    options = rank_options(DEVICES, [replace(SMALL, alone={}), TREE], 16)
    assert best_of(options, Mode.DECOUPLED) is None
    few = rank_options(Devices(4, 64, VERIFY), [SMALL], 16)
    assert best_of(few, Mode.DECOUPLED) is None


def test_a_drafter_larger_than_every_engine_drafts_inside_alone() -> None:
    large = replace(SMALL, alone={8: AffineLatency(0.002, 1e-5)})
    modes = {one.mode for one in rank_options(DEVICES, [large], 16)}
    assert modes == {None, Mode.COUPLED}


def test_no_drafter_is_plain_decoding() -> None:
    (only,) = rank_options(DEVICES, [], 16)
    assert (only.mode, only.drafter, only.num_groups, only.batch) == (None, "", 64, 64)
    assert describe([only]).startswith("no drafts; 64 engines of 4 GPUs, 64 requests each")


def test_the_line_names_what_lost() -> None:
    text = describe(rank_options(DEVICES, [SMALL, TREE], 16))
    assert "ahead" in text
    assert "in the engine" in text
    assert "plain" in text


def test_devices_without_an_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no engine of \[4\] GPUs fits 3"):
        rank_options(Devices(3, 8, VERIFY), [SMALL], 16)


@given(
    st.floats(0.0, 0.99),
    st.integers(1, 20_000),
    st.floats(0.0, 1e-3),
    st.floats(0.0, 0.02),
)
def test_nothing_beats_the_first(acceptance: float, requests: int, slope: float, base: float) -> None:
    devices = Devices(64, requests, {4: AffineLatency(0.01, slope)})
    one = Candidate("x", acceptance, AffineLatency(base, 0.0), {1: AffineLatency(base / 2, 0.0)})
    options = rank_options(devices, [one], 8)
    plain = best_of(options, None)
    assert plain is not None
    assert options[0].tokens_per_s >= plain.tokens_per_s
    assert all(
        option.num_groups * (option.num_verify_gpus + option.num_draft_gpus) <= 64 for option in options
    )
    assert all(option.batch * option.num_groups >= requests for option in options)
