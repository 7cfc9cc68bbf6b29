"""What a drafter's drafts are worth on responses that are there: agreement in closed form, and acceptance by the dice.

The dice that decided a response are known (its key), so what a drafter would have drafted at every token, and how far
it would have been right, is computed and not estimated: it is what an engine that drafts chains of one length accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline import dice
from paceline.distillation.losses import agreement
from paceline.distillation.networks import Network, Shared
from paceline.distillation.packing import Pack, Sample, divide, pack_samples
from paceline.types import Float32Array, Int64Array, UInt64Array

PACK_TOKENS = 2048
COMPARED_TOKENS = 512
"""Of a pack, at most, for agreement: evenly spread ones. It sorts the vocabulary for each, which takes longer than all
the rest, and its mean over some thousands of tokens is known to a percentage point.
"""


@dataclass(frozen=True, slots=True)
class Dice:
    """What threw the tokens of a response."""

    key: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Worth:
    """Of a drafter on a set of responses."""

    acceptance_length: float
    """1 + accepted tokens per verification."""
    acceptance: tuple[float, ...]
    """By place in the draft: how often a token is right if those before it are."""
    agreement: tuple[float, ...]
    """The same in closed form, the target's own tokens before it; the mean over a part of the tokens."""
    num_tokens: int
    """Response tokens that could be drafted, the first of each response left out."""


def measure(
    network: Network,
    shared: Shared,
    responses: Iterable[tuple[Sample, Dice]],
    depth: int,
    sharpness: float = 1.0,
) -> Worth:
    """Draft chains of `depth` tokens through all responses, one verification after another.

    responses: each with the dice that threw it. sharpness: exponent on the drafter's distribution, inf = greedy.
    """
    tally = _Tally(depth)
    with torch.no_grad():
        for part in divide(responses, PACK_TOKENS, lambda response: response[0].num_tokens):
            part.sort(key=lambda response: response[0].num_tokens)  # as they stand in a pack
            samples, thrown = zip(*part, strict=True)
            _measure_pack(network, shared, pack_samples(samples), samples, thrown, sharpness, tally)
    return tally.worth()


class _Tally:
    def __init__(self, depth: int) -> None:
        self.agreed = np.zeros(depth)
        self.tried, self.right, self.compared = np.zeros((3, depth), np.int64)
        self.num_drafts = self.num_accepted = self.num_tokens = 0

    def worth(self) -> Worth:
        return Worth(
            acceptance_length=1 + self.num_accepted / max(self.num_drafts, 1),
            acceptance=tuple((self.right / np.maximum(self.tried, 1)).tolist()),
            agreement=tuple((self.agreed / np.maximum(self.compared, 1)).tolist()),
            num_tokens=self.num_tokens,
        )


def _measure_pack(
    network: Network,
    shared: Shared,
    pack: Pack,
    samples: Sequence[Sample],
    thrown: Sequence[Dice],
    sharpness: float,
    tally: _Tally,
) -> None:
    """Fill `matches`: whether the k-th draft behind token r is the response's token; then walk every response."""
    keys, temperatures, firsts = _by_token(samples, thrown)
    heat = torch.from_numpy(np.where(temperatures > 0, temperatures, 1.0))[:, None]
    states = pack.states[:, -shared.head.shape[1] :]
    num_ids = min(shared.vocab_size, network.vocab_size)
    depth = len(tally.tried)
    matches = np.zeros((depth, pack.num_tokens), np.bool_)
    for step, hidden in enumerate(network.unroll(pack, depth)):
        kept, rows = pack.rows(network.lead + step)
        deciding = pack.deciding[kept].numpy()
        inside = firsts[deciding] <= deciding - step  # the chain begins behind a response token
        rows, deciding = rows[torch.from_numpy(inside)], deciding[inside]
        logits = network.logits(hidden[rows])[:, :num_ids].float()
        some = slice(None, None, max(1, -(-len(deciding) // COMPARED_TOKENS)))
        compared = deciding[some]
        log_p, log_q = (
            (one / heat[compared]).log_softmax(-1)
            for one in (shared.logits(states[compared])[:, :num_ids], logits[some])
        )
        tally.agreed[step] += float(agreement(log_p, log_q).sum())
        tally.compared[step] += len(compared)
        positions = pack.positions.numpy()[deciding] + 1
        drafted, *_ = dice.propose(
            logits.contiguous().numpy(), keys[deciding], positions, temperatures[deciding], sharpness
        )
        matches[step, deciding - step] = drafted == pack.ids.numpy()[deciding + 1]
    start = 0
    for sample in samples:
        stop = start + len(sample.ids)
        _walk(matches[:, start + sample.num_prompt_tokens : stop - 1], tally)
        start = stop


def _walk(matches: np.typing.NDArray[np.bool_], tally: _Tally) -> None:
    """One response, draft by draft. matches: [depth, num_tokens], by the last known token."""
    depth, num_tokens = matches.shape
    tally.num_tokens += num_tokens
    at = 0
    while at < num_tokens:
        length = min(depth, num_tokens - at)
        wrong = np.flatnonzero(~matches[:length, at])
        accepted = int(wrong[0]) if len(wrong) else length
        tally.tried[: min(accepted + 1, length)] += 1
        tally.right[:accepted] += 1
        tally.num_drafts += 1
        tally.num_accepted += accepted
        at += accepted + 1


def _by_token(
    samples: Sequence[Sample], thrown: Sequence[Dice]
) -> tuple[UInt64Array, Float32Array, Int64Array]:
    """Key, temperature, and index of the response's first token in the pack, for every token. Each [num_tokens]"""
    lengths = [len(sample.ids) for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    firsts = starts + [sample.num_prompt_tokens for sample in samples]
    return (
        np.repeat(np.array([one.key for one in thrown], np.uint64), lengths),
        np.repeat(np.array([one.temperature for one in thrown], np.float32), lengths),
        np.repeat(firsts.astype(np.int64), lengths),
    )
