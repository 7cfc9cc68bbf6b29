"""Grouped suffix drafting: counts over a prompt and all its responses, drafted from with the shared dice.

Owns the front door to the native forest (`csrc/suffix*.hpp`): one counted, depth-capped suffix trie per
rollout group, fed by every response of the group as it grows. Invariant: what is drafted, evicted or
forgotten here changes only when tokens are computed, never which. Called by the engine's fast loop once per
step. Not thread-safe: one thread uses a forest. While it does the GIL is free. Drafts for many requests
may be shared among threads, whose number changes none of them; and the forest may make them on a thread of its own
while the caller does something else.

Source: Seer 3.3, 4.4 and 5 (grouped context, multi-path drafts). Differs: the distribution interpolates all
matching contexts instead of taking the longest, with weights learned online; proposals use the verifier's own
noise; each token's acceptance is estimated from what was accepted before, not from the counts alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline import _suffix
from paceline.errors import ConfigError, RequestError
from paceline.types import (
    DraftBatch,
    DraftPaths,
    DraftQuery,
    Float32Array,
    Int32Array,
    Int64Array,
    UInt64Array,
)

T = TypeVar("T", bound=np.generic)
_Columns = tuple[Int64Array, Int64Array, UInt64Array, Int64Array, Float32Array, Int32Array]

NUM_CELLS: int = _suffix.NUM_CELLS
"""Calibration cells: dice or none x one or several responses behind the token x probability x margin."""

MAX_DEPTH: int = _suffix.MAX_DEPTH
"""Longest context, in tokens, that a forest can be asked to count."""


class SuffixForest:
    """All groups of one engine, bounded in bytes; whole groups are evicted, the least recently used first.

    Eviction is harmless: appends to a group that is gone open it again (without its prompt, until
    `open_group` brings that back), and drafts from it are empty until it has counts again.
    """

    def __init__(
        self, max_depth: int = 24, max_bytes: int = 1 << 30, shared_depth: int = 6, num_threads: int = 1
    ) -> None:
        """max_depth: longest context, tokens. max_bytes: bound on everything held.

        shared_depth: longest context of the counts that all groups share; 0 keeps groups apart. It is cut to
        max_depth. num_threads: most threads that draft. Raises ConfigError.
        """
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ConfigError(
                f"suffix context depth {max_depth} is out of range: choose 1 to {MAX_DEPTH} tokens"
            )
        if max_bytes <= 0:
            raise ConfigError(f"suffix memory bound of {max_bytes} bytes: choose a positive number")
        if shared_depth < 0:
            raise ConfigError(f"shared context depth {shared_depth} is negative: choose 0 (off) or more")
        if num_threads < 1:
            raise ConfigError(f"{num_threads} drafting threads: choose at least 1")
        self._native = _suffix.SuffixForest(max_depth, min(shared_depth, max_depth), max_bytes, num_threads)

    # -- text

    def open_group(self, group: int, prompt: ArrayLike) -> None:
        """Count the prompt of a group ([num_tokens] ids), once. Raises RequestError for another prompt."""
        tokens = _ids(prompt)
        try:
            self._native.open_group(group, tokens)
        except ValueError as error:
            raise RequestError(f"group {group}: {error}") from None

    def append(self, group: int, response: int, tokens: ArrayLike) -> None:
        """Count new tokens ([num_tokens] ids) of a response; at first use it begins after the prompt."""
        ids = _ids(tokens)
        try:
            self._native.append(group, response, ids)
        except ValueError as error:
            raise RequestError(f"group {group}, response {response}: {error}") from None

    def append_batch(
        self, groups: Int64Array, responses: Int64Array, offsets: Int32Array, tokens: Int32Array
    ) -> None:
        """`append` for n responses: tokens[offsets[i] : offsets[i + 1]] go to (groups[i], responses[i]).

        groups, responses: [n]. offsets: [n + 1]. tokens: [offsets[n]]. Raises RequestError if they do not
        fit together.
        """
        try:
            self._native.append_batch(
                _row(groups, np.int64), _row(responses, np.int64), _row(offsets, np.int32), _ids(tokens)
            )
        except ValueError as error:
            raise RequestError(str(error)) from None

    def resync(self, group: int, response: int, tokens: ArrayLike) -> None:
        """Make the response exactly `tokens` ([num_tokens] ids since the prompt): it resumes or restarts.

        What is counted already is not counted again: a response that restarts drafts from its own earlier
        tokens. A context that crosses the place where it departs from them may be counted short.
        """
        ids = _ids(tokens)
        try:
            self._native.resync(group, response, ids)
        except ValueError as error:
            raise RequestError(f"group {group}, response {response}: {error}") from None

    def close_response(self, group: int, response: int) -> None:
        """The response has ended: its cursor goes, its counts stay."""
        self._native.close_response(group, response)

    def drop_group(self, group: int) -> None:
        """Free all of a group at once; unknown groups are ignored."""
        self._native.drop_group(group)

    def clear(self) -> None:
        """Drop all groups; the learned interpolation weights stay."""
        self._native.clear()

    # -- drafts

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        """Propose argmax(sharpness * log q + G) token after token, for all requests in one native call.

        sharpness: inf = argmax q, as always at temperature 0. sharpness_grid: [num_sharpness], for probes.
        calibration: [NUM_CELLS] acceptance per cell. floor: a path ends before its probability falls below.
        Requests of unknown groups get 0 tokens. Raises RequestError for arrays that do not fit each other.
        """
        batch = _empty_batch(query, len(sharpness_grid))
        settings = sharpness, _row(sharpness_grid, np.float32), _row(calibration, np.float32), floor
        try:
            self._native.draft(*(*_columns(query), *settings, *_outputs(batch)))
        except ValueError as error:
            raise RequestError(str(error)) from None
        return batch

    def draft_later(
        self,
        groups: Int64Array,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        num_paths: int = 1,
    ) -> Callable[[], tuple[DraftBatch, DraftPaths | None]]:
        """`append_batch`, then `draft` and, for more than one, `draft_paths`, on a thread of the forest's own; what is
        returned waits for the drafts.

        No array may change before. Every other call waits first. Raises RequestError as these do.
        """
        batch = _empty_batch(query, len(sharpness_grid))
        paths = _empty_paths(query, num_paths if num_paths > 1 else 0)
        grown = _row(groups, np.int64), _row(responses, np.int64), _row(offsets, np.int32), _ids(tokens)
        settings = sharpness, _row(sharpness_grid, np.float32), _row(calibration, np.float32), floor
        try:
            self._native.draft_later(
                *(*grown, *_columns(query), *settings, *_outputs(batch), *_path_outputs(paths))
            )
        except ValueError as error:
            raise RequestError(str(error)) from None

        def wait() -> tuple[DraftBatch, DraftPaths | None]:
            self._native.settle()
            return batch, paths if num_paths > 1 else None

        return wait

    def draft_paths(
        self, query: DraftQuery, *, num_paths: int, sharpness: float, calibration: Float32Array, floor: float
    ) -> DraftPaths:
        """Up to `num_paths` paths per request, those of `draft` first; arguments as there.

        The others, best first, leave an earlier path at a runner-up and follow the dice from there (a beam by
        path probability).
        """
        if num_paths < 1:
            raise ConfigError(f"{num_paths} draft paths: choose at least 1")
        paths = _empty_paths(query, num_paths)
        settings = sharpness, _row(calibration, np.float32), floor
        try:
            self._native.draft_paths(*(*_columns(query), *settings, *_path_outputs(paths)))
        except ValueError as error:
            raise RequestError(str(error)) from None
        return paths

    # -- views

    def count(self, group: int, context: ArrayLike) -> int:
        """How often a context (at most max_depth + 1 ids) occurred in the group's prompt and responses."""
        return self._native.count(group, _ids(context))

    @property
    def memory_bytes(self) -> int:
        """Bytes held by all groups."""
        return self._native.memory_bytes

    @property
    def num_groups(self) -> int:
        return self._native.num_groups

    @property
    def num_tokens(self) -> int:
        """Tokens counted in all groups, prompts included."""
        return self._native.num_tokens


