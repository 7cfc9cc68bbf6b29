"""Key/value rows of the small-model drafter: which tokens each response has cached, and attention over them.

Owns two things. `RowTable` and `RowBook` are plain bookkeeping on NumPy arrays: which row a response has, which token
ids the row holds, which of them belong to the context for certain and which were only drafted. `RowCache` holds the
tensors and stands in for a Hugging Face cache: the model hands it the new keys and values of a *packed* step
(the fresh tokens of all rows side by side, no padding in the linear layers) and gets attention over each
row's own prefix.

Invariant: live rows are 0..len(book)-1 without holes, so that a batch over all live responses reads the
storage in place; nothing is gathered or copied per step. Called by `model.ModelDrafter`, and by `head.HeadDrafter`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline.errors import ConfigError, UnsupportedError
from paceline.types import Int32Array, Int64Array

ATTENTION_NAME = "paceline_rows"
"""Name under which the attention function is registered with transformers."""

PADDED_QUERY = 8
"""Rows that feed at most this many tokens share one attention call, padded to the longest of them."""

LENGTH_STEP = 512
"""Neighbours whose contexts differ by more tokens get attention calls of their own: a call costs less than
reading so many masked keys."""

IDLE_KEYS = 4096
"""Keys of rows between two that take part: fewer are read along with them rather than paying for another call."""

SHORTEST_SHARE = 16
"""Shorter common prefixes are computed again, not copied."""


class RowTable:
    """Rows of a cache by response id, the least recently used one taken over when all are in use.

    Live rows are 0..len - 1 without holes. What is known of a row is in columns, 0 when a row begins.
    """

    def __init__(self, max_requests: int) -> None:
        self._columns: list[Int64Array] = []
        self._rows: dict[int, int] = {}
        self._clock = 0
        self.max_requests = max_requests
        self.cached = self.add_column()  # tokens whose keys and values are in the row
        self._used = self.add_column()  # clock of the last call that used the row
        self._owners = self.add_column()

    def add_column(self) -> Int64Array:
        """A number for each row. [max_requests]"""
        self._columns.append(np.zeros(self.max_requests, np.int64))
        return self._columns[-1]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, response: int) -> int | None:
        """Row of a response, None while it has none."""
        return self._rows.get(response)

    def assign(self, responses: Int64Array) -> Int64Array:
        """Give each response of one call a row; -1 where more responses draft than there are rows.

        Responses that have a row keep it; the others take free rows, then the least recently used ones
        (lowest row on a tie) among those that are not part of this call.
        """
        self._clock += 1
        get = self._rows.get
        rows = np.fromiter((get(response, -1) for response in responses.tolist()), np.int64, len(responses))
        held = rows[rows >= 0]
        self._used[held] = self._clock
        for index in np.flatnonzero(rows < 0).tolist():
            rows[index] = self._open(int(responses[index]))
        return rows

    def _open(self, response: int) -> int:
        row = len(self._rows)
        if row == self.max_requests:
            row = int(np.argmin(self._used))
            if self._used[row] == self._clock:
                return -1
            del self._rows[int(self._owners[row])]
        self._rows[response] = row
        for column in self._columns:
            column[row] = 0
        self._owners[row], self._used[row] = response, self._clock
        return row

    def close(self, response: int) -> tuple[int, int] | None:
        """Free a response's row. Returns (from, to) if the last row has to move into the hole, else None."""
        row = self._rows.pop(response, None)
        last = len(self._rows)
        if row is None or row == last:
            return None
        self._rows[int(self._owners[last])] = row
        for column in self._columns:
            column[row] = column[last]
        return last, row

    def clear(self) -> None:
        """Forget every response."""
        self._rows.clear()


