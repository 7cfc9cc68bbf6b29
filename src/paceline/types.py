"""The shared nouns. Frozen, without behaviour beyond views of their own fields; imported by every floor.

Array shapes are given with names; `num_requests` counts the requests that decode in one engine step.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import _step

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


def _values(counters: Any) -> list[Any]:
    """The fields of a dataclass with slots, in order; `dataclasses.astuple` copies each of them deeply, in 0.1 ms."""
    return [getattr(counters, name) for name in counters.__slots__]


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """What a drafter is asked for in one engine step, one row per decoding request."""

    groups: Int64Array  # [num_requests] rollout group ids
    responses: Int64Array  # [num_requests] response ids, unique within the engine
    keys: UInt64Array  # [num_requests] dice keys
    positions: Int64Array  # [num_requests] absolute position of the first token to be drafted
    temperatures: Float32Array  # [num_requests] 0 = greedy
    max_tokens: Int32Array  # [num_requests] longest draft that the request can still take


@dataclass(frozen=True, slots=True)
class DraftChains:
    """One chain of draft tokens per request.

    `acceptance[r, j]` estimates P(token j is accepted | tokens 0..j-1 were accepted); its running product along j is
    the path probability. Entries beyond `num_tokens[r]` are undefined.
    """

    tokens: Int32Array  # [num_requests, max_draft_tokens]
    num_tokens: Int32Array  # [num_requests]
    acceptance: Float32Array  # [num_requests, max_draft_tokens]

    @property
    def path_probability(self) -> Float32Array:
        """P(tokens 0..j are all accepted), 0 beyond the draft. [num_requests, max_draft_tokens] float32."""
        return _step.path_probability(self.num_tokens, self.acceptance)


@dataclass(frozen=True, slots=True)
class DraftBatch(DraftChains):
    """Draft tokens proposed by one drafter for one engine step, before the budget cuts them.

    `cells[r, j]` is the calibration cell that the estimate came from (planning/acceptance.py).
    `probes[r, s]` is the token that the s-th value of the sharpness grid would have drafted at the first position
    (-1: no proposal): whatever was drafted, every sharpness is then scored against the target's token.
    """

    cells: Int32Array  # [num_requests, max_draft_tokens]
    probes: Int32Array  # [num_requests, num_sharpness]


@dataclass(frozen=True, slots=True)
class ModelBatch(DraftBatch):
    """What a model drafter proposes: it knows the dice, so it knows what is likeliest where a token is rejected."""

    rivals: Int32Array  # [num_requests, max_draft_tokens] the runner-up of log q + noise, -1: none


@dataclass(frozen=True, slots=True)
class DraftPaths:
    """Several diverging draft paths per request; path 0 is the one that is drafted where one has to do.

    No two paths of a request are alike: each leaves an earlier one at one token. Entries beyond
    `num_tokens[r, p]` are undefined; unused paths have 0 tokens.
    """

    tokens: Int32Array  # [num_requests, num_paths, max_draft_tokens]
    num_tokens: Int32Array  # [num_requests, num_paths]
    acceptance: (
        Float32Array  # [num_requests, num_paths, max_draft_tokens] given that the path so far is accepted
    )
    cells: Int32Array  # [num_requests, num_paths, max_draft_tokens]


@dataclass(frozen=True, slots=True)
class MetDrafts(DraftChains):
    """The best chain of each request among those of all drafters (drafting/tree.py)."""

    sources: Int32Array  # [num_requests, max_draft_tokens] whose estimate stands for the token
    num_open: int
    """Requests for which more may be drafted ahead."""
    open_probability: float
    """Of these, the sum of the probabilities that the whole draft is accepted."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What an engine's steps cost and bring, as it has measured lately."""

    base_s: float
    token_s: float
    """A step over n tokens takes base_s + token_s n, near the present batch."""
    inside_s: float
    """What drafting inside the engine adds to a step."""
    tokens_per_step: float
    """Of a response, accepted draft tokens included."""
    step_tokens: float
    """Of a response in a step, draft tokens included."""
    draft_s: float
    """D, seconds of a draft token of all responses; 0: the model drafter has not drafted."""
    acceptance: float
    """Probability that the model drafter's token is accepted if those before it were."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What an engine has generated in its life, or in a part of it."""

    num_tokens: int = 0
    step_s: float = 0.0
    """Of its steps, by the clock: drafting inside and waiting for drafts are part of them."""
    response_s: float = 0.0
    """The same, each step counted once for every response there."""
    num_steps: int = 0

    def __add__(self, other: Progress) -> Progress:
        """Both together."""
        return Progress(*map(add, _values(self), _values(other)))

    def __sub__(self, before: Progress) -> Progress:
        """What came since."""
        return Progress(*map(sub, _values(self), _values(before)))


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """What the scheduler wants of the model drafter after a step."""

    depth: int
    """Most draft tokens per request."""
    sharpness: float
    calibration: Float32Array  # [num_cells] acceptance estimate of each cell
    floor: float
    """Path probability below which a draft ends."""
    level_costs: Float32Array
    """Accepted tokens that one more level over 0, 1, .. requests must promise. [num_requests + 1]"""
    most_requests: int | None = None
    """Requests to draft for at most, the first of the batch; None: all."""
    num_paths: int = 1
    """Most draft paths per request."""
    rivals: Float32Array | None = None
    """What a runner-up is worth: the probability that it is right, by the proposal's cell. [num_cells] None: unused."""
    is_exact: bool = False
    """Whether just `depth` tokens are wanted of every request: where steps overlap the next one counts on them."""


