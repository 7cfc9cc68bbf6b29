"""Branches of a model's drafts: what is drafted behind a runner-up is what its text alone would be drafted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_model import VOCAB, make_model

pytest.importorskip("transformers", reason="transformers is not installed")

from paceline.drafting import model as model_module
from paceline.drafting.branches import draft_branches
from paceline.drafting.model import ModelDrafter
from paceline.drafting.proposal import NUM_CELLS, prior_calibration
from paceline.types import DraftOrder, DraftPaths, DraftQuery, Int32Array, ModelBatch

DEPTH = 5
ORDER = DraftOrder(
    DEPTH,
    1.0,
    prior_calibration(),
    0.0,
    np.zeros(1, np.float32),
    num_paths=4,
    rivals=np.linspace(0.1, 0.6, NUM_CELLS, dtype=np.float32),
)


@pytest.fixture(params=["native", "torch"])
def drafter(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelDrafter:
    """A small model in this form."""
    if request.param == "torch":
        monkeypatch.setattr(model_module, "native_decoder", lambda *_: None)
    return load(make_model(tmp_path / "small", layers=1, tie=False))


def load(folder: Path) -> ModelDrafter:
    return ModelDrafter(folder, max_model_len=256, max_requests=8)


def query_of(
    texts: list[Int32Array], max_tokens: int = DEPTH, responses: list[int] | None = None
) -> DraftQuery:
    count = len(texts)
    numbers = np.array(list(range(count)) if responses is None else responses, np.int64)
    return DraftQuery(
        groups=np.zeros(count, np.int64),
        responses=numbers,
        keys=(numbers % 100).astype(np.uint64) * np.uint64(7919),
        positions=np.array([len(text) for text in texts], np.int64),
        temperatures=np.full(count, 1.0, np.float32),
        max_tokens=np.full(count, max_tokens, np.int32),
    )


def draft(drafter: ModelDrafter, texts: list[Int32Array], query: DraftQuery) -> ModelBatch:
    made, _ = drafter.draft(
        texts,
        query,
        DEPTH,
        sharpness=1.0,
        sharpness_grid=np.empty(0, np.float32),
        calibration=ORDER.calibration,
        floor=0.0,
    )
    return made


def grow(drafter: ModelDrafter, texts: list[Int32Array]) -> tuple[ModelBatch, DraftPaths]:
    """The chains, and all that leaves them."""
    query = query_of(texts)
    chains = draft(drafter, texts, query)
    paths, growth = draft_branches(drafter, query, chains, ORDER)
    assert paths is not None
    assert growth.num_levels <= (ORDER.num_paths - 1) * DEPTH
    return chains, paths


def test_branches_are_what_their_text_would_be_drafted(drafter: ModelDrafter) -> None:
    """Over several steps, with responses that go on along the chain, along a branch, or neither."""
    random = np.random.default_rng(0)
    fresh = load(drafter.checkpoint)
    texts = [random.integers(3, VOCAB, length).astype(np.int32) for length in (20, 33, 41, 9)]
    for step in range(5):
        chains, paths = grow(drafter, texts)
        assert (paths.num_tokens[:, 0] == chains.num_tokens).all()
        assert (paths.tokens[:, 0] == chains.tokens).all()
        assert (paths.num_tokens > 0).all(), "places and levels cost nothing here"
        for request, text in enumerate(texts):
            levels = []
            for number in range(1, ORDER.num_paths):
                length = int(paths.num_tokens[request, number])
                line = paths.tokens[request, number, :length]
                level = int(
                    (np.append(line, -1) != np.append(chains.tokens[request], -2)[: length + 1]).argmax()
                )
                levels.append(level)
                assert line[level] == chains.rivals[request, level]
                assert length == DEPTH
                assert paths.acceptance[request, number, level] == ORDER.rivals[chains.cells[request, level]]
                behind = np.concatenate([text, line[: level + 1]])
                query = query_of([behind], DEPTH - level - 1, [100 * (1 + 9 * step + number) + request])
                alone = draft(fresh, [behind], query)
                assert line[level + 1 :].tolist() == alone.tokens[0, : alone.num_tokens[0]].tolist()
                fresh.forget(query.responses.tolist())
            assert levels == sorted(set(levels), reverse=True)
        taken = [
            paths.tokens[0, 0, :3],
            paths.tokens[1, 1, :4],
            paths.tokens[2, 3, :2],
            np.array([5, 6], np.int32),
        ]
        texts = [np.concatenate([text, more]) for text, more in zip(texts, taken, strict=True)]


def test_chains_are_the_same_after_branches(drafter: ModelDrafter) -> None:
    """What branches left in the cache is not taken for the text."""
    random = np.random.default_rng(1)
    plain = load(drafter.checkpoint)
    texts = [random.integers(3, VOCAB, length).astype(np.int32) for length in (20, 33, 41)]
    for _ in range(6):
        chains, paths = grow(drafter, texts)
        expected = draft(plain, texts, query_of(texts))
        assert (chains.tokens == expected.tokens).all()
        source = random.integers(0, ORDER.num_paths, len(texts))
        texts = [
            np.concatenate([text, paths.tokens[row, source[row], : 1 + row], [9]]).astype(np.int32)
            for row, text in enumerate(texts)
        ]


def test_one_path_where_none_is_worth_it(drafter: ModelDrafter) -> None:
    texts = [np.arange(3, 20, dtype=np.int32)]
    query = query_of(texts)
    chains = draft(drafter, texts, query)
    dear = DraftOrder(
        DEPTH, 1.0, ORDER.calibration, 0.9, np.zeros(1, np.float32), num_paths=4, rivals=ORDER.rivals
    )
    paths, growth = draft_branches(drafter, query, chains, dear)
    assert paths is None
    assert growth.num_levels == 0
