"""What would each drafting policy make of the very same responses? Replays them through the fast loop on a model clock.

A live comparison is as noisy as the machine; here all policies get the same responses and the same clock. Stages:

1. The real engine generates a rollout (by default 8 x 16 Countdown responses, the target of speed.py) without and with
   drafts. Kept are the responses, and of every step its requests, tokens, context and seconds.
2. The model drafter drafts at every position of every response, as deep as the engine drafts.
3. For each policy the engine's own `FastLoop` decides step after step what is verified; whether a draft token is
   accepted is read off the response, and the clock advances by the step time and the drafting time fitted in stage 1.

`--drafters` and `--limits` replay the same responses with other drafters and other limits: what changed a figure
can be told apart. The drafter that the project shipped before it learned from the policy's responses is in the history:

    mkdir older
    git archive 'HEAD^{/The shipped drafter learns from the policy}^' assets/countdown-drafter | tar -x -C older

`policy` off, fixed (5 tokens), thresholds, bandit and marginal are the engine's budget policies with the model drafter
alone, each after rollouts of other prompts to learn from. `best sum` is marginal without fair weights. `suffix only`
is marginal with suffix trees alone, as `PACELINE=1` gives it, and `suffix+model` has both; the clock leaves out what
trees take, about two microseconds a token. `clairvoyant` verifies exactly the tokens that will be accepted, with drafts
that cost nothing: no policy can do better with this drafter on this machine. `free drafts` is marginal with drafts that
cost nothing.
`after a disturbance` is marginal in a rollout right after one: with `--disturb 3` steps and drafting took three times
as long in all of the rollout before, as while another process has the cores. `undisturbed` is how fast it is in parts
of marginal, which has heard of the same rollouts at the usual speed.
`measured_s` is what the real engine took, prefill included, which the clock leaves out. It drafted with the first
drafter: with the others there is a measured time of `off` alone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from harness import parser, publish
from numpy.typing import NDArray
from pairs import PAIRS, ROOT, TARGETS
from recording import (
    SHARPNESS,
    Clock,
    Recorder,
    Rollout,
    draft_everywhere,
    make_query,
)
from rollouts import TAIL_SHARE

from paceline.config import BudgetSettings, EngineSettings
from paceline.dice import NO_TOKEN
from paceline.planning.budget import fair_weights
from paceline.types import DraftGrowth, DraftQuery, ModelDrafts, StepObservation

SUFFIX, BOTH = "suffix only", "suffix+model"
FREE = "free drafts"
DISTURBED = "after a disturbance"
POLICIES = ("off", "fixed", "thresholds", "bandit", "marginal", "best sum", SUFFIX, BOTH)
COLUMNS = (
    "drafter",
    "limit",
    "policy",
    "wall_s",
    "measured_s",
    "ratio",
    "tail_ratio",
    "steps",
    "acceptance_length",
    "accepted_share",
    "undisturbed",
)


@dataclass
class Outcome:
    """One replayed rollout."""

    wall_s: float
    tail_s: float
    num_steps: int
    num_decoded: int  # (response, step) pairs
    num_drafted: int
    num_accepted: int


Decision = Callable[[DraftQuery, NDArray[np.int64]], tuple[NDArray[np.int32], NDArray[np.int32], float]]
"""(query, generated tokens of each) -> draft tokens to verify, accepted ones, seconds of drafting."""


class Replay:
    """Advances the responses of one rollout step by step; knows nothing of who decides."""

    def __init__(self, rollout: Rollout, clock: Clock, slowness: float = 1.0) -> None:
        """slowness: factor of all times."""
        self.rollout, self.clock, self.slowness = rollout, clock, slowness
        self.lengths = np.array([len(response) for response in rollout.responses])
        self.prompts = np.array([len(prompt) for prompt in rollout.prompts])

    def run(
        self, decide: Decision, after: Callable[[DraftQuery, NDArray[np.int32], int, float], None]
    ) -> Outcome:
        """Play to the end. `after` hears of each step: query, tokens gained by each, tokens verified, seconds."""
        at = np.ones(len(self.lengths), np.int64)
        wall_s, ends, result = 0.0, np.zeros(len(self.lengths)), Outcome(0.0, 0.0, 0, 0, 0, 0)
        while len(live := np.flatnonzero(at < self.lengths)):
            rows, left = live.tolist(), (self.rollout.max_tokens - at[live]).tolist()
            positions = (self.prompts[live] + at[live]).tolist()
            query = make_query(rows, positions, self.rollout.keys, self.rollout.groups, left)
            drafted, accepted, drafting_s = decide(query, at[live])
            num_tokens = len(live) + int(drafted.sum())
            step_s = self.slowness * self.clock.step_s(len(live), num_tokens, sum(positions))
            after(query, accepted + 1, num_tokens, step_s)
            at[live] += accepted + 1
            wall_s += step_s + drafting_s
            ends[live[at[live] >= self.lengths[live]]] = wall_s
            result.num_steps += 1
            result.num_decoded += len(live)
            result.num_drafted += int(drafted.sum())
            result.num_accepted += int(accepted.sum())
        result.wall_s = wall_s
        result.tail_s = wall_s - float(np.sort(ends)[int(TAIL_SHARE * (len(ends) - 1))])
        return result

    def matches(self, row: int, at: int, tokens: NDArray[np.integer]) -> int:
        """Leading tokens that are those of the response; its last token is never a draft's."""
        truth = self.rollout.responses[row][at : at + len(tokens)]
        differs = np.flatnonzero(tokens[: len(truth)] != truth)
        return min(int(differs[0]) if len(differs) else len(truth), len(self.rollout.responses[row]) - at - 1)


