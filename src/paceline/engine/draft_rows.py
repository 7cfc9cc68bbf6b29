"""Drafts of a step as arrays, a row for each: what was right of them, and how likely they are from some token on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline import _step
from paceline.types import DraftChains, DraftPaths, Float32Array, Int32Array


def table_of(rows: Sequence[Sequence[int]]) -> Int32Array:
    """Token ids of each request as a table, -1 behind them. [num_requests, at least 1]"""
    return _step.table_of(list(rows))


def leading_matches(tokens: Int32Array, lengths: Int32Array, decided: Int32Array) -> Int32Array:
    """Tokens of each draft that are what the target decided, up to the first that is not.

    The target's tokens reach one beyond the longest accepted path, so they judge every other path too.

    Args:
        tokens: [num_drafts, max_draft_tokens]
        lengths: draft tokens that count. [num_drafts]
        decided: the target's tokens, -1 behind them. [num_drafts, most]
    """
    return _step.leading_matches(tokens, lengths, decided)


def behind(path_probability: Float32Array, ahead: Int32Array | None) -> Float32Array:
    """Path probabilities from behind the first `ahead` tokens of each draft on, 0 beyond them. [num_drafts, any]"""
    return path_probability if ahead is None else _step.behind(path_probability, ahead)


def goes_on(batch: DraftChains, branches: DraftPaths | None, ahead: Int32Array) -> Float32Array:
    """Probability that one of a request's drafts is right in its first `ahead` tokens. [num_requests]"""
    before = np.maximum(ahead - 1, 0).astype(np.int32)
    right = _step.behind(batch.path_probability, before)[:, 0]
    if branches is not None:
        right = np.minimum(right + any_behind(branches, before)[:, 0], np.float32(1.0))
    return np.where(ahead > 0, right, np.float32(1.0))


def any_behind(branches: DraftPaths, ahead: Int32Array | None) -> Float32Array:
    """Probability that one of a request's branches is accepted up to each token behind the first `ahead`: no two can
    be. [num_requests, any]
    """
    count, num_branches, width = branches.tokens.shape
    path = _step.path_probability(branches.num_tokens.reshape(-1), branches.acceptance.reshape(-1, width))
    each = behind(path, None if ahead is None else np.repeat(ahead, num_branches))
    total: Float32Array = each.reshape(count, num_branches, -1).sum(axis=1)
    return total


def equal(tokens: Int32Array, decided: Int32Array) -> NDArray[np.bool_]:
    """Which tokens are what the target decided. [num_drafts, max_draft_tokens], as `tokens`"""
    found, width = np.zeros(tokens.shape, np.bool_), min(tokens.shape[1], decided.shape[1])
    found[:, :width] = tokens[:, :width] == decided[:, :width]
    return found


def no_drafts(num_requests: int) -> DraftChains:
    """A draft of no token for each request."""
    zero = np.zeros((num_requests, 1), np.float32)
    return DraftChains(zero.astype(np.int32), np.zeros(num_requests, np.int32), zero)
