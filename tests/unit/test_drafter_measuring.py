"""What drafts are worth, against drafting and verifying one response token by token."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_target import VOCAB, tiny_target

from paceline import dice
from paceline.distillation import measuring
from paceline.distillation.measuring import Dice, measure
from paceline.distillation.methods import METHODS, compute_loss
from paceline.distillation.networks import Eagle, Network, Shared, SmallModel
from paceline.distillation.packing import Sample, pack_samples
from paceline.distillation.target import read_samples, share

TARGET = tiny_target()
SHARED = share(TARGET)
DEPTH = 3


def respond(prompt: torch.Tensor, key: int, num_tokens: int, temperature: float) -> torch.Tensor:
    """Prompt and response, thrown with the shared dice."""
    ids = prompt
    for _ in range(num_tokens):
        hidden = TARGET.base_model(
            input_ids=ids[None], use_cache=False, document_lengths=(len(ids),)
        ).last_hidden_state[0, -1:]
        logits = F.linear(hidden, SHARED.head).numpy()
        drawn = dice.sample(
            logits, np.array([key], np.uint64), np.array([len(ids)]), np.array([temperature], np.float32)
        )
        ids = torch.cat([ids, torch.from_numpy(drawn)])
    return ids


@pytest.fixture(scope="module")
def responses() -> tuple[list[Sample], list[Dice]]:
    thrown = [Dice(11, 1.0), Dice((1 << 64) - 5, 0.7), Dice(3, 1.3)]
    ids = [
        respond(torch.arange(3, 3 + n), one.key, length, one.temperature)
        for one, n, length in zip(thrown, (5, 4, 6), (30, 18, 18), strict=True)
    ]
    samples = list(read_samples(TARGET, list(zip(ids, (5, 4, 6), strict=True)), (1, 2, 3), 512))
    return samples, thrown


def draft_and_verify(network: Network, sample: Sample, thrown: Dice, sharpness: float) -> tuple[int, int]:
    """(drafts, accepted tokens) of one response."""
    pack = pack_samples([sample])
    hidden = [network.logits(step).detach().numpy() for step in network.unroll(pack, DEPTH)]
    known, drafts, accepted = sample.num_prompt_tokens, 0, 0  # `known`: index of the last known token
    while known < len(sample.ids) - 1:
        drafts += 1
        for step in range(min(DEPTH, len(sample.ids) - 1 - known)):
            logits = hidden[step][known - network.lead]
            noise = dice.gumbel_reference([thrown.key], [known + step + 1], np.arange(logits.size))
            scores = logits if math.isinf(sharpness) else sharpness * logits / thrown.temperature + noise
            if int(np.argmax(scores)) != int(sample.ids[known + step + 1]):
                break
            accepted += 1
        else:
            step += 1
        known += step + 1
    return drafts, accepted


@pytest.mark.parametrize("sharpness", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", ["eagle", "small"])
def test_acceptance_is_that_of_drafting_and_verifying(
    kind: str, sharpness: float, responses: tuple[list[Sample], list[Dice]]
) -> None:
    samples, thrown = responses
    torch.manual_seed(2)
    network: Network = Eagle(SHARED) if kind == "eagle" else SmallModel(tiny_target(4))
    worth = measure(network, SHARED, zip(samples, thrown, strict=True), DEPTH, sharpness)
    pairs = [draft_and_verify(network, *pair, sharpness) for pair in zip(samples, thrown, strict=True)]
    drafts, accepted = map(sum, zip(*pairs, strict=True))
    assert worth.acceptance_length == pytest.approx(1 + accepted / drafts)
    assert worth.num_tokens == 29 + 17 + 17


def test_the_target_itself_is_always_right(responses: tuple[list[Sample], list[Dice]]) -> None:
    worth = measure(SmallModel(TARGET), SHARED, zip(*responses, strict=True), DEPTH)
    assert worth.acceptance == (1.0, 1.0, 1.0)
    assert worth.agreement == pytest.approx((1.0, 1.0, 1.0), abs=1e-4)
    assert worth.acceptance_length > 3


@pytest.mark.parametrize("num_ids", [VOCAB - 1, VOCAB + 3])
@pytest.mark.parametrize("is_targets", [False, True])
def test_rows_of_padding_count_for_nothing(
    num_ids: int, is_targets: bool, responses: tuple[list[Sample], list[Dice]]
) -> None:
    """Target and drafter of one tokenizer, of which the larger one has more rows than the other."""
    model, padded = tiny_target(4), copy.deepcopy(tiny_target(4))
    torch.manual_seed(0)
    rows = torch.cat([SHARED.head, torch.randn(3, SHARED.head.shape[1])])[:num_ids]
    with torch.no_grad():
        padded.resize_token_embeddings(num_ids)
    network, shared = SmallModel(model if is_targets else padded), SHARED
    if is_targets:
        shared = replace(SHARED, head=rows)
    least = min(num_ids, VOCAB)
    plain = replace(SHARED, head=SHARED.head[:least])
    model.resize_token_embeddings(least)
    samples = [one for one in responses[0] if int(one.ids.max()) < least]
    thrown = responses[1][: len(samples)]
    assert samples
    found = measure(network, shared, zip(samples, thrown, strict=True), DEPTH)
    expected = measure(SmallModel(model), plain, zip(samples, thrown, strict=True), DEPTH)
    assert found == expected
    pack = pack_samples(samples)
    losses = [
        compute_loss(*pair, pack, METHODS["osd"].objective).item()
        for pair in ((network, shared), (SmallModel(model), plain))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_target_is_computed_for_the_compared_tokens_alone(
    responses: tuple[list[Sample], list[Dice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is as wide as the vocabulary."""
    computed = []

    def note(shared: Shared, states: torch.Tensor) -> torch.Tensor:
        computed.append(len(states))
        return F.linear(states, shared.head)

    monkeypatch.setattr(measuring, "COMPARED_TOKENS", 10)
    monkeypatch.setattr(Shared, "logits", note)
    measure(SmallModel(TARGET), SHARED, zip(*responses, strict=True), DEPTH)
    assert len(computed) == DEPTH
    assert max(computed) <= 10
