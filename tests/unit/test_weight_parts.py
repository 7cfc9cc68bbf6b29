"""Which weights a push has left out of what vLLM keeps as one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.engine.weight_parts import checkpoint_names, missing_parts, noted

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkvo"}
BIASES = {f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"}
EXPERTS = {
    f"model.layers.0.mlp.experts.{n}.{part}_proj.weight" for n in range(3) for part in ("gate", "up", "down")
}
SHARED = {f"model.layers.0.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
KNOWN = ATTENTION | BIASES | EXPERTS | SHARED


@pytest.mark.parametrize(
    ("came", "missing"),
    [
        (KNOWN, set()),
        (set(), set()),
        ({"model.layers.0.self_attn.o_proj.weight"}, set()),
        (ATTENTION, set()),
        ({"model.layers.0.mlp.shared_experts.down_proj.weight"}, set()),
        ({"model.layers.0.mlp.experts.gate_up_proj"}, set()),  # all experts of a layer in one
        ({"another.layers.0.self_attn.q_proj.weight"}, set()),
        (
            {"model.layers.1.self_attn.q_proj.weight"},
            {f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"},
        ),
        (
            {"model.layers.0.self_attn.k_proj.bias"},
            {f"model.layers.0.self_attn.{part}_proj.bias" for part in "qv"},
        ),
        (
            {"model.layers.0.mlp.shared_experts.up_proj.weight"},
            {"model.layers.0.mlp.shared_experts.gate_proj.weight"},
        ),
        (
            EXPERTS - {"model.layers.0.mlp.experts.2.down_proj.weight"},
            {"model.layers.0.mlp.experts.2.down_proj.weight"},
        ),
    ],
)
def test_parts_that_did_not_come(came: set[str], missing: set[str]) -> None:
    assert missing_parts(came, KNOWN, PACKED) == sorted(missing)
    assert missing_parts(came, frozenset(), PACKED) == []


def test_names_are_noted_as_they_are_read() -> None:
    names: set[str] = set()
    weights = noted([("a", torch.zeros(1)), ("b", torch.zeros(1))], names)
    assert names == set()
    assert next(weights)[0] == "a"
    assert names == {"a"}
    assert [name for name, _ in weights] == ["b"]
    assert names == {"a", "b"}


def test_a_checkpoints_names(tmp_path: Path) -> None:
    assert checkpoint_names(tmp_path) == frozenset()
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    assert checkpoint_names(tmp_path) == {"a", "b"}
    (tmp_path / "model-3.safetensors").write_bytes(b"torn")
    assert checkpoint_names(tmp_path) == frozenset()
