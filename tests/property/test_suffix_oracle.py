"""The native suffix forest against a brute-force oracle that keeps nothing but the texts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _suffix, dice
from paceline.drafting.suffix import NUM_CELLS, SuffixForest
from paceline.types import DraftQuery

GRID = np.array([1.0, 2.0, np.inf], dtype=np.float32)
CALIBRATION = np.linspace(0.5, 0.99, NUM_CELLS, dtype=np.float32)
Texts = list[tuple[list[int], int, int]]  # (tokens, how many of them only give context, mask bit)


@dataclass
class Seen:
    """All that followed a context."""

    counts: Counter[int] = field(default_factory=Counter)
    masks: dict[int, int] = field(default_factory=dict)  # token -> responses it came from
    mask: int = 0  # responses (or groups) in which the context itself occurred

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass
class Oracle:
    """Texts of groups, and slow versions of the counts, the mixture and its learning, as suffix.hpp defines them."""

    max_depth: int
    shared_depth: int
    prompts: dict[int, list[int]] = field(default_factory=dict)
    responses: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    seen: list[float] = field(default_factory=lambda: [4.0] * 768)
    escaped: list[float] = field(default_factory=lambda: [4.0 * 0.7] * 768)

    def escape(self, bucket: int) -> float:
        return min(max(self.escaped[bucket] / self.seen[bucket], 1e-4), 0.9999)

    def own_bit(self, group: int, response: int) -> int:
        order = list(self.responses[group])
        return 1 << ((1 + order.index(response)) & 31) if response in order else 0

    def group_bit(self, group: int) -> int:
        return 1 << (list(self.responses).index(group) & 31)

    def group_texts(self, group: int) -> Texts:
        prompt = self.prompts[group]
        texts: Texts = [(prompt, 0, 1)]
        for response, tokens in self.responses[group].items():
            texts.append((prompt + tokens, len(prompt), self.own_bit(group, response)))
        return texts

    def shared_texts(self) -> Texts:
        return [
            (tokens, 0, self.group_bit(group))
            for group, responses in self.responses.items()
            for tokens in responses.values()
        ]

    def count(self, group: int, context: list[int]) -> int:
        return occurrences(self.group_texts(group), context)

    def levels(self, group: int, response: int, drafted: list[int]) -> list[tuple[int, int, Seen]]:
        """(depth, bucket, what followed) of each context that has a continuation, in the order of use."""
        own = self.responses[group].get(response, [])
        full, alone = self.prompts[group] + own + drafted, own + drafted
        found = []
        for depth in range(max(self.max_depth, self.shared_depth), 0, -1):
            if depth <= min(len(full), self.max_depth):
                seen = followers(self.group_texts(group), full[-depth:])
                if seen.total:
                    found.append((depth, bucket(False, depth, seen, self.own_bit(group, response)), seen))
            if depth <= min(len(alone), self.shared_depth):
                seen = followers(self.shared_texts(), alone[-depth:])
                if seen.total and seen.mask != self.group_bit(group):
                    found.append((depth, bucket(True, depth, seen, self.group_bit(group)), seen))
        return found

    def predict(
        self, group: int, response: int, drafted: list[int]
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Probabilities of the candidates, and the responses behind each in its longest context."""
        q: dict[int, float] = {}
        masks: dict[int, int] = {}
        reach, last_depth = 1.0, None
        for depth, b, seen in self.levels(group, response, drafted):
            if depth != last_depth and reach <= 0.01:
                break
            last_depth = depth
            escape = self.escape(b)
            for token, count in seen.counts.items():
                q[token] = q.get(token, 0.0) + reach * (1 - escape) * count / seen.total
                masks.setdefault(token, seen.masks[token])
            reach *= escape
        return q, masks

    def append(self, group: int, response: int, token: int) -> None:
        self.responses[group].setdefault(response, [])
        levels = self.levels(group, response, [])
        everything = followers(self.group_texts(group), [])
        base = everything.counts[token] / everything.total if everything.total else 0.0
        self.learn([(b, seen.counts[token] / seen.total) for _, b, seen in levels], 0.9 * base + 1e-5)
        self.responses[group][response].append(token)

    def learn(self, levels: list[tuple[int, float]], base: float) -> None:
        below, p = [], base
        for b, share in reversed(levels):
            passed = self.escape(b) * p
            p = passed + (1 - self.escape(b)) * share
            below.append(passed / p)
        reach = 1.0
        for (b, _), share_below in zip(levels, reversed(below), strict=True):
            if reach <= 1e-3:
                break
            self.seen[b] += reach
            self.escaped[b] += reach * share_below
            reach *= share_below


