"""The second pair of policy and drafter: a real vocabulary, entropy and agreement as stated, held-out prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from pairs import PAIRS, TARGET_SIZES  # noqa: E402
from pretrain_prose import INSTRUCTION, is_held_out  # noqa: E402
from pretraining import (  # noqa: E402
    compute_coupled,
    load_model,
    measure_agreement,
    sample_responses,
)

PAIR = PAIRS["prose"]
EOS_ID = 2


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_model(PAIR.policy)


@pytest.fixture(scope="module")
def drafter() -> Any:
    return load_model(PAIR.drafter)


@pytest.mark.slow
def test_entropy_and_agreement_are_those_of_the_documentation(policy: Any, drafter: Any) -> None:
    prompts = [list(prompt) for prompt in PAIR.draw_prompts(PAIR.policy, 4, 1)]
    responses = sample_responses(policy, prompts, max_new_tokens=160, seed=1)
    found = measure_agreement(policy, drafter, prompts, responses)
    assert 0.3 <= found["entropy_nats"] <= 1.0
    assert 0.6 <= found["coupled"] <= 0.9
    assert found["coupled"] <= found["overlap"] <= 1.0


def test_the_vocabulary_is_one_of_byte_pairs_for_both() -> None:
    from transformers import AutoTokenizer

    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (PAIR.policy, PAIR.drafter)]
    text = "Janet’s ducks lay 16 eggs per day.\n**Total:** $5 \\times 2 = 10$ Ωμέγα 🦆"
    for tokenizer in tokenizers:
        assert len(tokenizer) >= 8192
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id == 1
        assert len(ids) < len(text.encode())
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def count_arithmetic(source: Path, sizes: dict[str, int]) -> int:
    """Parameters of the inflated model that a token is multiplied with: layers and head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size = sizes["hidden"], sizes["intermediate"]
    config.num_hidden_layers = sizes["layers"]
    config.num_attention_heads, config.num_key_value_heads = sizes["heads"], sizes["kv_heads"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    return layers + model.lm_head.weight.numel() * model.config.tie_word_embeddings


def test_the_inflated_drafter_costs_a_tenth_of_the_inflated_target() -> None:
    assert PAIR.drafter_sizes is not None
    target = count_arithmetic(PAIR.policy, TARGET_SIZES)
    ratio = count_arithmetic(PAIR.drafter, dict(PAIR.drafter_sizes)) / target
    assert 100e6 <= target <= 210e6
    assert 0.08 <= ratio <= 0.12


@pytest.mark.slow
def test_the_drafter_inflated_is_the_same_drafter(tmp_path: Path) -> None:
    from paceline.tasks.inflation import measure_difference

    folder = PAIR.make_drafter(tmp_path / "drafter")
    prompt = PAIR.draw_prompts(PAIR.policy, 1, 2)[0]
    assert measure_difference(PAIR.drafter, folder, list(prompt)) < 2e-3


def test_prompts_are_held_out_and_none_is_drawn_twice() -> None:
    lines = (ROOT / "assets/prose-prompts.jsonl").read_text().splitlines()
    questions = [json.loads(line)["prompt"].removesuffix(INSTRUCTION) for line in lines]
    assert all(map(is_held_out, questions))
    assert len(set(questions)) == len(questions) >= 256
    drawn = PAIR.draw_prompts(PAIR.policy, 64, 3)
    assert len(set(drawn)) == 64
    assert drawn == PAIR.draw_prompts(PAIR.policy, 64, 3)
    with pytest.raises(SystemExit, match="are needed"):
        PAIR.draw_prompts(PAIR.policy, len(lines) + 1, 0)


def test_shipped_files_stay_small() -> None:
    files = [file for folder in (PAIR.policy, PAIR.drafter) for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 20e6


def test_the_coupled_agreement_is_that_of_the_sum_over_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 40, generator=generator).double().mul(2).softmax(-1) for _ in range(2))
    ratio = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    expected = (1 / ratio.sum(-1)).sum(-1)
    assert torch.allclose(compute_coupled(p, q), expected)
    assert torch.allclose(compute_coupled(p, p), torch.ones(5, dtype=torch.float64))


def test_the_coupled_agreement_is_that_of_shared_noise() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(1, 12, generator=generator).double().softmax(-1) for _ in range(2))
    noise = -torch.empty(40_000, 12, dtype=torch.float64).exponential_(generator=generator).log()
    agree = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double().mean()
    assert compute_coupled(p, q).item() == pytest.approx(agree.item(), abs=0.01)
