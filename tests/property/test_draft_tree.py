"""The draft tree against a model that keeps every chain and the whole text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.tree import DraftTrees, Source
from paceline.drafting.worker_wire import pack_draft
from paceline.types import DraftChains

START, TOKENS, MOST_AHEAD = 7, 3, 4
LEAST = float(np.float32(1e-6))


@dataclass
class Model:
    """One response: its tokens since START, and every chain as (source, start, tokens, acceptance)."""

    text: list[int] = field(default_factory=list)
    chains: list[tuple[int, int, list[int], list[float]]] = field(default_factory=list)

    def living(self) -> list[tuple[int, list[int], list[float]]]:
        """(source, tokens, acceptance) behind the text, of the chains that go on from it."""
        found = []
        for source, start, tokens, acceptance in self.chains:
            behind = len(self.text) - start
            if 0 <= behind < len(tokens) and tokens[:behind] == self.text[start:]:
                found.append((source, tokens[behind:], acceptance[behind:]))
        return found

    def claims(self) -> dict[tuple[int, ...], dict[int, float]]:
        """Of each token, by the chain to it, the sources' latest estimates."""
        made: dict[tuple[int, ...], dict[int, float]] = {}
        for source, tokens, acceptance in self.living():
            for j in range(len(tokens)):
                made.setdefault(tuple(tokens[: j + 1]), {})[source] = acceptance[j]
        return made

    def best_value(self, limit: int) -> float:
        claims = self.claims()
        return max((value_of(claims, node) for node in claims if len(node) <= limit), default=0.0)


def estimate(claims: dict[tuple[int, ...], dict[int, float]], node: tuple[int, ...]) -> tuple[float, int]:
    """Acceptance of a chain's last token by the last source that claims it, and who that is.

    Other tokens there that later sources claim leave it at most the rest.
    """
    source = max(claims[node])
    others = [
        max(sure for later, sure in own.items() if later > source)
        for other, own in claims.items()
        if len(other) == len(node) and other[:-1] == node[:-1] and other != node and max(own) > source
    ]
    return max(min(claims[node][source], 1.0 - sum(others)), LEAST), source


def value_of(claims: dict[tuple[int, ...], dict[int, float]], chain: tuple[int, ...]) -> float:
    """Expected accepted tokens."""
    path, total = 1.0, 0.0
    for j in range(len(chain)):
        path *= estimate(claims, chain[: j + 1])[0]
        total += path
    return total


SOURCES = st.sampled_from(range(Source.LEAD + 1))
chain = st.lists(st.tuples(st.integers(0, TOKENS), st.sampled_from([0.125, 0.5, 0.75, 1.0])), max_size=6)
branches = st.lists(
    st.tuples(st.integers(0, TOKENS), st.sampled_from([0.125, 0.5, 0.75, 1.0]), st.integers(0, 9)), max_size=8
)
"""Tokens, their acceptance, and behind which of those before: 0 the decided ones, 1 the first token, .."""
event = st.one_of(
    st.tuples(st.just("grow"), st.lists(st.integers(0, TOKENS), min_size=1, max_size=4)),
    st.tuples(st.just("follow"), st.integers(1, 4)),
    st.tuples(st.just("add"), SOURCES, st.integers(0, 5), chain, st.booleans()),
    st.tuples(st.just("pack"), SOURCES, st.integers(0, 5), branches),
)


def chains_of(tokens: list[int], acceptance: list[float]) -> DraftChains:
    width = max(len(tokens), 1)
    row = np.zeros((1, width), np.int32)
    row[0, : len(tokens)] = tokens
    sure = np.ones((1, width), np.float32)
    sure[0, : len(tokens)] = acceptance
    return DraftChains(row, np.array([len(tokens)], np.int32), sure)


def grow(trees: DraftTrees, model: Model, tokens: list[int]) -> None:
    trees.advance(np.array([5]), np.array([0, len(tokens)], np.int32), np.array(tokens, np.int32))
    model.text += tokens
    model.chains = [one for one in model.chains if any(one is kept for kept in surviving(model))]


def surviving(model: Model) -> list[tuple[int, int, list[int], list[float]]]:
    return [
        one
        for one in model.chains
        if len(model.text) - one[1] < len(one[2])
        and one[2][: len(model.text) - one[1]] == model.text[one[1] :]
    ]


