"""What drafts are worth, against drafting and verifying one response token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_target import tiny_target

from paceline import dice
from paceline.distillation.measuring import Dice, measure
from paceline.distillation.networks import Eagle, Network, SmallModel
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
