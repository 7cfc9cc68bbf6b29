"""The fast loop's end of planning/coupling.py: a model drafter in the engine and one in a worker, of which one rests.

Owns what goes with a mode: whether the worker drafts, how many threads the engine computes with while responses run,
and which step times and confidence the draft budget has learned. Called by the fast loop, in the thread that runs the
target: OpenMP has a number of threads for each of those that it is called from.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine.draft_ahead import DraftAhead
from paceline.engine.loop_log import EngineLog
from paceline.planning.budget import BudgetState
from paceline.planning.coupling import Coupling
from paceline.types import StepObservation


class LiveCoupling:
    """One per engine with `draft_worker="auto"`."""

    def __init__(self, ahead: DraftAhead, fresh: Callable[[], BudgetState]) -> None:
        """fresh: what a budget knows that was never used."""
        self._ahead, self._fresh = ahead, fresh
        self.state = Coupling()
        self._is_ahead = False  # what has been carried out
        self._other: BudgetState | None = None  # of the mode that is not in use
        self._threads = 1  # all of the engine's, while a core is shared
        self._has_all_threads = True
        self.num_changes = 0
        """Changes between coupled and ahead."""
        ahead.rest()

    def observe(self, step: StepObservation) -> None:
        """A measured step. One that went without a proposal, after a change was decided, was drafted for as before."""
        if self.state.is_ahead == self._is_ahead:
            self.state.after_step(step)

    def advance(self, budget: BudgetState, log: EngineLog) -> BudgetState:
        """A step begins: decide how its drafts are made, and return what the budget knows of such steps."""
        has_worker = self._ahead.has_come
        if not has_worker:
            self.state = Coupling.without_worker(self.state.at)
        log.write_coupling(self.state.is_ahead, has_worker)
        budget = self._carry_out(budget)
        if self._is_ahead == self._has_all_threads:
            self._share_cores(self._is_ahead)
        return budget

    def leave(self, budget: BudgetState, log: EngineLog) -> BudgetState:
        """Go back to coupled with all threads, as for plain decoding. What was learned stays."""
        self.state.begin_again()
        log.write_coupling(self.state.is_ahead, begins_again=True)
        self.take_all_threads()
        return self._carry_out(budget)

    def take_all_threads(self) -> None:
        """Nothing runs, or nothing is drafted: whoever computes in this process until the next step has all threads."""
        if not self._has_all_threads:
            self._share_cores(False)

    def forget(self) -> None:
        """Another policy decides about drafts: nothing learned under the last one counts, but for what the worker has
        to read, and what that costs. Only when coupled.
        """
        kept = self.state
        self.state = Coupling(unread=kept.unread, priced=kept.priced, priced_s=kept.priced_s)
        self._other = None

    def _carry_out(self, budget: BudgetState) -> BudgetState:
        is_ahead = self.state.is_ahead
        if is_ahead == self._is_ahead:
            return budget
        self._is_ahead = is_ahead
        self.num_changes += 1
        if is_ahead:
            self._ahead.wake()
        else:
            self._ahead.rest()
        other, self._other = self._other, budget
        return self._fresh() if other is None else other

    def _share_cores(self, is_shared: bool) -> None:
        """Leave a core to each worker that drafts, or to none. vLLM has made `torch.set_num_threads` do nothing."""
        import torch

        if self._has_all_threads:
            self._threads = torch.get_num_threads()
        left = self._threads - len(self._ahead.links) if is_shared else self._threads
        torch._C.set_num_threads(max(left, 1))
        self._has_all_threads = not is_shared
