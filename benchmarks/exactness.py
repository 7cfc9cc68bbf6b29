"""Exactness: responses compared with plain decoding, token for token and, behind every token, logit for logit.

The reference is the same engine without drafts, all responses in one batch. Each case generates the same requests
(prompts, keys) in another way: suffix and model drafts, garbage drafts of ragged length, small batches, chunks that
are submitted again. `logits_different` counts accepted tokens whose raw logits differ in any bit. The last cases have
batch invariance off; there diverged tokens are counted per response from its first difference on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import parser, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/engine"))
COLUMNS = ("case", "dtype", "tokens", "diverged_tokens", "per_million", "logits_different", "accepted_drafts")
CHUNK_TOKENS = 48


def make_requests(model: str, num_prompts: int, samples: int, max_tokens: int) -> list[Any]:
    """Countdown prompts, `samples` responses each, with fixed keys."""
    from pairs import make_prompts

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    return [
        RolloutRequest(prompt, max_tokens, key=derive_key(1, prompt, sample), sample=sample)
        for prompt in make_prompts(model, num_prompts, 31)
        for sample in range(samples)
    ]


class Bench:
    """One engine and the ways to generate on it."""

    def __init__(self, options: argparse.Namespace, dtype: str, invariant: bool) -> None:
        from paceline.config import BudgetSettings, EngineSettings
        from paceline.engine.rollout_engine import RolloutEngine

        self.options = options
        self.settings = EngineSettings(
            model_drafter=options.drafter,
            max_draft_tokens=8,
            batch_invariant=invariant,
            budget=BudgetSettings(policy="fixed", fixed_tokens=8),
        )
        self.engine = RolloutEngine(
            options.model, self.settings, dtype=dtype, max_num_seqs=128, kv_cache_bytes=2 << 30
        )
        self.loop = self.engine.scheduler.loop
        self.suffix = self.loop.drafter

    def generate(self, requests: list[Any]) -> list[Any]:
        from vllm import SamplingParams

        self.engine.reset_prefix_cache()
        return self.engine.generate(requests, SamplingParams(temperature=1.0))

    def plain(self, requests: list[Any]) -> list[Any]:
        self.loop.set_drafting(False)
        responses = self.generate(requests)
        self.loop.set_drafting(True)
        return responses

    def drafted(self, requests: list[Any]) -> list[Any]:
        return self.generate(requests)

    def garbage(self, requests: list[Any]) -> list[Any]:
        from drafters import ScriptedDrafter

        self.loop.drafter = ScriptedDrafter({}, 0.0, self.engine.vocab_size)
        responses = self.generate(requests)
        self.loop.drafter = self.suffix
        return responses

    def small_batches(self, requests: list[Any]) -> list[Any]:
        size = self.options.small_batch
        return [r for at in range(0, len(requests), size) for r in self.generate(requests[at : at + size])]

    def chunked(self, requests: list[Any]) -> list[Any]:
        """Cut every response after each CHUNK_TOKENS tokens, drop its cache and submit it again."""
        done: dict[int, Any] = {}
        waiting = dict(enumerate(requests))
        while waiting:
            part = {
                index: replace(
                    request, max_tokens=min(len(request.generated) + CHUNK_TOKENS, requests[index].max_tokens)
                )
                for index, request in waiting.items()
            }
            for index, response in zip(part, self.generate(list(part.values())), strict=True):
                if response.finish_reason == "stop" or len(response.tokens) >= requests[index].max_tokens:
                    done[index] = response
                    del waiting[index]
                else:
                    waiting[index] = replace(requests[index], generated=response.tokens)
        return [done[index] for index in range(len(requests))]


def diverged(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens from the first difference on."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return max(len(one), len(other)) - same


def measure(
    bench: Bench, requests: list[Any], dtype: str, cases: dict[str, Callable[..., Any]]
) -> list[dict[str, Any]]:
    from recorded_logits import recorded

    with recorded(bench.engine) as wanted:
        reference = bench.plain(requests)
    tokens = sum(len(response.tokens) for response in reference)
    print(f"{dtype}: {tokens} tokens to compare", file=sys.stderr, flush=True)
    rows = []
    for case, generate in cases.items():
        with recorded(bench.engine) as found:
            responses = generate(bench, requests)
        lost = sum(diverged(a.tokens, b.tokens) for a, b in zip(reference, responses, strict=True))
        rows.append(
            {
                "case": case,
                "dtype": dtype,
                "tokens": tokens,
                "diverged_tokens": lost,
                "per_million": 1e6 * lost / tokens,
                "logits_different": sum(found.get(name) != digest for name, digest in wanted.items()),
                "accepted_drafts": sum(response.num_accepted_tokens for response in responses),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", metavar="DIR", default=str(ROOT / "assets/countdown-policy"))
    made.add_argument("--drafter", metavar="DIR", default=str(ROOT / "assets/countdown-drafter"))
    made.add_argument("--prompts", type=int, default=32)
    made.add_argument("--samples", type=int, default=12)
    made.add_argument("--max-tokens", type=int, default=768)
    made.add_argument("--small-batch", type=int, default=7)
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = made.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    requests = make_requests(options.model, options.prompts, options.samples, options.max_tokens)
    cases: dict[str, Callable[..., Any]] = {
        "again without drafts": Bench.plain,
        "suffix and model drafts": Bench.drafted,
        "garbage drafts": Bench.garbage,
        "batches of a few, with drafts": Bench.small_batches,
        "chunks submitted again": Bench.chunked,
    }
    rows = []
    for dtype in options.dtypes:
        bench = Bench(options, dtype, invariant=True)
        rows += measure(bench, requests, dtype, cases)
        bench.engine.close()
        bench = Bench(options, dtype, invariant=False)
        part = {
            f"{name}, invariance off": cases[name]
            for name in ("suffix and model drafts", "batches of a few, with drafts", "chunks submitted again")
        }
        rows += measure(bench, requests, dtype, part)
        bench.engine.close()
    publish("exactness", rows, COLUMNS, options)


if __name__ == "__main__":
    main()