def occurrences(texts: Texts, context: list[int]) -> int:
    """Times a context ends inside the counted part of a text."""
    size = len(context)
    return sum(
        tokens[end - size : end] == context
        for tokens, skipped, _ in texts
        for end in range(max(skipped + 1, size), len(tokens) + 1)
    )


def followers(texts: Texts, context: list[int]) -> Seen:
    seen, size = Seen(), len(context)
    for tokens, skipped, bit in texts:
        for end in range(size, len(tokens) + 1):
            if tokens[end - size : end] != context:
                continue
            if end > skipped:
                seen.mask |= bit
            if skipped <= end < len(tokens):
                seen.counts[tokens[end]] += 1
                seen.masks[tokens[end]] = seen.masks.get(tokens[end], 0) | bit
    return seen


def bucket(shared: bool, depth: int, seen: Seen, own: int) -> int:
    def step(value: float, *edges: int) -> int:
        return sum(value > edge for edge in edges)

    total, distinct = seen.total, len(seen.counts)
    if distinct == 1:
        (mask,) = seen.masks.values()
        whose = 0 if mask == own else 1 if mask.bit_count() == 1 else 2
        kind = step(total, 1, 2, 4) * 3 + whose
    elif distinct == 2:
        kind = 12 + step(total, 2, 4, 8)
    elif distinct <= 4:
        kind = 16 + step(total, 4, 8, 16)
    else:
        kind = 20 + step(total // distinct, 1, 3, 7)
    return ((16 if shared else 0) + min(depth, 16) - 1) * 24 + kind


def cell(q: float, margin: float, mask: int, noisy: bool) -> int:
    several = int(mask.bit_count() > 1)
    p = sum(q >= edge for edge in _suffix.PROBABILITY_EDGES)
    m = sum(margin >= edge for edge in _suffix.MARGIN_EDGES)
    return ((int(noisy) * 2 + several) * 8 + p) * 8 + m


def near_edge(value: float, edges: list[float]) -> bool:
    return any(abs(value - edge) < 1e-7 for edge in edges)


tokens_of = st.integers(0, 3)
appends = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.lists(tokens_of, max_size=6)), max_size=12
)
prompts_of = st.lists(st.lists(tokens_of, max_size=8), min_size=2, max_size=2)


def build(
    depth: int, shared: int, prompts: list[list[int]], chunks: list[tuple[int, int, list[int]]]
) -> tuple[SuffixForest, Oracle]:
    forest, oracle = SuffixForest(depth, shared_depth=shared), Oracle(depth, min(shared, depth))
    for group, prompt in enumerate(prompts):
        forest.open_group(group, prompt)
        oracle.prompts[group], oracle.responses[group] = prompt, {}
    for group, response, tokens in chunks:
        forest.append(group, response, tokens)
        oracle.responses[group].setdefault(response, [])
        for token in tokens:
            oracle.append(group, response, token)
    return forest, oracle


def ask(
    group: int, response: int, position: int, temperature: float, limit: int, key: int = 99
) -> DraftQuery:
    return DraftQuery(
        groups=np.array([group], np.int64),
        responses=np.array([response], np.int64),
        keys=np.array([key], np.uint64),
        positions=np.array([position], np.int64),
        temperatures=np.array([temperature], np.float32),
        max_tokens=np.array([limit], np.int32),
    )


