"""Inflation keeps the function of a checkpoint and refuses sizes that cannot."""

from __future__ import annotations

import json
import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paceline.errors import CheckpointError, ConfigError  # noqa: E402
from paceline.tasks.alphabet import build_tokenizer  # noqa: E402
from paceline.tasks.inflation import inflate_checkpoint, inflate_head, main, measure_difference  # noqa: E402

SIZES = {"hidden": 256, "intermediate": 200, "layers": 5, "heads": 8, "kv_heads": 4}
TOKENS = [1, 5, 6, 7, 20, 9, 11, 4, 18]


def save_model(folder, model_type, tied=True, dtype="float32", layers=2):
    """A random two-layer model; every parameter, norms and biases too, is away from its initial value."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=28,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("model_type", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_logits_agree(tmp_path, model_type, tied):
    source = save_model(tmp_path / "small", model_type, tied)
    parameters = inflate_checkpoint(source, tmp_path / "large", **SIZES)
    large = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    assert sum(p.numel() for p in large.parameters()) == parameters
    assert large.config.hidden_size == 256
    assert large.config.num_hidden_layers == 5
    assert measure_difference(source, tmp_path / "large", TOKENS) < 1e-4


def test_the_comparison_can_fail(tmp_path):
    source = save_model(tmp_path / "small", "llama")
    inflate_checkpoint(source, tmp_path / "large", **SIZES)
    large = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    large.config.rms_norm_eps *= 2
    large.save_pretrained(tmp_path / "wrong")
    assert measure_difference(source, tmp_path / "wrong", TOKENS) > 1e-4


def test_bfloat16_stays_exact_when_the_width_grows_fourfold(tmp_path):
    source = save_model(tmp_path / "small", "llama", dtype="bfloat16")
    sizes = {**SIZES, "hidden": 512, "heads": 16, "kv_heads": 8}
    inflate_checkpoint(source, tmp_path / "large", **sizes)
    large = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype="auto")
    assert large.dtype == torch.bfloat16
    assert measure_difference(source, tmp_path / "large", TOKENS) < 1e-4


def test_tokenizer_comes_along(tmp_path):
    source = save_model(tmp_path / "small", "llama")
    inflate_checkpoint(source, tmp_path / "large", **SIZES)
    ids = [
        transformers.AutoTokenizer.from_pretrained(f)("24,3,29:21 ")["input_ids"]
        for f in (source, tmp_path / "large")
    ]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 1}, "layers = 1 is below the source's 2"),
        ({"intermediate": 95}, "intermediate = 95 is below"),
        ({"hidden": 192}, "hidden = 192 is not heads = 8 x 32"),
        ({"kv_heads": 8}, "8 heads over 8 kv_heads do not keep"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, change, message):
    source = save_model(tmp_path / "small", "llama")
    with pytest.raises(ConfigError, match=re.escape(message)):
        inflate_checkpoint(source, tmp_path / "large", **{**SIZES, **change})
    assert not (tmp_path / "large").exists()


def test_source_must_be_a_known_checkpoint(tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inflate_checkpoint(tmp_path, tmp_path / "large", **SIZES)
    assert main([str(tmp_path), str(tmp_path / "large")]) == CheckpointError.exit_code
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="'gpt2'"):
        inflate_checkpoint(tmp_path, tmp_path / "large", **SIZES)


def test_command_prints_size_and_difference(tmp_path, capsys):
    source = save_model(tmp_path / "small", "llama")
    words = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    assert main([str(source), str(tmp_path / "large"), *words]) == 0
    assert re.search(r"M parameters, largest difference in logits \d\.\de-0[5-9]", capsys.readouterr().out)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_inflated_head_drafts_the_same(tmp_path, method):
    from draft_head import make_head
    from safetensors.torch import load_file

    from paceline.distillation.methods import METHODS, build_network
    from paceline.distillation.packing import Sample, pack_samples
    from paceline.distillation.target import choose_layers, load_model, read_samples, share

    small = save_model(tmp_path / "small", "llama", layers=4)
    inflate_checkpoint(small, tmp_path / "large", **SIZES)
    make_head(tmp_path / "head", load_model(small), method)
    inflate_head(tmp_path / "head", tmp_path / "large", tmp_path / "large-head")
    logits = []
    for policy, head in (("small", "head"), ("large", "large-head")):
        target = load_model(tmp_path / policy)
        network = build_network(METHODS[method], share(target), None)
        network.load_state_dict(load_file(tmp_path / head / "model.safetensors"), strict=True)
        config = json.loads((tmp_path / head / "config.json").read_text())
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"):
            assert config[name] == getattr(network.config, name)
        layers = choose_layers(4)  # those that inflation added come behind
        samples = list(read_samples(target, [(torch.tensor(TOKENS), 3)], layers, 64))
        pack = pack_samples([Sample(one.ids, one.num_prompt_tokens, one.states) for one in samples])
        with torch.no_grad():
            logits.append([network.logits(hidden) for hidden in network.unroll(pack, 2)])
    for one, other in zip(*logits, strict=True):
        assert (one - other).abs().max() < 1e-4 * one.std()


def test_a_head_of_another_policy_is_refused(tmp_path):
    from draft_head import make_head

    from paceline.distillation.target import load_model

    small = save_model(tmp_path / "small", "llama")
    make_head(tmp_path / "head", load_model(small))
    with pytest.raises(CheckpointError, match="no draft head"):
        inflate_head(tmp_path / "nothing", small, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no draft head"):
        inflate_head(small, small, tmp_path / "out")
    config = json.loads((tmp_path / "head/config.json").read_text())
    (tmp_path / "head/config.json").write_text(json.dumps(config | {"vocab_size": 29}))
    with pytest.raises(CheckpointError, match="29 ids"):
        inflate_head(tmp_path / "head", small, tmp_path / "out")