def clairvoyant(replay: Replay) -> Outcome:
    """Verify what will be accepted and nothing else; drafts are free."""

    def decide(
        query: DraftQuery, at: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], float]:
        tokens = replay.rollout.tokens
        hits = [
            replay.matches(r, a, tokens[r, a])
            for r, a in zip(query.responses.tolist(), at.tolist(), strict=True)
        ]
        accepted = np.minimum(np.array(hits, np.int32), query.max_tokens)
        return accepted, accepted, 0.0

    return replay.run(decide, lambda *_: None)


class Policy:
    """A budget policy with the engine's fast loop behind it; keeps what it learned from rollout to rollout."""

    def __init__(self, name: str, drafter: str, *, free_drafts: bool = False) -> None:
        from paceline.engine.fast_loop import FastLoop

        policy: Any = "marginal" if name in ("best sum", SUFFIX, BOTH) else name
        budget = BudgetSettings(policy=policy, fixed_tokens=5, fair=name != "best sum")
        if name == SUFFIX:
            settings = EngineSettings(drafter="suffix", budget=budget)
        else:
            free: Any = "suffix" if name == BOTH else "none"
            settings = EngineSettings(drafter=free, model_drafter=drafter, sharpness=SHARPNESS, budget=budget)
        self.loop = FastLoop(settings)
        self.free_drafts = free_drafts

    def play(self, replay: Replay) -> Outcome:
        """Replay one rollout."""
        from paceline.engine.draft_rows import table_of

        rollout, loop = replay.rollout, self.loop
        self._cached = np.zeros(
            len(rollout.responses), np.int64
        )  # tokens that the model drafter has taken in
        loop.forget_tokens()
        for row, prompt in enumerate(rollout.prompts):
            first = rollout.responses[row][:1].tolist()
            limit = len(prompt) + rollout.max_tokens - 1
            loop.open(rollout.groups[row], row, prompt, first, rollout.keys[row], limit=limit)
        order = [loop.order()]
        steps = itertools.count()
        measured: list[StepObservation] = []

        def decide(
            query: DraftQuery, at: NDArray[np.int64]
        ) -> tuple[NDArray[np.int32], NDArray[np.int32], float]:
            made = None if order[0] is None else self._model_drafts(replay, query, at, order[0])
            taken_s = 0.0 if made is None else made.total_s
            if measured:  # the step before, which these drafts were made in
                step = measured.pop()
                loop.observe(replace(step, step_s=step.step_s + taken_s))
            if made is not None:
                loop.receive(made)
            drafting_s = 0.0 if self.free_drafts else taken_s
            self._at, num_steps = at.copy(), np.full(len(at), next(steps))
            if not loop.may_draft or loop.pauses(len(at)):
                order[0] = loop.order()
                return np.zeros(len(at), np.int32), np.zeros(len(at), np.int32), drafting_s
            weight, left = fair_weights(at, num_steps) if loop.is_fair else None, rollout.max_tokens - at
            proposal = loop.propose(query, 0, weight=weight, left=left)
            order[0] = loop.order()
            pairs = list(zip(query.responses.tolist(), at.tolist(), strict=True))
            accepted = np.array(
                [
                    replay.matches(row, a, proposal.batch.tokens[i, : proposal.lengths[i]])
                    for i, (row, a) in enumerate(pairs)
                ],
                np.int32,
            )
            decided = [
                rollout.responses[row][a : a + count + 1].tolist()
                for (row, a), count in zip(pairs, accepted.tolist(), strict=True)
            ]
            loop.learn(proposal, proposal.lengths, table_of(decided))
            return proposal.lengths, accepted, drafting_s

        def after(query: DraftQuery, gained: NDArray[np.int32], num_tokens: int, step_s: float) -> None:
            rows, count = query.responses.tolist(), len(gained)
            accepted = int(gained.sum()) - count
            context = int(query.positions.sum())
            measured.append(
                StepObservation(count, num_tokens - count, accepted, 0, step_s, num_context_tokens=context)
            )
            loop.append(
                (rollout.groups[row], row, rollout.responses[row][a : a + n].tolist())
                for row, a, n in zip(rows, self._at.tolist(), gained.tolist(), strict=True)
            )

        outcome = replay.run(decide, after)
        for last in measured:
            loop.observe(last)
        for row, group in enumerate(rollout.groups):
            loop.close(group, row)
        return outcome

    def _model_drafts(
        self, replay: Replay, query: DraftQuery, at: NDArray[np.int64], order: Any
    ) -> ModelDrafts:
        """What the model drafter would make of the order: its own growth rule over the tokens drafted before."""
        from paceline.drafting.proposal import Draft
        from paceline.planning.sharpness import SHARPNESS_GRID

        grid = np.asarray(SHARPNESS_GRID, np.float32)
        columns = (getattr(query, column.name) for column in fields(query))
        query = DraftQuery(*(column[: order.most_requests] for column in columns))
        at = at[: order.most_requests]
        limits = np.minimum(query.max_tokens, order.depth).astype(np.int64)
        draft = Draft(
            query,
            limits,
            order.depth,
            order.sharpness,
            grid,
            order.calibration,
            order.floor,
            order.level_costs,
        )
        grown, levels, rows_fed = np.flatnonzero(limits > 0), 0, 0
        while len(grown) and levels < order.depth:
            rows, places = query.responses[grown], at[grown]
            tokens = replay.rollout.tokens[rows, places, levels].astype(np.int64)
            cells = replay.rollout.cells[rows, places, levels].astype(np.int32)
            rows_fed += len(grown)
            grown = grown[draft.put(grown, levels, tokens, cells, np.full_like(tokens, NO_TOKEN))]
            levels += 1
        growth = DraftGrowth(levels, rows_fed, 0.0)
        seconds = 1e-6 if self.free_drafts else replay.slowness * replay.clock.drafting_s(growth)
        growth = DraftGrowth(levels, rows_fed, seconds)
        if not self.free_drafts:
            seconds += replay.slowness * replay.clock.catching_up_s(
                int((query.positions - self._cached[query.responses]).sum())
            )
        self._cached[query.responses] = query.positions
        return ModelDrafts(query.responses, query.positions, draft.batch(), growth, seconds)


