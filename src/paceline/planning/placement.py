"""Placement: on how many GPUs do drafters and verifiers run, and how long is the draft window? (SpecActor algorithm 1)

Owns one decision, taken before a rollout: (g_d, g_v, w) with the highest token rate per request. g_v runs over the
profiled verifiers, g_d over the profiled drafters up to g_v, w over the windows; b follows from both. Invariant: the
plan is the best of all of these, as an exhaustive search would find it; ties go to the smaller g_v, then the smaller
g_d, then the smaller w (the paper's order, with its strict ">").

Differs under `Rules.PROTOCOL`:
* tau_w (see `window.py`).
* w_max. The paper's max(ceil(V'_{g,w} / D'_g), ceil(beta_{g,w} / alpha_g)) uses what depends on w, knows nothing of the
  acceptance, and does not end where verifying a token costs more than drafting one. Ours is a bound: a rejection comes
  every 1/(1-p) tokens and costs its round and a refill, at least w D + V_w, so TGS(w) <= 1 / ((1-p) (w D + V_1)); no
  w > (1 / ((1-p) rate) - V_1) / D can beat a rate already found. It holds for every model that never falls.
* b. The paper's ceil((g_d+g_v) B / G) shares requests among G / (g_d+g_v) groups even where that is no whole number.
  Ours is ceil(B / floor(G / (g_d+g_v))): the same where the groups fill the cluster, and true where GPUs are left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.planning.latency_profile import (
    AffineLatency,
    LatencyModel,
    RequestLatency,
    VerifyLatency,
    verify_s,
)
from paceline.planning.window import Mode, Rules, StepTimes, checked_acceptance, tokens_per_s
from paceline.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a placement is chosen for."""

    num_gpus: int
    """G."""
    num_requests: int
    """B, requests of the whole cluster at the start of the rollout."""
    draft: Mapping[int, LatencyModel]
    """D_g: drafting on g GPUs, for every g_d that can be chosen."""
    verify: Mapping[int, VerifyLatency]
    """V_g: verifying on g GPUs, for every g_v that can be chosen (the paper's set of configurations)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One placement with the window that is best for it."""

    num_draft_gpus: int
    """g_d of one group."""
    num_verify_gpus: int
    """g_v of one group."""
    window: int
    """w, draft tokens."""
    num_groups: int
    """Groups of g_d + g_v GPUs that fit the cluster."""
    batch: int
    """b, requests of one group."""
    draft_s: float
    """w D(b), seconds to draft a window."""
    verify_s: float
    """V_w(b), seconds to verify it; the round takes the longer of the two."""
    tokens_per_s: float
    """TGS, of one request."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The plan chosen and what it was chosen over."""

    best: Plan
    alternatives: tuple[Plan, ...]
    """The next best pairs (g_d, g_v), each with its best window, best first."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Every g_d that may go with one g_v, ascending; arrays are [num_pairs]."""

    num_verify_gpus: int
    verify: VerifyLatency
    num_draft_gpus: Int64Array
    draft: tuple[LatencyModel, ...]
    batch: Int64Array
    draft_s: Float64Array  # D(b)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Pairs (g_d, g_v) in the paper's order, each with its best window; arrays are [num_pairs]."""

    num_draft_gpus: Int64Array
    num_verify_gpus: Int64Array
    batch: Int64Array
    window: Int64Array
    tokens_per_s: Float64Array


def place(
    cluster: Cluster,
    acceptance: float,
    max_window: int,
    rules: Rules = Rules.PROTOCOL,
    num_alternatives: int = 8,
) -> Placement:
    """The best placement for requests whose draft tokens are accepted with probability `acceptance`.

    Raises ConfigError if no pair of profiled drafter and verifier fits the cluster, for a max_window below 1, and
    under Rules.PAPER for latency models that are not affine; EngineError for an acceptance outside [0, 1].
    """
    checked_acceptance(acceptance)
    if max_window < 1 or cluster.num_requests < 1:
        raise ConfigError(
            f"a placement for {cluster.num_requests} requests and windows up to {max_window} tokens is empty: "
            "plan for at least 1 of both"
        )
    found = [_best_windows(p, acceptance, max_window, rules) for p in _pairs(cluster, rules)]
    if not found:
        raise ConfigError(
            f"no group fits {cluster.num_gpus} GPUs with drafters on {sorted(cluster.draft)} and verifiers on "
            f"{sorted(cluster.verify)} GPUs, as a drafter may not be larger than its verifier: profile smaller ones"
        )
    candidates = _joined(found)
    order = np.argsort(-candidates.tokens_per_s, kind="stable")[: num_alternatives + 1]
    best, *others = (_plan(cluster, candidates, at) for at in order.tolist())
    return Placement(best, tuple(others))


def _pairs(cluster: Cluster, rules: Rules) -> Iterator[_Pairs]:
    """Lines 2-4, for every g_v that leaves room for a drafter, ascending."""
    batches = _batches(cluster, rules)
    sizes = np.array(sorted(cluster.draft), dtype=np.int64)
    models = [cluster.draft[g] for g in sizes.tolist()]
    draft_s = np.array([model.seconds(batches) for model in models])  # [num_sizes, num_gpus + 1]
    for g_v in sorted(cluster.verify):
        count = int(np.searchsorted(sizes, min(g_v, cluster.num_gpus - g_v), side="right"))
        if count:
            group = sizes[:count] + g_v
            yield _Pairs(
                num_verify_gpus=g_v,
                verify=cluster.verify[g_v],
                num_draft_gpus=sizes[:count],
                draft=tuple(models[:count]),
                batch=batches[group],
                draft_s=draft_s[np.arange(count), group],
            )


