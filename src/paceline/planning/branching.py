"""Which further paths does a model drafter draft beside its chain, so that a request's drafts become a tree?

A draft of d tokens can be left at each of them, for the runner-up of the model's proposal there, and drafted on behind
it. A branch at level j of m tokens is then verified as a row of its own, with the j tokens that it shares (row
expansion, docs/multipath.md). It is expected to bring

    P(first j accepted) x P(the runner-up is right) x (1 + a_(j+1) + a_(j+1) a_(j+2) + ..)    m terms

where the chain's own acceptance at a level stands for the branch's, which is not known before it is drafted. A place
in the target's step costs `floor` accepted tokens (drafter_worth.choose_floor), so the branch costs that for each of
its tokens, for those that it shares, and for the last decided token, which its row verifies once more.

Invariant: where no branch is worth its places and the time of drafting it, there is none. In a large batch, where every
place counts, the drafts stay chains.

Source: TLT 5.2, EAGLE-2 (topK and tokens to verify of a tree). Differs: branches leave one chain, for its runner-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.types import Float32Array, Float64Array, Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Branches:
    """One at most of each request; they are drafted together."""

    requests: Int64Array  # [num_branches]
    levels: Int64Array  # [num_branches] draft tokens that it shares with the chain
    lengths: Int64Array  # [num_branches] tokens behind these, the runner-up first


def choose_branches(
    acceptance: Float32Array,
    num_tokens: Int32Array,
    rivals: Float32Array,
    most: int,
    floor: float,
    level_costs: Float32Array,
) -> list[Branches]:
    """The branches to draft, a request's deeper ones first: what those leave of the chain serves the others.

    acceptance: of the chains' tokens, given those before. [num_requests, depth]
    num_tokens: of the chains; a branch reaches no further. [num_requests]
    rivals: probability that the runner-up is right, given the tokens before it; 0: there is none. [num_requests, depth]
    most: branches of a request. floor, level_costs: as in `DraftOrder`.

    Each request's best branches are taken, the earlier level on a tie. All that are drafted together end where one more
    token of each would promise less than drafting it costs.
    """
    chances = _chances(acceptance, num_tokens, rivals)
    taken = (chances > 0.0) & (chances >= floor)  # ends once: chances fall along a branch
    shared = floor * (np.arange(chances.shape[1]) + 1.0)
    gains = np.where(taken, chances - floor, 0.0).sum(axis=2) - shared
    best = np.argsort(-gains, axis=1, kind="stable")[:, :most]
    best = np.where(np.take_along_axis(gains, best, axis=1) > 0.0, best, -1)
    best = -np.sort(-best, axis=1)  # deeper levels first, -1: none
    rounds = []
    for levels in best.T:
        requests = np.flatnonzero(levels >= 0)
        levels = levels[requests]
        values = np.where(taken, chances, 0.0)[requests, levels]
        lengths = _cut(values, levels, floor, level_costs)
        inside = np.arange(values.shape[1]) < (levels + lengths)[:, None]
        pays = np.where(inside & (values > 0.0), values - floor, 0.0).sum(axis=1) > shared[levels]
        if pays.any():
            rounds.append(Branches(requests[pays], levels[pays], lengths[pays]))
    return rounds


def _chances(acceptance: Float32Array, num_tokens: Int32Array, rivals: Float32Array) -> Float64Array:
    """Probability that the branch at level j is accepted up to level k; 0 for k < j. [num_requests, depth, depth]"""
    depth = acceptance.shape[1]
    inside = np.arange(depth) < num_tokens[:, None]
    factors = np.where(inside, acceptance, 0.0)
    before = np.cumprod(np.concatenate([np.ones((len(factors), 1)), factors[:, :-1]], axis=1), axis=1)
    begin = before * np.where(inside, rivals, 0.0)
    at, to = np.arange(depth)[:, None], np.arange(depth)
    steps = np.where(to > at, factors[:, None, :], np.where(to == at, begin[:, :, None], 1.0))
    return np.where(to >= at, np.cumprod(steps, axis=2), 0.0)


def _cut(values: Float64Array, levels: Int64Array, floor: float, level_costs: Float32Array) -> Int64Array:
    """Tokens of branches that are drafted together. values: 0 where a branch is not to reach. [num_branches, depth]

    The runner-up is known and costs no drafting.
    """
    lengths: Int64Array = (values > 0.0).sum(axis=1, dtype=np.int64)
    for length in range(1, int(lengths.max(initial=0))):
        growing = np.flatnonzero(lengths > length)
        promised = float((values[growing, levels[growing] + length] - floor).sum())
        if promised < level_costs[min(len(growing), len(level_costs) - 1)]:
            lengths = np.minimum(lengths, length)
            break
    return lengths
