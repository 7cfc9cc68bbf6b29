"""A verifier and a draft worker in simulated time: independent acceptance, steps of V seconds, draft tokens of D."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.planning.wait import WaitSnapshot


@dataclass(slots=True)
class _Row:
    ahead: int = 0
    is_void: bool = False  # the call in progress drafts behind what was rejected


def run(
    decide: Callable[[WaitSnapshot], float],
    *,
    num_requests: int,
    acceptance: float,
    draft_s: float,
    verify_s: float = 1.0,
    window: int = 8,
    num_steps: int = 4000,
    seed: int = 0,
) -> float:
    """Tokens per second of all requests together. A drafting call adds a token to every row with room in its window."""
    rng = np.random.default_rng(seed)
    rows = [_Row() for _ in range(num_requests)]
    now_s, tick_s, heard_s, tokens = 0.0, draft_s, draft_s, 0

    def draft_until(end_s: float) -> None:
        nonlocal tick_s
        while tick_s <= end_s:
            for row in rows:
                if row.is_void:
                    row.is_void = False
                elif row.ahead < 2 * window:
                    row.ahead += 1
            tick_s += draft_s

    for _ in range(num_steps):
        while True:
            open_rows = [acceptance**row.ahead for row in rows if row.ahead < 2 * window]
            arrival_s = max(tick_s, heard_s) - now_s
            snapshot = WaitSnapshot(
                num_requests, sum(open_rows), acceptance, 1, arrival_s, verify_s, verify_s
            )
            if not decide(snapshot):
                break
            now_s += arrival_s
            draft_until(now_s)
        offered = [row.ahead for row in rows]
        now_s += verify_s
        draft_until(now_s)
        heard_s = tick_s + draft_s  # the call in progress does not know of this step
        for row, length in zip(rows, offered, strict=True):
            right = int(min(rng.geometric(1.0 - acceptance) - 1, length))
            tokens += right + 1
            if right == length and row.ahead > length and rng.random() < acceptance:
                row.ahead -= length + 1
            else:
                row.ahead, row.is_void = 0, True
    return tokens / now_s
