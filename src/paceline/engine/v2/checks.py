"""What a GPU is asked before anything is built on it: does it throw the shared dice, and what does verifying cost?

Called by `paceline doctor --gpu`. Triton's interpreter answers on a CPU too, but its times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from paceline import dice


@dataclass(frozen=True, slots=True)
class ThrownDice:
    """Tokens drawn by vLLM's kernel on the device and by `paceline.dice` on the host, from the same logits."""

    num_rows: int
    num_different: int
    widest_lead: float
    """Largest difference between the two best scores of a row in which the tokens differ; of the size of a rounding
    error where only the last bits of a logarithm do."""


def throw_dice(device: str, num_rows: int = 2048, vocab_size: int = 32_768) -> ThrownDice:
    """Draw a token of each row in both places; keys of 64 bits, positions up to a million, some rows greedy."""
    random = np.random.default_rng(0)
    logits = random.normal(0.0, 3.0, (num_rows, vocab_size)).astype(np.float32)
    keys = random.integers(0, 1 << 64, num_rows, dtype=np.uint64)
    positions = random.integers(1, 1_000_000, num_rows)
    temperatures = np.where(np.arange(num_rows) % 8 == 0, 0.0, 1.0).astype(np.float32)
    on_device: Callable[[Any], torch.Tensor] = partial(torch.as_tensor, device=device)
    drawn = gumbel_sample(
        on_device(logits),
        on_device(np.arange(num_rows, dtype=np.int32)),
        on_device(temperatures),
        on_device(keys.view(np.int64)),
        on_device(positions - 1),  # vLLM names the position of the input token, one before the drawn one
        apply_temperature=True,
        is_drafting=False,
    )
    expected = dice.sample(logits, keys, positions, temperatures)
    rows = np.flatnonzero(drawn.cpu().numpy() != expected)
    noise = dice.gumbel(keys[rows, None], positions[rows, None], np.arange(vocab_size))
    scores = logits[rows] + np.where(temperatures[rows, None] > 0, noise, 0)
    best = np.sort(scores, axis=1)[:, -2:]
    return ThrownDice(num_rows, len(rows), float(np.max(best[:, 1] - best[:, 0], initial=0.0)))


@dataclass(frozen=True, slots=True)
class VerifyingCost:
    """Milliseconds to verify one step's drafts, logits given."""

    num_requests: int
    num_draft_tokens: int
    """Of each request."""
    vocab_size: int
    exact_ms: float
    """By the dice."""
    vllm_ms: float
    """By vLLM's own test of probability ratios, on the same rows."""


def time_verifying(
    runner: Any, num_requests: int, num_draft_tokens: int, vocab_size: int, repetitions: int
) -> VerifyingCost:
    """Verify random logits of requests that sample at temperature 1.

    runner: a KeyedRunnerV2 that is idle, with room for so many requests and drafts.
    """
    verifier, device = runner.rejection_sampler, runner.device
    width = num_draft_tokens + 1
    num_rows = num_requests * width
    owners = np.repeat(np.arange(num_requests, dtype=np.int32), width)
    tokens = torch.randint(0, vocab_size, (num_rows,), dtype=torch.int32, device=device)
    verifier.sampler.sampling_states.temperature.gpu[:num_requests] = 1.0
    verify = {
        "logits": torch.randn(num_rows, vocab_size, device=device),
        "draft_logits": None,
        "draft_sampled": tokens,
        "pos": torch.arange(num_rows, device=device),
        "cu_num_logits": torch.arange(num_requests + 1, dtype=torch.int32, device=device) * width,
        "idx_mapping": torch.arange(num_requests, dtype=torch.int32, device=device),
        "idx_mapping_np": np.arange(num_requests, dtype=np.int32),
        "expanded_idx_mapping": torch.from_numpy(owners).to(device),
        "expanded_local_pos": torch.arange(num_rows, dtype=torch.int32, device=device) % width,
        "seq_lens_upper_bound_np": np.full(num_requests, num_rows, np.int32),
        "verify_draft_sampled": tokens,
    }
    exact_s = _seconds(lambda: verifier._verify(**verify), repetitions)
    vllm_s = _seconds(lambda: RejectionSampler._verify(verifier, **verify), repetitions)
    return VerifyingCost(num_requests, num_draft_tokens, vocab_size, 1e3 * exact_s, 1e3 * vllm_s)


def _seconds(work: Callable[[], tuple[torch.Tensor, ...]], repetitions: int) -> float:
    """Seconds of one call, the device's work included; the first call, which compiles, is not counted."""
    work()[-1].cpu()
    began_s = time.perf_counter()
    for _ in range(repetitions):
        made = work()
    made[-1].cpu()  # waits for the device
    return (time.perf_counter() - began_s) / repetitions