def prior_calibration() -> Float32Array:
    """Acceptance of each cell before anything was verified, [NUM_CELLS] float32.

    With dice, the logistic of 0.9 x the margin: groups sampled from an n-gram model with the shared dice gave that
    within 0.05, whatever the probability. Without, the interpolated probability itself: replayed recorded
    responses agreed with it within 0.05 in nearly every cell.
    """
    probability = _centres(_suffix.PROBABILITY_EDGES, 0.13, 0.985)
    lead = 1.0 / (1.0 + np.exp(-0.9 * _centres(_suffix.MARGIN_EDGES, -1.5, 6.0)))
    without = np.repeat(probability, len(lead))
    with_dice = np.tile(lead, len(probability))
    prior: Float32Array = np.concatenate([without, without, with_dice, with_dice]).astype(np.float32)
    return prior


def _centres(edges: list[float], lowest: float, highest: float) -> NDArray[np.float64]:
    """The middle of each bin, with stand-ins for the two open ones."""
    inner = np.asarray(edges)
    return np.concatenate([[lowest], (inner[1:] + inner[:-1]) / 2, [highest]])


def _empty_batch(query: DraftQuery, num_probes: int) -> DraftBatch:
    rows, width = len(query.groups), _width(query)
    return DraftBatch(
        tokens=np.empty((rows, width), np.int32),
        num_tokens=np.empty(rows, np.int32),
        acceptance=np.empty((rows, width), np.float32),
        cells=np.empty((rows, width), np.int32),
        probes=np.empty((rows, num_probes), np.int32),
    )


def _outputs(batch: DraftBatch) -> tuple[Int32Array, Int32Array, Float32Array, Int32Array, Int32Array]:
    return batch.tokens, batch.num_tokens, batch.acceptance, batch.cells, batch.probes


def _empty_paths(query: DraftQuery, num_paths: int) -> DraftPaths:
    rows, width = len(query.groups), _width(query)
    return DraftPaths(
        tokens=np.empty((rows, num_paths, width), np.int32),
        num_tokens=np.empty((rows, num_paths), np.int32),
        acceptance=np.empty((rows, num_paths, width), np.float32),
        cells=np.empty((rows, num_paths, width), np.int32),
    )


def _path_outputs(paths: DraftPaths) -> tuple[Int32Array, Int32Array, Float32Array, Int32Array]:
    return paths.tokens, paths.num_tokens, paths.acceptance, paths.cells


def _row(values: ArrayLike, dtype: type[T]) -> NDArray[T]:
    return np.ascontiguousarray(values, dtype=dtype)


def _ids(tokens: ArrayLike) -> Int32Array:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)):
        raise RequestError(f"token ids must be one row of integers, got {ids.dtype} of shape {ids.shape}")
    return np.ascontiguousarray(ids, dtype=np.int32)


def _columns(query: DraftQuery) -> _Columns:
    return (
        _row(query.groups, np.int64),
        _row(query.responses, np.int64),
        _row(query.keys, np.uint64),
        _row(query.positions, np.int64),
        _row(query.temperatures, np.float32),
        _row(query.max_tokens, np.int32),
    )


def _width(query: DraftQuery) -> int:
    return max(1, int(query.max_tokens.max())) if len(query.max_tokens) else 1
