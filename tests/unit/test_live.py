"""Responses that go through steps together are counted in arrays, and told when somebody looks."""

from __future__ import annotations

import numpy as np

from paceline.engine.live import LiveBatch, ScheduledResponse


def responses(count: int) -> list[ScheduledResponse]:
    return [
        ScheduledResponse(i, i // 2, 2**63 + i, temperature=1.0, drafts_allowed=True) for i in range(count)
    ]


def test_what_steps_bring_is_counted_until_it_is_settled() -> None:
    lives = responses(3)
    batch = LiveBatch.of(lives)
    batch.grow(np.array([1, 4, 0]))
    batch.num_draft_tokens[:] += [0, 5, 2]
    batch.grow(np.array([3, 1, 2]))
    assert [live.num_steps for live in lives] == [0, 0, 0]
    batch.settle()
    batch.settle()
    assert [live.num_steps for live in lives] == [2, 2, 1]
    assert [live.num_accepted_tokens for live in lives] == [2, 3, 1]
    assert [live.num_draft_tokens for live in lives] == [0, 5, 2]
    again = LiveBatch.of(lives[1:])
    again.grow(np.array([2, 1]))
    again.settle()
    assert [(live.num_steps, live.num_accepted_tokens) for live in lives] == [(2, 2), (3, 4), (2, 1)]


def test_a_response_is_withdrawn_until_it_has_grown() -> None:
    lives = responses(2)
    for live in lives:
        live.is_withdrawn = True
    batch = LiveBatch.of(lives)
    batch.grow(np.array([0, 1]))
    batch.settle()
    assert [live.is_withdrawn for live in lives] == [True, False]
