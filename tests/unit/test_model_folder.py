"""The model folder and the batch it allows, before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import CONFIG

from paceline.commands.inputs.launch import check_batch
from paceline.commands.inputs.model_folder import Checkpoint, read_checkpoint
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 32),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, 64),
    ],
)
def test_the_longest_sequence_is_read_from_the_configuration(
    fields: dict[str, Any], length: int | None
) -> None:
    assert Checkpoint(Path(), {**CONFIG, **fields}).max_len == length


def test_the_fingerprint_follows_the_weights(model: Path) -> None:
    checkpoint = read_checkpoint(model)
    before = checkpoint.fingerprint()
    assert read_checkpoint(model).fingerprint() == before
    (model / "model.safetensors").write_bytes(bytes(500) + b"x" + bytes(499))
    assert checkpoint.fingerprint() != before


def test_an_impossible_batch_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.commands.inputs.launch.is_cpu_build", lambda: True)
    checkpoint = read_checkpoint(model)
    per_token = 2 * 2 * 2 * 16 * 4
    assert checkpoint.kv_bytes_per_token("float32") == per_token
    needed = per_token * 100 / 2**30
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 100, "max_num_seqs": 1}
    assert check_batch(checkpoint, kv_cache_gib=needed * 1.01, **options) >= per_token * 100
    with pytest.raises(ConfigError, match="one response of 100 tokens needs"):
        check_batch(checkpoint, kv_cache_gib=needed * 0.99, **options)
    with pytest.raises(ConfigError, match=r"3 engine\(s\) need 3\d+\.\d GiB"):
        check_batch(checkpoint, kv_cache_gib=1e5 / 1000 * 1.01, num_engines=3, **options)
    names = ("batch", "capacity.kv", "lengths")
    with pytest.raises(ConfigError, match=r"capacity\.kv gives .* GiB: raise it, or lower lengths"):
        check_batch(checkpoint, kv_cache_gib=needed * 0.99, names=names, **options)
