"""Tiny random models for engine tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tiny_model import make_model

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _kernels_replaced_once(little_to_collect: None) -> Iterator[None]:
    """vLLM looks through all modules for kernels to replace, for every engine of a process anew: a second each."""
    from vllm.platforms.cpu import CpuPlatform

    replace = CpuPlatform.register_triton_kernel_overrides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, replace.__name__, staticmethod(cache(replace)))
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random model with tied embeddings."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def drafter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a little noise on its weights: it agrees often, and not always."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05 * weight.std())
    folder = tmp_path_factory.mktemp("drafter")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    return folder
