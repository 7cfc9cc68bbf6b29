"""When is it not even asked whether drafts pay?

Asking costs the host about a millisecond per step: drafts are made, sorted and weighed. Where arithmetic binds a step,
no draft pays for hundreds of steps, whatever the text; and the more requests share a step, the more this depends on the
machine and the less on any one of them. So after some questions in vain the next is put off by one step, then two, then
four, and at most by a quarter of the number of requests: a few requests are asked about in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 4
"""Questions in vain before the first pause."""
LONGEST = 16
"""Steps without a question, at most."""
REQUESTS_PER_STEP = 4
"""Requests that each step of a pause needs."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Where an engine stands; `Pause()` asks in the next step."""

    num_in_vain: int = 0
    """Questions in a row after which nothing was verified."""
    left: int = 0
    """Steps still to come without a question."""
    batch: int = 0
    """Requests of the step that was asked about last."""

    def holds(self, batch: int) -> bool:
        """Whether the coming step of `batch` requests goes without a question; one of another size never does."""
        return self.left > 0 and self.batch < 2 * batch < 4 * self.batch


def after_question(pause: Pause, batch: int, num_drafted: int) -> Pause:
    """The pause after a step that was asked about, of which `num_drafted` draft tokens were verified."""
    if num_drafted:
        return Pause()
    num = pause.num_in_vain + 1
    longest = min(batch // REQUESTS_PER_STEP, LONGEST)
    return Pause(num, min(1 << min(num - PATIENCE, 5), longest) if num >= PATIENCE else 0, batch)


def after_rest(pause: Pause) -> Pause:
    """The pause after a step of it."""
    return Pause(pause.num_in_vain, pause.left - 1, pause.batch)
