"""Pieces of responses, from which a draft head learns to begin anywhere."""

from __future__ import annotations

from random import Random

import pytest
import torch

from paceline.distillation.packing import CUT_SHARE, LEAST_PIECE, Sample, cut_contexts


def make_sample(number: int, num_prompt_tokens: int, num_tokens: int) -> Sample:
    ids = torch.arange(num_tokens) + 10_000 * number
    return Sample(ids, num_prompt_tokens, ids[:, None].float())


def test_pieces_are_the_response_again_and_the_prompt_stays_whole() -> None:
    random = Random(3)
    samples = [make_sample(n, random.randint(1, 20), random.randint(21, 300)) for n in range(200)]
    pieces = cut_contexts(samples, random, 1024)
    assert torch.equal(torch.cat([piece.ids for piece in pieces]), torch.cat([one.ids for one in samples]))
    assert all(torch.equal(piece.states[:, 0], piece.ids.float()) for piece in pieces)
    firsts = [piece for piece in pieces if piece.ids[0] % 10_000 == 0]
    assert [piece.num_prompt_tokens for piece in firsts] == [one.num_prompt_tokens for one in samples]
    whole = sum(piece.num_tokens == one.num_tokens for piece, one in zip(firsts, samples, strict=True))
    assert 1 - CUT_SHARE - 0.1 < whole / len(samples) < 1 - CUT_SHARE + 0.25, "short ones are not cut"
    others = [piece for piece in pieces if piece.ids[0] % 10_000]
    assert all(piece.num_prompt_tokens == 1 and piece.num_tokens >= LEAST_PIECE for piece in others)
    assert all(piece.num_tokens >= piece.num_prompt_tokens + 1 for piece in firsts)
    lengths = [piece.num_tokens for piece in others]
    assert min(lengths) < 2 * LEAST_PIECE
    assert max(lengths) > 100


def test_what_is_short_is_left_alone() -> None:
    samples = [make_sample(n, 4, 4 + LEAST_PIECE) for n in range(20)]
    assert [piece.num_tokens for piece in cut_contexts(samples, Random(0), 1024)] == [12] * 20
    assert cut_contexts([], Random(0), 1024) == []


@pytest.mark.parametrize("num_prompt_tokens", [5, 700])
def test_no_piece_is_longer_than_attention_has_memory_for(num_prompt_tokens: int) -> None:
    samples = [make_sample(n, num_prompt_tokens, 701 + 97 * n) for n in range(20)]
    pieces = cut_contexts(samples, Random(1), 256)
    assert 200 < max(piece.num_tokens for piece in pieces) <= 256
    assert all(torch.equal(piece.states[:, 0], piece.ids.float()) for piece in pieces)
    assert all(piece.num_tokens > piece.num_prompt_tokens for piece in pieces), "each has something to learn"
    ids = torch.cat([piece.ids for piece in pieces]).tolist()
    assert ids == sorted(set(ids))
    learned = {int(one) for piece in pieces for one in piece.ids[piece.num_prompt_tokens :]}
    response = {int(one) for sample in samples for one in sample.ids[sample.num_prompt_tokens :]}
    assert learned <= response
    assert len(learned) >= len(response) - len(pieces), "but for the first token of a piece"
