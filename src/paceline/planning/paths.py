"""The path budget: which alternative draft paths are worth a row of the step beside the drafts already chosen?

A pure decision, taken after `budget.decide` by the engine alone (engine/multipath/alternatives.py). The simulator has
no tries of drafts and asks alternatives.py instead. The paths of a request form a trie, and at most one token of each
depth comes true, so the expected number of accepted tokens is the sum of P(node) over all nodes of the trie: an
alternative gains the path probabilities of the tokens that no path of the request verifies yet. It costs all its
tokens, those it shares with another path included, and the request's last token once more. Rows are taken one at a
time, each the one (and each of the length) with the best tokens per second under the measured T(n), while that rises:
in a large batch, where T rises with every token, none is.

Source: Seer 4.4 (multi-path drafts under low concurrency). Differs: the step time decides, not a fixed number of paths.
Invariant: an alternative is never longer than the draft of its request, whose slots the winner's tokens go to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from paceline.config import BudgetSettings
from paceline.planning import bandit
from paceline.planning.budget import BudgetState
from paceline.planning.latency import (
    StepTimeModel,
    at_context,
    largest_known_tokens,
    predict_one_s,
    predict_s,
)
from paceline.types import Float32Array, Float64Array, Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class PathSnapshot:
    """One engine step after its drafts were chosen, with the candidates for further paths, the best first."""

    num_requests: int
    """Decoding requests (batch size)."""
    num_other_tokens: int
    """Prefill tokens in the same step."""
    num_draft_tokens: int
    """Draft tokens already chosen."""
    expected_accepted: float
    """What they promise."""
    owners: Int64Array  # [num_candidates] request of each
    tokens: Int32Array  # [num_candidates, max_draft_tokens]
    path_probability: Float32Array  # [num_candidates, max_draft_tokens] 0 beyond the path
    limits: Int32Array  # [num_candidates] longest length to be chosen
    covered: Int32Array  # [num_candidates] first tokens that the request's draft verifies already
    contexts: Int64Array  # [num_candidates] tokens of the request so far, which its row reads once more
    max_rows: int
    """Alternatives the step has room for."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The alternatives to verify, in the order in which they were chosen."""

    candidates: Int64Array  # [num_chosen] index into the snapshot
    lengths: Int32Array  # [num_chosen] draft tokens to verify, more than `covered`
    covered: Int32Array  # [num_chosen] first tokens that the draft or an earlier alternative verifies already


@dataclass(frozen=True, slots=True)
class PathTrust:
    """What came of the promises of earlier alternatives, decayed.

    Alternatives are the runners-up of a drafter that was calibrated mostly on its first choices, and those of them that
    look best are taken: their promises are overrated more than the drafts' are (by a factor of 2 in measurements).
    """

    promised: float = 0.0
    gained: float = 0.0

    @property
    def worth(self) -> float:
        """What a promised token is worth, at most 1."""
        return min((self.gained + _TRUSTED_TOKENS) / (self.promised + _TRUSTED_TOKENS), 1.0)


_TRUSTED_TOKENS = 4.0  # promised tokens that are believed before any evidence counts
_TRUST_DECAY = 0.998  # per step, with alternatives or not, so that lost trust comes back and is tried again


def update_trust(trust: PathTrust, promised: float, gained: float) -> PathTrust:
    """The trust after one step whose alternatives promised and gained so many tokens beyond the drafts."""
    return PathTrust(trust.promised * _TRUST_DECAY + promised, trust.gained * _TRUST_DECAY + gained)


def choose_paths(
    snapshot: PathSnapshot, state: BudgetState, settings: BudgetSettings, trust: PathTrust
) -> PathChoice:
    """Choose alternatives by the policy of the draft budget.

    marginal: see above; equally good rows: the earlier candidate, then the shorter. fixed: every path that adds a
    token, to the fixed length. thresholds: likewise its likely tokens, as far as the batch's limit reaches.
    bandit: as many paths as the step's strategy has, with what the drafts have left of its tokens to verify. off: none.
    """
    if settings.policy == "marginal":
        return _choose_marginal(snapshot, state, settings, trust.worth)
    if settings.policy == "fixed":
        return _choose_in_order(snapshot, settings.fixed_tokens, snapshot.path_probability.size)
    if settings.policy == "thresholds":
        likely = (snapshot.path_probability > 0) & (
            snapshot.path_probability >= settings.threshold_min_probability
        )
        room = settings.threshold_batch_tokens - snapshot.num_draft_tokens
        return _choose_in_order(snapshot, settings.threshold_request_tokens, room, likely.sum(axis=1))
    if settings.policy == "bandit":
        arm = bandit.select_strategy(state.bandit, snapshot.num_requests)
        room = arm.tokens_to_verify * snapshot.num_requests - snapshot.num_draft_tokens
        return _choose_in_order(snapshot, arm.draft_depth, room, most_rows=arm.top_k - 1)
    return _choice([], [], [])


def may_pay(
    draft_probability: Float32Array,
    lengths: Int32Array,
    num_other_tokens: int,
    expected_accepted: float,
    state: BudgetState,
    settings: BudgetSettings,
) -> bool:
    """Whether any alternative at all could raise the expected rate, before alternatives are made.

    A bound: at depth j all alternatives of a request together cannot gain more than 1 - P(draft token j is accepted).

    draft_probability: path probabilities of the drafts. [num_requests, max_draft_tokens]
    lengths: draft tokens chosen. [num_requests]
    """
    if settings.policy == "off" or not lengths.any():
        return False
    if settings.policy == "bandit":
        return bandit.select_strategy(state.bandit, len(lengths)).top_k > 1
    if settings.policy != "marginal":
        return True
    inside = np.arange(draft_probability.shape[1]) < lengths[:, None]
    bound = np.cumsum(np.where(inside, 1.0 - draft_probability, 0.0), axis=1)
    model = state.prefill_time if num_other_tokens else state.decode_time
    base = len(lengths) + num_other_tokens + int(lengths.sum())
    sure = len(lengths) + state.confidence * expected_accepted
    room = _trusted_room(model, base, settings)
    rate = _rates(bound, inside, sure, base, room, model, np.zeros(len(lengths), np.int64))
    return bool(rate.max(initial=0.0) > sure / predict_one_s(model, base))


