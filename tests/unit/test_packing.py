"""Packs: every document is computed as if it were alone, forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_target import make_samples, tiny_target
from torch import Tensor

from paceline.distillation import methods
from paceline.distillation.methods import METHODS, compute_loss
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.packing import Pack, Sample, divide, pack_samples
from paceline.distillation.target import share
from paceline.errors import TrainingError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from sequence_packing import pad_samples

LENGTHS = [9, 30, 14, 14, 6, 23]


def gradients(network: Network, packs: list[tuple[Pack, float]], method: str) -> dict[str, Tensor]:
    """Of the packs' losses, weighted."""
    shared = share(tiny_target())
    for pack, weight in packs:
        (weight * compute_loss(network, shared, pack, METHODS[method].objective)).backward()
    found = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_gradients_of_a_pack_are_those_of_padded_rows_and_of_single_documents(method: str) -> None:
    target = tiny_target()
    samples = make_samples(target, LENGTHS)
    kind = METHODS[method].network
    torch.manual_seed(3)
    network = SmallModel(tiny_target(9).requires_grad_(True)) if kind is SmallModel else kind(share(target))
    pack = pack_samples(samples)
    packed = gradients(network, [(pack, 1.0)], method)
    padded = gradients(network, [(pad_samples(samples), 1.0)], method)
    share_of = [(pack_samples([s]), (len(s.ids) - s.num_prompt_tokens) / len(pack.deciding)) for s in samples]
    alone = gradients(network, share_of, method)
    assert any(gradient.abs().max() > 1e-3 for gradient in packed.values())
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, padded[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_long_response_is_learned_from_part_by_part(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distributions are never all in memory, and the gradients are those of the whole."""
    target = tiny_target()
    kind = METHODS[method].network
    torch.manual_seed(3)
    network = SmallModel(tiny_target(9).requires_grad_(True)) if kind is SmallModel else kind(share(target))
    pack = pack_samples(make_samples(target, [90]))
    whole = gradients(network, [(pack, 1.0)], method)
    together, logits = [], Shared.logits

    def note(shared: Shared, states: Tensor) -> Tensor:
        together.append(len(states))
        return logits(shared, states)

    monkeypatch.setattr(Shared, "logits", note)
    monkeypatch.setattr(methods, "MOST_ROWS", 20)
    parts = gradients(network, [(pack, 1.0)], method)
    assert max(together) == 20
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)


def test_what_is_decided_is_each_documents_response() -> None:
    samples = [Sample(torch.arange(5), 2, torch.zeros(5, 1)), Sample(torch.arange(4), 3, torch.zeros(4, 1))]
    pack = pack_samples(samples)
    assert pack.lengths == (4, 5)
    assert pack.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert pack.deciding.tolist() == [2, 5, 6, 7]
    kept, rows = pack.rows(2)
    assert kept.tolist() == [0, 2, 3]
    assert rows.tolist() == [0, 4, 5]


def test_a_stream_is_cut_where_the_next_response_does_not_fit() -> None:
    samples = [Sample(torch.zeros(n), 1, torch.zeros(n, 1)) for n in (4, 5, 30, 1, 9)]
    assert [[len(s.ids) for s in part] for part in divide(samples, 10, lambda s: s.num_tokens)] == [
        [4, 5],
        [30],
        [1, 9],
    ]
    assert not list(divide([], 10, len))


def test_nothing_makes_no_pack() -> None:
    with pytest.raises(TrainingError, match="at least one"):
        pack_samples([])
