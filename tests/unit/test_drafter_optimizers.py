"""What follows the gradients of drafters in training."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paceline.distillation.optimizers import Float32Muon, orthogonalise  # noqa: E402


@pytest.mark.parametrize("shape", [(8, 8), (16, 40), (40, 16)])
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) * 7.0
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.max() < 1.3
    assert values[: min(shape) * 3 // 4].min() > 0.6
    turned = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonalise(matrix) * (turned.U @ turned.Vh)).sum() > 0.8 * min(shape)


def test_it_is_torchs_muon_but_for_the_number_format() -> None:
    ends = []
    for kind, options in ((torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}), (Float32Muon, {})):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(24, 12))
        optimizer = kind([weight], lr=0.02, weight_decay=0.1, **options)
        inputs, wanted = torch.randn(64, 12), torch.randn(64, 24)
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(inputs @ weight.T, wanted).backward()
            optimizer.step()
        ends.append(weight.detach())
    start = torch.randn(24, 12, generator=torch.Generator().manual_seed(0))
    assert (ends[0] - ends[1]).norm() < 0.02 * (ends[0] - start).norm()


def test_what_has_no_gradient_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = Float32Muon([weight], lr=0.1)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3, 3))
    assert not optimizer.state
