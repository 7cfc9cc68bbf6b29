"""What drafters' training takes from a target, and the targets that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_target import tiny_target
from transformers import AutoModelForCausalLM

from paceline.distillation.methods import METHODS, build_network
from paceline.distillation.networks import Eagle, SmallModel, head_config
from paceline.distillation.packing import ATTENTION_NAME
from paceline.distillation.target import check_packs, load_model, read_states, share
from paceline.errors import CheckpointError, TrainingError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IDS = torch.arange(3, 20)


def make(name: str, **fields: Any) -> Any:
    """A random model of an architecture of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | {"initializer_range": 0.2} | fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).float().eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(IDS[None], document_lengths=(len(IDS),), use_cache=False).logits[0]
    return made


@pytest.mark.parametrize(
    ("name", "fields", "scale"),
    [
        ("Llama", {}, 1.0),
        ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}, 0.125),
        ("Cohere", {}, 0.0625),
    ],
)
def test_a_constant_that_logits_are_multiplied_by_is_taken_over(
    name: str, fields: dict[str, Any], scale: float
) -> None:
    model = make(name, **fields)
    shared = share(model)
    assert shared.scale == pytest.approx(scale, rel=1e-4)
    assert model.config._attn_implementation == ATTENTION_NAME
    states = read_states(model, [IDS], ())[0]
    torch.testing.assert_close(shared.logits(states), logits_of(model), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        drafted = SmallModel(model).logits(states)
    torch.testing.assert_close(drafted, logits_of(model), rtol=1e-4, atol=1e-4)


def test_a_head_says_what_its_logits_are_multiplied_by() -> None:
    """vLLM's heads go by it."""
    assert Eagle(share(make("Granite", logits_scaling=8.0))).config.logit_scale == pytest.approx(0.125)
    assert not hasattr(Eagle(share(make("Llama"))).config, "logit_scale")


def test_logits_that_are_more_than_a_multiple_are_refused() -> None:
    model = make("Phi")
    torch.nn.init.normal_(model.lm_head.bias)
    for take in (share, SmallModel):
        with pytest.raises(CheckpointError, match="the logits of PhiForCausalLM are more than"):
            take(model)
    assert model.config._attn_implementation == ATTENTION_NAME


def test_a_target_whose_attention_cannot_be_packed_can_lend_its_head() -> None:
    """A head that grows beside a run has its states from the engine."""
    model = make("Mistral", sliding_window=128)
    assert share(model).scale == 1.0
    with pytest.raises(TrainingError, match="with sliding_window cannot be packed"):
        check_packs(model)


def test_models_that_mix_the_documents_of_a_pack_are_refused() -> None:
    check_packs(make("Llama"))
    check_packs(make("Qwen2Moe"))
    mixed = make("Lfm2", layer_types=["conv", "full_attention", "conv", "full_attention"])
    with pytest.raises(CheckpointError, match="Lfm2ForCausalLM mixes responses"):
        check_packs(mixed)


def test_attention_that_is_not_told_the_documents_is_refused() -> None:
    with pytest.raises(TrainingError, match="not told where documents begin"):
        check_packs(make("StableLm"))


@pytest.mark.parametrize(("name", "missing"), [("Cohere", "rms_norm_eps"), ("GPT2", "hidden_act")])
def test_a_head_of_a_target_that_has_no_llama_layer_is_refused(name: str, missing: str) -> None:
    config = make(name).config
    with pytest.raises(CheckpointError, match=f"needs {missing} .* --method osd"):
        head_config(config)


@pytest.mark.parametrize("name", ["Glm", "Phi3"])
def test_a_head_turns_all_of_its_width(name: str) -> None:
    fields = {"partial_rotary_factor": 0.5, "head_dim": 16}
    target = make(name, **fields).config
    assert target.rope_parameters["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in head_config(target).to_dict()["rope_parameters"]


def test_a_model_without_all_of_its_weights_is_refused(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path)
    load_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of its model, first 'lm_head\.weight'"):
        load_model(tmp_path)


def test_a_small_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="vocabulary has 96 ids, the target's 29"):
        build_network(METHODS["osd"], share(tiny_target()), tmp_path)