class RowBook(RowTable):
    """What the rows of the small-model drafter hold, token by token."""

    def __init__(self, max_requests: int, max_model_len: int) -> None:
        super().__init__(max_requests)
        self.tokens: Int32Array = np.zeros((max_requests, max_model_len), np.int32)
        self.certain = self.add_column()  # of the cached tokens, those known to be of the context

    def close(self, response: int) -> tuple[int, int] | None:
        move = super().close(response)
        if move is not None:
            last, row = move
            length = int(self.cached[row])
            self.tokens[row, :length] = self.tokens[last, :length]
        return move

    def match(self, row: int, context: Int32Array) -> int:
        """Number of leading context tokens that the row has cached; at least the last one is left to be fed.

        Only what was drafted since the row was last brought up to date can differ, so only that is compared.
        The row is cut back to the match.
        """
        start, stop = int(self.certain[row]), int(self.cached[row])
        stop = min(stop, len(context) - 1)
        start = min(start, stop)
        stop = start + common_prefix(self.tokens[row, start:stop], context[start:stop])
        self.cached[row] = self.certain[row] = stop
        return stop

    def cut(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row at most."""
        self.cached[row] = min(self.cached[row], length)
        self.certain[row] = min(self.certain[row], length)

    def fork(self, source: int, target: int, length: int) -> tuple[int, int]:
        """The target row shall have the first `length` tokens of the source's, as far as that has them.

        Returns how many of them it has already, and how many it will have.
        """
        length = min(length, int(self.cached[source]))
        known = min(length, int(self.cached[target]))
        known = common_prefix(self.tokens[source, :known], self.tokens[target, :known])
        self.tokens[target, known:length] = self.tokens[source, known:length]
        self.cached[target] = self.certain[target] = length
        return known, length

    def donor(self, context: Int32Array) -> tuple[int, int]:
        """The row that shares the longest prefix with `context`, and how many tokens they share.

        Responses of a group share their prompt: copying its keys and values costs less than computing them
        again. Ties go to the lowest row; at least one token of the context stays to be fed; (0, 0) if none
        shares SHORTEST_SHARE tokens.
        """
        best, shared = 0, SHORTEST_SHARE - 1
        if len(context) <= SHORTEST_SHARE:
            return 0, 0
        alike = (self.tokens[: len(self), :SHORTEST_SHARE] == context[:SHORTEST_SHARE]).all(axis=1)
        for row in np.flatnonzero(alike & (self.cached[: len(self)] >= SHORTEST_SHARE)).tolist():
            length = min(int(self.cached[row]), len(context) - 1)
            if length > shared:
                length = common_prefix(self.tokens[row, :length], context[:length])
                best, shared = (row, length) if length > shared else (best, shared)
        return (best, shared) if shared >= SHORTEST_SHARE else (0, 0)


def common_prefix(one: Int32Array, other: Int32Array) -> int:
    """Number of leading tokens that two arrays of the same length have in common."""
    differs = one != other
    first = int(differs.argmax()) if len(differs) else 0
    return first if len(differs) and differs[first] else len(differs)


def ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """starts[i], starts[i] + 1, .. for each i, `counts[i]` numbers each, side by side."""
    ends = np.cumsum(counts)
    made: Int64Array = np.arange(counts.sum()) + np.repeat(starts - ends + counts, counts)
    return made


@dataclass(slots=True)
class Run:
    """A range of rows that goes through attention in one call, all padded on the left to `width` query tokens."""

    rows: slice  # rows of the storage
    length: int  # longest prefix, fresh tokens included
    width: int  # query tokens per row
    tokens: (
        slice | torch.Tensor
    )  # packed query tokens -> [num_rows * width]; a tensor where padding is needed
    valid: torch.Tensor | None  # positions in [num_rows * width] that are no padding, None: all
    packed: slice  # the run's tokens in the packed step
    mask: (
        torch.Tensor | None
    )  # [num_rows, 1, width, length], 0 or -inf; None: every query sees `length` tokens


class PackedStep:
    """Where the fresh tokens of one forward pass go and what they may attend to.

    `rows` must ascend. `starts[i]` is the position of row i's first fresh token, `counts[i]` how many it
    feeds.
    """

    def __init__(
        self,
        rows: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self.counts = counts
        ends = np.cumsum(counts)
        if ends[-1] == len(rows):
            positions, owner_rows = starts, rows
        else:
            offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
            positions = np.repeat(starts, counts) + offsets
            owner_rows = np.repeat(rows, counts)
        self.positions = torch.from_numpy(positions)
        self.slots = torch.from_numpy(owner_rows * max_model_len + positions)
        self.last = torch.from_numpy(ends - 1)
        self.runs = [
            _run(rows[a:b], starts[a:b], counts[a:b], int(ends[a] - counts[a]), dtype)
            for a, b in _run_bounds(rows, starts, counts)
        ]


def _run_bounds(rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Iterable[tuple[int, int]]:
    """Cut around rows that feed a long piece, where the length jumps, and where many idle rows lie between."""
    long = counts > PADDED_QUERY
    stops = starts + counts
    idle_keys = (np.diff(rows) - 1) * np.maximum(stops[1:], stops[:-1])
    jumps = np.abs(np.diff(starts)) > LENGTH_STEP
    cuts = (idle_keys > IDLE_KEYS) | jumps | (long[1:] | long[:-1])
    edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(rows)]
    return itertools.pairwise(edges)


def _run(
    rows: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    offset: int,
    dtype: torch.dtype,
) -> Run:
    first, num_rows, total = int(rows[0]), int(rows[-1] - rows[0]) + 1, int(counts.sum())
    packed = slice(offset, offset + total)
    width, length = int(counts.max()), int((starts + counts).max())
    tokens: slice | torch.Tensor = packed
    valid = None
    if num_rows > len(rows):  # idle rows in between: no query of their own, and the first key for company
        lanes_of = rows - first
        starts, counts = _spread(starts, lanes_of, num_rows), _spread(counts, lanes_of, num_rows)
    if total != num_rows * width:
        lanes = np.arange(width)[None, :] - (width - counts)[:, None]  # [num_rows, width], negative: padding
        begin = (offset + np.cumsum(counts) - counts)[:, None]
        tokens = torch.from_numpy((begin + np.maximum(lanes, 0)).reshape(-1))
        valid = torch.from_numpy(np.flatnonzero(lanes.reshape(-1) >= 0))
    mask = None
    stops = starts + counts
    if width > 1 or int(stops.min()) != length:
        sees = stops[:, None] - width + np.arange(width)[None, :]  # last position that each query sees
        sees = np.maximum(sees, starts[:, None])
        hidden: NDArray[np.bool_] = np.arange(length)[None, None, :] > sees[:, :, None]
        bias = torch.zeros(num_rows, 1, width, length, dtype=dtype)
        mask = bias.masked_fill_(torch.from_numpy(hidden).unsqueeze(1), -torch.inf)
    return Run(slice(first, first + num_rows), length, width, tokens, valid, packed, mask)


def _spread(values: Int64Array, places: Int64Array, size: int) -> Int64Array:
    """Zeros with `values` at `places`."""
    spread = np.zeros(size, np.int64)
    spread[places] = values
    return spread


class RowCache:
    """Keys and values, one row per response; in place of a Hugging Face cache during a packed forward pass.

    The model calls `update` and then, through the registered attention function, `attend`, once per layer.
    Storage per layer: keys and values, [max_requests, max_model_len, num_kv_heads, head_dim], allocated when
    the layer is first used (the drafter's warm-up).
    """

    is_compileable = False

    def __init__(self, max_requests: int, max_model_len: int) -> None:
        self.max_requests = max_requests
        self.max_model_len = max_model_len
        self.step: PackedStep | None = None
        self.attended: set[int] = set()  # layers whose attention came through `attend`
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def layers(self) -> set[int]:
        """Indices of the layers that have stored something."""
        return set(self._layers)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the fresh keys and values, [1, num_kv_heads, num_tokens, head_dim]; returned as they are."""
        assert self.step is not None
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocate(key), self._allocate(value))
        self.write(layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key, value

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store fresh keys and values in an allocated layer, both [num_tokens, num_kv_heads, head_dim]."""
        assert self.step is not None
        for store, fresh in zip(self._layers[layer_idx], (key, value), strict=True):
            store.view(-1, *store.shape[2:]).index_copy_(0, self.step.slots, fresh)

    def num_kv_heads(self, layer_idx: int) -> int:
        """Key and value heads of an allocated layer."""
        return int(self._layers[layer_idx][0].shape[2])

    def clear(self) -> None:
        """Drop the storage; the next forward pass allocates it anew."""
        self._layers.clear()

    def _allocate(self, fresh: torch.Tensor) -> torch.Tensor:
        """Zeros, not empty memory: a masked key weighs 0, and 0 * NaN would spoil the row."""
        shape = (self.max_requests, self.max_model_len, fresh.shape[1], fresh.shape[3])
        try:
            return torch.zeros(shape, dtype=fresh.dtype, device=fresh.device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            need_mib = 2 * np.prod(shape) * fresh.element_size() / 2**20
            raise ConfigError(
                f"the drafter's KV cache needs {need_mib:.0f} MiB per layer for {self.max_requests} requests "
                f"of {self.max_model_len} tokens and does not fit in memory: lower the drafter's "
                "max_requests or max_model_len"
            ) from error

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of the Hugging Face cache interface; positions are always passed explicitly, so 0."""
        return 0

    def attend(self, layer_idx: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Attention of the packed query tokens over their rows.

        query [1, num_heads, num_tokens, head_dim] -> [1, num_tokens, num_heads, head_dim]. Query heads that
        share a key head are laid out as further query tokens, so keys and values are never repeated.
        """
        self.attended.add(layer_idx)
        return self.attend_packed(layer_idx, query[0].transpose(0, 1), scaling).unsqueeze(0)

    def attend_packed(self, layer_idx: int, queries: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """`attend` for queries [num_tokens, num_heads, head_dim], result in the same shape."""
        assert self.step is not None
        keys, values = self._layers[layer_idx]
        parts = [_attend_run(queries, keys, values, run, scaling) for run in self.step.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def clear_behind(self, row: int, length: int) -> None:
        """Zero everything of a row but its first `length` tokens."""
        for layer in self._layers.values():
            for store in layer:
                store[row, length:] = 0

    def copy(self, source: int, target: int, known: int, length: int) -> None:
        """Copy the first `length` tokens of one row into another, which has the first `known` of them already."""
        for layer in self._layers.values():
            for store in layer:
                store[target, known:length] = store[source, known:length]


def _attend_run(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: Run, scaling: float | None
) -> torch.Tensor:
    """One attention call over a range of rows; returns [run tokens, num_heads, head_dim]."""
    key = keys[run.rows, : run.length].transpose(1, 2)  # [num_rows, num_kv_heads, length, head_dim]
    value = values[run.rows, : run.length].transpose(1, 2)
    num_rows, num_kv_heads = key.shape[:2]
    num_heads, head_dim = queries.shape[1:]
    share = num_heads // num_kv_heads
    query = queries[run.tokens].reshape(num_rows, run.width, num_kv_heads, share, head_dim).transpose(1, 2)
    mask = run.mask
    if mask is not None and run.width > 1 and share > 1:
        mask = mask.repeat_interleave(share, dim=2)
    flat = query.reshape(num_rows, num_kv_heads, run.width * share, head_dim)
    out = F.scaled_dot_product_attention(flat, key, value, attn_mask=mask, scale=scaling)
    out = (
        out.view(num_rows, num_kv_heads, run.width, share, -1)
        .transpose(1, 2)
        .reshape(-1, num_heads, out.shape[-1])
    )
    return out if run.valid is None else out[run.valid]


def attend_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls as attention; key and value already lie in the `RowCache`."""
    cache: RowCache = module.paceline_rows  # type: ignore[assignment]
    window = options.get("sliding_window")
    if window is not None and window < cache.max_model_len:
        raise UnsupportedError(
            f"the drafter attends over a sliding window of {window} tokens, shorter than max_model_len "
            f"{cache.max_model_len}: lower the drafter's max_model_len to {window} or choose another drafter"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedError(
                f"the drafter's attention uses {name}, which row attention does not compute: choose a "
                "drafter with plain softmax attention (Llama, Qwen2, Qwen3 and their kin)"
            )
    return cache.attend(module.layer_idx, query, scaling), None  # type: ignore[arg-type]
