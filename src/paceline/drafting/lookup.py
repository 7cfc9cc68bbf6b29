"""N-gram lookup: draft what followed the last occurrence of the newest tokens in the own prompt and response.

The simplest drafter, for comparison and for machines where nothing else fits. Owns one text and one index per
response, one index per prompt; same calls as `suffix.SuffixForest`. Every index has the same share of the memory and
forgets its oldest n-grams when it grows beyond that; one that does not grow, a prompt's, keeps what it has. Called by
the engine's fast loop. Not thread-safe.

Source: prompt lookup decoding (Saxena 2023), vLLM's "ngram" method. Differs: an index in place of a scan, the
longest n-gram first, and calibrated acceptance estimates.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError, RequestError
from paceline.types import DraftBatch, DraftQuery, Float32Array, Int32Array, Int64Array

MAX_NGRAM = 4
"""Longest n-gram that is looked up, tokens."""
_POSITION_CLASSES = 8
NUM_CELLS = MAX_NGRAM * _POSITION_CLASSES
"""Calibration cells: length of the n-gram found x position in the draft (the last class is open)."""

ENTRY_BYTES = 256
"""What an n-gram takes in an index, about: a tuple of up to four numbers, its place and theirs."""

_Index = dict[tuple[int, ...], int]
_Text: TypeAlias = "array[int]"


@dataclass(slots=True)
class _Response:
    text: _Text  # prompt and response
    has_prompt: (
        bool  # the text begins with the group's prompt, so places in the prompt's index are places in it
    )
    index: _Index = field(default_factory=dict)  # n-gram -> where its last continuation stands; oldest first


@dataclass(slots=True)
class _Group:
    prompt: _Text = field(default_factory=lambda: array("i"))
    index: _Index = field(default_factory=dict)
    responses: dict[int, _Response] = field(default_factory=dict)


class LookupDrafter:
    """The n-gram indices of all responses of one engine."""

    def __init__(self, min_ngram: int = 2, max_ngram: int = MAX_NGRAM, memory_bytes: int = 1 << 30) -> None:
        """Shortest and longest n-gram to look for, tokens; memory of all indices. Raises ConfigError."""
        if not 1 <= min_ngram <= max_ngram <= MAX_NGRAM:
            raise ConfigError(
                f"n-grams of {min_ngram} to {max_ngram} tokens: choose 1 <= min <= max <= {MAX_NGRAM}"
            )
        self._sizes = range(min_ngram, max_ngram + 1)
        self._groups: dict[int, _Group] = {}
        self._max_entries = memory_bytes // ENTRY_BYTES
        self._num_indices = 0

    def open_group(self, group: int, prompt: ArrayLike) -> None:
        """Index the prompt ([num_tokens] ids) of a group, once."""
        found = self._home(group)
        if not found.prompt:
            found.prompt = array("i", _ids(prompt))
            for end in range(1, len(found.prompt)):
                self._note(found.prompt, end, found.index)

    def append(self, group: int, response: int, tokens: ArrayLike) -> None:
        """Index new tokens ([num_tokens] ids) of a response; at first use it begins after the prompt."""
        found = self._open(group, response)
        for token in _ids(tokens):
            found.text.append(token)
            self._note(found.text, len(found.text) - 1, found.index)

    def append_batch(
        self, groups: Int64Array, responses: Int64Array, offsets: Int32Array, tokens: Int32Array
    ) -> None:
        """`append` for n responses: tokens[offsets[i] : offsets[i + 1]] go to (groups[i], responses[i])."""
        if not (len(groups) == len(responses) == len(offsets) - 1):
            raise RequestError("append_batch needs n groups, n responses and n + 1 offsets")
        for i, (group, response) in enumerate(zip(groups.tolist(), responses.tolist(), strict=True)):
            self.append(group, response, tokens[offsets[i] : offsets[i + 1]])

    def resync(self, group: int, response: int, tokens: ArrayLike) -> None:
        """Index the tokens ([num_tokens] ids) of a response that begins or goes on; what it had before is forgotten."""
        if group in self._groups and self._groups[group].responses.pop(response, None) is not None:
            self._num_indices -= 1
        self.append(group, response, tokens)

    def close_response(self, group: int, response: int) -> None:
        """Forget a response, which nothing else reads, and with its last response the group."""
        if group in self._groups:
            responses = self._groups[group].responses
            if responses.pop(response, None) is not None:
                self._num_indices -= 1
                if not responses:
                    self.drop_group(group)

    def drop_group(self, group: int) -> None:
        """Forget a group; unknown groups are ignored."""
        if (found := self._groups.pop(group, None)) is not None:
            self._num_indices -= 1 + len(found.responses)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._num_indices = 0

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        """Copy the continuation of the longest n-gram found; arguments as for `SuffixForest.draft`.

        A copy has no distribution, so every sharpness proposes the same. calibration: [NUM_CELLS].
        """
        if not sharpness > 0.0:
            raise RequestError(f"sharpness {sharpness} must be positive (inf: greedy)")
        rows = len(query.groups)
        width = max(1, int(query.max_tokens.max())) if rows else 1
        batch = DraftBatch(
            tokens=np.zeros((rows, width), np.int32),
            num_tokens=np.zeros(rows, np.int32),
            acceptance=np.zeros((rows, width), np.float32),
            cells=np.zeros((rows, width), np.int32),
            probes=np.full((rows, len(sharpness_grid)), -1, np.int32),
        )
        chances = calibration.tolist()
        for r in range(rows):
            size, copied = self._find(int(query.groups[r]), int(query.responses[r]), int(query.max_tokens[r]))
            if copied:
                batch.probes[r] = copied[0]
                _write(batch, r, copied, size, chances, floor)
        return batch

    def _home(self, group: int) -> _Group:
        if group not in self._groups:
            self._groups[group] = _Group()
            self._num_indices += 1
        return self._groups[group]

    def _open(self, group: int, response: int) -> _Response:
        home = self._home(group)
        if response not in home.responses:
            home.responses[response] = _Response(home.prompt[:], bool(home.prompt))
            self._num_indices += 1
        return home.responses[response]

    def _note(self, text: _Text, end: int, index: _Index) -> None:
        """The token at `end` is the newest continuation of the n-grams before it."""
        for size in self._sizes:
            if size > end:
                break
            ngram = tuple(text[end - size : end])
            index.pop(ngram, None)
            index[ngram] = end
        share = self._max_entries // self._num_indices
        if len(index) > share:  # half of it at once: single entries at the front of a dict are slow to find
            newest = list(itertools.islice(index.items(), len(index) - share // 2, None))
            index.clear()
            index.update(newest)

    def _find(self, group: int, response: int, limit: int) -> tuple[int, list[int]]:
        """Length of the longest n-gram at the end that occurred before, and what followed it."""
        if group not in self._groups or limit <= 0:
            return 0, []
        found = self._open(group, response)
        text, prompt_index = found.text, self._groups[group].index if found.has_prompt else {}
        for size in reversed(self._sizes):
            newest = tuple(text[-size:])
            if len(newest) == size and (at := found.index.get(newest, prompt_index.get(newest))) is not None:
                return size, _copy(text, at, limit)
        return 0, []


def prior_calibration() -> Float32Array:
    """Acceptance of each cell before anything was verified, [NUM_CELLS] float32.

    Longer n-grams are believed more, and a token behind an accepted one more than the first. The numbers are
    those of a replay of recorded chain-of-thought responses, rounded.
    """
    first = np.array([0.2, 0.35, 0.5, 0.65])[:, None]
    later = np.minimum(np.arange(_POSITION_CLASSES) * 0.15, 0.5)[None, :]
    prior: Float32Array = (first + (1.0 - first) * later).astype(np.float32).ravel()
    return prior


def _copy(text: _Text, at: int, limit: int) -> list[int]:
    """`limit` tokens from `at` on; a copy that runs into the end goes on with what it has copied."""
    copied = text[at : at + limit].tolist()
    period = len(copied)
    return [copied[i % period] for i in range(limit)]


def _write(
    batch: DraftBatch, r: int, copied: list[int], size: int, chances: list[float], floor: float
) -> None:
    path = 1.0
    for j, token in enumerate(copied):
        cell = (size - 1) * _POSITION_CLASSES + min(j, _POSITION_CLASSES - 1)
        path *= chances[cell]
        if path < floor:
            return
        batch.tokens[r, j] = token
        batch.acceptance[r, j] = chances[cell]
        batch.cells[r, j] = cell
        batch.num_tokens[r] = j + 1


def _ids(tokens: ArrayLike) -> list[int]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)):
        raise RequestError(f"token ids must be one row of integers, got {ids.dtype} of shape {ids.shape}")
    listed: list[int] = ids.tolist()
    return listed