def _batches(cluster: Cluster, rules: Rules) -> Int64Array:
    """b of a group of 0, 1, .. G GPUs; the entry for 0 is never used. [num_gpus + 1]"""
    group_gpus = np.maximum(np.arange(cluster.num_gpus + 1), 1)
    if rules is Rules.PAPER:
        return np.asarray(-(-group_gpus * cluster.num_requests // cluster.num_gpus))
    return np.asarray(-(-cluster.num_requests // (cluster.num_gpus // group_gpus)))


def _best_windows(pairs: _Pairs, acceptance: float, max_window: int, rules: Rules) -> _Candidates:
    """Lines 5-10: the best window of every pair, the smallest of equally good ones."""
    if rules is Rules.PAPER:
        windows = np.arange(1, max_window + 1)
        rates = _rates(pairs, windows, acceptance, rules)
        rates = np.where(_allowed_by_paper(pairs, windows), rates, 0.0)
    else:
        probes = 2 ** np.arange(max_window.bit_length())
        known = _rates(pairs, probes, acceptance, rules).max(axis=1)
        longest = int(min(_window_bound(pairs, acceptance, known), max_window))
        windows = np.arange(1, longest + 1)
        rates = _rates(pairs, windows, acceptance, rules)
    best = rates.argmax(axis=1)
    return _Candidates(
        num_draft_gpus=pairs.num_draft_gpus,
        num_verify_gpus=np.full_like(pairs.num_draft_gpus, pairs.num_verify_gpus),
        batch=pairs.batch,
        window=windows[best],
        tokens_per_s=rates[np.arange(len(best)), best],
    )


def _rates(pairs: _Pairs, windows: Int64Array, acceptance: float, rules: Rules) -> Float64Array:
    """TGS, [num_pairs, num_windows]."""
    batch = pairs.batch[:, None]
    times = StepTimes(batch, pairs.draft_s[:, None], verify_s(pairs.verify, batch, windows))
    return tokens_per_s(acceptance, windows, times, Mode.DECOUPLED, rules)


def _window_bound(pairs: _Pairs, acceptance: float, rate: Float64Array) -> float:
    """No larger window beats the rate known of its pair, as TGS(w) <= 1 / ((1-p) (w D + V_1)). rate: [num_pairs]"""
    with np.errstate(divide="ignore"):
        cycle_s = 1.0 / ((1.0 - acceptance) * rate)
    slack_s = cycle_s - verify_s(pairs.verify, pairs.batch, 1)
    bound = float((slack_s / np.maximum(pairs.draft_s, 1e-30)).max())
    return max(float(np.ceil(bound)), 1.0)


def _allowed_by_paper(pairs: _Pairs, windows: Int64Array) -> NDArray[np.bool_]:
    """Line 5: w goes on while it is at most max(ceil(V'_{g_v,w} / D'_{g_d}), ceil(beta_{g_v,w} / alpha_{g_d})).

    The paper leaves open at which w the bound is taken; here it is the w that is tried next, and w = 1 always is.
    [num_pairs, num_windows]
    """
    verify, request_s = pairs.verify, 0.0
    if isinstance(verify, RequestLatency):
        request_s, verify = verify.request_s, verify.by_tokens
    affine = [draft for draft in pairs.draft if isinstance(draft, AffineLatency)]
    if len(affine) < len(pairs.draft) or not isinstance(verify, AffineLatency):
        raise ConfigError(
            "the paper's longest window is defined by the coefficients of affine latency models, and a piecewise "
            "linear one was given: fit affine models or plan with Rules.PROTOCOL"
        )
    base_s = np.array([draft.base_s for draft in affine])[:, None]
    per_token_s = np.array([draft.per_token_s for draft in affine])[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        by_slope = np.ceil((verify.per_token_s * (windows + 1) + request_s) / per_token_s)
        by_base = np.ceil(verify.base_s / base_s)
    longest = np.fmax(np.fmax(by_slope, by_base), 1.0)
    return np.logical_and.accumulate(windows <= longest, axis=1)


def _joined(found: list[_Candidates]) -> _Candidates:
    return _Candidates(
        np.concatenate([part.num_draft_gpus for part in found]),
        np.concatenate([part.num_verify_gpus for part in found]),
        np.concatenate([part.batch for part in found]),
        np.concatenate([part.window for part in found]),
        np.concatenate([part.tokens_per_s for part in found]),
    )


def _plan(cluster: Cluster, candidates: _Candidates, at: int) -> Plan:
    g_d, g_v = int(candidates.num_draft_gpus[at]), int(candidates.num_verify_gpus[at])
    batch, window = int(candidates.batch[at]), int(candidates.window[at])
    return Plan(
        num_draft_gpus=g_d,
        num_verify_gpus=g_v,
        window=window,
        num_groups=cluster.num_gpus // (g_d + g_v),
        batch=batch,
        draft_s=window * float(cluster.draft[g_d].seconds(batch)),
        verify_s=float(verify_s(cluster.verify[g_v], batch, window)),
        tokens_per_s=float(candidates.tokens_per_s[at]),
    )