@settings(max_examples=300, deadline=None)
@given(st.lists(event, max_size=30), st.integers(1, 8))
def test_the_best_chain_is_the_models(events: list[tuple], limit: int) -> None:
    trees, model = DraftTrees(most_ahead=MOST_AHEAD), Model()
    trees.open(5, np.arange(START, dtype=np.int32))
    for name, *rest in events:
        if name == "grow":
            grow(trees, model, rest[0])
        elif name == "pack":
            pack(trees, model, *rest)
        elif name == "follow" and model.living():
            grow(trees, model, model.living()[0][1][: rest[0]])
        elif name == "add":
            source, back, pairs, anew = rest
            start = len(model.text) if anew else max(len(model.text) - back, 0)
            tokens = [*model.text[start:], *(token for token, _ in pairs)]
            acceptance = [0.5] * (len(model.text) - start) + [sure for _, sure in pairs]
            trees.add(
                source, np.array([5]), np.array([START + start]), chains_of(tokens, acceptance), anew=anew
            )
            if anew:
                model.chains = [one for one in model.chains if one[0] != source]
            model.chains.append((source, start, tokens, acceptance))
        check_best(trees, model, limit)
        check_sources(trees, model)
        assert trees.text(5) == np.array([*range(START), *model.text], np.int32).tobytes()
        assert trees.num_nodes == len(model.claims())


def pack(trees: DraftTrees, model: Model, source: int, back: int, branches: list[tuple]) -> None:
    """The last decided tokens, and branches behind them."""
    start = max(len(model.text) - back, 0)
    behind = model.text[start:]
    tokens = [*behind, *(token for token, _, _ in branches)]
    acceptance = [0.5] * len(behind) + [sure for _, sure, _ in branches]
    parents = list(range(-1, len(behind) - 1))
    parents += [len(behind) - 1 + min(above, place) for place, (_, _, above) in enumerate(branches)]
    arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(acceptance, np.float32)
    trees.add_packed(source, pack_draft(9, 0, *arrays) + pack_draft(5, START + start, *arrays))
    chains: list[tuple[int, ...]] = []  # from the first token to each
    said: dict[tuple[int, ...], float] = {}  # the same token may come twice: the later estimate counts
    for token, sure, above in zip(tokens, acceptance, parents, strict=True):
        chains.append((*(chains[above] if above >= 0 else ()), token))
        said[chains[-1]] = sure
        sures = [said[chains[-1][: j + 1]] for j in range(len(chains[-1]))]
        model.chains.append((source, start, list(chains[-1]), sures))


def check_best(trees: DraftTrees, model: Model, limit: int) -> None:
    position = START + len(model.text)
    best = trees.best(np.array([5]), np.array([position]), np.array([limit], np.int32))
    length = int(best.num_tokens[0])
    found = tuple(best.tokens[0, :length].tolist())
    claims = model.claims()
    for j in range(length):
        assert (best.acceptance[0, j], best.sources[0, j]) == estimate(claims, found[: j + 1])
    is_open = length < min(limit, MOST_AHEAD)
    whole = np.prod(best.acceptance[0, :length], dtype=np.float64)
    assert (best.num_open, best.open_probability) == (int(is_open), pytest.approx(whole * is_open))
    assert value_of(claims, found) == model.best_value(limit)


def check_sources(trees: DraftTrees, model: Model) -> None:
    claims, one = model.claims(), np.array([5])
    for source in Source:
        assert trees.holds(source, one) == any(max(own) >= source for own in claims.values())
        for _, decided, _ in model.living()[-3:]:
            told, right = trees.judge(source, one, np.array([[*decided, -1, -1]], np.int32))
            assert (told[0], right[0]) in judged(claims, source, tuple(decided))


def judged(
    claims: dict[tuple[int, ...], dict[int, float]], source: int, decided: tuple[int, ...]
) -> set[tuple[int, int]]:
    """What decided tokens may say of a source: told and right ones. Of its equally likely tokens any may count."""
    found: set[tuple[int, int]] = set()
    for place, token in enumerate(decided):
        own = {
            chain[-1]: max(sure[source], LEAST)
            for chain, sure in claims.items()
            if len(chain) == place + 1 and chain[:-1] == decided[:place] and source in sure
        }
        if not own:
            return {*found, (place, place)}
        likeliest = {one for one, sure in own.items() if sure == max(own.values())}
        if likeliest - {token}:
            found.add((place + 1, place))
        if token not in likeliest:
            return found
    return {*found, (len(decided), len(decided))}


