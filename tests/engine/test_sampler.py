"""Sampling options mean what they mean in vLLM: every row's distribution against vLLM's own sampler.

vLLM's sampler knows one row per request, so each of our rows (draft rows too) is for it a request of its own, whose
output ends with the draft tokens before the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.compat import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    SamplingMetadata,
)
from paceline.engine.v1.sampler import (
    PLACEHOLDER,
    KeyedSampler,
    Rows,
    apply_filters,
    apply_options,
    scale,
    throw,
)

VOCABULARY = 24
REQUESTS = 6


@dataclass
class Request:
    """One request's options and state."""

    params: Any
    prompt: list[int]
    output: list[int]
    bad_words: list[list[int]]
    allowed: list[int] | None


def draw_request(rng: np.random.Generator) -> Request:
    """Options of all kinds, each on about half of the requests."""
    from vllm import SamplingParams

    def some(values: list[Any], off: Any) -> Any:
        return values[rng.integers(len(values))] if rng.random() < 0.5 else off

    output = rng.integers(0, VOCABULARY, rng.integers(0, 6)).tolist()
    params = SamplingParams(
        temperature=some([0.0, 0.4, 1.6], 1.0),
        top_k=some([1, 3, 10], 0),
        top_p=some([0.3, 0.8], 1.0),
        min_p=some([0.05, 0.4], 0.0),
        presence_penalty=some([0.7, -0.5], 0.0),
        frequency_penalty=some([0.6], 0.0),
        repetition_penalty=some([1.4, 0.7], 1.0),
        logit_bias=some([{3: 4.0, 9: -6.0}, {0: 2.5}], None),
        min_tokens=some([4, 8], 0),
        max_tokens=20,
        stop_token_ids=[1, 2],
    )
    last = output[-1:] or [5]
    bad_words = some([[[7]], [[*last, 4], [4, 6]], [[6, 6, 2]]], [])
    allowed = some([sorted(rng.choice(VOCABULARY, 12, replace=False).tolist())], None)
    return Request(params, rng.integers(0, VOCABULARY, 5).tolist(), output, bad_words, allowed)


def make_metadata(requests: list[Request], num_logprobs: int | None = None) -> SamplingMetadata:
    """What vLLM's model runner would build for a batch of them."""
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors

    count = len(requests)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=count))
    device = torch.device("cpu")
    kinds = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    processors = [kind(config, device, False) for kind in kinds]
    added = [(i, r.params, r.prompt, r.output) for i, r in enumerate(requests)]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=count, removed=(), added=added, moved=()))

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(r.params, name) for r in requests], dtype=dtype)

    top_k = column("top_k", torch.int32)
    mask = None
    if any(r.allowed is not None for r in requests):
        mask = torch.zeros(count, VOCABULARY, dtype=torch.bool)
        for row, request in enumerate(requests):
            if request.allowed is not None:
                mask[row] = True
                mask[row, request.allowed] = False
    temperature = column("temperature")
    penalties = [column(f"{kind}_penalty") for kind in ("frequency", "presence", "repetition")]
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        top_p=column("top_p"),
        top_k=torch.where(top_k > 0, top_k, VOCABULARY).to(torch.int32),
        generators={},
        max_num_logprobs=num_logprobs,
        no_penalties=bool(
            (penalties[0] == 0).all() and (penalties[1] == 0).all() and (penalties[2] == 1).all()
        ),
        prompt_token_ids=torch.tensor([r.prompt for r in requests]),
        frequency_penalties=penalties[0],
        presence_penalties=penalties[1],
        repetition_penalties=penalties[2],
        output_token_ids=[r.output for r in requests],
        allowed_token_ids_mask=mask,
        bad_words_token_ids={i: r.bad_words for i, r in enumerate(requests) if r.bad_words},
        logitsprocs=LogitsProcessors(processors),
    )


def of_vllm(logits: torch.Tensor, requests: list[Request], mode: Any) -> torch.Tensor:
    """Log-probabilities over the vocabulary. [num_requests, VOCABULARY]"""
    from vllm.v1.sample.sampler import Sampler

    made = Sampler(mode)(logits.clone(), make_metadata(requests, num_logprobs=-1))
    assert made.logprobs_tensors is not None
    return made.logprobs_tensors.logprobs