@given(st.integers(1, 5), prompts_of, appends)
@settings(max_examples=150)
def test_every_context_is_counted_exactly(
    depth: int, prompts: list[list[int]], chunks: list[tuple[int, int, list[int]]]
) -> None:
    forest, oracle = build(depth, 2, prompts, chunks)
    for group in (0, 1):
        texts = oracle.group_texts(group)
        contexts = {
            tuple(tokens[end - size : end])
            for tokens, _, _ in texts
            for end in range(len(tokens) + 1)
            for size in range(min(end, depth + 1) + 1)
        }
        for context in contexts | {(9,), (0, 9), (3, 3)}:
            if len(context) <= depth + 1:
                assert forest.count(group, list(context)) == oracle.count(group, list(context))
    shared = oracle.shared_texts()
    for size in range(1, min(2, depth) + 2):
        for tokens, _, _ in shared:
            for end in range(size, len(tokens) + 1):
                context = tokens[end - size : end]
                native = forest._native.count_shared(np.array(context, np.int32))
                assert native == occurrences(shared, context)


@given(st.integers(1, 5), st.integers(0, 3), prompts_of, appends)
@settings(max_examples=150)
def test_the_mixture_learns_what_the_slow_one_learns(
    depth: int, shared: int, prompts: list[list[int]], chunks: list[tuple[int, int, list[int]]]
) -> None:
    forest, oracle = build(depth, shared, prompts, chunks)
    expected = [oracle.escape(b) for b in range(768)]
    np.testing.assert_allclose(forest._native.escapes(), expected, rtol=1e-9)


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    prompts_of,
    appends,
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 2.0, math.inf]),
)
@settings(max_examples=200)
def test_drafts_follow_the_formula(
    depth: int,
    shared: int,
    prompts: list[list[int]],
    chunks: list[tuple[int, int, list[int]]],
    temperature: float,
    sharpness: float,
) -> None:
    forest, oracle = build(depth, shared, prompts, chunks)
    for group, response in ((0, 0), (0, 2), (1, 1)):
        text = prompts[group] + oracle.responses[group].get(response, [])
        batch = forest.draft(
            ask(group, response, len(text), temperature, 4),
            sharpness=sharpness,
            sharpness_grid=GRID,
            calibration=CALIBRATION,
            floor=0.2,
        )
        drafted: list[int] = []
        path = 1.0
        for j in range(4):
            q, masks = oracle.predict(group, response, drafted)
            noisy = temperature > 0
            noise = {
                t: float(dice.gumbel(np.uint64(99), np.int64(len(text) + j), np.int32(t))) if noisy else 0.0
                for t in q
            }
            if j == 0:
                check_probes(batch.probes[0], q, noise, noisy)
            if j >= batch.num_tokens[0]:
                assert (
                    not q or path * CALIBRATION.max() < 0.2 or stops(q, noise, masks, sharpness, noisy, path)
                )
                break
            token = int(batch.tokens[0, j])
            scores = score(q, noise, sharpness, noisy)
            assert scores[token] >= max(scores.values()) - 1e-9
            check_cell(q, noise, masks, token, noisy, int(batch.cells[0, j]))
            assert batch.acceptance[0, j] == CALIBRATION[batch.cells[0, j]]
            path *= float(batch.acceptance[0, j])
            assert path >= 0.2
            drafted.append(token)


def score(q: dict[int, float], noise: dict[int, float], sharpness: float, noisy: bool) -> dict[int, float]:
    if not noisy or math.isinf(sharpness):
        return q
    return {token: sharpness * math.log(p) + noise[token] for token, p in q.items()}


def check_probes(probes: np.ndarray, q: dict[int, float], noise: dict[int, float], noisy: bool) -> None:
    for sharpness, probe in zip(GRID.tolist(), probes.tolist(), strict=True):
        if not q:
            assert probe == -1
        else:
            scores = score(q, noise, sharpness, noisy)
            assert scores[probe] >= max(scores.values()) - 1e-9


