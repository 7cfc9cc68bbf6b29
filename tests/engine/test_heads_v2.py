"""EAGLE, EAGLE-3 and the target's own prediction layers on vLLM's model runner V2: exact, and with the target's dice.

One process runs all engines (interpreted_heads.py), because Triton has to be prepared before anything imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interpreted_run import MARKS, run_interpreted

from paceline.config import MTP, EngineSettings
from paceline.engine.arguments import engine_arguments
from paceline.engine.installed import is_cpu_build
from paceline.errors import ConfigError, UnsupportedError

HERE = Path(__file__).parent
HEADS = ("eagle", "eagle3", "mtp")
pytestmark = MARKS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines made, by head."""
    folder = tmp_path_factory.mktemp("heads")
    return run_interpreted(HERE / "interpreted_heads.py", folder=folder, timeout_s=900)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("head", HEADS)
def test_tokens_are_plain_vllms(made: dict[str, Any], head: str) -> None:
    """Of a target with the same seeds, with the head's drafts alone and with others between them."""
    assert "CoupledHead" in made[head]["speculator"]
    assert len(set(map(tuple, made[head]["plain"]))) > 1
    for way in ("alone", "mixed", "overlapped"):
        assert made[head][way]["tokens"] == made[head]["plain"], way


@pytest.mark.parametrize("head", ["eagle3", "mtp"])
def test_heads_throw_the_targets_dice(made: dict[str, Any], head: str) -> None:
    """Both know as little as the target is sure of: with other dice one token in 64 would be right."""
    assert made[head]["alone"]["accepted"] > 0.6 * made[head]["alone"]["drafted"] > 12
    assert made[head]["mixed"]["accepted"] < made[head]["mixed"]["drafted"]


@pytest.mark.parametrize("head", ["eagle3", "mtp"])
def test_heads_draft_behind_steps_that_overlap(made: dict[str, Any], head: str) -> None:
    """Their tokens stay on the device, and are as good as those that went through the host."""
    assert made[head]["overlapped"]["accepted"] > 0.6 * made[head]["overlapped"]["drafted"] > 12
    assert made[head]["overlapped"]["model"] == made[head]["overlapped"]["accepted"]


@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_heads_draft_as_they_were_trained(made: dict[str, Any], head: str) -> None:
    """From the states of the very tokens and layers that the network is trained on; near-ties aside."""
    right, compared = made[head]["as trained"]
    assert compared > 20
    assert right >= (0.97 if is_cpu_build() else 0.8) * compared


def test_hidden_states_are_those_of_a_forward_pass(made: dict[str, Any]) -> None:
    """With drafts of which most are rejected: of all tokens, fused layers and the last one, in their places."""
    states = made["eagle3"]["states"]
    assert states["samples"] == len(made["eagle3"]["plain"])
    assert states["begins"] == [0] * states["samples"]
    assert states["prompts"] == [3] * states["samples"]
    assert states["worst"] < (1e-4 if is_cpu_build() else 0.2)


def test_swapped_weights_are_drafted_with_and_change_no_token(made: dict[str, Any]) -> None:
    swap = made["eagle3"]["swap"]
    assert swap["tokens"] == made["eagle3"]["plain"]
    assert swap["difference"] < (1e-5 if is_cpu_build() else 0.02)
    assert "embed_tokens.weight" in " ".join(swap["lent"])
    few, infinite = swap["refused"]
    assert "were not sent" in few
    assert "not finite" in infinite


def test_prediction_layers_are_for_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UnsupportedError, match="model_drafter='mtp' is for GPUs"):
        engine_arguments(model_drafter=MTP)


@pytest.mark.parametrize(
    "fields", [{"draft_worker": True}, {"draft_help": True}, {"further_drafters": ("x",)}]
)
def test_prediction_layers_draft_in_the_engine_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'mtp' is a part of the target"):
        engine_arguments(model_drafter=MTP, **fields)
    assert EngineSettings(model_drafter=MTP).model_drafters == (MTP,)
