"""Training of drafters: every method learns, and goes on from what was saved as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_target import make_samples, tiny_target

from paceline.distillation.losses import LOSSES
from paceline.distillation.methods import METHODS, Method, build_network
from paceline.distillation.networks import Network, SmallModel
from paceline.distillation.packing import Pack, pack_samples
from paceline.distillation.target import share
from paceline.distillation.trainer import MOVING, NETWORK, Trainer
from paceline.errors import CheckpointError, ConfigError

TARGET = tiny_target()
SHARED = share(TARGET)


def make_trainer(method: Method, seed: int = 0, averaging: float = 0.0, is_fresh: bool = True) -> Trainer:
    torch.manual_seed(seed)
    network: Network
    if method.network is SmallModel:
        network = SmallModel(tiny_target(seed + 1).requires_grad_(True))
    else:
        network = build_network(method, SHARED, None)
    return Trainer(network, SHARED, method.objective, averaging=averaging, is_fresh=is_fresh)


@pytest.fixture(scope="module")
def pack() -> Pack:
    return pack_samples(make_samples(TARGET, [40, 25, 33]))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_learns(name: str, pack: Pack) -> None:
    trainer = make_trainer(METHODS[name])
    losses = [trainer.step(pack, 3e-3) for _ in range(25)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_can_be_trained(loss: str, pack: Pack) -> None:
    trainer = make_trainer(METHODS["eagle3"].with_loss(loss))
    losses = [trainer.step(pack, 3e-3) for _ in range(25)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("averaging", [0.0, 0.1])
@pytest.mark.parametrize("name", ["hass", "eagle3", "osd"])
def test_a_loaded_trainer_goes_on_bit_for_bit(name: str, averaging: float, pack: Pack) -> None:
    first = make_trainer(METHODS[name], averaging=averaging)
    for _ in range(2):
        first.step(pack, 1e-3)
    saved = {key: tensor.clone() for key, tensor in first.tensors().items()}
    expected = [first.step(pack, 1e-3) for _ in range(3)]
    second = make_trainer(METHODS[name], seed=5, averaging=averaging)
    second.step(pack, 1e-3)
    second.load(saved)
    assert [second.step(pack, 1e-3) for _ in range(3)] == expected
    for key, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[key]), key


@pytest.mark.parametrize("name", ["eagle", "osd"])
def test_what_another_optimizer_kept_is_begun_anew(name: str, pack: Pack) -> None:
    """Heads of an older Paceline learned with Muon; no checkpoint is lost to that."""
    saved = make_trainer(METHODS[name]).tensors()
    weights = {key: tensor.clone() for key, tensor in saved.items() if key.startswith("network.")}
    kept = ("exp_avg",) if name == "osd" else ("momentum_buffer",)
    other = {f"optimizer.{k}.{key.removeprefix('network.')}": t for key, t in weights.items() for k in kept}
    trainer, fresh = make_trainer(METHODS[name], seed=3), make_trainer(METHODS[name], seed=4)
    trainer.load(weights | {key: tensor.clone() for key, tensor in other.items() if tensor.ndim == 2})
    fresh.load(weights)
    assert [trainer.step(pack, 1e-3) for _ in range(3)] == [fresh.step(pack, 1e-3) for _ in range(3)]


def test_the_average_is_what_is_saved_and_measured(pack: Pack) -> None:
    plain, trainer = make_trainer(METHODS["eagle"]), make_trainer(METHODS["eagle"], averaging=0.25)
    averages: dict[str, torch.Tensor] = {}
    for number in range(45):
        assert plain.step(pack, 1e-3) == trainer.step(pack, 1e-3), "it learns as it would without"
        share = max(0.25, 10 / (10 + number))
        for key, tensor in plain.tensors().items():
            if key.startswith(NETWORK):
                before = averages.get(key, tensor)
                averages[key] = before + share * (tensor - before)
    for key, average in averages.items():
        torch.testing.assert_close(trainer.tensors()[key], average)
        moving = trainer.tensors()[key.replace(NETWORK, MOVING)]
        assert torch.equal(moving, plain.tensors()[key])
        assert not torch.equal(moving, average)
    with trainer.averaged() as network:
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(parameter.detach(), averages[f"{NETWORK}{name}"])
    assert plain.step(pack, 1e-3) == trainer.step(pack, 1e-3)


def test_a_folder_without_averages_begins_them_with_its_weights(pack: Pack) -> None:
    old = make_trainer(METHODS["eagle"])
    for _ in range(30):
        old.step(pack, 1e-3)
    saved = {key: tensor.clone() for key, tensor in old.tensors().items()}
    trainer = make_trainer(METHODS["eagle"], seed=5, averaging=0.01)
    trainer.load(saved)
    for key, tensor in saved.items():
        assert torch.equal(trainer.tensors()[key], tensor)
    expected = old.step(pack, 1e-3), old.step(pack, 1e-3)
    assert (trainer.step(pack, 1e-3), trainer.step(pack, 1e-3)) == expected


def test_frozen_parts_of_the_target_are_not_saved(pack: Pack) -> None:
    trainer = make_trainer(METHODS["eagle"])
    trainer.step(pack, 1e-3)
    vocab = SHARED.embedding.shape[0]
    assert all(vocab not in tensor.shape for tensor in trainer.tensors().values())


def test_a_checkpoint_of_another_network_is_refused(pack: Pack) -> None:
    saved = make_trainer(METHODS["eagle3"]).tensors()
    with pytest.raises(CheckpointError, match="another network"):
        make_trainer(METHODS["eagle"]).load(saved)


def test_a_small_model_belongs_to_osd_alone() -> None:
    with pytest.raises(ConfigError, match="give its folder"):
        build_network(METHODS["osd"], SHARED, None)
    with pytest.raises(ConfigError, match="choose osd"):
        build_network(METHODS["eagle"], SHARED, Path("small"))
    with pytest.raises(ConfigError, match="forward_kl"):
        METHODS["eagle"].with_loss("l2")


def test_what_a_drafter_had_learned_before_stays_in_the_average(pack: Pack) -> None:
    trainer = make_trainer(METHODS["eagle"], averaging=0.25, is_fresh=False)
    averages = {key: t.clone() for key, t in trainer.tensors().items() if key.startswith(NETWORK)}
    for _ in range(3):
        trainer.step(pack, 1e-3)
        for key, average in averages.items():
            average.lerp_(trainer.tensors()[key.replace(NETWORK, MOVING)], 0.25)
    for key, average in averages.items():
        torch.testing.assert_close(trainer.tensors()[key], average)


def test_gradients_that_are_not_finite_change_nothing(pack: Pack) -> None:
    trainer = make_trainer(METHODS["eagle"], averaging=0.25)
    trainer.step(pack, 1e-3)
    before = {key: tensor.clone() for key, tensor in trainer.tensors().items()}
    trainer.look_at(pack)
    next(trainer.network.parameters()).grad[0] = float("nan")
    trainer.move(1e-3)
    for key, tensor in trainer.tensors().items():
        assert torch.equal(tensor, before[key]), key
    assert trainer.step(pack, 1e-3) > 0
    assert all(tensor.isfinite().all() for tensor in trainer.tensors().values())
