"""The shared dice: known answers, one noise in three forms, its distribution, and clear refusals."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from paceline import dice
from paceline.errors import RequestError
from paceline.types import Float32Array, Int64Array, UInt64Array

# (key, position, token, hash, bits of the float32 noise), frozen: a change would change recorded rollouts.
KNOWN = [
    (0x0, 1, 0, 0x8134CDF8, 0x3EB4B534),
    (0x1, 1, 0, 0x92228D1B, 0x3E2B5732),
    (0x0, 2, 0, 0x0D568719, 0x403B6323),
    (0x0, 1, 1, 0x00990201, 0x40C1E0D9),
    (0x2A, 7, 31999, 0xE1EDD3E1, 0xBF42F5AB),
    (0xFFFFFFFFFFFFFFFF, 2147483648, 151935, 0xB9529F90, 0xBE8134C3),
    (0x123456789ABCDEF, 4096, 50256, 0x377FC3E5, 0x3FB45E03),
    (0x8000000000000000, 1, 255, 0x10754F14, 0x402D861C),
    (0x100000000, 4294967296, 1, 0x3AB41637, 0x3FAC31CF),
    (0xAB54A98CEB1F0AD2, 8, 42, 0x0751B170, 0x406292F6),
    (0x7, 8589934597, 100000, 0xE3AF3D69, 0xBF4A0D03),
    (0x3E7, 131072, 2147483647, 0x6668F5D2, 0x3F2BEDF1),
]


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of Pearson's statistic by the Wilson-Hilferty approximation (from some ten cells on)."""
    statistic = float((((observed - expected) ** 2) / expected).sum())
    freedom = observed.size - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def triples(count: int) -> tuple[UInt64Array, Int64Array, np.ndarray]:
    rng = np.random.default_rng(20)
    keys = rng.integers(0, 2**64, count, dtype=np.uint64)
    return keys, rng.integers(1, 2**40, count), rng.integers(0, 2**31, count).astype(np.int32)


def rows(
    num_rows: int, vocab: int, temperature: float
) -> tuple[Float32Array, UInt64Array, Int64Array, Float32Array]:
    rng = np.random.default_rng(vocab)
    logits = (3 * rng.standard_normal((num_rows, vocab))).astype(np.float32)
    logits[:, -1] = 1.0  # one id can always be drawn, however small the temperature
    return (
        logits,
        rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        rng.integers(1, 5000, num_rows),
        np.full(num_rows, temperature, np.float32),
    )


@pytest.mark.parametrize(("key", "position", "token", "word", "bits"), KNOWN)
def test_known_answers(key: int, position: int, token: int, word: int, bits: int) -> None:
    assert int(dice.hash_words(key, position, token)) == word
    for form in (dice.gumbel, dice.gumbel_reference):
        assert int(form(key, position, token).view(np.uint32)) == bits


def test_known_keys() -> None:
    assert dice.derive_key(0, [], 0) == 0x243E7D8955ABABB8
    assert dice.derive_key(-7, [1, 2, 3], 15) == 0xB34A98EF7C750E27
    assert dice.derive_key(-7, np.array([1, 2, 3], np.int32), 15) == dice.derive_key(-7, (1, 2, 3), 15)
    assert (dice.key_from_seed(42), dice.key_from_seed(-1)) == (42, 2**64 - 1)


def test_keys_differ_in_every_argument() -> None:
    keys = {
        dice.derive_key(seed, prompt, s)
        for seed in (0, 1, -1)
        for prompt in ([], [0], [0, 0])
        for s in range(64)
    }
    assert len(keys) == 3 * 3 * 64


def test_native_and_numpy_noise_have_the_same_bits() -> None:
    keys, positions, tokens = triples(10**6)
    native = dice.gumbel(keys, positions, tokens)
    numpy = dice.gumbel_reference(keys, positions, tokens)
    np.testing.assert_array_equal(native.view(np.uint32), numpy.view(np.uint32))