@dataclass(frozen=True, slots=True)
class DraftGrowth:
    """What it took to grow drafts level by level; bringing new contexts into the cache is left out."""

    num_levels: int = 0
    """Forward passes, each with its proposals."""
    num_rows: int = 0
    """Requests in all of them together."""
    seconds: float = 0.0

    def __add__(self, other: DraftGrowth) -> DraftGrowth:
        """What both took."""
        return DraftGrowth(*map(add, _values(self), _values(other)))


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """What the model drafter made of an order, and what it cost."""

    responses: Int64Array  # [num_requests]
    positions: Int64Array  # [num_requests] position of the first draft token
    batch: DraftBatch
    growth: DraftGrowth
    total_s: float
    """Time from the order to the drafts, seconds; part of the engine step's wall time."""
    paths: DraftPaths | None = None
    """The drafts with further paths; None: there are none."""
    branching: DraftGrowth = DraftGrowth()
    """What growing these took."""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One measured engine step: what was verified, what came of it and how long it took."""

    num_requests: int
    """Decoding requests in the step (batch size)."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Accepted draft tokens, bonus tokens not counted."""
    num_prefill_tokens: int
    step_s: float
    """Wall time from schedule to output, seconds."""
    num_alternatives: int = 0
    """Draft paths beyond one per request; each sends the request's last token through the target once more."""
    num_waiting: int = 0
    """Requests that the engine has taken but not begun, or preempted."""
    num_context_tokens: int = 0
    """Tokens that attention reads: of the decoding requests so far, and once more for each alternative."""
    is_typical: bool = True
    """Whether the time is that of such a step: T(n) is learned from it."""
    num_model_tokens: int = 0
    """Accepted draft tokens for which a model drafter's estimate stood."""
    further_tokens: tuple[int, ...] = ()
    """Of these, those of each of the engine's further drafters."""
    num_adopted_tokens: int = 0
    """Of the accepted draft tokens, those that another engine had generated before (a race)."""
    num_wasted_tokens: int = 0
    """Tokens that a draft worker had drafted behind a rejected one, as far as was heard since the step before."""
    further_wasted_tokens: tuple[int, ...] = ()
    """Of these, those of each further drafter's worker."""
    num_branches: int = 0
    """Likely corrections that a draft worker has prepared since the step before, as far as was heard."""
    num_branch_hits: int = 0
    """Rejections whose correction was prepared, likewise."""
    ahead_tokens: tuple[int, ...] = ()
    """Tokens that each draft worker has drafted since the step before, as far as was heard; by model drafter."""
    ahead_s: tuple[float, ...] = ()
    """What each has spent on them."""
    wait_s: float = 0.0
    """Part of `step_s`: taking what a draft worker has drafted, and waiting for it."""
    draft_s: float = 0.0
    """As the budget learns from the step: what its drafts took beside `step_s`, which then holds neither the wait nor
    the drafting for the next step."""

    @property
    def num_tokens(self) -> int:
        """Tokens that went through the target in the step."""
        return self.num_requests + self.num_draft_tokens + self.num_prefill_tokens + self.num_alternatives


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One response to be generated."""

    prompt: tuple[int, ...]
    """Prompt token ids."""
    max_tokens: int
    key: int | None = None
    """Dice key, 64 bits; None: derived from (run seed, prompt, sample)."""
    group: int | None = None
    """Rollout group; None: derived from the prompt, so that equal prompts share drafts."""
    sample: int = 0
    """Index of the response within its group."""
    generated: tuple[int, ...] = ()
    """Response tokens that already exist (a resumed chunk); they count against max_tokens."""
    keep_kv: bool = True
    """With a KV pool: whether keys and values are kept when the response is cut by max_tokens or aborted. Give False
    where max_tokens is the response's own end: nothing will go on from there."""


