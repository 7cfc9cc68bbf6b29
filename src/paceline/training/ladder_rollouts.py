"""Rollouts on engines with several model drafters: each step begins with the one that promises most.

After the first rollout the ladder is measured with its responses, whose right tokens are known then (engine/rungs.py),
and how often each drafter is right. From there on every step drafts with the best rung at the acceptance of earlier
steps (planning/ladder.py). Both are kept in the run folder, for a resumed run. In a fleet one engine measures, and all
of them draft with what is chosen here. Nothing here changes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.engine.rungs import LEAST_TOKENS
from paceline.planning.ladder import Rung, choose_first, observe
from paceline.record import Note
from paceline.record.ladder_file import FILE_NAME, LadderFile, read_ladder, write_ladder
from paceline.training.randomness import unchanged_randomness
from paceline.training.rollouts import Rollout, Rollouts
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.fleet.journal import Journal

MEASURED = 8
"""Responses with which the ladder is measured: the longest ones, as drafts count in the tail."""


class LadderRollouts(Rollouts):
    """Rollouts on one engine, or on a fleet, that chooses its drafter."""

    def __init__(
        self,
        rollouts: Rollouts,
        names: Sequence[str],
        measure: Callable[[Sequence[Response], SamplingParams], LadderFile | None],
        folder: Path,
        tell: Callable[[LadderFile], None] = lambda known: None,
    ) -> None:
        """rollouts: carry out what is run. names: of the drafters, by place. folder: of the run.

        measure: gives the ladder and how often the drafters are right, with responses of the present weights, or None
        where that cannot be measured now; the engines then draft with their first model.

        tell: is told before each step what is known of all drafters.

        Raises RecordError for a ladder in the folder that cannot be read, or is of other drafters.
        """
        super().__init__(rollouts.engine, rollouts.record, rollouts.watcher, rollouts.interruption)
        self._rollouts, self._names = rollouts, tuple(names)
        self._measure, self._tell = measure, tell
        self._path = folder / FILE_NAME
        self._drafter = self._names[0]
        self._known = read_ladder(self._path, names) if self._path.exists() else LadderFile(ladder=None)

    def run(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        step: int | None,
        journal: Journal | None = None,
    ) -> Rollout:
        if step is None:
            return self._rollouts.run(requests, params, step, journal)
        if self._known.ladder is not None:
            self._tell(self._known)
            self._begin_with(choose_first(self._known.ladder, self._known.tried), step)
        before = self.engine.drafter_score()
        rollout = self._rollouts.run(requests, params, step, journal)
        score = self.engine.drafter_score() - before
        tried = observe(self._known.tried, self._drafter, score.right, score.tried)
        self._known = replace(self._known, tried=tried)
        if self._known.ladder is None and (made := self._measure_with(rollout.responses, params)) is not None:
            self._known = replace(made, tried={**made.tried, **tried})
        write_ladder(self._known, self._path)
        return rollout

    def _begin_with(self, rung: Rung, step: int) -> None:
        if rung.drafter == self._drafter:
            return
        self._drafter = rung.drafter
        self.engine.use_drafter(self._names.index(rung.drafter))
        self._note(
            f"drafter {rung.drafter} from step {step} on: {rung.speedup:.2f} times plain decoding by the ladder at an "
            f"acceptance rate of {rung.acceptance:.2f}"
        )

    def _measure_with(self, responses: Sequence[Response], params: SamplingParams) -> LadderFile | None:
        """None also where the responses are too short to measure with."""
        whole = [one for one in responses if one.failure is None]
        longest = sorted(whole, key=lambda one: -len(one.tokens))
        if not longest or len(longest[0].tokens) < LEAST_TOKENS:
            return None
        begin_s = self.record.now_s()
        with unchanged_randomness():
            made = self._measure(longest[:MEASURED], params)
        if made is None or made.ladder is None:
            return None
        ladder = made.ladder
        gains = "; ".join(
            f"{one.drafter} {', '.join(f'{gain:.2f}' for gain in one.speedup)}" for one in ladder.drafters
        )
        rates = ", ".join(f"{rate:g}" for rate in ladder.rates)
        self._note(
            f"the draft ladder was measured in {self.record.now_s() - begin_s:.0f} s: times plain decoding at "
            f"acceptance rates of {rates}, {ladder.batch} responses: {gains}"
        )
        return made

    def _note(self, text: str) -> None:
        self.record.write(Note(t_s=self.record.now_s(), text=text))