@pytest.mark.parametrize("seed", range(40))
def test_every_row_has_vllms_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [draw_request(rng) for _ in range(REQUESTS)]
    num_drafts = rng.integers(0, 4, REQUESTS)
    drafts = [rng.integers(0, VOCABULARY, count).tolist() for count in num_drafts]
    starts = np.array([len(r.prompt) + len(r.output) for r in requests])
    rows = Rows.of(num_drafts, starts)
    logits = torch.from_numpy(3 * rng.standard_normal((len(rows.requests), VOCABULARY)).astype(np.float32))
    alone = [
        Request(r.params, r.prompt, [*r.output, *d[:offset]], r.bad_words, r.allowed)
        for r, d in zip(requests, drafts, strict=True)
        for offset in range(len(d) + 1)
    ]
    wanted = of_vllm(logits, alone, "processed_logprobs")

    metadata = make_metadata(requests)
    flat = np.array([token for draft in drafts for token in draft], np.int64)
    made = apply_options(logits.clone(), rows, flat, metadata, [r.output for r in requests])
    temperatures = np.array([r.params.temperature for r in requests], np.float32)[rows.requests]
    made = apply_filters(scale(made, temperatures), rows, metadata).log_softmax(-1)
    greedy = torch.from_numpy(temperatures == 0)
    assert torch.equal(made[greedy].argmax(-1), wanted[greedy].argmax(-1))
    torch.testing.assert_close(made[~greedy], wanted[~greedy], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_vllms(mode: Any) -> None:
    rng = np.random.default_rng(3)
    requests = [draw_request(rng) for _ in range(REQUESTS)]
    for request in requests:
        request.params.temperature = max(request.params.temperature, 0.4)
    logits = torch.from_numpy(3 * rng.standard_normal((REQUESTS, VOCABULARY)).astype(np.float32))
    wanted = of_vllm(logits, requests, mode)
    none = np.zeros(REQUESTS, np.int64)
    rows = Rows.of(none, np.array([len(r.prompt) + len(r.output) for r in requests]))
    keys = rng.integers(0, 1 << 63, REQUESTS).astype(np.uint64)
    metadata = make_metadata(requests, num_logprobs=0)
    sampler = KeyedSampler(mode)
    output, _ = sampler.sample(logits.clone(), rows, none[:0], keys, metadata, [r.output for r in requests])
    assert output.logprobs_tensors is not None
    chosen = output.sampled_token_ids.long()
    own = output.logprobs_tensors.logprobs
    torch.testing.assert_close(own, wanted.gather(1, chosen), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(own).all()


def test_rows_without_a_token_leave_the_others_alone() -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(3 * rng.standard_normal((6, VOCABULARY)).astype(np.float32))
    keys, positions = rng.integers(0, 1 << 63, 6).astype(np.uint64), np.arange(1, 7)
    temperatures = np.array([1.0, 0.0, 0.7, 1.0, 0.0, 2.0], np.float32)
    sound = throw(logits, keys, positions, temperatures)
    logits[1], logits[3, 5], logits[4, 2] = float("-inf"), float("nan"), float("nan")
    logits[5, :-1] = float("-inf")
    wanted = [sound[0], PLACEHOLDER, sound[2], PLACEHOLDER, PLACEHOLDER, VOCABULARY - 1]
    assert throw(logits, keys, positions, temperatures).tolist() == wanted
    assert throw(logits[1:2], keys[:1], positions[:1], temperatures[1:2]).tolist() == [PLACEHOLDER]


def few_drafts(rng: np.random.Generator, depth: int) -> tuple[list[Request], Rows, np.ndarray]:
    """Requests of which one has many draft tokens."""
    requests = [draw_request(rng) for _ in range(REQUESTS)]
    counts = np.zeros(REQUESTS, np.int64)
    counts[2] = depth
    rows = Rows.of(counts, np.array([len(r.prompt) + len(r.output) for r in requests]))
    return requests, rows, rng.integers(0, VOCABULARY, depth)


def test_a_neighbours_top_p_excludes_nothing() -> None:
    """Cutting by a probability of 1 would exclude what has none."""
    from vllm import SamplingParams

    one, other = (
        Request(SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k), [5], [], [], None)
        for top_p, top_k in ((1.0, 4), (0.5, 0))
    )
    logits = torch.zeros(2, VOCABULARY)
    logits[:, :4] = torch.tensor([200.0, 150.0, 96.0, 90.0])
    rows = Rows.of(np.zeros(2, np.int64), np.ones(2, np.int64))
    first, second = apply_filters(logits.clone(), rows, make_metadata([one, other]))
    assert first[:4].tolist() == [200.0, 150.0, 96.0, 90.0]
    assert torch.isneginf(first[4:]).all()
    assert torch.isneginf(second[1:]).all()


@pytest.mark.parametrize("named", [False, True])
def test_log_probabilities_are_computed_where_there_is_a_token(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    rng = np.random.default_rng(6)
    requests, rows, drafts = few_drafts(rng, 12)
    logits = torch.from_numpy(3 * rng.standard_normal((len(rows.requests), VOCABULARY)).astype(np.float32))
    keys = rng.integers(0, 1 << 63, REQUESTS).astype(np.uint64)
    outputs = [r.output for r in requests]
    metadata = make_metadata(requests, num_logprobs=2)
    if named:
        metadata.logprob_token_ids = {2: [3, 4, 5], 4: [6]}
    sampler, sizes, log_softmax = KeyedSampler("processed_logprobs"), [], torch.Tensor.log_softmax

    def watch(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sizes.append(len(values))
        return log_softmax(values, *args, **options)

    monkeypatch.setattr(torch.Tensor, "log_softmax", watch)
    output, verdict = sampler.sample(logits.clone(), rows, drafts, keys, metadata, outputs)
    assert sizes == [int((verdict.table >= 0).sum())]
    made = output.logprobs_tensors
    assert made is not None
    assert len(made.logprobs) == len(made.logprob_token_ids) == verdict.table.size
    # Each row alone, as a request of its own, has the same ones.
    width = verdict.table.shape[1]
    for request, column in zip(*np.nonzero(verdict.table >= 0), strict=True):
        row = int(rows.first[request] + column)
        one = Request(requests[request].params, requests[request].prompt,
                      [*outputs[request], *drafts[:column].tolist()],
                      requests[request].bad_words, requests[request].allowed)  # fmt: skip
        ids = metadata.logprob_token_ids.get(int(request)) if named else None
        alone = make_metadata([one], num_logprobs=0 if ids else 2)
        alone.logprob_token_ids = {0: ids} if ids else None
        single = Rows.of(np.zeros(1, np.int64), rows.positions[row : row + 1])
        wanted, _ = sampler.sample(
            logits[row : row + 1].clone(),
            single,
            drafts[:0],
            keys[request : request + 1],
            alone,
            [one.output],
        )
        assert wanted.logprobs_tensors is not None
        found = made.logprobs[int(request) * width + int(column)]
        count = wanted.logprobs_tensors.logprobs.shape[1]
        assert torch.equal(found[:count], wanted.logprobs_tensors.logprobs[0])
        assert torch.isneginf(found[count:]).all()