def most_paths(state: BudgetState, settings: BudgetSettings, num_requests: int, most: int) -> int:
    """Draft paths of a request that are worth drafting for the step after the coming one, if it has so many requests.

    most: that the engine can verify. A drafter that costs time looks closer (branching.py).
    """
    if settings.policy == "bandit":
        return min(bandit.select_ahead(state.bandit, num_requests).top_k, most)
    return most


def shared_prefix(one: Int32Array, other: Int32Array) -> Int32Array:
    """Equal tokens at the beginning of each pair of rows. [num_rows, width] each -> [num_rows]"""
    width = min(one.shape[1], other.shape[1])
    same: Int32Array = np.cumprod(one[:, :width] == other[:, :width], axis=1).sum(axis=1).astype(np.int32)
    return same


def _choose_marginal(
    snapshot: PathSnapshot, state: BudgetState, settings: BudgetSettings, worth: float
) -> PathChoice:
    model = state.prefill_time if snapshot.num_other_tokens else state.decode_time
    size = snapshot.num_requests + snapshot.num_other_tokens + snapshot.num_draft_tokens
    room = _trusted_room(model, size, settings)
    promised = snapshot.num_requests + state.confidence * snapshot.expected_accepted
    first_rate = rate = promised / predict_one_s(model, size)
    covered = snapshot.covered.astype(np.int32, copy=True)
    columns = np.arange(snapshot.path_probability.shape[1])
    chosen: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    while len(chosen) < snapshot.max_rows:
        usable = (columns >= covered[:, None]) & (columns < snapshot.limits[:, None])
        gains = np.cumsum(np.where(usable, snapshot.path_probability, 0.0), axis=1, dtype=np.float64)
        rates = _rates(gains * worth, usable, promised, size, room, model, snapshot.contexts)
        best = int(rates.argmax()) if rates.size else 0
        if not rates.size or rates.flat[best] <= rate:
            break
        row, last = divmod(best, rates.shape[1])
        rate = float(rates.flat[best])
        chosen.append(row)
        lengths.append(last + 1)
        starts.append(int(covered[row]))
        promised += worth * float(gains[row, last])
        size, room = size + last + 2, room - last - 2
        model = at_context(model, int(snapshot.contexts[row]))
        _cover(covered, snapshot, row, last + 1)
    if rate <= first_rate * (1.0 + settings.min_gain):
        return _choice([], [], [])
    return _choice(chosen, lengths, starts)


def _rates(
    gains: Float64Array,
    usable: np.ndarray,
    promised: float,
    size: int,
    room: int,
    model: StepTimeModel,
    contexts: Int64Array,
) -> Float64Array:
    """Tokens per second with each candidate at each length in the step; 0 where that is not to be had."""
    cost = np.arange(2, gains.shape[1] + 2)
    reading_s = np.interp(size + cost, model.curve_tokens, model.slopes_s) * contexts[:, None]
    rates: Float64Array = (promised + gains) / (predict_s(model, size + cost) + reading_s)
    rates[~usable] = 0.0
    rates[:, cost > room] = 0.0
    return rates


def _trusted_room(model: StepTimeModel, size: int, settings: BudgetSettings) -> int:
    """Tokens that may be added to a step of `size` (the rule E2 of budget.py)."""
    return int(max(size, largest_known_tokens(model)) * settings.max_growth) - size


def _choose_in_order(
    snapshot: PathSnapshot,
    most: int,
    room: int,
    available: Int64Array | None = None,
    most_rows: int | None = None,
) -> PathChoice:
    """Every candidate that adds tokens, cut to `most` tokens, while rows and tokens last.

    available: tokens of each candidate that count, None: all. most_rows: of a request, None: any number.
    """
    covered = snapshot.covered.astype(np.int32, copy=True)
    limits = np.minimum(snapshot.limits, most)
    if available is not None:
        limits = np.minimum(limits, available)
    chosen: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    rows = Counter[int]()
    for row, owner in enumerate(snapshot.owners.tolist()):
        length = min(int(limits[row]), room)
        if len(chosen) == snapshot.max_rows or length <= covered[row] or rows[owner] == most_rows:
            continue
        room -= length
        rows[owner] += 1
        chosen.append(row)
        lengths.append(length)
        starts.append(int(covered[row]))
        _cover(covered, snapshot, row, length)
    return _choice(chosen, lengths, starts)


def _cover(covered: Int32Array, snapshot: PathSnapshot, row: int, length: int) -> None:
    """Note in `covered` what the request's other candidates share with `row`, now that `length` of it is chosen."""
    others = np.flatnonzero(snapshot.owners == snapshot.owners[row])
    same = shared_prefix(snapshot.tokens[others], snapshot.tokens[row : row + 1])
    covered[others] = np.maximum(covered[others], np.minimum(same, length))


def _choice(chosen: list[int], lengths: list[int], covered: list[int]) -> PathChoice:
    return PathChoice(
        np.asarray(chosen, dtype=np.int64),
        np.asarray(lengths, dtype=np.int32),
        np.asarray(covered, dtype=np.int32),
    )
