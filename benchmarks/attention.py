"""Attention of all layers of a target in one step, by Paceline's kernel and by vLLM's, over what verifying drafts asks.

The shapes are those of the inflated policies: 16 layers, 16 heads of 64 over 8 KV heads, blocks of 32 tokens; bfloat16.
Each request has `queries` tokens in the step, the last ones of `context`. Milliseconds are medians of interleaved
repetitions; `ratio` is vLLM's time over Paceline's, `gb_per_s` what Paceline reads of keys and values. vLLM's kernel
may split contexts over threads, as it does by default; for batch invariance it may not, and long queries are cut
besides.
Needs a processor with the bfloat16 dot product (avx512_bf16).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import median, parser, publish

LAYERS, HEADS, KV_HEADS, SIZE, BLOCK_TOKENS = 16, 16, 8, 64, 32
SCALE = SIZE**-0.5
STEPS = (
    (1, 1, 700),
    (1, 3, 700),
    (1, 8, 700),
    (1, 16, 700),
    (8, 1, 250),
    (8, 2, 250),
    (8, 4, 250),
    (8, 1, 1000),
    (128, 1, 250),
    (128, 2, 250),
    (16, 100, 100),
    (1, 1500, 1500),
)
"""Requests, queries of each, context of each."""
COLUMNS = ("requests", "queries", "context", "vllm_ms", "paceline_ms", "ratio", "gb_per_s")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repetitions", type=int, default=9)
    made.add_argument("--threads", type=int, default=2)
    options = made.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import torch

    from paceline._attention import IS_SUPPORTED

    if not IS_SUPPORTED:
        sys.exit(
            "this processor has no bfloat16 dot product (avx512_bf16): Paceline's kernel is not used here"
        )
    torch.set_num_threads(options.threads)
    rows = []
    for requests, queries, context in STEPS:
        step = make_step(requests, queries, context)
        systems = {"vllm": vllm_attention(step), "paceline": own_attention(step)}
        times = [[take_ms(run) for run in systems.values()] for _ in range(options.repetitions)]
        vllm_ms, paceline_ms = map(median, zip(*times, strict=True))
        num_bytes = 2 * 2 * LAYERS * KV_HEADS * SIZE * requests * context
        rows.append(
            {
                "requests": requests,
                "queries": queries,
                "context": context,
                "vllm_ms": vllm_ms,
                "paceline_ms": paceline_ms,
                "ratio": vllm_ms / paceline_ms,
                "gb_per_s": num_bytes / paceline_ms / 1e6,
            }
        )
    publish("attention", rows, COLUMNS, options)


def make_step(requests: int, queries: int, context: int) -> dict[str, Any]:
    """Queries, keys, values and blocks at random; the same arguments for both kernels."""
    import torch

    per_request = -(-context // BLOCK_TOKENS)
    tables = torch.randperm(requests * per_request).int().reshape(requests, per_request)
    places = torch.arange(context)
    slots = tables[:, places // BLOCK_TOKENS].long() * BLOCK_TOKENS + places % BLOCK_TOKENS
    keys, values = torch.randn(2, requests * context, KV_HEADS, SIZE).bfloat16()
    return {
        "query": torch.randn(requests * queries, HEADS, SIZE).bfloat16(),
        "keys": keys,
        "values": values,
        "slots": slots.flatten(),
        "starts": torch.arange(requests + 1, dtype=torch.int32) * queries,
        "contexts": torch.full((requests,), context, dtype=torch.int32),
        "tables": tables,
        "caches": [
            torch.zeros(tables.numel(), KV_HEADS, BLOCK_TOKENS, 2 * SIZE, dtype=torch.bfloat16)
            for _ in range(LAYERS)
        ],
    }


def own_attention(step: dict[str, Any]) -> Callable[[], None]:
    """Fills caches of its own and returns what attends in all layers."""
    import torch

    from paceline.engine import attention

    caches, output = [torch.zeros_like(cache) for cache in step["caches"]], torch.empty_like(step["query"])
    for cache in caches:
        attention.store(step["keys"], step["values"], cache, step["slots"])

    def run() -> None:
        for cache in caches:
            attention.attend_all(
                step["query"], output, cache, step["starts"], step["contexts"], step["tables"], SCALE
            )

    return run


def vllm_attention(step: dict[str, Any]) -> Callable[[], None]:
    """The same by vLLM's kernel, as its backend calls it."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, BLOCK_TOKENS, SIZE, "auto")
    halves = [cache.view(-1, KV_HEADS, 2 * BLOCK_TOKENS, SIZE).chunk(2, dim=2) for cache in step["caches"]]
    for keys, values in halves:
        ops.cpu_attn_reshape_and_cache(
            step["keys"],
            step["values"],
            keys,
            values,
            step["slots"],
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(step["contexts"]),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        seq_lens=step["contexts"],
        dtype=torch.bfloat16,
        query_start_loc=step["starts"],
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    output = torch.empty_like(step["query"])

    def run() -> None:
        for keys, values in halves:
            ops.cpu_attention_with_kv_cache(
                query=step["query"],
                key_cache=keys,
                value_cache=values,
                output=output,
                query_start_loc=step["starts"],
                seq_lens=step["contexts"],
                scale=SCALE,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=step["tables"],
                softcap=0,
                scheduler_metadata=plan,
                s_aux=None,
            )

    return run


def take_ms(run: Callable[[], None]) -> float:
    """Wall time of one call."""
    begin_s = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin_s)


if __name__ == "__main__":
    main()
