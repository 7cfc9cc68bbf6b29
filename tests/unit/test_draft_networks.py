"""Draft heads: chains of drafts in one pass against the same chains one token at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_target import make_samples, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.distillation.networks import DraftHead, Eagle, Eagle3, SmallModel
from paceline.distillation.packing import ATTENTION_NAME, Pack, pack_samples
from paceline.distillation.target import choose_layers, read_states, share
from paceline.errors import CheckpointError


def draft_one_by_one(head: DraftHead, pack: Pack, row: int, num_steps: int) -> list[Tensor]:
    """The steps of the chain from `row` of a pack of one document, each over all that a cache would hold."""
    hidden = head.begin(pack.states)[: row + 1]
    outputs = []
    for step in range(num_steps):
        length = row + 1 + step
        positions = torch.arange(length)
        prefix = Pack(pack.ids[:length], positions, hidden, positions, (length,))
        cos, sin = head.rotary(hidden, positions[None])
        embedded = F.embedding(pack.ids[1 : length + 1], head.shared.embedding)
        output, fed = head.step(hidden, embedded, (cos[0], sin[0]), prefix, [])
        outputs.append(output[-1])
        hidden = torch.cat([hidden, fed[-1:]])
    return outputs


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_chains_of_a_pack_are_those_drafted_one_by_one(kind: type[DraftHead]) -> None:
    target = tiny_target()
    torch.manual_seed(1)
    head = kind(share(target))
    samples = make_samples(target, [21, 12, 12])
    num_steps = 4
    with torch.no_grad():
        steps = list(head.unroll(pack_samples(samples), num_steps))
        for document, start in ((1, 0), (2, 12), (0, 24)):  # as the pack sorts them
            alone = pack_samples([samples[document]])
            for row in (0, 3, 7):
                expected = draft_one_by_one(head, alone, row, num_steps)
                for step, output in enumerate(expected):
                    torch.testing.assert_close(steps[step][start + row], output, rtol=1e-4, atol=1e-5)


def test_heads_train_one_layer_and_nothing_of_the_target() -> None:
    target = tiny_target()
    shared = share(target)
    for head in (Eagle(shared), Eagle3(shared)):
        owned = {p.data_ptr() for p in head.parameters()}
        assert shared.embedding.data_ptr() not in owned
        assert shared.head.data_ptr() not in owned
        assert not any("rotary" in name for name in head.state_dict())


def test_a_small_model_drafts_what_it_would_alone() -> None:
    target = tiny_target()
    model = tiny_target(5)
    samples = make_samples(target, [9, 17])
    pack = pack_samples(samples)
    (first, second) = SmallModel(model).unroll(pack, 2)
    for sample, start in zip(samples, (0, 9), strict=True):
        alone = model.base_model(
            input_ids=sample.ids[None], use_cache=False, document_lengths=(len(sample.ids),)
        ).last_hidden_state[0]
        rows = slice(start, start + len(sample.ids))
        torch.testing.assert_close(first[rows], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(second[rows][:-1], alone[1:], rtol=1e-4, atol=1e-5)


def test_a_small_model_must_take_packs() -> None:
    model = tiny_target()
    model.set_attn_implementation("sdpa")
    with pytest.raises(CheckpointError, match=ATTENTION_NAME):
        SmallModel(model)


def test_states_of_packed_documents_are_those_of_transformers_own_attention(tmp_path: Path) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = [torch.randint(3, 29, (n,)) for n in (5, 31, 31, 2)]
    layers = choose_layers(4)
    for document, states in zip(ids, read_states(target, ids, layers), strict=True):
        output = stock(document[None], output_hidden_states=True)
        expected = torch.cat([output.hidden_states[layer][0] for layer in (*layers, -1)], -1)
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


def test_eagle3_reads_three_different_layers() -> None:
    assert [choose_layers(n) for n in (4, 7, 8, 32)] == [(1, 2, 3), (1, 2, 3), (2, 4, 5), (2, 16, 29)]
    with pytest.raises(CheckpointError, match="EAGLE head"):
        choose_layers(3)
