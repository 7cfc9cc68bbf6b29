"""Processes are killed at random moments: every response still comes once, with the tokens of an undisturbed run.

The same in bfloat16: test_faults.py.
"""

from __future__ import annotations

import random
from collections import Counter

from fleet_parts import Generate, make_requests, make_score
from saboteurs import Chaos, roll_out
from vllm import SamplingParams

from paceline.fleet.fleet import Fleet

ENGINE_KILLS, DRAFT_KILLS, REWARD_KILLS = 3, 9, 10
MOST_ROUNDS = 12


def test_nothing_is_lost_and_no_token_changes(
    fleet: Fleet, plain: Generate, prompts: list[tuple[int, ...]]
) -> None:
    requests = make_requests(prompts[:6], 4, 700)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    wanted = [response.tokens for response in plain(requests, params)]
    rewards = [
        make_score()(index, response) for index, response in enumerate(fleet.generate(requests, params))
    ]
    kills = Counter(engine=ENGINE_KILLS, draft=DRAFT_KILLS, reward=REWARD_KILLS)
    chaos = Chaos(fleet, random.Random(7), kills)
    losses = chaos.count_losses()
    fleet.chunks.take()
    lost: set[tuple[str, float]] = set()
    num_rounds = 0
    while sum(chaos.left.values()) and num_rounds < MOST_ROUNDS:
        num_rounds += 1
        found = roll_out(fleet, requests, params, chaos.strike)
        assert [one.response.tokens for one in found] == wanted
        assert [one.reward and one.reward.value for one in found] == rewards
        assert all(len(one.response.logprobs) == 700 for one in found)
        spans = fleet.chunks.take()
        gained = [sum(span.num_tokens for span in spans if span.index == i) for i in range(len(requests))]
        assert gained == [700] * len(requests)
        lost |= {(span.worker, span.end_s) for span in spans if span.finish_reason == "lost"}
    assert not sum(chaos.left.values()), f"{chaos.left} kills were left after {num_rounds} rollouts"
    chaos.wait_for_losses(losses + ENGINE_KILLS)
    assert 1 <= len(lost) <= ENGINE_KILLS, "what busy engines ran is told of as lost"
    assert fleet._draft_server is not None
    assert fleet._draft_server.child.num_starts >= DRAFT_KILLS
    assert fleet.board.num_preemptions == 0
