"""The stand-in for a device under `benchmarks/host_time.py`: it takes drafts as a target would."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from host_time import NUM_DRAFTS, PROMPT_TOKENS, RIGHT, SHARED, Device, System, make_texts, row_of

from paceline.engine.v2.runner import KeyedRunnerV2

PROMPT = (7, 8)
TEXT = np.array([7, 8, 1, 2, 3, 4, 5, 6, 9, 9, 9, 9, 9])


def scheduled(drafts: list[int], new: bool = False) -> Any:
    request = SimpleNamespace(req_id="a", prompt_token_ids=list(PROMPT))
    return SimpleNamespace(
        scheduled_new_reqs=[request] if new else [],
        num_scheduled_tokens={"a": 1 + len(drafts)},
        scheduled_spec_decode_tokens={"a": drafts} if drafts else {},
    )


def test_drafts_are_taken_up_to_the_first_wrong_one() -> None:
    device = Device({PROMPT: TEXT}, lambda drafts: None)
    steps = (scheduled([], new=True), scheduled([2, 3, 7]), scheduled([5, 6]))
    made = [device.execute_model(step).result().sampled_token_ids for step in steps]
    assert made == [[[1]], [[2, 3, 4]], [[5, 6, 9]]]
    assert (device.num_drafts, device.num_tokens) == (5, 7)
    assert device.take_draft_token_ids() is None


def test_plain_vllm_is_given_ready_drafts() -> None:
    device = Device({PROMPT: np.arange(40)}, None)
    device.execute_model(scheduled([], new=True))
    ready = device.take_draft_token_ids()
    assert ready.req_ids == ["a"]
    assert len(ready.draft_token_ids[0]) == NUM_DRAFTS


@pytest.mark.parametrize(("overlaps", "tokens"), [(False, 4.0), (True, 3.1)])
def test_ready_drafts_are_right_as_often_as_paceline_s(overlaps: bool, tokens: float) -> None:
    device = Device({PROMPT: np.arange(20_000)}, None, right=RIGHT[overlaps])
    device.execute_model(scheduled([], new=True))
    device.num_tokens = 0
    for _ in range(2000):
        device.execute_model(scheduled(device.take_draft_token_ids().draft_token_ids[0]))
    assert device.num_tokens / 2000 == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize(("tokens", "beyond"), [(3.7, 2.0), (4.3, 2.0), (3.5, None), (1.0, None)])
def test_systems_are_compared_where_responses_grow_alike(tokens: float, beyond: float | None) -> None:
    plain = {"wall_ms": 1.0, "cpu_ms": 1.0, "drafter_ms": 0.0, "tokens_per_request": 4.0}
    values = {"wall_ms": 3.0, "cpu_ms": 3.0, "drafter_ms": 0.5, "tokens_per_request": tokens}
    row = row_of(System("drafts", "fixed"), 64, values, plain)
    assert (row["beyond_cpu_ms"], row["beyond_wall_ms"], row["drafter_ms"]) == (beyond, beyond, 0.5)


def test_what_a_thread_drafts_beside_the_step_has_no_time_in_it() -> None:
    values = {"wall_ms": 3.0, "cpu_ms": 3.0, "drafter_ms": 0.0, "tokens_per_request": 3.1}
    assert row_of(System("drafts", "fixed", overlaps=True), 64, values, values)["drafter_ms"] is None
    assert row_of(System("drafts", None), 64, values, values)["drafter_ms"] is None


def test_drafts_of_any_length_are_put_where_their_request_is() -> None:
    states = SimpleNamespace(
        draft_tokens=torch.full((4, NUM_DRAFTS), -1), req_id_to_index={"a": 2, "b": 0, "c": 3}
    )
    runner = SimpleNamespace(req_states=states, device=torch.device("cpu"))
    KeyedRunnerV2.put_drafts(runner, {"c": [5], "a": [6, 7, 8], "b": [9, 10]})
    assert [row[:3] for row in states.draft_tokens.tolist()][:1] == [[9, 10, 0]]
    assert states.draft_tokens[2, :3].tolist() == [6, 7, 8]
    assert states.draft_tokens[3, 0] == 5
    assert (states.draft_tokens[1] == -1).all()
    assert (states.draft_tokens[:, 3:] == -1).all()


def test_responses_of_a_group_share_most_of_their_text() -> None:
    texts = list(make_texts(9, 2000).items())
    assert len(texts) == 9
    assert all(tuple(text[:PROMPT_TOKENS]) == prompt for prompt, text in texts)
    one, other, stranger = (texts[index][1] for index in (0, 1, 8))
    assert (one == other).mean() == pytest.approx(SHARED**2, abs=0.05)
    assert (one == stranger).mean() < 0.05
