"""The shared dice: Gumbel noise as a pure function of (key, position, token), and exact sampling with it.

Invariant: the same arguments give the same 32 bits on every machine, here and in C++ (`csrc/dice.hpp`). A
*position* is absolute and names the drawn token: the first response token of an n-token prompt has position n. Samplers
and drafters of every floor call this module.

Source: the Gumbel-max trick; hash and float32 arithmetic of the Gumbel sampler in vLLM's model runner V2
(murmur3 over key, position word and id; small hashes give large noise). Differs: the logarithm is our own,
rounded once from float64, where V2 takes the device's; the hash bits are V2's exactly, the noise agrees
within a few units in the last place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import InstallError, RequestError
from paceline.types import Float32Array, Float64Array, Int32Array, Int64Array, UInt64Array

try:
    from paceline import _dice
except ImportError as error:
    raise InstallError(
        "the native module paceline._dice cannot be loaded; reinstall the package (a checkout: make native)"
    ) from error

UInt32Array = NDArray[np.uint32]

__all__ = [
    "NO_TOKEN",
    "derive_key",
    "gumbel",
    "gumbel_reference",
    "hash_words",
    "key_from_seed",
    "propose",
    "sample",
    "sample_reference",
]

NO_TOKEN = -1
"""Stands for the token of a row from which nothing can be drawn: a NaN in it, or -inf throughout."""

_KEY_LIMIT = 1 << 64


def key_from_seed(seed: int) -> int:
    """The key of a request that brings its own `SamplingParams.seed`: the seed's 64-bit pattern, unsigned.

    The identity is right because runner V2 feeds the seed itself to the hash: -1 and 2**64 - 1 are one key.
    Raises RequestError outside -2**63 .. 2**64 - 1.
    """
    if not -(1 << 63) <= seed < _KEY_LIMIT:
        raise RequestError(f"seed {seed} does not fit in 64 bits; use a value from -2**63 to 2**64 - 1")
    return seed % _KEY_LIMIT


def derive_key(run_seed: int, prompt: Sequence[int] | Int32Array, sample: int) -> int:
    """The 64-bit key of response number `sample` to `prompt` (token ids) in a run, stable across machines.

    BLAKE2b over run seed and sample (8 bytes each, little-endian) and the prompt (int32, little-endian), so
    the samples of a prompt share no noise with each other, nor with any other prompt or run.
    Raises RequestError for a seed beyond 64 bits, a sample below 0 or beyond 63 bits, or a wrong token id.
    """
    if not 0 <= sample < 1 << 63:
        raise RequestError(f"sample {sample} is outside 0 .. 2**63 - 1; number a group's responses from 0")
    ids = np.asarray(prompt)
    if ids.size and (ids.dtype.kind not in "iu" or not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31):
        raise RequestError("the prompt is not a list of token ids within 0 .. 2**31 - 1; tokenize it first")
    head = key_from_seed(run_seed).to_bytes(8, "little") + sample.to_bytes(8, "little")
    digest = hashlib.blake2b(head + ids.astype("<i4").tobytes(), digest_size=8, person=b"paceline-key-1")
    return int.from_bytes(digest.digest(), "little")


def gumbel(keys: ArrayLike, positions: ArrayLike, tokens: ArrayLike) -> Float32Array:
    """Standard Gumbel noise, float32, of the broadcast shape of the arguments; between -2.82 and 22.88.

    `keys` uint64 (Python ints up to 2**64 - 1), `positions` int64 from 1, `tokens` ids from 0.
    Raises RequestError for other types, a position below 1 or an id below 0.
    """
    key, position, token = np.broadcast_arrays(*_typed(keys, positions, tokens))
    noise = np.empty(key.shape, np.float32)
    flat = [np.ascontiguousarray(array).reshape(-1) for array in (key, position, token)]
    _dice.gumbel(flat[0], flat[1], flat[2], noise.reshape(-1))
    return noise


def sample(
    logits: Float32Array,
    keys: UInt64Array,
    positions: Int64Array,
    temperatures: Float32Array,
    out: Int64Array | None = None,
) -> Int64Array:
    """One token per row: argmax over ids of logit / T + noise, ties to the lowest id; T = 0: plain argmax.

    logits: [num_rows, vocab] float32, C-contiguous; an id at -inf is never drawn. keys: [num_rows] uint64.
    positions: [num_rows] int64 from 1. temperatures: [num_rows] float32, finite, from 0.
    out: [num_rows] int64, filled and returned where given.
    Runs on one thread without the interpreter lock. Ids that cannot win are skipped; the result is that of
    `sample_reference` on every input: NO_TOKEN for a row from which nothing can be drawn.
    Raises RequestError for wrong shapes, types, positions or temperatures; `out` is then undefined.
    """
    try:
        result = np.empty(len(logits), np.int64) if out is None else out
        failed = _dice.sample(logits, keys, positions, temperatures, result)
    except (TypeError, ValueError) as error:
        raise RequestError(_describe_arrays((logits, keys, positions, temperatures, out))) from error
    if failed >= 0:
        _raise_bad_row(failed, int(positions[failed]), float(temperatures[failed]))
    return result


def propose(
    logits: Float32Array,
    keys: UInt64Array,
    positions: Int64Array,
    temperatures: Float32Array,
    sharpness: float,
) -> tuple[Int64Array, Float32Array, Float32Array, Int64Array]:
    """A drafter's proposal per row, argmax over ids of sharpness * logit / T + noise, and how sure it is.

    Arguments as for `sample`; the logits are overwritten. sharpness: above 0, inf = greedy.
    Returns tokens, log q of each (q = softmax(logits / T), T = 1 for greedy rows), each one's margin: its lead over its
    rival, the best other id in logit / T + noise, negative where sharpness chose another one than the coupling would;
    and the rivals, NO_TOKEN where there is none. A row from which nothing can be drawn has NO_TOKEN and zeros.
    Errors as for `sample`; RequestError for a sharpness that is not above 0.
    """
    if not sharpness > 0:
        raise RequestError(f"sharpness is {sharpness}, must be above 0 (1 = coupled, inf = greedy)")
    try:
        tokens, rivals = np.empty((2, len(logits)), np.int64)
        log_q, margins = np.empty((2, len(logits)), np.float32)
        failed = _dice.propose(
            logits, keys, positions, temperatures, sharpness, tokens, log_q, margins, rivals
        )
    except (TypeError, ValueError) as error:
        raise RequestError(_describe_arrays((logits, keys, positions, temperatures, None))) from error
    if failed >= 0:
        _raise_bad_row(failed, int(positions[failed]), float(temperatures[failed]))
    return tokens, log_q, margins, rivals


def hash_words(keys: ArrayLike, positions: ArrayLike, tokens: ArrayLike) -> UInt32Array:
    """The 32 uniform bits below the noise (NumPy, broadcasting as `gumbel`): murmur3 as in runner V2."""
    key, position, token = _typed(keys, positions, tokens)
    low = np.uint64(0xFFFFFFFF)
    h = _mix(np.zeros((), np.uint32), (key & low).astype(np.uint32))
    h = _mix(h, (key >> np.uint64(32)).astype(np.uint32))
    word = (position - 1).view(np.uint64) & low  # runner V2 counts the input token's position
    h = _mix(h, word.astype(np.uint32))
    h = _mix(h, token) ^ np.uint32(16)
    with np.errstate(over="ignore"):
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    result: UInt32Array = np.asarray(h ^ (h >> np.uint32(16)), np.uint32)
    return result


def gumbel_reference(keys: ArrayLike, positions: ArrayLike, tokens: ArrayLike) -> Float32Array:
    """`gumbel` in plain NumPy: the same bits, slower; the definition that tests hold the others to."""
    words = hash_words(keys, positions, tokens)
    noise = -_log(-_log1p_neg(_uniform(words.reshape(-1))))
    return noise.reshape(words.shape)


def sample_reference(
    logits: Float32Array, keys: UInt64Array, positions: Int64Array, temperatures: Float32Array
) -> Int64Array:
    """`sample` in plain NumPy, every score computed; same contract and errors."""
    tokens = np.full(len(logits), NO_TOKEN, np.int64)
    ids = np.arange(logits.shape[1])
    for r, (row, temperature) in enumerate(zip(logits, temperatures, strict=True)):
        if not (0 <= temperature < np.inf) or positions[r] < 1:
            _raise_bad_row(r, int(positions[r]), float(temperature))
        scores = row
        if temperature != 0:
            with np.errstate(over="ignore"):
                scores = row / np.float32(temperature) + gumbel_reference(keys[r], positions[r], ids)
        if scores.size and scores.max() > -np.inf:  # not for a NaN
            tokens[r] = np.argmax(scores)
    return tokens


def _typed(
    keys: ArrayLike, positions: ArrayLike, tokens: ArrayLike
) -> tuple[UInt64Array, Int64Array, UInt32Array]:
    """The arguments in the word types of the hash; a signed key stands for its 64-bit pattern."""
    key, position, token = (
        _integers("keys", keys),
        _integers("positions", positions),
        _integers("tokens", tokens),
    )
    if position.size and int(position.min()) < 1:
        raise RequestError(
            f"position {int(position.min())} is below 1; pass the absolute position of the drawn token"
        )
    if token.size and not 0 <= int(token.min()) <= int(token.max()) < 1 << 32:
        raise RequestError("tokens hold an id outside 0 .. 2**32 - 1; pass the tokenizer's ids")
    signed = key.dtype.kind == "i"
    word = key.astype(np.int64).view(np.uint64) if signed else key.astype(np.uint64)
    return word, position.astype(np.int64), token.astype(np.uint32)


def _integers(name: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise RequestError(f"{name} have type {array.dtype}; pass integers of at most 64 bits")
    return array


def _rotate(value: UInt32Array, shift: int) -> UInt32Array:
    return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))


def _mix(h: UInt32Array, word: UInt32Array) -> UInt32Array:
    with np.errstate(over="ignore"):
        word = _rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        return _rotate(h ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _uniform(words: UInt32Array) -> Float32Array:
    """(word + 0.5) * 2**-32 rounded to float32, in (0, 1]."""
    high = (words >> np.uint32(16)).astype(np.float32) * np.float32(1.52587890625e-05)
    low = (words & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    return high + low * np.float32(2.3283064365386963e-10)


def _log1p_neg(u: Float32Array) -> Float32Array:
    """log(1 - u): a degree-8 series below a quarter, where the winning tail lies, direct above."""
    p = np.full_like(u, 1 / 8)
    for divisor in (7, 6, 5, 4, 3, 2, 1):
        p = np.float32(1 / divisor) + u * p
    direct = _log(np.maximum(np.float32(1) - u, np.float32(5.960464477539063e-08)))
    return np.where(u < np.float32(0.25), -u * p, direct)


def _log(x: Float32Array) -> Float32Array:
    """log of positive normal floats, rounded once from float64: 2 atanh((m - 1) / (m + 1)) + e log 2."""
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    m = (bits - (exponent << np.int32(23))).view(np.float32).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    p: Float64Array = np.full_like(s, 1 / 17)
    for divisor in (15, 13, 11, 9, 7, 5, 3, 1):
        p = 1 / divisor + s2 * p
    return (exponent * 0.6931471805599453 + (s + s) * p).astype(np.float32)


def _raise_bad_row(row: int, position: int, temperature: float) -> None:
    if position < 1:
        raise RequestError(
            f"row {row}: position {position} is below 1; pass the absolute position of the drawn token"
        )
    raise RequestError(f"row {row}: temperature {temperature} is not a finite number >= 0; 0 means greedy")


def _describe_arrays(arrays: Iterable[Any]) -> str:
    found = ", ".join(
        "none" if a is None else f"{getattr(a, 'dtype', type(a).__name__)}{list(np.shape(a))}" for a in arrays
    )
    return (
        "dice.sample needs C-contiguous logits float32[num_rows, vocab], keys uint64[num_rows], positions "
        f"int64[num_rows], temperatures float32[num_rows] and out int64[num_rows] or none; got {found}"
    )