def test_noise_is_finite_at_the_ends_of_the_hash() -> None:
    words = np.array([0, 1, 2, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    numpy = -dice._log(-dice._log1p_neg(dice._uniform(words)))
    assert np.isfinite(numpy).all()
    assert (numpy.max(), numpy.min()) == (numpy[0], numpy[-1])
    assert numpy[0] == np.float32(-math.log(2**-33))


def test_noise_follows_the_exact_formula() -> None:
    keys, positions, tokens = triples(10**5)
    uniform = (dice.hash_words(keys, positions, tokens).astype(np.float64) + 0.5) / 2**32
    exact = -np.log(-np.log1p(-uniform))
    # The series ends after degree 8, 4.2e-7 short of log(1 - u) at a quarter; above, 1 - u is rounded.
    near = uniform < 0.999
    np.testing.assert_allclose(
        dice.gumbel(keys, positions, tokens)[near], exact[near], rtol=3e-6, atol=1.2e-5
    )


def test_broadcasting_matches_single_calls() -> None:
    noise = dice.gumbel(np.array([[5], [6]], np.uint64), [[9], [10]], np.arange(7))
    assert noise.shape == (2, 7)
    assert noise[1, 3] == dice.gumbel(6, 10, 3)
    assert dice.gumbel(-1, 10, 3) == dice.gumbel(2**64 - 1, 10, 3)
    assert dice.gumbel([], 1, []).shape == (0,)


# Distribution. Keys, positions and ids are consecutive on purpose: the hardest inputs for such a hash.


def streams() -> dict[str, np.ndarray]:
    """Hashes along one axis with the other two fixed, 2**20 each."""
    count = np.arange(1, 2**20 + 1)
    return {
        "tokens": dice.hash_words(3, 17, count),
        "positions": dice.hash_words(3, count, 17),
        "low keys": dice.hash_words(count.astype(np.uint64), 17, 3),
        "high keys": dice.hash_words(count.astype(np.uint64) << np.uint64(32), 17, 3),
    }


@pytest.mark.parametrize("axis", ["tokens", "positions", "low keys", "high keys"])
def test_hashes_are_uniform_along_each_axis(axis: str) -> None:
    words = np.sort(streams()[axis])
    steps = np.arange(1, words.size + 1) / words.size
    uniform = (words + 0.5) / 2**32
    distance = max((steps - uniform).max(), (uniform - steps + 1 / words.size).max())
    assert distance * math.sqrt(words.size) < 1.95  # Kolmogorov-Smirnov at 0.1 %
    for shift in (0, 12, 24):  # high, middle and low bytes
        counts = np.bincount((words >> np.uint32(shift)) & 0xFF, minlength=256)
        assert chi_square_p(counts, np.full(256, words.size / 256)) > 1e-4


@pytest.mark.parametrize("lag", [1, 2, 64])
@pytest.mark.parametrize("axis", ["tokens", "positions", "low keys", "high keys"])
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    words = streams()[axis]
    first, second = words[:-lag], words[lag:]
    joint = np.bincount((first >> np.uint32(27)) * 32 + (second >> np.uint32(27)), minlength=1024)
    assert chi_square_p(joint, np.full(1024, first.size / 1024)) > 1e-4
    correlation = np.corrcoef(first.astype(np.float64), second.astype(np.float64))[0, 1]
    assert abs(correlation) * math.sqrt(first.size) < 4.5


def test_keys_and_positions_do_not_share_noise() -> None:
    ids = np.arange(2**15)
    cells = [dice.hash_words(key, position, ids) for key in (0, 1, 2**32, 2**63) for position in (1, 2, 3)]
    for first, second in combinations(cells, 2):
        correlation = np.corrcoef(first.astype(np.float64), second.astype(np.float64))[0, 1]
        assert abs(correlation) * math.sqrt(ids.size) < 4.5
        joint = np.bincount((first >> np.uint32(28)) * 16 + (second >> np.uint32(28)), minlength=256)
        assert chi_square_p(joint, np.full(256, ids.size / 256)) > 1e-5


@pytest.mark.parametrize("axis", ["keys", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampling_matches_softmax(temperature: float, axis: str) -> None:
    draws, vocab, part = 10**6, 50, 10**5
    logits = (2 * np.random.default_rng(4).standard_normal(vocab)).astype(np.float32)
    counts = np.zeros(vocab, np.int64)
    for start in range(0, draws, part):
        moving = np.arange(start + 1, start + part + 1)
        fixed = np.full(part, 77)
        keys, positions = (moving, fixed) if axis == "keys" else (fixed, moving)
        table = np.broadcast_to(logits, (part, vocab)).copy()
        tokens = dice.sample(table, keys.astype(np.uint64), positions, np.full(part, temperature, np.float32))
        counts += np.bincount(tokens, minlength=vocab)
    weights = np.exp(logits.astype(np.float64) / np.float32(temperature))
    expected = weights / weights.sum() * draws
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert chi_square_p(counts, expected) > 1e-3


# The samplers


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-3, 0.7, 1.0, 5.0, 1e38])
@pytest.mark.parametrize("vocab", [1, 2, 64, 127, 128, 129, 5000])
def test_both_samplers_agree(vocab: int, temperature: float) -> None:
    batch = rows(24, vocab, temperature)
    reference = dice.sample_reference(*batch)
    np.testing.assert_array_equal(dice.sample(*batch), reference)


def test_position_moves_the_draw_and_rows_do_not_matter() -> None:
    logits, keys, positions, temperatures = rows(200, 64, 1.0)
    flat = np.zeros_like(logits)
    drawn = dice.sample(flat, keys, positions, temperatures)
    assert (drawn != dice.sample(flat, keys, positions + 1, temperatures)).mean() > 0.9
    order = np.random.default_rng(1).permutation(200)
    np.testing.assert_array_equal(
        dice.sample(logits[order], keys[order], positions[order], temperatures),
        dice.sample(logits, keys, positions, temperatures)[order],
    )


def test_out_is_filled_and_returned() -> None:
    batch = rows(3, 64, 1.0)
    out = np.full(3, -1)
    assert dice.sample(*batch, out=out) is out
    np.testing.assert_array_equal(out, dice.sample(*batch))


# Refusals


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"temperatures": math.nan}, "temperature nan"),
        ({"temperatures": math.inf}, "temperature inf"),
        ({"temperatures": -0.5}, "temperature -0.5"),
        ({"positions": 0}, "position 0"),
    ],
)
def test_bad_rows_are_named(damage: dict[str, float], message: str) -> None:
    logits, keys, positions, temperatures = rows(4, 300, 1.0)
    temperatures[2] = damage.get("temperatures", 1.0)
    positions[2] = damage.get("positions", 5)
    batch = (logits, keys, positions, temperatures)
    with pytest.raises(RequestError, match=f"row 2.*{message}"):
        dice.sample(*batch)
    with pytest.raises(RequestError, match=f"row 2.*{message}"):
        dice.sample_reference(*batch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", [math.nan, -math.nan, -math.inf])
def test_a_row_from_which_nothing_can_be_drawn_has_no_token_and_the_others_have_theirs(
    damage: float, temperature: float
) -> None:
    batch = rows(4, 300, temperature)
    sound = dice.sample(*batch)
    batch[0][2, 131 if math.isnan(damage) else slice(None)] = damage
    expected = [*sound[:2], dice.NO_TOKEN, sound[3]]
    assert dice.sample(*batch).tolist() == expected
    assert dice.sample_reference(*batch).tolist() == expected
    tokens, log_q, margin, rivals = dice.propose(*batch, 1.0)
    assert tokens.tolist() == expected
    assert np.isfinite(log_q).all()
    assert np.isfinite(margin).all()
    assert (rivals == dice.NO_TOKEN).tolist() == [False, False, True, False]


def test_wrong_arrays_are_described() -> None:
    logits, keys, positions, temperatures = rows(4, 300, 1.0)
    wrong = [
        (logits.astype(np.float64), keys, positions, temperatures),
        (logits.T, keys, positions, temperatures),
        (logits[:, ::2], keys, positions, temperatures),
        (logits, keys[:3], positions, temperatures),
        (logits, keys.view(np.int64), positions, temperatures),
        (logits, keys, positions.astype(np.int32), temperatures),
        (None, keys, positions, temperatures),
    ]
    for batch in wrong:
        with pytest.raises(RequestError, match="needs C-contiguous logits"):
            dice.sample(*batch)
    assert dice.sample(np.empty((4, 0), np.float32), keys, positions, temperatures).tolist() == [-1] * 4
    assert dice.sample(logits[:0], keys[:0], positions[:0], temperatures[:0]).size == 0


def test_wrong_words_are_refused() -> None:
    for call in (
        lambda: dice.gumbel(1, 0, 5),
        lambda: dice.gumbel(1, 1, -5),
        lambda: dice.gumbel(1.5, 1, 5),
        lambda: dice.gumbel(2**64, 1, 5),
        lambda: dice.key_from_seed(2**64),
        lambda: dice.key_from_seed(-(2**63) - 1),
        lambda: dice.derive_key(0, [1], -1),
        lambda: dice.derive_key(0, [-1], 0),
        lambda: dice.derive_key(0, [1.5], 0),
        lambda: dice.derive_key(2**64, [1], 0),
    ):
        with pytest.raises(RequestError):
            call()


@pytest.mark.parametrize("vocab", [2, 28, 129, 5003])
@pytest.mark.parametrize("sharpness", [1.0, 1.5, np.inf])
def test_a_proposal_is_the_sharpened_sample_and_says_how_sure_it_is(vocab: int, sharpness: float) -> None:
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((40, vocab))).astype(np.float32)
    keys, positions = rng.integers(0, 2**63, 40).astype(np.uint64), rng.integers(1, 4096, 40)
    temperatures = np.resize(np.array([1.0, 0.6, 0.0, 1.7], np.float32), 40)
    tokens, log_q, margins, rivals = dice.propose(logits.copy(), keys, positions, temperatures, sharpness)
    assert (
        tokens.tolist() == dice.sample(logits, keys, positions, temperatures / np.float32(sharpness)).tolist()
    )
    scale = np.where(temperatures > 0, temperatures, 1.0)[:, None]
    scaled = logits.astype(np.float64) / scale
    rows = np.arange(40)
    expected = scaled[rows, tokens] - np.log(np.exp(scaled).sum(axis=1))
    np.testing.assert_allclose(log_q, expected, atol=2e-5)
    noise = dice.gumbel(keys[:, None], positions[:, None], np.arange(vocab)[None, :])
    scores = scaled + np.where(temperatures > 0, 1.0, 0.0)[:, None] * noise
    own = scores[rows, tokens]
    scores[rows, tokens] = -np.inf
    np.testing.assert_allclose(margins, own - scores.max(axis=1), atol=2e-5)
    np.testing.assert_allclose(scores[rows, rivals], scores.max(axis=1), atol=2e-5)


def test_a_proposal_without_rival_has_no_bound() -> None:
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, 7] = 1.0
    one = np.ones(1)
    tokens, log_q, margins, rivals = dice.propose(
        logits, one.astype(np.uint64), one.astype(int), one.astype(np.float32), 1.0
    )
    assert (tokens.tolist(), log_q.tolist(), margins.tolist()) == ([7], [0.0], [np.inf])
    assert rivals.tolist() == [dice.NO_TOKEN]