def truncate(rollout: Rollout, limit: int) -> Rollout:
    """The rollout as it would have been with this limit of tokens per response."""
    responses = [response[:limit] for response in rollout.responses]
    measured_s = rollout.measured_s if limit >= rollout.max_tokens else {}
    return replace(
        rollout, responses=responses, max_tokens=min(limit, rollout.max_tokens), measured_s=measured_s
    )


def measured_with(took: dict[str, float], is_recorder: bool) -> dict[str, float]:
    """What of the real engine's times holds for a drafter; is_recorder: the engine drafted with this one."""
    return took if is_recorder else {"off": took["off"]}


def compare(
    rollouts: list[Rollout], clock: Clock, drafter: str, disturb: float | None
) -> list[dict[str, Any]]:
    """One row per policy on the last rollout; the ones before it are what the policies learn from."""
    *lessons, last = (Replay(rollout, clock) for rollout in rollouts)
    outcomes: dict[str, Outcome] = {}
    for name in (*POLICIES, FREE, *((DISTURBED,) if disturb else ())):
        policy = Policy("marginal" if name in (FREE, DISTURBED) else name, drafter, free_drafts=name == FREE)
        for lesson in lessons[:-1]:
            policy.play(lesson)
        policy.play(lessons[-1] if name != DISTURBED else Replay(rollouts[-2], clock, disturb or 1.0))
        outcomes[name] = policy.play(last)
    outcomes["clairvoyant"] = clairvoyant(last)
    plain = outcomes["off"]
    return [
        {
            "policy": name,
            "wall_s": one.wall_s,
            "measured_s": last.rollout.measured_s.get(name),
            "ratio": plain.wall_s / one.wall_s,
            "tail_ratio": plain.tail_s / one.tail_s if one.tail_s else None,  # None: all have ended at once
            "steps": one.num_steps,
            "acceptance_length": 1 + one.num_accepted / one.num_decoded,
            "accepted_share": one.num_accepted / one.num_drafted if one.num_drafted else None,
            "undisturbed": outcomes["marginal"].wall_s / one.wall_s if name == DISTURBED else None,
        }
        for name, one in outcomes.items()
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--pair", default="countdown", choices=list(PAIRS), help="target, drafter and prompts")
    made.add_argument("--model", metavar="DIR", help="another target; default: the pair's policy, inflated")
    made.add_argument(
        "--drafters", metavar="DIR", nargs="+", help="the first one records; default: the pair's"
    )
    made.add_argument("--prompts", type=int, default=8)
    made.add_argument("--samples", type=int, default=16, help="responses to each prompt")
    made.add_argument(
        "--limits", type=int, nargs="+", default=[1024], help="tokens; the largest is generated"
    )
    made.add_argument("--rollouts", type=int, default=3, help="the last one is compared; at least 2")
    made.add_argument("--disturb", type=float, metavar="FACTOR", help="adds `after a disturbance`; above 1")
    made.add_argument("--threads", type=int, default=2)
    options = made.parse_args()
    if options.disturb is not None and not options.disturb > 1:
        made.error(f"--disturb {options.disturb:g}: a disturbance makes steps slower, so above 1")
    if options.rollouts < 2:
        made.error(f"--rollouts {options.rollouts}: the policies learn from all but the last, so at least 2")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from paceline.engine.rollout_engine import prepare_environment

    prepare_environment()
    pair = PAIRS[options.pair]
    model = options.model or pair.make_target(TARGETS / options.pair)
    options.drafters = options.drafters or [pair.make_drafter(TARGETS / f"{options.pair}-drafter")]
    recorder = Recorder(model, options.drafters[0], max(options.limits), options.prompts, options.samples)
    recorded = [
        recorder.rollout(pair.draw_prompts(pair.policy, options.prompts, 900 + turn), turn)
        for turn in range(options.rollouts)
    ]
    rows = []
    for drafter in options.drafters:
        is_recorder = drafter == options.drafters[0]
        rollouts = [
            draft_everywhere(responses, drafter, measured_with(took, is_recorder))
            for responses, took in recorded
        ]
        for limit in options.limits:
            cut = [truncate(rollout, limit) for rollout in rollouts]
            found = compare(cut, recorder.clock(), drafter, options.disturb)
            rows += [{"drafter": os.path.relpath(drafter, ROOT), "limit": limit, **row} for row in found]
    publish("replay", rows, COLUMNS, options)


if __name__ == "__main__":
    main()
