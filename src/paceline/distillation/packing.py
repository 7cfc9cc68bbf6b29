"""Responses of different lengths side by side, without padding, each attending to itself alone (TLT 4.2).

A `Pack` is what every network here is trained on. Documents stand one behind another along the token axis; linear
layers see one long row, attention goes document by document. Neighbours of the same length share an attention call, so
a padded batch is the special case of documents of one length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from random import Random
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from paceline.errors import TrainingError

ATTENTION_NAME = "paceline_documents"
"""Name under which transformers knows `attend_documents`; pass `document_lengths=pack.lengths` to the model."""

CUT_SHARE = 0.5
"""Of the samples that a draft head learns from in pieces."""
LEAST_PIECE = 8
"""Tokens."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and what the target thought at each of its tokens.

    The states of a token are those of EAGLE-3's layers, if they were kept, and behind them the last layer's after the
    final norm, from which the target's head decides the next token.
    """

    ids: Tensor  # [num_tokens] integers, prompt and response
    num_prompt_tokens: int
    states: Tensor  # [num_tokens, num_states * hidden]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return int(self.ids.nbytes + self.states.nbytes)


@dataclass(frozen=True, slots=True)
class Pack:
    """Samples behind each other."""

    ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, within the document
    states: Tensor  # [num_tokens, num_states * hidden] float32
    deciding: Tensor  # [num_decided] int64, the tokens whose states decide a response token, in order
    lengths: tuple[int, ...]
    """Tokens of each document."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def rows(self, shift: int) -> tuple[Tensor, Tensor]:
        """The tokens so far before the deciding ones: (which of these have one in their document, that one's row)."""
        kept = (self.positions[self.deciding] >= shift).nonzero()[:, 0]
        return kept, self.deciding[kept] - shift


def pack_samples(samples: Sequence[Sample]) -> Pack:
    """Put samples behind each other, sorted by length. Raises TrainingError for none."""
    if not samples:
        raise TrainingError("there is nothing to pack: give at least one sample")
    samples = sorted(samples, key=lambda sample: sample.num_tokens)
    lengths = tuple(sample.num_tokens for sample in samples)
    starts = itertools.accumulate(lengths, initial=0)
    deciding = [
        torch.arange(start + sample.num_prompt_tokens - 1, start + length - 1)
        for start, sample, length in zip(starts, samples, lengths, strict=False)
    ]
    return Pack(
        ids=torch.cat([sample.ids for sample in samples]).long(),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        states=torch.cat([sample.states for sample in samples]).float(),
        deciding=torch.cat(deciding),
        lengths=lengths,
    )


def cut_contexts(samples: Sequence[Sample], random: Random, max_tokens: int) -> list[Sample]:
    """A share of the samples (`CUT_SHARE`) in pieces of random lengths, short ones as often as long ones, and all in
    pieces of at most `max_tokens` tokens, as attention needs memory by the square of these. Pieces of a prompt alone
    are left out.

    For a draft head: a piece begins with a state that has none before it, as its context does in an engine after a
    rest, a swap or a move. A head that has seen whole responses alone makes little of such a state.
    """
    made = []
    for sample in samples:
        first = sample.num_prompt_tokens
        cuts = _cuts(first, sample.num_tokens, random) if random.random() < CUT_SHARE else []
        for begin, end in _shortened([0, *cuts, sample.num_tokens], max_tokens):
            if end > first:
                num_prompt_tokens = max(first - begin, 1)
                made.append(Sample(sample.ids[begin:end], num_prompt_tokens, sample.states[begin:end]))
    return made


def _shortened(cuts: Sequence[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Begin and end of what lies between the cuts, in equal pieces where it is longer than `max_tokens`."""
    for begin, end in itertools.pairwise(cuts):
        count = ceil((end - begin) / max_tokens)
        yield from itertools.pairwise(begin + (end - begin) * n // count for n in range(count + 1))


def _cuts(begin: int, end: int, random: Random) -> list[int]:
    """Where what lies between two places is cut, into pieces of `LEAST_PIECE` at least."""
    cuts: list[int] = []
    while True:
        begin += int(exp(random.uniform(log(LEAST_PIECE), log(max(end - begin, LEAST_PIECE)))))
        if end - begin < LEAST_PIECE:
            return cuts
        cuts.append(begin)


def divide(items: Iterable[Item], max_tokens: int, count: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Cut a stream into parts of at most `max_tokens` tokens, as `count` tells; a longer item is one by itself."""
    part: list[Item] = []
    num_tokens = 0
    for item in items:
        if part and num_tokens + count(item) > max_tokens:
            yield part
            part, num_tokens = [], 0
        part.append(item)
        num_tokens += count(item)
    if part:
        yield part


def same_lengths(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbours of one length: (first token, documents, tokens of each)."""
    start = 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        yield start, count, length
        start += count * length


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scaling: float) -> Tensor:
    """Causal attention of each document over itself.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]. Result as query.
    """
    parts = []
    for start, count, length in same_lengths(lengths):
        q, k, v = (
            x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
            for x in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def attend_documents(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls as attention for a pack, a batch of one row. query: [1, num_heads, num_tokens, head_dim]

    Raises TrainingError for attention that is not plain softmax over everything before, or is not told the documents.
    """
    unknown = [
        f"with {name}"
        for name in ("sliding_window", "softcap", "s_aux", "position_bias")
        if options.get(name) is not None
    ]
    if document_lengths is None:
        unknown.append("that is not told where documents begin")
    if unknown or document_lengths is None:
        raise TrainingError(
            f"attention {unknown[0]} cannot be packed: use a model with full softmax attention, "
            "such as Llama, Qwen2 or Qwen3"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, document_lengths, scaling or query.shape[-1] ** -0.5)[None], None


AttentionInterface.register(ATTENTION_NAME, attend_documents)
