"""One push reaches every worker, and nobody generates with the weights of another version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleet_parts import POLICY, make_requests
from vllm import SamplingParams

from paceline.control.events import LoadWeights, RunChunk
from paceline.fleet.fleet import Fleet

PARAMS = SamplingParams(temperature=1.0)


def load() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()


def gap(responses: list[Any], policy: torch.nn.Module) -> float:
    """Largest difference between the fleet's log-probabilities and those of a model in this process."""
    worst = 0.0
    for response in responses:
        prompt = response.request.prompt
        tokens = torch.tensor([[*prompt, *response.tokens]])
        with torch.no_grad():
            scores = torch.log_softmax(policy(tokens).logits.float(), -1)[0, len(prompt) - 1 : -1]
        own = scores[torch.arange(len(response.tokens)), tokens[0, len(prompt) :]]
        worst = max(worst, float((own - torch.tensor(response.logprobs)).abs().max()))
    return worst


def test_new_weights_reach_every_worker(fleet: Fleet, prompts: list[tuple[int, ...]]) -> None:
    policy, before = load(), fleet.policy_version
    original = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.02)
    requests = make_requests(prompts, 4, 60)
    stale = fleet.generate(requests, PARAMS)
    assert gap(stale, policy) > 0.05, "the control: stale weights must be visible"
    assert fleet.push_weights(policy.named_parameters()) == before + 1
    old = {name: status.num_tokens for name, status in fleet.board.workers.items()}
    responses = fleet.generate(requests, PARAMS)
    assert gap(responses, policy) < 1e-4
    assert {response.policy_version for response in responses} == {before + 1}
    assert all(status.num_tokens > old[name] for name, status in fleet.board.workers.items())
    assert fleet.push_weights(original.items()) == before + 2
    assert [r.tokens for r in fleet.generate(requests, PARAMS)] == [r.tokens for r in stale]


def test_an_engine_refuses_a_chunk_of_another_version(
    fleet: Fleet, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has missed a push is told to load the weights before anything else."""
    requests = make_requests(prompts[:2], 2, 30)
    fleet.push_weights(load().named_parameters())
    wanted = fleet.generate(requests, PARAMS)
    orders, order = [], fleet._actors.order

    def misdirect(worker: str, given: list[Any], params: Any) -> None:
        chunks = [one for one in given if isinstance(one, RunChunk)]
        if chunks and not orders:
            from dataclasses import replace

            given = [replace(one, version=-1) if one in chunks else one for one in given]
        orders.append(given)
        order(worker, given, params)

    told: list[LoadWeights] = []
    decide = fleet._controller.decide

    def watch(event: Any) -> list[Any]:
        actions = decide(event)
        told.extend(one for one in actions if isinstance(one, LoadWeights))
        return actions

    monkeypatch.setattr(fleet._actors, "order", misdirect)
    monkeypatch.setattr(fleet._controller, "decide", watch)
    found = fleet.generate(requests, PARAMS)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    [refused] = {one.worker for one in orders[0] if isinstance(one, RunChunk)}
    assert [one.worker for one in told] == [refused]