def margin_of(q: dict[int, float], noise: dict[int, float], token: int, noisy: bool) -> float:
    unseen = math.log(max(1 - sum(q.values()), 1e-3)) + (0.5772156649015329 if noisy else 0.0)
    rivals = [math.log(p) + noise[t] for t, p in q.items() if t != token]
    return math.log(q[token]) + noise[token] - max([unseen, *rivals])


def check_cell(
    q: dict[int, float], noise: dict[int, float], masks: dict[int, int], token: int, noisy: bool, found: int
) -> None:
    margin = margin_of(q, noise, token, noisy)
    if not near_edge(q[token], _suffix.PROBABILITY_EDGES) and not near_edge(margin, _suffix.MARGIN_EDGES):
        assert found == cell(q[token], margin, masks[token], noisy)


def stops(
    q: dict[int, float],
    noise: dict[int, float],
    masks: dict[int, int],
    sharpness: float,
    noisy: bool,
    path: float,
) -> bool:
    """Whether one of the (possibly tied) best tokens leads below the floor."""
    scores = score(q, noise, sharpness, noisy)
    best = [token for token in q if scores[token] >= max(scores.values()) - 1e-9]
    cells = [cell(q[t], margin_of(q, noise, t, noisy), masks[t], noisy) for t in best]
    return any(path * float(CALIBRATION[c]) < 0.2 + 1e-6 for c in cells)


@given(prompts_of, appends, st.integers(2, 4))
@settings(max_examples=100)
def test_paths_diverge_and_the_first_is_the_draft(
    prompts: list[list[int]], chunks: list[tuple[int, int, list[int]]], num_paths: int
) -> None:
    forest, _ = build(4, 2, prompts, chunks)
    query = ask(0, 0, 5, 1.0, 4)
    batch = forest.draft(query, sharpness=1.0, sharpness_grid=GRID, calibration=CALIBRATION, floor=0.05)
    paths = forest.draft_paths(query, num_paths=num_paths, sharpness=1.0, calibration=CALIBRATION, floor=0.05)
    found = [
        tuple(paths.tokens[0, p, : paths.num_tokens[0, p]].tolist())
        for p in range(num_paths)
        if paths.num_tokens[0, p]
    ]
    assert found[:1] == ([tuple(batch.tokens[0, : batch.num_tokens[0]].tolist())] if found else [])
    assert bool(found) == bool(batch.num_tokens[0])
    for i, path in enumerate(found):
        for other in found[:i]:
            assert path != other[: len(path)]
            assert other != path[: len(other)]
        assert math.prod(paths.acceptance[0, i, : len(path)].tolist()) >= 0.05 - 1e-6


@given(prompts_of, appends, st.lists(tokens_of, max_size=10), st.integers(0, 10))
@settings(max_examples=100)
def test_resync_counts_nothing_twice(
    prompts: list[list[int]],
    chunks: list[tuple[int, int, list[int]]],
    tokens: list[int],
    cut: int,
) -> None:
    forest, oracle = build(4, 2, prompts, chunks)
    forest.append(0, 7, tokens)
    before = forest.num_tokens
    forest.resync(0, 7, tokens[:cut])
    assert forest.num_tokens == before
    forest.append(0, 7, tokens[cut:])  # the dice give the same tokens again
    assert forest.num_tokens == before
    forest.append(0, 7, [1, 2])
    assert forest.num_tokens == before + 2
    for token in tokens:
        oracle.append(0, 7, token)
    for token in (1, 2):
        oracle.append(0, 7, token)
    text = prompts[0] + tokens + [1, 2]
    for end in range(len(prompts[0]) + 1, len(text) + 1):
        for size in range(1, min(end, 5) + 1):
            assert forest.count(0, text[end - size : end]) == oracle.count(0, text[end - size : end])
