"""Processes are killed at random moments: every response still comes once, with the tokens of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from conftest import Generate, make_requests, make_score
from vllm import SamplingParams

from paceline.fleet.rollout import Fleet

ENGINE_KILLS, DRAFT_KILLS, REWARD_KILLS = 3, 9, 10
MOST_ROUNDS = 12


@dataclass
class Chaos:
    """Kills a process now and then, engines only while another one is up."""

    fleet: Fleet
    rng: random.Random
    left: Counter[str] = field(
        default_factory=lambda: Counter(engine=ENGINE_KILLS, draft=DRAFT_KILLS, reward=REWARD_KILLS)
    )
    next_s: float = 0.0

    def strike(self) -> None:
        """Kill something if it is time to; cheap ones more often."""
        now_s = time.monotonic()
        kinds = [kind for kind, count in self.left.items() if count]
        if not kinds or now_s < self.next_s:
            return
        self.next_s = now_s + self.rng.uniform(0.05, 1.5)
        kind = self.rng.choice(kinds)
        process = getattr(self, f"_{kind}")()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has just been killed, and nobody knows yet
            os.kill(process, signal.SIGKILL)
            self.left[kind] -= 1

    def _engine(self) -> int | None:
        busy = [s.name for s in self.fleet.board.workers.values() if s.state == "up" and s.num_running]
        up = [s.name for s in self.fleet.board.workers.values() if s.state == "up"]
        return self.fleet._actors.process(self.rng.choice(busy)) if busy and len(up) > 1 else None

    def _draft(self) -> int | None:
        server = self.fleet._draft_server
        assert server is not None
        return server.pid if server._process.poll() is None else None

    def _reward(self) -> int | None:
        assert self.fleet._rewards is not None
        return self.rng.choice(self.fleet._rewards.processes) if self.fleet._rewards.processes else None


def test_nothing_is_lost_and_no_token_changes(
    fleet: Fleet, plain: Generate, prompts: list[tuple[int, ...]]
) -> None:
    requests = make_requests(prompts[:6], 4, 700)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    wanted = [response.tokens for response in plain(requests, params)]
    rewards = [
        make_score()(index, response) for index, response in enumerate(fleet.generate(requests, params))
    ]
    chaos = Chaos(fleet, random.Random(7))
    losses = sum(status.num_losses for status in fleet.board.workers.values())
    fleet.chunks.take()
    lost: set[tuple[str, float]] = set()
    num_rounds = 0
    while sum(chaos.left.values()) and num_rounds < MOST_ROUNDS:
        num_rounds += 1
        found: dict[int, Any] = {}
        fleet.submit(requests, params)
        while fleet.num_unfinished:
            chaos.strike()
            for finished in fleet.advance(0.02):
                assert finished.index not in found, "a response came twice"
                found[finished.index] = finished
        assert [found[i].response.tokens for i in range(len(requests))] == wanted
        assert [found[i].reward.value for i in range(len(requests))] == rewards
        assert all(len(one.response.logprobs) == 700 for one in found.values())
        spans = fleet.chunks.take()
        gained = [sum(span.num_tokens for span in spans if span.index == i) for i in range(len(requests))]
        assert gained == [700] * len(requests)
        lost |= {(span.worker, span.end_s) for span in spans if span.finish_reason == "lost"}
    assert not sum(chaos.left.values()), f"{chaos.left} kills were left after {num_rounds} rollouts"
    assert sum(status.num_losses for status in fleet.board.workers.values()) == losses + ENGINE_KILLS
    assert 1 <= len(lost) <= ENGINE_KILLS, "what busy engines ran is told of as lost"
    assert fleet._draft_server is not None
    assert fleet._draft_server.num_starts >= DRAFT_KILLS
    assert fleet.board.num_preemptions == 0