def test_each_source_is_judged_by_what_it_proposed_whosever_token_was_offered() -> None:
    """The further drafter proposes what the first one does, and is right: else it were judged only where that fails."""
    trees, one = DraftTrees(), np.array([3, 4])
    for response in (3, 4):
        trees.open(response, np.arange(10, dtype=np.int32))
        for source, tokens in ((Source.MODEL, [1, 2, 3]), (Source.MODEL - 1, [1, 2, 9])):
            trees.add(source, np.array([response]), np.array([10]), chains_of(tokens, [0.5] * 3))
    decided = np.array([[1, 2, 3, 7], [1, 2, -1, -1]], np.int32)
    for source, told, right in ((Source.MODEL, [3, 2], [3, 2]), (Source.MODEL - 1, [3, 2], [2, 2])):
        found = trees.judge(source, one, decided)
        assert [values.tolist() for values in found] == [told, right]
    assert [values.tolist() for values in trees.judge(Source.FREE, one, decided)] == [[0, 0], [0, 0]]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), max_size=12))
def test_memory_is_bounded_and_a_chain_loses_its_end(chains: list[list[int]]) -> None:
    trees = DraftTrees(max_nodes=8)
    trees.open(0, np.empty(0, np.int32))
    for tokens in chains:
        trees.add(Source.FREE, np.array([0]), np.array([0]), chains_of(tokens, [0.5] * len(tokens)))
    assert trees.num_nodes <= 8
    if chains:
        best = trees.best(np.array([0]), np.array([0]), np.array([20], np.int32))
        assert best.num_tokens[0] >= min(len(chains[0]), 8)


def test_what_is_unknown_is_ignored() -> None:
    trees = DraftTrees()
    one, at = np.array([3]), np.array([10])
    draft = chains_of([1, 2], [0.5, 0.5])
    trees.add(Source.FREE, one, at, draft)
    trees.open(3, np.arange(10, dtype=np.int32))
    trees.add(Source.FREE, one, np.array([11]), draft)  # from a position that the response has not reached
    assert trees.num_nodes == 0
    trees.add(Source.MODEL, one, at, draft)
    limit = np.array([4], np.int32)
    assert trees.best(one, np.array([11]), limit).num_tokens.tolist() == [0]
    assert trees.best(one, at, np.array([0], np.int32)).num_tokens.tolist() == [0]
    assert trees.best(np.array([4]), at, limit).num_tokens.tolist() == [0]
    assert trees.text(4) == b""
    trees.close(3)
    assert trees.num_responses == 0


def test_who_drafts_anew_says_where_the_response_is() -> None:
    trees, one, limit = DraftTrees(), np.array([3]), np.array([4], np.int32)
    for position in (10, 12):
        trees.add(Source.FREE, one, np.array([position]), chains_of([1, 2], [0.5, 0.5]), anew=True)
        assert trees.best(one, np.array([position]), limit).num_tokens.tolist() == [2]
    assert trees.num_nodes == 2


def test_the_model_is_believed_where_both_draft() -> None:
    """What a suffix tree promises beside a small model's token is what the model leaves of it."""
    trees, one, limit = DraftTrees(), np.array([3]), np.array([4], np.int32)
    trees.open(3, np.arange(10, dtype=np.int32))
    trees.add(Source.FREE, one, np.array([10]), chains_of([1, 2], [0.75, 0.75]))
    trees.add(Source.MODEL, one, np.array([10]), chains_of([1, 3], [0.5, 0.625]))
    best = trees.best(one, np.array([10]), limit)
    assert best.tokens[0, :2].tolist() == [1, 3]
    np.testing.assert_array_equal(best.acceptance[0, :2], np.float32([0.5, 0.625]))
    trees.add(Source.MODEL, one, np.array([10]), chains_of([1, 3], [0.5, 0.25]), anew=True)
    best = trees.best(one, np.array([10]), limit)
    assert best.tokens[0, :2].tolist() == [1, 2]
    np.testing.assert_array_equal(best.acceptance[0, :2], np.float32([0.5, 0.75]))
    assert best.sources[0, :2].tolist() == [Source.MODEL, Source.FREE]


@pytest.mark.parametrize(
    "data",
    [
        b"123",
        np.array([5, 7, -1], np.int64).tobytes(),
        np.array([5, 7, 1 << 62], np.int64).tobytes(),
        pack_draft(5, 7, *(np.zeros(2, kind) for kind in (np.int32, np.int32, np.float32)))[:-1],
        pack_draft(5, 7, np.zeros(2, np.int32), np.array([1, 0], np.int32), np.ones(2, np.float32)),
    ],
)
def test_what_is_no_draft_is_refused(data: bytes) -> None:
    trees = DraftTrees()
    trees.open(5, np.arange(START, dtype=np.int32))
    with pytest.raises(ValueError, match=r"torn|parent"):
        trees.add_packed(Source.MODEL, data)
    assert trees.num_nodes == 0
