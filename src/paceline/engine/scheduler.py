"""The scheduler: vLLM's own, with each running request's draft tokens filled in just before a step is scheduled.

Given to vLLM as `scheduler_cls="paceline.engine.scheduler.PacelineScheduler"`. Lives in the engine process. It turns
vLLM's requests into the fast loop's arrays and back; every decision is made in fast_loop.py and planning/.
Invariant: which tokens a response consists of does not depend on anything here. Cost per step is O(batch).
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from paceline import _step
from paceline.engine.arguments import read_settings
from paceline.engine.compat import (
    AsyncScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from paceline.engine.draft_ahead import TargetSizes
from paceline.engine.draft_rows import table_of
from paceline.engine.fast_loop import FastLoop, Proposal
from paceline.engine.keys import OPTIONS, KeyBook, engine_seed
from paceline.engine.live import LiveBatch, ScheduledResponse
from paceline.engine.multipath.layout import PathPlan, plan_paths
from paceline.engine.multipath.spare_blocks import SpareBlocks
from paceline.engine.runner import FreshDrafts, StepOrder, give_order, undrawable_of, withdrawn_of
from paceline.engine.waiting import num_admissible_tokens
from paceline.errors import RequestError, UnsupportedError
from paceline.planning.budget import fair_weights
from paceline.types import DraftQuery, Float64Array, Int32Array, Int64Array, StepObservation

LOGGER = logging.getLogger(__name__)

MAX_KEPT_STEPS = 1 << 14
"""Step observations kept for a reader in the same process (RolloutEngine); older ones are dropped."""


class PacelineScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with drafts made, cut by the budget and scored around each step."""

    _ready: list[Request] | None = None
    """Running requests that can draft, in vLLM's order; None: each has to be looked at again."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> PacelineScheduler:
        if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            from paceline.engine.async_scheduler import OverlappingScheduler

            if cls is not PacelineScheduler:
                raise UnsupportedError(
                    f"{cls.__name__} does not let steps overlap: start the engine with async_scheduling=False, or "
                    "derive it from OverlappingScheduler"
                )
            cls = OverlappingScheduler
        return object.__new__(cls)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.settings = read_settings(vllm_config)
        sizes = TargetSizes(
            vocab_size=vllm_config.model_config.get_vocab_size(),
            max_step_tokens=self.max_num_scheduled_tokens,
            slots_per_request=vllm_config.speculative_config.max_num_new_slots_for_drafting,
            max_model_len=self.max_model_len,
            max_requests=self.scheduler_config.max_num_seqs,
        )
        self.loop = FastLoop(self.settings, sizes)
        seed = engine_seed(self.settings.run_seed, vllm_config)
        self._is_v2 = vllm_config.use_v2_model_runner
        self.keys = KeyBook(seed, is_seed=self._is_v2)
        self.live: dict[str, ScheduledResponse] = {}
        self.finished: dict[str, ScheduledResponse] = {}
        self.observations: deque[StepObservation] = deque(maxlen=MAX_KEPT_STEPS)
        self.num_preemptions = 0
        # A constant table switches off vLLM's padding of new requests with drafts of -1.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)
        self._next_response = 0
        self._proposal: Proposal | None = None
        self._queried: list[str] = []
        self._batch = LiveBatch.of([])
        self._positions: Int64Array = np.empty(0, np.int64)  # [len(_ready)] tokens of each so far
        self._ends: Int64Array = np.empty(0, np.int64)  # [len(_ready)] tokens that each can have at most
        self._context = 0
        self._ended: list[ScheduledResponse] | None = None  # while a step's tokens are handed out
        self._stained: list[list[int]] = []  # KV blocks that the last step may have left NaN in
        self._aborted: dict[
            str, tuple[list[int], ...]
        ] = {}  # KV blocks of requests that ended while a step ran
        self._started_s = 0.0
        self._is_told = False  # the drafter, of the step's tokens
        self._num_stopped = 0  # responses that have ended by themselves in a step
        has_rows = self.settings.num_paths > 1 and not self._is_v2
        self.spare_blocks = self._lend_blocks() if has_rows else None
        pool = self.settings.kv_pool
        has_pool = pool is not None and pool.backend == "paceline"
        self.kv_pool_obstacle: str | None = self.connector.obstacle if has_pool else None
        self.kv_pool = self.connector if has_pool and self.kv_pool_obstacle is None else None

    def _lend_blocks(self) -> SpareBlocks:
        pool, wanted = self.kv_cache_manager.block_pool, self.settings.max_alternatives
        return SpareBlocks(pool, wanted + self.blocks_for(self.num_spec_tokens) - 1)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens touch at most, wherever they begin."""
        return 1 - int(-num_tokens // self.block_size)

    # -- requests come and go

    def add_request(self, request: Request) -> None:
        if request.sampling_params is not None:
            if (live := self.live.get(request.request_id)) is not None:
                self._go_on(request, live)
            else:
                self._open(request)
        super().add_request(request)

    def _go_on(self, request: Request, live: ScheduledResponse) -> None:
        """More input of a streaming session: its sampling parameters replace the session's, the key stays."""
        params = request.sampling_params = copy.copy(request.sampling_params)
        own = {name: value for name, value in (params.extra_args or {}).items() if name not in OPTIONS}
        params.extra_args = {**own, "paceline_key": live.key, "paceline_response": live.response}
        params.seed = self.keys.seed(live.key)

    def _open(self, request: Request) -> None:
        tokens = request.prompt_token_ids
        if tokens is None:
            return
        # The samples of one request with n > 1 share their parameters; each needs a key of its own.
        params = request.sampling_params = copy.copy(request.sampling_params)
        failure = None
        try:
            self._check_salt(request)
            key, group, carried = self.keys.assign(params, tokens, self._next_response)
        except RequestError as error:  # let out, it would end the engine: this request alone is to fail
            failure = str(error)
            params.extra_args = params.seed = None
            key, group, carried = self.keys.assign(params, tokens, self._next_response)
        live = ScheduledResponse(
            response=self._next_response,
            group=group,
            key=key,
            temperature=float(params.temperature),
            drafts_allowed=not request.use_structured_output,
        )
        self._next_response += 1
        self.live[request.request_id] = live
        if failure is not None:
            self._give_up(request.request_id, failure)
        self._tell(request, live, carried)

    def _tell(self, request: Request, live: ScheduledResponse, carried: int) -> None:
        """The fast loop hears of a response that is to run. carried: prompt tokens that were generated earlier."""
        tokens = request.prompt_token_ids
        assert tokens is not None
        end = min(self.max_model_len, len(tokens) + request.max_tokens) - 1
        first = len(tokens) - carried
        self.loop.open(
            live.group,
            live.response,
            tokens[:first],
            [*tokens[first:], *request.output_token_ids],
            live.key,
            temperature=live.temperature,
            limit=end if live.drafts_allowed else 0,
        )

    def _give_up(self, name: str, why: str) -> None:
        """End one request with an error at the end of the step; the others go on."""
        LOGGER.error("request %s ends with an error: %s", name, why)
        self.grammar_compile_error_reqs.add(name)
        if (live := self.live.get(name)) is not None:
            live.failure = why

    def _check_salt(self, request: Request) -> None:
        """Other backends of the KV pool know entries by tokens and salt; without it they serve those of old weights."""
        pool = self.settings.kv_pool
        if pool is not None and pool.backend != "paceline" and not request.cache_salt:
            raise RequestError(
                f"kv_pool.backend={pool.backend!r} needs a cache_salt in every request that changes with the weights: "
                "generate with RolloutEngine, which sets it, or set it yourself"
            )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        live = self.live.pop(request.request_id, None)
        if live is not None:
            self.finished[request.request_id] = live
            if len(self.finished) > MAX_KEPT_STEPS:
                self.finished.pop(next(iter(self.finished)))
            self._num_stopped += request.status == RequestStatus.FINISHED_STOPPED
            if self._ended is None:
                self._aborted[request.request_id] = self._blocks_of(request.request_id)
                self._batch.settle()
                self.loop.close(live.group, live.response)
            else:  # its last tokens come first
                self._ended.append(live)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Weights have changed or are about to: what was learned about tokens of the old policy goes too.

        For the drafters responses that run begin anew.
        """
        running = [(self.requests[name], live) for name, live in self.live.items() if name in self.requests]
        for _, live in running:
            self.loop.close(live.group, live.response)
        self.loop.forget_tokens()
        if self.kv_pool is not None:
            self.kv_pool.forget_running()
        if self.spare_blocks is not None:
            self.spare_blocks.release()
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            for request, live in running:
                carried = (request.sampling_params.extra_args or {}).get("paceline_generated") or 0
                self._tell(request, live, carried)

    def shutdown(self) -> None:
        self.loop.shut_down()
        super().shutdown()

    # -- a step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._started_s = time.perf_counter()
        self._aborted.clear()
        ready, others = self._divide()
        self._context = int(self._positions.sum())
        self._context += sum(request.num_tokens for request in others if not request.is_prefill_chunk)
        spare = 0 if self.spare_blocks is None else self.spare_blocks.hold(self._block_demand())
        wanted = ready and self.loop.may_draft and not self.loop.pauses(len(ready))
        most = min(spare, self.settings.max_alternatives)
        self._proposal = self._propose(ready, others, most) if wanted else None
        output = super().schedule(*args, **kwargs)
        paths = self._plan_paths(output)
        give_order(output, StepOrder(self.loop.order(), paths, tuple(self._stained)))
        self._stained.clear()
        return output

    def _divide(self) -> tuple[list[Request], list[Request]]:
        """The running requests that can draft, and the others.

        Most often all can, and are those of the step before; `_positions` has grown with them then.
        """
        if self._ready and self.running == self._ready and self._went_on(self._ready):
            return self._ready, []
        ready: list[Request] = []
        others: list[Request] = []
        for request in self.running:
            (ready if self._can_draft(request) else others).append(request)
        self._ready = ready
        self._queried = [request.request_id for request in ready]
        self._positions = lengths_of(ready)
        self._ends = self._ends_of(ready)
        self._live_batch()
        return ready, others

    def _went_on(self, ready: list[Request]) -> bool:
        """Whether all of these have computed all tokens but the last of `_positions`."""
        computed = np.array([request.num_computed_tokens for request in ready], np.int64)
        return np.array_equal(computed + 1, self._positions)

    def _block_demand(self) -> int:
        """KV blocks that the coming step may take: what running requests can grow by, and the next waiting one."""
        grown = sum(
            self.blocks_for(r.num_tokens - r.num_computed_tokens + self.num_spec_tokens) for r in self.running
        )
        return grown + (self.blocks_for(self.waiting.peek_request().num_tokens) if self.waiting else 0)

    def _plan_paths(self, output: SchedulerOutput) -> PathPlan | None:
        """The step's alternatives, as far as vLLM scheduled their requests and blocks last.

        Lengths that are sent are kept in the proposal, 0 for alternatives that are not.
        """
        if self._proposal is None or self._proposal.alternatives is None:
            return None
        assert self.spare_blocks is not None
        alternatives = self._proposal.alternatives
        names = [self._queried[owner] for owner in alternatives.owners.tolist()]
        drafts = output.scheduled_spec_decode_tokens
        plan, lengths = plan_paths(
            alternatives,
            names,
            starts=[self.requests[name].num_tokens - 1 if name in self.requests else 0 for name in names],
            limits=[len(drafts.get(name, ())) for name in names],
            room=self.scheduler_config.max_num_batched_tokens - output.total_num_scheduled_tokens,
            blocks=self.spare_blocks.ids,
            block_size=self.block_size,
        )
        self._proposal = replace(self._proposal, alternatives=replace(alternatives, lengths=lengths))
        return plan

    def _can_draft(self, request: Request) -> bool:
        live = self.live.get(request.request_id)
        return (
            live is not None
            and live.drafts_allowed
            and not live.is_withdrawn
            and not request.is_prefill_chunk
            and self._unread(request) == 1
        )

    def _propose(self, ready: list[Request], others: list[Request], max_alternatives: int) -> Proposal:
        batch = self._batch
        query = self._query(batch, self._room(ready))
        num_other_tokens = self._num_other_tokens(len(ready), others)
        weights, left = self._weights(batch), self._ends - self._positions
        proposal = self.loop.propose(query, num_other_tokens, max_alternatives, weights, left)
        tokens = proposal.batch.tokens[:, : int(proposal.lengths.max(initial=0))].tolist()
        for request, drafts, length in zip(ready, tokens, proposal.lengths.tolist(), strict=True):
            request.spec_token_ids = drafts[:length]
        return proposal

    def _query(
        self, batch: LiveBatch, longest: Int32Array, positions: Int64Array | None = None
    ) -> DraftQuery:
        """What to draft for the requests that can draft. [num_requests] each

        longest: draft tokens of each. positions: from where on; None: behind what they are now.
        """
        return DraftQuery(
            groups=batch.groups,
            responses=batch.numbers,
            keys=batch.keys,
            positions=self._positions if positions is None else positions,
            temperatures=batch.temperatures,
            max_tokens=longest,
        )

    def _live_batch(self) -> LiveBatch:
        """The requests that draft; most often they are those of the step before."""
        lives = [self.live[name] for name in self._queried]
        if lives != self._batch.responses:
            self._batch.settle()
            self._batch = LiveBatch.of(lives)
        return self._batch

    def _weights(self, batch: LiveBatch) -> Float64Array | None:
        """What a token of each response counts in the draft budget, by its tokens per step in this engine."""
        if not self.loop.is_fair:
            return None
        return fair_weights(batch.num_steps + batch.num_accepted_tokens, batch.num_steps)

    def _num_other_tokens(self, num_ready: int, others: list[Request]) -> int:
        """Tokens that the coming step should have beside the next ones of the requests that draft, and their drafts.

        others: running requests that do not draft.
        """
        longest = self._longest_prefill()
        running = sum(min(self._unread(request), longest) for request in others)
        room: int = self.max_num_scheduled_tokens - num_ready
        total: int = running + num_admissible_tokens(self, room, longest)
        return min(total, room)

    def _unread(self, request: Request) -> int:
        """Tokens of a request that the target has not computed."""
        return int(request.num_tokens - request.num_computed_tokens)

    def _longest_prefill(self) -> int:
        """Most tokens of one prompt in a step: vLLM's `long_prefill_token_threshold`, while there are others."""
        limit: int = self.scheduler_config.long_prefill_token_threshold
        count = sum(self.get_request_counts()) if limit > 0 else 0
        if count <= 1:
            return int(self.max_num_scheduled_tokens)
        fair = self.scheduler_config.max_num_batched_tokens // count
        return max(limit, fair) if self.adaptive_long_prefill_threshold else limit

    def _room(self, ready: list[Request]) -> Int32Array:
        """Longest draft of each request whose tokens can all still become part of the response. [num_requests]"""
        ends = self._ends if ready is self._ready else self._ends_of(ready)
        room = np.maximum(ends - self._positions - 1, 0)
        longest: Int32Array = np.minimum(room, self.num_spec_tokens).astype(np.int32)
        return longest

    def _ends_of(self, requests: list[Request]) -> Int64Array:
        """Tokens that each request can have at most, its prompt included. [num_requests]"""
        ends = [min(x.num_tokens - x.num_output_tokens + x.max_tokens, self.max_model_len) for x in requests]
        return np.array(ends, np.int64)

    def update_draft_token_ids(self, draft_token_ids: FreshDrafts) -> None:
        """Take the model drafter's fresh drafts; they are weighed against the others when the next step is made."""
        self.loop.receive(draft_token_ids.drafts)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        rows = rows_of(model_runner_output, self._queried)
        observed = self._judge(scheduler_output, rows)
        for name, why in undrawable_of(model_runner_output).items():
            self._give_up(name, why)
            self._stained += self._blocks_of(name)
            # vLLM takes no log-probabilities of a prompt without a token behind it.
            model_runner_output.prompt_logprobs_dict.pop(name, None)
            model_runner_output.prompt_token_id_logprobs_dict.pop(name, None)
        withdrawn = withdrawn_of(model_runner_output)
        if withdrawn:
            self._batch.settle()  # what was counted before this step is no growth of it
        for name in withdrawn:
            self._withdraw(name, scheduler_output.num_scheduled_tokens[name])
        grown = self._grown(scheduler_output, model_runner_output, rows)
        self._draft_early(*grown)
        self._ended = []
        result: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._take_growth(*grown)
        if withdrawn and self._is_v2:
            self._forget_on_device(withdrawn)
        self._time(observed)
        return result

    def _blocks_of(self, name: str) -> tuple[list[int], ...]:
        """KV blocks of a request of the present step, by group; it may have been aborted meanwhile."""
        running = self.kv_cache_manager.get_blocks(name)
        found: tuple[list[int], ...] = self._aborted.get(name) or running.get_block_ids()
        return found

    def _forget_on_device(self, names: list[str]) -> None:
        """Preempt requests: V2 counts on the device what each has computed, and would count a withdrawn step."""
        for request in [self.requests[name] for name in names if name in self.live]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def _withdraw(self, name: str, num_tokens: int) -> None:
        """A request's step of so many tokens does not count; what it computed may be in the prefix cache already."""
        groups = self._blocks_of(name)
        self._stained += groups
        if name in self.live:
            self.live[name].is_withdrawn = True
            self._ready = None
            request = self.requests[name]
            request.num_computed_tokens -= num_tokens
            first = (request.num_tokens - 1) // self.block_size  # of what no step before has computed
            for blocks in groups:
                self.kv_cache_manager.evict_blocks(set(blocks[first:]))

    def _grown(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, rows: list[list[int]]
    ) -> tuple[list[Request], LiveBatch, Int64Array, list[list[int]]]:
        """(requests, their responses, their lengths, their new tokens) of a step, before vLLM hands the tokens out.

        vLLM cuts the tokens where a response ends, and leaves out some requests. rows: those of `_queried`.
        """
        names = list(scheduled.num_scheduled_tokens)
        if self._ready is not None and names == self._queried:
            return self._ready, self._batch, self._positions, rows
        self._batch.settle()
        self._ready, self._batch = None, LiveBatch.of([])
        return self._growth_of(names, output)

    def _growth_of(
        self, names: list[str], output: ModelRunnerOutput
    ) -> tuple[list[Request], LiveBatch, Int64Array, list[list[int]]]:
        """`_grown` for any requests; their counts must be settled."""
        names = [name for name in names if name in self.live and name in self.requests]
        requests = [self.requests[name] for name in names]
        responses = LiveBatch.of([self.live[name] for name in names])
        return requests, responses, lengths_of(requests), rows_of(output, names)

    def _draft_early(
        self, requests: list[Request], batch: LiveBatch, before: Int64Array, rows: list[list[int]]
    ) -> None:
        """Where steps overlap: let the drafter begin with what `_grown` says, before vLLM hands it out."""

    def _take_growth(
        self, requests: list[Request], batch: LiveBatch, before: Int64Array, rows: list[list[int]]
    ) -> None:
        """Count what the responses have grown by, tell the drafter, and then of those that have ended.

        A response that is closed before its last tokens are told would be opened again by them.
        """
        after = lengths_of(requests)
        grew = after > before
        made = np.fromiter(map(len, rows), np.int64, len(rows)) * grew
        batch.grow(made)
        self.loop.endings.note(int(made.sum()), self._num_stopped)
        self._num_stopped = 0
        if grew.any():
            offsets, tokens = _step.joined(rows, grew)
            everyone = len(offsets) > len(rows)
            groups = batch.groups if everyone else batch.groups[grew]
            numbers = batch.numbers if everyone else batch.numbers[grew]
            self.loop.grow(groups, numbers, offsets, tokens, drafter_knows=self._is_told)
        self._is_told = False
        if self._ready is requests:
            self._positions = after
        if self._ended or batch is not self._batch:
            batch.settle()
        for live in self._ended or ():
            self.loop.close(live.group, live.response)
        self._ended = None

    def _judge(self, scheduled: SchedulerOutput, rows: list[list[int]]) -> StepObservation | None:
        """Score the step's drafts against what the target decided; the step but for its time, None if it was empty.

        rows: the tokens that the target decided for each request of `_queried`.
        """
        proposal, self._proposal = self._proposal, None
        decided = table_of(rows)
        made = (decided >= 0).sum(axis=1)
        num_requests = int(np.count_nonzero(made))  # vLLM may have left some out, or preempted them
        drafted = accepted = num_alternatives = 0
        context = self._context
        sent = scheduled.scheduled_spec_decode_tokens
        sent_tokens = sum(map(len, sent.values()))
        if proposal is not None:
            verified = proposal.lengths
            if sent_tokens != int(verified.sum()):  # vLLM has cut some
                verified = np.array([len(sent.get(name, ())) for name in self._queried], np.int32)
            drafts, accepted = verified, int(made.sum()) - num_requests
            others = proposal.alternatives
            self.loop.learn(proposal, verified, decided)
            if others is not None:
                num_alternatives = int(np.count_nonzero(others.lengths))
                context += int(self._positions[others.owners[others.lengths > 0]].sum())
                drafts = verified + np.bincount(others.owners, others.lengths, len(rows)).astype(np.int32)
            drafted = int(drafts.sum())
            self._batch.num_draft_tokens[:] += drafts
        total = int(scheduled.total_num_scheduled_tokens)
        if not total:
            return None
        return StepObservation(
            num_requests=num_requests,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_prefill_tokens=total - num_requests - sent_tokens,
            step_s=0.0,
            num_alternatives=num_alternatives,
            num_waiting=len(self.waiting),
            num_context_tokens=context,
        )

    def _time(self, step: StepObservation | None, *, is_typical: bool = True) -> None:
        """Score a step against the clock, all its work done: judging drafts and telling drafters are costs too.

        is_typical: whether the time was that of such a step.
        """
        step_s = time.perf_counter() - self._started_s
        if self.kv_pool is not None:
            step_s -= self.kv_pool.take_spent_s()
        if step is None:
            return
        self.observations.append(self.loop.observe(replace(step, step_s=step_s, is_typical=is_typical)))


def lengths_of(requests: list[Request]) -> Int64Array:
    """Tokens of each request so far. [num_requests]"""
    return np.array([request.num_tokens for request in requests], np.int64)


def rows_of(output: ModelRunnerOutput, names: list[str]) -> list[list[int]]:
    """The tokens that a step has made for each of these requests: vLLM's own lists."""
    sampled, index = output.sampled_token_ids, output.req_id_to_index
    return [sampled[index[name]] if sampled and name in index else [] for name in names]
