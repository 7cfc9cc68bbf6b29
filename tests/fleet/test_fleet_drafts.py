"""The fleet's own draft server: workers tell what they generate, each token once, and draft from what others tell."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fleet_parts import POLICY, Generate, make_requests
from vllm import SamplingParams

from paceline.drafting.client import DraftClient
from paceline.drafting.suffix import SuffixForest
from paceline.engine.sharing import SharedDrafts
from paceline.fleet.fleet import Fleet
from paceline.types import Response, RolloutRequest

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)
NUM_TOKENS = 300
SILENT = 1 << 50
"""Key of a response that says nothing and keeps a group watched."""
PATIENCE_S = 20.0


@pytest.fixture
def client(fleet: Fleet) -> Iterator[SharedDrafts]:
    """Shares drafts with the workers, which have just got weights: they speak of groups by the version."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32")
    version = fleet.push_weights(policy.named_parameters())
    assert fleet._draft_server is not None
    made = SharedDrafts(DraftClient([fleet._draft_server.address]))
    made.epoch = version << 20
    yield made
    made.close_client()


def requests_for(prompts: list[tuple[int, ...]]) -> list[RolloutRequest]:
    """One response to a prompt: nobody here to draft from."""
    return make_requests(prompts[:4], 1, NUM_TOKENS)


def accepted(responses: list[Response]) -> int:
    return sum(response.num_accepted_tokens for response in responses)


def test_workers_tell_every_token_once(
    fleet: Fleet, client: SharedDrafts, prompts: list[tuple[int, ...]]
) -> None:
    forest, requests = SuffixForest(), requests_for(prompts)
    groups = [fleet._resolve(0, request).group for request in requests]
    for number, group in enumerate(groups):
        assert group is not None
        client.open(group, number, SILENT + number, [])
    responses = fleet.generate(requests, PARAMS)
    deadline_s = time.monotonic() + PATIENCE_S
    while forest.num_tokens < len(requests) * NUM_TOKENS:
        assert time.monotonic() < deadline_s, forest.num_tokens
        client.take_over(forest)
        time.sleep(0.02)
    for response in responses:
        assert forest.count(response.group, response.tokens[:20]) == 1
        assert forest.count(response.group, response.tokens[-20:]) == 1
    time.sleep(0.2)
    client.take_over(forest)
    assert forest.num_tokens == len(requests) * NUM_TOKENS


def test_workers_draft_from_what_others_tell(
    fleet: Fleet, client: SharedDrafts, plain: Generate, prompts: list[tuple[int, ...]]
) -> None:
    requests = requests_for(prompts)
    wanted = plain(requests, PARAMS)
    alone = fleet.generate(requests[:2], PARAMS)
    for number, response in enumerate(wanted[2:]):
        client.open(response.group, number, SILENT + number, response.tokens)
    helped = fleet.generate(requests[2:], PARAMS)
    assert [r.tokens for r in (*alone, *helped)] == [r.tokens for r in wanted]
    assert accepted(helped) > 1.2 * accepted(alone), (accepted(helped), accepted(alone))
