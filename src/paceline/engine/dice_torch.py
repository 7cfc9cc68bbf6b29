"""The shared dice in torch, on any device with int64 and float64: for a GPU without vLLM's runner V2.

Invariant: the same noise bits as `paceline.dice`: integer operations and IEEE + - * / in one fixed order.
Work is chunked over the vocabulary, so extra memory stays at about a hundred bytes x max(CHUNK, num_rows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.dice import NO_TOKEN
from paceline.errors import RequestError

CHUNK = 1 << 18
"""Scores computed at once, over all rows."""

_MASK = 0xFFFFFFFF


def gumbel(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the broadcast shape; arguments as in `paceline.dice.gumbel`.

    `keys` int64 or uint64 (the same 64 bits), `positions` and `tokens` any integer type, all on one device.
    """
    return _noise(_hash(_prefix(keys, positions), tokens.to(torch.int64)))


def sample(logits: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    """One token per row, [num_rows] int64 on the device of `logits`; the tokens of `paceline.dice.sample`.

    logits: [num_rows, vocab], any float type and strides (scores are float32).
    keys: [num_rows] int64 or uint64.
    positions: [num_rows] integers from 1. temperatures: [num_rows] float32, finite, from 0 (0: plain argmax).
    Raises as `paceline.dice.sample` does; the check costs one synchronisation with the device.
    """
    prefix = _prefix(keys, positions)[:, None]
    temperatures = temperatures.to(torch.float32)[:, None]
    greedy = temperatures == 0
    divisor = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    best = torch.full((len(logits),), float("-inf"), dtype=torch.float32, device=logits.device)
    winner = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    width = max(1, CHUNK // max(1, len(logits)))
    for start in range(0, logits.shape[1], width):
        part = logits[:, start : start + width].to(torch.float32)
        ids = torch.arange(start, start + part.shape[1], device=logits.device)
        scores = torch.where(greedy, part, part / divisor + _noise(_hash(prefix, ids)))
        local = scores.argmax(dim=1)
        value = scores.gather(1, local[:, None])[:, 0]
        better = (value > best) | value.isnan()
        best = torch.where(best.isnan(), best, torch.where(better, value, best))
        winner = torch.where(better, local + start, winner)
    _check(positions, temperatures[:, 0])
    return winner.masked_fill_(~(best > float("-inf")), NO_TOKEN)  # of a NaN, too


def _check(positions: Tensor, temperatures: Tensor) -> None:
    bad = (positions < 1) | ~((temperatures >= 0) & (temperatures < float("inf")))
    if bool(bad.any()):
        row = int(bad.int().argmax())
        raise RequestError(
            f"row {row}: position {int(positions[row])} must be at least 1 and temperature "
            f"{float(temperatures[row])} a finite number from 0"
        )


def _rotate(value: Tensor, shift: int) -> Tensor:
    return ((value << shift) | (value >> (32 - shift))) & _MASK


def _mix(h: Tensor, word: Tensor) -> Tensor:
    """One murmur3 round on 32-bit words held in int64; products may wrap, the mask keeps the low half."""
    word = (_rotate((word * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(h ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _prefix(keys: Tensor, positions: Tensor) -> Tensor:
    """State of the hash after key and position word (that of the input token, one below the drawn one)."""
    keys = keys.view(torch.int64) if keys.dtype == torch.uint64 else keys.to(torch.int64)
    h = _mix(torch.zeros_like(keys), keys & _MASK)
    h = _mix(h, (keys >> 32) & _MASK)
    return _mix(h, (positions.to(torch.int64) - 1) & _MASK)


def _hash(prefix: Tensor, tokens: Tensor) -> Tensor:
    h = _mix(prefix, tokens & _MASK) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def _noise(words: Tensor) -> Tensor:
    u = (words >> 16).to(torch.float32) * 1.52587890625e-05
    u = u + ((words & 0xFFFF).to(torch.float32) + 0.5) * 2.3283064365386963e-10
    return -_log(-_log1p_neg(u))


def _log1p_neg(u: Tensor) -> Tensor:
    p = torch.full_like(u, 1 / 8)
    for divisor in (7, 6, 5, 4, 3, 2, 1):
        p = u * p + 1 / divisor
    direct = _log((1.0 - u).clamp(min=5.960464477539063e-08))
    return torch.where(u < 0.25, -u * p, direct)


def _log(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).view(torch.float32).to(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    p = torch.full_like(s, 1 / 17)
    for divisor in (15, 13, 11, 9, 7, 5, 3, 1):
        p = s2 * p + 1 / divisor
    return (exponent.to(torch.float64) * 0.6931471805599453 + (s + s) * p).to(torch.float32)
