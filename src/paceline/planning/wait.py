"""Wait or go: does the engine verify the drafts that it has, or wait a moment for those under way?

While a step runs the draft worker drafts on, so tokens that the engine does not wait for are not lost: they are there
when the step ends. What waiting for k more tokens saves is a step, if the rejection is then found in this one. Without
them this step finds it if it is among the tokens there or the one behind them, which the bonus token decides anyway.
So a step is saved if all of these are accepted, with path probability P and p, and one of the k is the last, with
1 - p^k. Of a step that B requests share, a request's part is V / B. So waiting pays if

    seconds of waiting + T(n + more) - T(n)  <  V / B p (1 - p^k) sum_i P_i

over the requests i for which tokens are under way. With one request, k = 1 and j draft tokens there, that is
D < V p^(j+1) (1 - p): where the mean time per rejection, about j D + V (1 + p^(j+1)), has its minimum over j (what
comes meanwhile takes one step more in most cases).

Differs: SpecActor 4.1 verifies a window as soon as it is whole, and never waits for less.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 2.0
"""A wait is given up after so many times what it should take: the worker may have been stopped."""


@dataclass(frozen=True, slots=True)
class WaitSnapshot:
    """A step that could begin now."""

    num_requests: int
    """B."""
    open_probability: float
    """sum P_i: that the whole draft is accepted, over the requests for which more tokens are under way."""
    acceptance: float
    """p, of the tokens under way."""
    num_tokens: int
    """k, tokens that come next for each of these requests."""
    arrival_s: float
    """Until then."""
    step_s: float
    """V, of the step as it is."""
    longer_step_s: float
    """Of the step with the coming tokens in it."""


def decide_wait(snapshot: WaitSnapshot) -> float:
    """Seconds to wait for the next tokens at most; 0: go."""
    saved_s = (
        snapshot.step_s
        / snapshot.num_requests
        * snapshot.acceptance
        * (1.0 - snapshot.acceptance**snapshot.num_tokens)
        * snapshot.open_probability
    )
    cost_s = snapshot.arrival_s + max(snapshot.longer_step_s - snapshot.step_s, 0.0)
    return PATIENCE * snapshot.arrival_s if cost_s < saved_s else 0.0
