"""A response that has failed: delivered with the others, and what reward it gets."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import FleetSettings, RewardSettings
from paceline.control.events import CancelChunk, Deliver
from paceline.errors import EngineError
from paceline.fleet.fleet import Finished, Fleet
from paceline.fleet.reward_pool import RewardPool
from paceline.fleet.rewards import Reward
from paceline.integrations.trl.generation import EngineGeneration
from paceline.training.fleet_rollouts import FleetRollouts
from paceline.types import Response, RolloutRequest

WHY = "failed on worker w0: NaN"


def response(failure: str | None) -> Response:
    reason = "stop" if failure is None else "error"
    return Response(RolloutRequest((1,), 5), (4,), (-1.0,), reason, 0, 0, 0, 0, 0, 1, failure)


def fleet_with_rewards(failure_reward: float | None) -> Fleet:
    fleet, pool = Fleet.__new__(Fleet), RewardPool.__new__(RewardPool)
    pool._failure_reward = failure_reward
    fleet._kv_pool, fleet._rewards, fleet._finished = None, pool, []
    return fleet


def test_a_failed_response_is_not_scored() -> None:
    fleet = fleet_with_rewards(-2.0)
    fleet._deliver(3, response(WHY))
    assert fleet._finished == [Finished(3, response(WHY), Reward(-2.0, f"it {WHY}"))]


def test_without_a_reward_for_it_a_failed_response_ends_the_rollout() -> None:
    with pytest.raises(EngineError, match=f"response 3 has no reward, it {WHY}: mend that, or set"):
        fleet_with_rewards(None)._deliver(3, response(WHY))


def test_workers_hear_of_all_else_before_it_ends() -> None:
    """A chunk that nobody cancels would run into the next weight push."""
    fleet, heard = fleet_with_rewards(None), list[Any]()
    fleet._journal, fleet._params = None, None
    fleet._actors = SimpleNamespace(order=lambda worker, orders, params: heard.extend(orders))  # type: ignore[assignment]
    cancel = CancelChunk("w0", 0, 7)
    with pytest.raises(EngineError, match="response 3 has no reward"):
        fleet._act([Deliver(3, response(WHY)), cancel])
    assert heard == [cancel]


def rollouts(rewards: RewardSettings | None, reward: Any = None) -> tuple[FleetRollouts, list[str]]:
    """And the notes that it writes."""
    made, notes = FleetRollouts.__new__(FleetRollouts), list[str]()
    made._fleet = SimpleNamespace(settings=FleetSettings(rewards=rewards))  # type: ignore[assignment]
    made._reward = reward
    made.record = SimpleNamespace(now_s=lambda: 0.0, write=lambda note: notes.append(note.text))  # type: ignore[assignment]
    return made, notes


def test_training_gives_a_failed_response_the_reward_of_a_failure() -> None:
    made, notes = rollouts(None)
    assert made._take_rewards([Finished(0, response(None), None)]) == (), "the trainer scores all of them"
    both = [Finished(0, response(None), None), Finished(1, response(WHY), None)]
    assert made._take_rewards(both) == (None, 0.0)
    assert notes == [f"1 of 2 responses have no reward of their own: it {WHY}"]
    scored = [Finished(0, response(None), Reward(1.0)), Finished(1, response(WHY), Reward(-1.0, f"it {WHY}"))]
    made, _ = rollouts(RewardSettings(failure_reward=-1.0), SimpleNamespace(knows=lambda prompt: True))
    assert made._take_rewards(scored) == (1.0, -1.0)


@pytest.mark.parametrize("tokens", [(), (4,)])
def test_training_stops_at_a_failed_response_without_a_token(tokens: tuple[int, ...]) -> None:
    """Whatever engine the trainer has; an evaluation, which TRL does not see, goes on."""
    failed = replace(response(WHY), tokens=tokens, logprobs=(-1.0,) * len(tokens))
    trainer: Any = SimpleNamespace(model=SimpleNamespace(training=True), state=SimpleNamespace(global_step=0))
    engine: Any = SimpleNamespace(generate=lambda requests, params: [response(None), failed])
    generation = EngineGeneration(
        trainer=trainer,
        engine=engine,
        run_seed=0,
        model=None,
        accelerator=SimpleNamespace(num_processes=1),
        processing_class=None,
        max_completion_length=5,
    )
    generation._params = lambda: None  # type: ignore[assignment, method-assign, return-value]
    with nullcontext() if tokens else pytest.raises(EngineError, match=f"response 1 {WHY}; it has no token"):
        assert generation.generate([[1], [1]], None, 2)[1] == [[4], list(tokens)]
    made, notes = rollouts(None)
    assert made._take_rewards([Finished(1, failed, None)]) == (0.0,)
    assert notes == [f"1 of 1 responses have no reward of their own: it {WHY}"]


def test_training_stops_where_a_failure_has_no_reward() -> None:
    made, _ = rollouts(RewardSettings(failure_reward=None))
    with pytest.raises(EngineError, match="response 1 failed on worker w0: NaN; it has no reward"):
        made._take_rewards([Finished(1, response(WHY), None)])
