"""Attention whose queries share a pass: right, the same bits in any batch, and only where it was made for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._attention import IS_SUPPORTED
from paceline.engine import attention
from paceline.errors import UnsupportedError

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="no bfloat16 dot product (avx512_bf16)")
NUM_BLOCKS = 40


@dataclass
class Request:
    """The last `num_queries` tokens of a context."""

    queries: torch.Tensor  # [num_queries, num_heads, head_size]
    keys: torch.Tensor  # [context, num_kv_heads, head_size]
    values: torch.Tensor


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    group: int
    head_size: int
    block_tokens: int


def make_requests(shape: Shape, sizes: list[tuple[int, int]], generator: torch.Generator) -> list[Request]:
    def draw(*dims: int) -> torch.Tensor:
        return (2 * torch.randn(*dims, shape.head_size, generator=generator)).bfloat16()

    return [
        Request(
            draw(count, shape.num_kv_heads * shape.group),
            draw(context, shape.num_kv_heads),
            draw(context, shape.num_kv_heads),
        )
        for count, context in sizes
    ]


def attended(shape: Shape, requests: list[Request], generator: torch.Generator) -> list[torch.Tensor]:
    """By the kernel, from blocks in any order in a cache that was used before."""
    cache = torch.randn(
        NUM_BLOCKS, shape.num_kv_heads, shape.block_tokens, 2 * shape.head_size, generator=generator
    ).bfloat16()
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    most = max(-(-len(r.keys) // shape.block_tokens) for r in requests)
    tables = torch.zeros(len(requests), most, dtype=torch.int32)
    for row, r in enumerate(requests):
        for at in range(-(-len(r.keys) // shape.block_tokens)):
            tables[row, at] = order.pop()
        places = torch.arange(len(r.keys))
        slots = tables[row, places // shape.block_tokens].long() * shape.block_tokens
        attention.store(r.keys, r.values, cache, slots + places % shape.block_tokens)
    lengths = torch.tensor([0, *(len(r.queries) for r in requests)])
    queries = torch.cat([r.queries for r in requests])
    output = torch.empty_like(queries)
    attention.attend_all(
        queries,
        output,
        cache,
        lengths.cumsum(0).int(),
        torch.tensor([len(r.keys) for r in requests], dtype=torch.int32),
        tables,
        shape.head_size**-0.5,
    )
    return list(output.split(lengths[1:].tolist()))


def exact(shape: Shape, request: Request) -> torch.Tensor:
    count, context = len(request.queries), len(request.keys)
    x = request.queries.double().transpose(0, 1)
    keys = request.keys.double().repeat_interleave(shape.group, 1).permute(1, 2, 0)
    values = request.values.double().repeat_interleave(shape.group, 1).transpose(0, 1)
    scores = x @ keys * shape.head_size**-0.5
    unseen = torch.arange(context) > torch.arange(count)[:, None] + context - count
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1)


shapes = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    head_size=st.sampled_from([32, 64, 96, 128]),
    block_tokens=st.sampled_from([32, 64, 160]),
)


@settings(deadline=None, max_examples=40)
@given(
    shape=shapes,
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 250)), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
)
def test_it_is_right_and_the_same_bits_in_any_batch(
    shape: Shape, sizes: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = make_requests(shape, [(count, count + more) for count, more in sizes], generator)
    together = attended(shape, requests, generator)
    for request, found in zip(requests, together, strict=True):
        wanted = exact(shape, request)
        largest = request.values.double().abs().max()
        assert ((found.double() - wanted).abs() <= 2**-7 * largest).all()
    for request, found in zip(requests, together, strict=True):
        cut = int(torch.randint(len(request.queries), (), generator=generator))
        seen = len(request.keys) - len(request.queries) + cut
        before = Request(request.queries[:cut], request.keys[:seen], request.values[:seen])
        behind = replace(request, queries=request.queries[cut:])
        parts = [attended(shape, [part], generator)[0] for part in (before, behind) if len(part.queries)]
        assert torch.equal(torch.cat(parts), found)


def test_threads_change_no_bit() -> None:
    shape, generator = Shape(4, 2, 64, 32), torch.Generator().manual_seed(5)
    requests = make_requests(shape, [(9, 400), (1, 300), (3, 77)], generator)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(torch.cat(attended(shape, requests, generator)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_is_nan_stays_with_those_who_see_it() -> None:
    shape, generator = Shape(2, 2, 64, 32), torch.Generator().manual_seed(6)
    requests = make_requests(shape, [(4, 90), (4, 90), (2, 40)], generator)
    clean = attended(shape, requests, generator)
    requests[1].queries[2, 1] = torch.nan  # one head of one token
    requests[2].keys[-1] = torch.nan  # seen by the last token alone
    found = attended(shape, requests, generator)
    assert torch.equal(found[0], clean[0])
    changed = found[1].isnan().any(-1)
    assert changed.nonzero().tolist() == [[2, 1]]
    assert torch.equal(found[1][~changed], clean[1][~changed])
    assert torch.equal(found[2][0], clean[2][0])
    assert found[2][1].isnan().all()


def test_a_token_without_a_slot_is_written_nowhere() -> None:
    cache = torch.zeros(2, 1, 32, 64, dtype=torch.bfloat16)
    ones = torch.ones(3, 1, 32, dtype=torch.bfloat16)
    attention.store(ones, 2 * ones, cache, torch.tensor([33, -1, 2]))
    assert (cache == 1).sum(dim=(1, 2, 3)).tolist() == [32, 32]
    assert (cache == 2).sum(dim=(1, 2, 3)).tolist() == [32, 32]


def test_keys_with_gaps_between_tokens_are_taken_as_they_are() -> None:
    both = torch.randn(5, 4, 32).bfloat16()  # as a fused projection gives them
    own, other = torch.zeros(2, 2, 2, 32, 64, dtype=torch.bfloat16)
    slots = torch.arange(5)
    attention.store(both[:, :2], both[:, 2:], own, slots)
    attention.store(both[:, :2].contiguous(), both[:, 2:].contiguous(), other, slots)
    assert torch.equal(own, other)
    assert own.any()


def test_blocks_may_have_gaps_between_them() -> None:
    """vLLM pads the smaller ones where layers have blocks of several sizes."""
    shape, generator = Shape(2, 2, 64, 32), torch.Generator().manual_seed(8)
    request = make_requests(shape, [(5, 70)], generator)[0]
    found = []
    for padding in (0, 96):
        step = 2 * 32 * 128
        room = torch.zeros(4, step + padding, dtype=torch.bfloat16)
        cache = (
            room[:, :step].view(4, 2, 32, 128) if not padding else room[:, :step].unflatten(1, (2, 32, 128))
        )
        output = torch.empty_like(request.queries)
        tables = torch.tensor([[3, 1, 2]], dtype=torch.int32)
        places = torch.arange(70)
        attention.store(
            request.keys, request.values, cache, tables[0, places // 32].long() * 32 + places % 32
        )
        starts, contexts = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
        attention.attend_all(request.queries, output, cache, starts, contexts, tables, 0.125)
        found.append(output)
    assert torch.equal(*found)


def test_a_layer_that_shares_a_cache_needs_the_kernel_of_who_writes_it() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    sizes: dict[str, Any] = {"num_heads": 2, "head_size": 64, "scale": 0.125, "num_kv_heads": 1}
    sizes |= {"alibi_slopes": None, "kv_cache_dtype": "auto"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with attention.replacing_attention(), set_current_vllm_config(config):
            make = attention.CpuAttentionBackend.get_impl_cls()
            for name, window in (("whole", None), ("windowed", 64)):
                writer = make(**sizes, sliding_window=window)
                config.compilation_config.static_forward_context[name] = SimpleNamespace(impl=writer)
                same = make(**sizes, sliding_window=window, kv_sharing_target_layer_name=name)
                assert same.is_own == writer.is_own == (window is None)
                with pytest.raises(
                    UnsupportedError, match=rf"shares the KV cache of {name}, .*linear_kernel='vllm'"
                ):
                    make(**sizes, sliding_window=None if window else 64, kv_sharing_target_layer_name=name)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("wrong", ["float", "size", "numbers"])
def test_what_would_read_beyond_its_arguments_is_refused(wrong: str) -> None:
    key = torch.zeros(1, 1, 64 if wrong == "size" else 32, dtype=torch.bfloat16)
    key = key.float() if wrong == "float" else key
    slots = torch.zeros(1, dtype=torch.int32 if wrong == "numbers" else torch.int64)
    with pytest.raises(ValueError, match="attention"):
        attention.store(key, key, torch.zeros(2, 1, 32, 64, dtype=torch.bfloat16), slots)


@pytest.mark.parametrize("wrong", ["output", "starts", "tables", "heads"])
def test_attention_that_would_reach_beyond_is_refused(wrong: str) -> None:
    heads = 3 if wrong == "heads" else 4
    query = torch.zeros(3, heads, 32, dtype=torch.bfloat16)
    output = torch.zeros(2 if wrong == "output" else 3, heads, 32, dtype=torch.bfloat16)
    starts = torch.tensor([0, 3] if wrong == "starts" else [0, 1, 3], dtype=torch.int32)
    tables = torch.zeros(1 if wrong == "tables" else 2, 1, dtype=torch.int32)
    cache, contexts = torch.zeros(2, 2, 32, 64, dtype=torch.bfloat16), torch.tensor([5, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"attention needs .*, got sizes"):
        attention.attend_all(query, output, cache, starts, contexts, tables, 1.0)


def test_blocks_that_it_cannot_take_are_refused() -> None:
    key, slots = torch.zeros(1, 1, 32, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long)
    long, fine = torch.zeros(2, 1, 48, 64).bfloat16(), torch.zeros(2, 1, 32, 128).bfloat16()
    for cache in (long, fine.float(), fine[..., :64]):
        with pytest.raises(ValueError, match=r"attention needs KV blocks .* multiple of 32 tokens"):
            attention.store(key, key, cache, slots)
    with pytest.raises(
        UnsupportedError, match=r"KV blocks of 48 tokens.* multiples of 32 .*linear_kernel='vllm'"
    ):
        attention.check_cache(torch.zeros(2, 1, 48, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "options",
    [
        {"head_size": 1024},
        {"sliding_window": 64},
        {"logits_soft_cap": 30.0},
        {"alibi_slopes": [0.5, 0.25]},
        {"sinks": torch.zeros(2)},
        {"kv_cache_dtype": "fp8"},
        {"attn_type": "encoder_only"},
        {"head_size": 80},
        {},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_layers_that_it_was_not_made_for_keep_vllms(options: dict[str, Any]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    arguments: dict[str, Any] = {
        "num_heads": 2,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    chosen = attention.CpuAttentionBackend.get_impl_cls()
    with attention.replacing_attention(), set_current_vllm_config(config):
        made = attention.CpuAttentionBackend.get_impl_cls()
        for dtype in (torch.bfloat16, torch.float32):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                layer = made(**arguments | options)
            finally:
                torch.set_default_dtype(before)
            assert layer.is_own == (dtype is torch.bfloat16 and not options)
    assert attention.CpuAttentionBackend.get_impl_cls() is chosen