@dataclass(frozen=True, slots=True)
class Response:
    """One finished (or aborted) response, token-in/token-out."""

    request: RolloutRequest
    tokens: tuple[int, ...]
    """Generated token ids, EOS included, `request.generated` included."""
    logprobs: tuple[float, ...]
    """Log-probability of each newly generated token (`len(tokens) - len(request.generated)`)."""
    finish_reason: str
    """"stop" (EOS or a stop token/string), "length", "abort", "repetition" or "error" (see `failure`)."""
    key: int
    group: int
    policy_version: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    """Engine steps in which the response decoded; acceptance length = new tokens / num_steps."""
    failure: str | None = None
    """Why this response was given up, and no other, to be read behind "response 3"; None unless `finish_reason` is
    "error"."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """The KV cache of one engine at a moment."""

    num_blocks: int
    """Blocks that requests may fill; drafts in flight need none beyond a request's own limit of tokens."""
    block_tokens: int
    num_used: int
    num_preemptions: int
    """Requests that were thrown out for want of blocks since the engine started."""


@dataclass(frozen=True, slots=True)
class DrafterScore:
    """How often an engine's own model drafter was right, counted since the engine started."""

    tried: int = 0
    """Drafts of which the first token was decided by the target, verified or not."""
    right: int = 0
    """Of these, the first tokens that were the target's."""
    alarms: int = 0
    """Times that the drafter, or that of a draft worker, was found dead and dropped (planning/zero_acceptance.py)."""

    @property
    def acceptance(self) -> float | None:
        """Of the first draft token; None before any was tried."""
        return self.right / self.tried if self.tried else None

    def __add__(self, other: DrafterScore) -> DrafterScore:
        """What both have."""
        return DrafterScore(self.tried + other.tried, self.right + other.right, self.alarms + other.alarms)

    def __sub__(self, before: DrafterScore) -> DrafterScore:
        """What came since."""
        return DrafterScore(self.tried - before.tried, self.right - before.right, self.alarms - before.alarms)


@dataclass(frozen=True, slots=True)
class DraftSharingCounters:
    """What one worker has told the draft servers and heard from them; a token may be told more than once."""

    told_tokens: int = 0
    heard_tokens: int = 0
    """Tokens of other workers' responses that drafts can be made from."""
    held_messages: int = 0
    """Times that a server took nothing more: what has grown waits."""
    unanswered_fetches: int = 0
    """Fetches without an answer within a second."""
    lost_tokens: int = 0
    """Told, but the server has them not or not any more: they are told again."""
    dropped_tokens: int = 0
    """Never told: too much waited, and the response had ended."""

    def __add__(self, other: DraftSharingCounters) -> DraftSharingCounters:
        """What both have."""
        return DraftSharingCounters(*map(add, _values(self), _values(other)))

    def __sub__(self, before: DraftSharingCounters) -> DraftSharingCounters:
        """What came since."""
        return DraftSharingCounters(*map(sub, _values(self), _values(before)))


@dataclass(frozen=True, slots=True)
class KvPoolCounters:
    """What one process has done with the KV pool since it opened it."""

    hits: int = 0
    """Entries that gave something."""
    disk_hits: int = 0
    """Of these, those that were on disk."""
    misses: int = 0
    """Responses that were looked for in vain; damaged entries count here too."""
    corrupt: int = 0
    """Damaged entries, which were removed."""
    saves: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    demoted: int = 0
    """Entries moved from memory to disk to make room."""
    promoted: int = 0
    """Entries moved from disk to memory by a prefetch."""
    evicted: int = 0
    """Entries dropped for want of room; their responses will be prefilled."""
    failed_writes: int = 0
    """Entries that could not be saved or moved: no room, disk full, or the directory's lock was not to be had."""
    failed_drops: int = 0
    """Responses whose entry could not be removed, and tiers that could not be emptied."""

    def __add__(self, other: KvPoolCounters) -> KvPoolCounters:
        """What both have done."""
        return KvPoolCounters(*map(add, _values(self), _values(other)))
