"""N-gram lookup: draft what followed the last occurrence of the newest tokens in the own prompt and response.

The simplest drafter, for comparison and for machines where nothing else fits. Owns the texts of all running responses
and their prompts, and one index of their n-grams; same calls as `suffix.SuffixForest`. Invariant: texts and index
together stay within `memory_bytes`. The n-grams noted longest ago go first; texts that alone would take more than half
of it are forgotten all at once. Called by the engine's fast loop. Not thread-safe.

Source: prompt lookup decoding (Saxena 2023), vLLM's "ngram" method. Differs: an index in place of a scan, the
longest n-gram first, and calibrated acceptance estimates.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError, RequestError
from paceline.types import DraftBatch, DraftQuery, Float32Array, Int32Array, Int64Array

MAX_NGRAM = 4
"""Longest n-gram that is looked up, tokens."""
_POSITION_CLASSES = 8
NUM_CELLS = MAX_NGRAM * _POSITION_CLASSES
"""Calibration cells: length of the n-gram found x position in the draft (the last class is open)."""

ENTRY_BYTES = 320
"""What an n-gram takes in the index at most: two numbers, a link, and its places in tables that double."""

TEXT_BYTES = 1024
"""What a text takes at most beside its tokens."""


@dataclass(slots=True)
class _Text:
    """A prompt, or a prompt and the response to it."""

    number: int  # names its n-grams in the index
    prompt: int  # number of the prompt that it begins with, its own without any
    tokens: array[int]
    num_prompt_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        return TEXT_BYTES + sys.getsizeof(self.tokens)


@dataclass(slots=True)
class _Group:
    prompt: _Text | None = None
    responses: dict[int, _Text] = field(default_factory=dict)

    def texts(self) -> Iterable[_Text]:
        return self.responses.values() if self.prompt is None else [self.prompt, *self.responses.values()]


class LookupDrafter:
    """The n-grams of all responses of one engine."""

    def __init__(self, min_ngram: int = 2, max_ngram: int = MAX_NGRAM, memory_bytes: int = 1 << 30) -> None:
        """Shortest and longest n-gram to look for, tokens; memory of everything. Raises ConfigError."""
        if not 1 <= min_ngram <= max_ngram <= MAX_NGRAM:
            raise ConfigError(
                f"n-grams of {min_ngram} to {max_ngram} tokens: choose 1 <= min <= max <= {MAX_NGRAM}"
            )
        self._sizes = range(min_ngram, max_ngram + 1)
        self._memory_bytes = memory_bytes
        self._groups: dict[int, _Group] = {}
        self._numbers = itertools.count()
        self._text_bytes = 0
        self._index: OrderedDict[int, int] = (
            OrderedDict()
        )  # n-gram of a text -> place of its last continuation

    def open_group(self, group: int, prompt: ArrayLike) -> None:
        """Index the prompt ([num_tokens] ids) of a group, once."""
        home = self._groups.setdefault(group, _Group())
        if home.prompt is None:
            number = next(self._numbers)
            home.prompt = self._new_text(_Text(number, number, array("i")))
            self._extend(home.prompt, _ids(prompt))

    def append(self, group: int, response: int, tokens: ArrayLike) -> None:
        """Index new tokens ([num_tokens] ids) of a response; at first use it begins after the prompt."""
        self._extend(self._open(group, response), _ids(tokens))

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
        if group in self._groups and (old := self._groups[group].responses.pop(response, None)) is not None:
            self._forget(old)
        self.append(group, response, tokens)

    def close_response(self, group: int, response: int) -> None:
        """Forget a response, which nothing else reads, and with its last response the group."""
        if group in self._groups:
            responses = self._groups[group].responses
            if (old := responses.pop(response, None)) is not None:
                self._forget(old)
                if not responses:
                    self.drop_group(group)

    def drop_group(self, group: int) -> None:
        """Forget a group; unknown groups are ignored."""
        if (found := self._groups.pop(group, None)) is not None:
            for text in found.texts():
                self._forget(text)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._index.clear()
        self._text_bytes = 0

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

    def _open(self, group: int, response: int) -> _Text:
        home = self._groups.setdefault(group, _Group())
        if response not in home.responses:
            number, prompt = next(self._numbers), home.prompt
            home.responses[response] = self._new_text(
                _Text(number, number, array("i"))
                if prompt is None
                else _Text(number, prompt.number, prompt.tokens[:], len(prompt.tokens))
            )
        return home.responses[response]

    def _new_text(self, text: _Text) -> _Text:
        self._text_bytes += text.num_bytes
        return text

    def _extend(self, text: _Text, tokens: list[int]) -> None:
        before, start = text.num_bytes, len(text.tokens)
        text.tokens.extend(tokens)
        self._text_bytes += text.num_bytes - before
        if 2 * self._text_bytes > self._memory_bytes:
            self.clear()
            return
        room = (self._memory_bytes - self._text_bytes) // ENTRY_BYTES
        for end in range(start, len(text.tokens)):
            for ngram in self._before(text, end):
                self._index[ngram] = end
                self._index.move_to_end(ngram)
            while len(self._index) > room:
                self._index.popitem(last=False)

    def _before(self, text: _Text, end: int) -> list[int]:
        """Names in the index of the n-grams that the token at `end` continues. Two may share one, if seldom."""
        return [hash((text.number, *text.tokens[end - size : end])) for size in self._sizes if size <= end]

    def _forget(self, text: _Text) -> None:
        self._text_bytes -= text.num_bytes
        for end in range(text.num_prompt_tokens, len(text.tokens)):
            for ngram in self._before(text, end):
                self._index.pop(ngram, None)

    def _find(self, group: int, response: int, limit: int) -> tuple[int, list[int]]:
        """Length of the longest n-gram at the end that occurred before, and what followed it."""
        if group not in self._groups or limit <= 0:
            return 0, []
        text = self._open(group, response)
        tokens = text.tokens
        for size in reversed(self._sizes):
            newest = tokens[-size:]
            for number in (text.number, text.prompt):
                at = self._index.get(hash((number, *newest)))
                if at is not None and len(newest) == size and tokens[at - size : at] == newest:
                    return size, _copy(tokens, at, limit)
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


def _copy(text: array[int], at: int, limit: int) -> list[int]:
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
