"""Fleet: the rollouts of N engines behind one interface, token for token those of a single one.

Its loop turns what Ray answers into events and the controller's actions into calls, and decides nothing; see
control/controller.py for what is promised. Callers: the command line, the trainers' seams, Python programs. One thread.

    with Fleet(model, FleetSettings(workers=4)) as fleet:
        responses = fleet.generate(requests, SamplingParams(temperature=1.0))
        fleet.push_weights(policy.named_parameters())
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import MTP, EngineSettings, FleetSettings, RewardSettings, Variant
from paceline.control.controller import Controller
from paceline.control.events import (
    Abandoned,
    Action,
    Adopt,
    CancelChunk,
    Deliver,
    Disagree,
    DraftFor,
    EndTraining,
    Event,
    Fail,
    Keep,
    LoadWeights,
    LoseDrafter,
    Opened,
    Order,
    Reported,
    Rest,
    RunChunk,
    StartWorker,
    StopWorker,
    Submitted,
    Tick,
    TrainDrafter,
    WeightsChanged,
    WorkerLost,
)
from paceline.dice import derive_key
from paceline.drafting.drafter import is_draft_head
from paceline.engine.keys import MASK, prompt_group
from paceline.engine.rollout_engine import check_checkpoint, check_params
from paceline.errors import CheckpointError, ConfigError, EngineError, RequestError, UnsupportedError
from paceline.fleet import cluster
from paceline.fleet.chunk_log import ChunkLog
from paceline.fleet.controller_log import ControllerLog, open_log
from paceline.fleet.draft_process import DraftProcess, start_draft_process
from paceline.fleet.help_log import HelpLog
from paceline.fleet.journal import Journal
from paceline.fleet.kv_pool import open_pool
from paceline.fleet.metrics import LOCAL_HOST, MetricsServer
from paceline.fleet.rewards import Reward, RewardFunction
from paceline.fleet.rollout_worker import EngineSpec
from paceline.fleet.status import StatusBoard, WorkerStatus
from paceline.fleet.weights import pack_weights
from paceline.planning.help import Drafting
from paceline.planning.ladder import known_draftings
from paceline.record.ladder_file import LadderFile
from paceline.types import (
    DrafterScore,
    DraftSharingCounters,
    KvPoolCounters,
    Response,
    RolloutRequest,
    StepObservation,
)

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams

    from paceline.distillation.packing import Sample
    from paceline.fleet.reward_pool import RewardPool, Scored

LOGGER = logging.getLogger(__name__)

TICK_S = 0.25
_PATIENCE = 0.5
"""How long other workers are waited for when the first is up, as a share of what that took."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A response that is complete."""

    index: int
    """Place of its request."""
    response: Response
    reward: Reward | None
    """None without a reward function."""


class DrafterTrainer(Protocol):
    """Processes that train a drafter while they are let; neither call waits for them."""

    @property
    def num_trainers(self) -> int:
        """How many there are."""
        ...

    def resume(self, lender: str, leader: str) -> None:
        """Let one train on the cores of the worker `lender`. leader: whose trainer leads from here on."""
        ...

    def pause(self, lender: str, leader: str | None) -> float | None:
        """Stop that one now; the processor time that it has used since, seconds, None where it did not run.

        leader: whose trainer leads those that are left.
        """
        ...


class Fleet:
    """N engines in Ray actors that share the responses of each rollout.

    Args:
        model: folder of the target in Hugging Face format, the same on every node.
        settings: the fleet's; see FleetSettings.
        engine: settings of every engine.
        max_model_len: longest prompt plus response, tokens.
        max_num_seqs: most responses that decode at once in one engine.
        kv_cache_bytes: memory of one engine's KV cache (CPU backend).
        reward: scores each response as soon as it is finished, in processes of its own.
        renews_drafter: the engines' model drafter gets new weights (`push_drafter`): then no worker drafts for others.
        vllm_arguments: any other argument of vLLM's EngineArgs.

    Returns once all engines are up, or one is and the others take half as long again. Raises CheckpointError,
    ConfigError or InstallError before anything starts, EngineError when no engine does.
    """

    def __init__(
        self,
        model: str | Path,
        settings: FleetSettings | None = None,
        engine: EngineSettings | None = None,
        *,
        dtype: str = "auto",
        max_model_len: int = 2048,
        max_num_seqs: int = 128,
        kv_cache_bytes: int = 1 << 30,
        reward: RewardFunction | None = None,
        renews_drafter: bool = False,
        **vllm_arguments: Any,
    ) -> None:
        self.settings = settings or FleetSettings()
        self.engine_settings = engine or EngineSettings()
        self.max_model_len = max_model_len
        self.policy_version = self.drafter_version = 0
        self._renews_drafter = renews_drafter
        self._num_rollouts, self._is_closed = 0, False
        folder = check_checkpoint(model).resolve()
        for drafter in self.engine_settings.drafter_folders:
            check_checkpoint(drafter)
        self._controller = Controller(self.settings)
        self.chunks = ChunkLog()
        self.helps = HelpLog()
        self._decision_log = self._open_decision_log()
        self.board = StatusBoard(
            {name: WorkerStatus(name) for name in self._controller.workers},
            self.engine_settings.drafter,
            self.engine_settings.drafter_names,
        )
        self._weights: Any = None
        self._requests: tuple[RolloutRequest, ...] = ()
        self._variant: Variant | None = self.settings.variant
        self._drafter = 0
        self._drafting: tuple[Drafting, ...] = ()
        self._trainer: DrafterTrainer | None = None
        self._params: SamplingParams | None = None
        self._journal: Journal | None = None
        self._finished: list[Finished] = []
        self._next_tick_s = 0.0
        self._rewards: RewardPool | None = None
        with ExitStack() as made:
            if self._decision_log is not None:
                made.callback(self._decision_log.close)
            self._prepare(made, vllm_arguments)
            from paceline.fleet.actors import Actors

            spec = EngineSpec(
                str(folder),
                self.engine_settings,
                dtype,
                max_model_len,
                max_num_seqs,
                kv_cache_bytes,
                vllm_arguments,
                tells_costs=self.settings.help != "none" or self.settings.num_drafters > 0,
            )
            self._actors = Actors(spec, self.settings)
            made.callback(self._actors.close)
            if reward is not None:
                from paceline.fleet.reward_pool import RewardPool

                self._rewards = RewardPool(reward, self.settings.rewards or RewardSettings())
                made.callback(self._rewards.close)
            self._tell(Opened())
            self._await_workers()
            self._made = made.pop_all()

    def _prepare(self, made: ExitStack, vllm_arguments: dict[str, Any]) -> None:
        """Start what the engines need."""
        self.metrics = self._serve_metrics()
        if self.metrics is not None:
            made.callback(self.metrics.close)
        if cluster.connect(self.settings, vllm_arguments):
            made.callback(cluster.disconnect)
        is_one_machine = cluster.is_one_machine(self.settings)
        self._kv_pool = open_pool(self.settings, self.engine_settings, is_one_machine)
        if self._kv_pool is not None:
            made.callback(self._kv_pool.close)
            self.engine_settings = self.engine_settings.model_copy(update={"kv_pool": self._kv_pool.settings})
        if self._can_help(is_one_machine):
            self.engine_settings = self.engine_settings.model_copy(update={"draft_help": True})
        if self.settings.help in {"auto", "copy"} and self.settings.workers > 1:
            self.engine_settings = self.engine_settings.model_copy(update={"adopt_leads": True})
        self._draft_server = self._start_draft_server(is_one_machine)
        if self._draft_server is not None:
            made.callback(self._draft_server.close)

    def _can_help(self, is_one_machine: bool) -> bool:
        """Whether workers may draft for others: these are reached through sockets of one machine, or by an interface.

        Raises ConfigError where they have to, by their roles, and cannot.
        """
        settings, engine = self.settings, self.engine_settings
        is_reached = is_one_machine or engine.draft_interface is not None
        is_possible = is_reached and engine.model_drafter is not None and not engine.draft_worker
        is_possible = is_possible and engine.model_drafter != MTP
        is_possible = is_possible and not is_draft_head(Path(str(engine.model_drafter)))
        is_possible = is_possible and not self._renews_drafter
        if (settings.num_drafters or settings.help == "draft") and not is_possible:
            asked = f"roles {settings.roles!r}" if settings.num_drafters else "help 'draft'"
            raise ConfigError(
                f"{asked}: drafters need a model_drafter that is no draft head and is not renewed, no draft_worker of "
                "each engine's own, and all workers on one machine or a draft_interface"
            )
        is_wanted = settings.help in {"auto", "draft"} or settings.num_drafters > 0
        return is_possible and settings.workers > 1 and is_wanted

    def _serve_metrics(self) -> MetricsServer | None:
        port, host = self.settings.metrics_port, self.settings.metrics_host or LOCAL_HOST
        return None if port is None else MetricsServer(self.board, lambda: self.num_unfinished, port, host)

    def _open_decision_log(self) -> ControllerLog | None:
        """Begin the controller's log, and name the engines the same folder wherever they run."""
        if (folder := self.engine_settings.decision_log) is not None:
            folder = str(Path(folder).resolve())
            self.engine_settings = self.engine_settings.model_copy(update={"decision_log": folder})
        return open_log(self.settings, folder)

    def _start_draft_server(self, is_one_machine: bool) -> DraftProcess | None:
        """Start a draft server and point the engines at it, if there is to be one."""
        settings, engine = self.settings, self.engine_settings
        wanted = settings.draft_server and is_one_machine and settings.workers > 1
        if not wanted or engine.drafter != "suffix" or engine.draft_servers:
            return None
        server = start_draft_process(engine.draft_secret_file)
        if server is not None:
            self.engine_settings = engine.model_copy(update={"draft_servers": (server.address,)})
        return server

    # -- generation

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Response]:
        """Generate all requests and return their responses in the same order. Raises as `submit` and `advance` do."""
        responses: dict[int, Response] = {}
        for finished in self.stream(requests, params):
            responses[finished.index] = finished.response
        return [responses[index] for index in range(len(requests))]

    def stream(
        self, requests: Sequence[RolloutRequest], params: SamplingParams
    ) -> Generator[Finished, None, None]:
        """Generate all requests, yielding each response as it is finished, and scored where there is a reward.

        Leaving the iterator early abandons the rest. Raises as `submit` and `advance` do, and EngineError once another
        rollout was begun meanwhile.
        """
        rollout, left = self._num_rollouts + 1, len(requests)
        try:
            self.submit(requests, params)
            while self.num_unfinished and self._num_rollouts == rollout:
                for finished in self.advance():
                    left -= 1
                    yield finished
            if left:
                what = "abandoned" if self._num_rollouts == rollout else "another rollout was begun"
                raise EngineError(
                    f"{what} while this one was being read, {left} responses are missing: read one to its end, or "
                    "close its iterator, before the next"
                )
        finally:
            if self._num_rollouts == rollout:
                self.abandon()

    def submit(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        journal: Journal | None = None,
        true_lengths: Sequence[int] = (),
    ) -> None:
        """Begin a rollout; `advance` carries it on.

        Args:
            requests: what to generate.
            params: vLLM's sampling options for all; `max_tokens` and `seed` come from the requests.
            journal: keeps what responses have so far; what it knows of them is not generated again.
            true_lengths: response tokens of each request, for the variant `oracle`.

        Raises RequestError or UnsupportedError before any work, EngineError for a fleet that is closed.
        """
        self._check_open()
        if self.num_unfinished:
            raise RequestError(
                f"{self.num_unfinished} responses are still running: finish or abandon them first"
            )
        _check_params(params)
        if len(true_lengths) != len(requests) and (true_lengths or self._variant == "oracle"):
            raise RequestError(
                f"{len(true_lengths)} true lengths for {len(requests)} requests: the variant 'oracle' needs the length "
                "of each, the others need none"
            )
        resolved = tuple(self._resolve(index, request) for index, request in enumerate(requests))
        kept = {} if journal is None else journal.find(resolved)
        self._requests, self._params, self._journal = resolved, params, journal
        self._num_rollouts += 1
        try:
            variant = self._variant or self._default_variant()
            others = [one for one in self._drafting if one.drafter != self._drafter]
            num_trainers = 0 if self._trainer is None else self._trainer.num_trainers
            lengths = tuple(true_lengths)
            self._tell(
                Submitted(resolved, kept, lengths, variant, self._drafter, tuple(others), num_trainers)
            )
        except BaseException:
            self.abandon()
            raise

    def advance(self, wait_s: float = TICK_S) -> list[Finished]:
        """Wait for something to happen, at most `wait_s`, and react; what has finished since the last call.

        Raises EngineError when no worker is left, engines disagree about a token or the fleet is closed, RequestError
        for a request that no engine can run. Call it often: between calls, workers run out of chunks.
        """
        import ray

        self._check_open()
        if self._draft_server is not None:
            self._draft_server.child.check()
        if self._kv_pool is not None:
            self._kv_pool.look_ahead(self._controller.next_waiting)
        calls = [*self._actors.calls, *(self._rewards.calls if self._rewards else ())]
        ready, waiting = ray.wait(calls, num_returns=1, timeout=0.0 if self._finished else wait_s)
        if waiting:
            more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready += more
        workers = set(self._actors.calls)
        for ref in ready:
            if ref in workers:
                if (event := self._actors.take(ref)) is not None:
                    self._hear(event)
            elif self._rewards is not None:
                self._settle(self._rewards.take(ref))
        if self._rewards is not None:
            self._settle(self._rewards.tick())
        self._tick(time.monotonic())  # last: who has said something by now is not silent
        for name, status in self.board.workers.items():
            status.state = self._controller.state_of(name)
            pairs = self._controller.pairs_of(name)
            status.helps = ", ".join(pair.helped.worker for pair in pairs) or None
            status.num_races, status.num_won = self.helps.races[name], self.helps.won[name]
        finished, self._finished = self._finished, []
        return finished

    def abandon(self) -> None:
        """Give up what is unfinished. What the journal knows stays there."""
        if self._is_closed:
            for action in self._controller.decide(Abandoned()):  # there is no worker to tell
                if isinstance(action, EndTraining) and self._trainer is not None:
                    self._trainer.pause(action.worker, action.leader)
        elif self.num_unfinished:
            self._tell(Abandoned())
            if self._rewards is not None:
                self._rewards.clear()
            if self._kv_pool is not None:
                self._kv_pool.clear()
        self._finished.clear()
        self._journal = None

    @property
    def num_unfinished(self) -> int:
        """Responses of the rollout that `advance` has not returned."""
        unscored = self._rewards.num_open if self._rewards else 0
        return self._controller.num_unfinished + unscored + len(self._finished)

    @property
    def num_running(self) -> int:
        """Responses that a worker is generating."""
        return self._controller.num_running

    def take_observations(self) -> list[StepObservation]:
        """Engine steps that workers have told of since the last call (at most the latest 16384)."""
        return [step.seen for _, step in self.board.take_steps()]

    # -- weights

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> int:
        """Give new weights of the policy to every worker, once for all of them; a worker that is lost or restarted
        meanwhile loads them before it generates again.

        Args:
            weights: (name, tensor) in the checkpoint's names, every parameter of the model.
            version: the trainer's number for them; the fleet's own next one if it is no higher than the present one,
                as no two weights may share a number.

        Returns the new policy version, once all workers that are there have it. Raises EngineError while responses are
        running, or where the fleet is closed.
        """
        import ray

        self._check_open()
        if self.num_unfinished:
            raise EngineError(
                f"{self.num_unfinished} responses are running: finish or abandon them before new weights"
            )
        before, self._weights = self._weights, ray.put(pack_weights(weights))
        self.policy_version = max(self.policy_version + 1, version or 0)
        self._tell(WeightsChanged(self.policy_version))
        self._wait_while(lambda: "loading" in self._states())
        del before
        return self.policy_version

    def kv_pool_counters(self) -> KvPoolCounters:
        """What workers, over all their lives, and this process have done with the KV pool; zeros without one."""
        own = KvPoolCounters() if self._kv_pool is None else self._kv_pool.counters()
        return sum((status.kv_pool for status in self.board.workers.values()), own)

    def draft_sharing_counters(self) -> DraftSharingCounters:
        """What workers, over all their lives, have told the draft servers and heard from them."""
        return self.board.draft_sharing

    def reset_prefix_cache(self) -> None:
        """Let every engine forget cached key-value blocks and the suffix trees of all groups."""
        self._actors.tell_all("reset_prefix_cache")

    def set_drafting(self, wanted: bool) -> None:
        """Switch drafting off in every engine, for plain decoding, or on again. Raises EngineError during a rollout."""
        self._check_idle()
        self._actors.settle("set_drafting", wanted)

    def use_drafter(self, place: int) -> None:
        """Let every engine draft with another of its models from now on, as `RolloutEngine.use_drafter`.

        Raises EngineError during a rollout, ConfigError for a place that has no model, and where engines do not choose.
        """
        self._check_idle()
        folders = self.engine_settings.model_drafters
        if not self.engine_settings.chooses_drafter or not 0 <= place < len(folders):
            raise ConfigError(
                f"drafter {place}: the engines choose from {list(folders)}; give EngineSettings.further_drafters, "
                "without draft_worker"
            )
        self._drafter = place
        self._actors.settle("use_drafter", place)

    def use_trainer(self, trainer: DrafterTrainer | None) -> None:
        """Let it train a drafter in the next rollouts, while workers are free and find nobody to help; None: no more.

        Each process is stopped before the worker whose time it has gets a chunk, and at the end of a rollout. Raises
        EngineError during one.
        """
        self._check_idle()
        self._trainer = trainer

    def push_drafter(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Give every engine new weights of its model drafter, as `RolloutEngine.push_drafter`, before its next chunk; a
        worker that is restarted gets them too.

        Returns the new drafter version. Raises UnsupportedError for a fleet that was not started with `renews_drafter`
        or whose engines have no drafter with a checkpoint of its own, CheckpointError for weights that are not finite.
        Those that do not fit are not taken: each engine goes on with its old ones, with a warning in its log.
        """
        import ray

        self._check_open()
        self._check_renewal()
        for name, tensor in weights.items():
            if not tensor.isfinite().all():
                raise CheckpointError(
                    f"weight {name!r} is not finite; the drafter goes on with the old ones: push those of an earlier "
                    "checkpoint"
                )
        self._actors.settle("load_drafter", ray.put(pack_weights(weights.items())))
        self.drafter_version += 1
        return self.drafter_version

    def drop_drafter(self) -> None:
        """Let every engine draft without its model drafter until weights are pushed: those that it has are no good."""
        self._check_renewal()
        self._actors.settle("load_drafter", None)

    def collect_states(self, share: float, max_bytes: int) -> None:
        """Let every engine keep hidden states of a share of the responses (`RolloutEngine.collect_states`); 0: none.

        max_bytes: of all engines together. Raises ConfigError for values out of range.
        """
        workers = self.settings.workers
        if not 0.0 <= share <= 1.0 or (share and max_bytes < workers):
            raise ConfigError(
                f"hidden states of a share of {share} of the responses in {max_bytes} bytes: give a share from 0 to 1, "
                f"and at least 1 byte for each of {workers} workers"
            )
        self._actors.settle("collect_states", share, max_bytes // workers)

    def take_samples(self) -> list[Sample]:
        """What the engines have kept since the last call (`RolloutEngine.take_samples`); what a lost one had is lost. A
        response that has moved comes in several samples.
        """
        answers = self._actors.ask_all("take_samples", timeout_s=self.settings.silence_s)
        return [sample for samples in answers for sample in samples]

    def collection_s(self) -> float:
        """Time that the engines' steps have spent on keeping hidden states since `collect_states`, of all together."""
        seconds: list[float] = self._actors.ask_all("collection_s", timeout_s=self.settings.silence_s)
        return sum(seconds)

    def _check_renewal(self) -> None:
        if not self._renews_drafter:
            raise UnsupportedError(
                "workers of this fleet may draft for others with the model too: start it with renews_drafter=True"
            )
        engine = self.engine_settings
        if engine.model_drafter in {None, MTP} or engine.draft_worker:
            raise UnsupportedError(
                f"model_drafter {engine.model_drafter!r}: the engines have no drafter that takes weights; start the "
                "fleet with a folder as model_drafter, and without draft_worker"
            )

    def use_ladder(self, known: LadderFile) -> None:
        """What is known of the engines' drafters: from the next rollout on a free worker may help with any of those
        whose cost and acceptance were measured (`FleetSettings.help`).
        """
        self._drafting = known_draftings(known, self.engine_settings.drafter_names)

    def measure_ladder(self, responses: Sequence[Response], params: SamplingParams) -> LadderFile | None:
        """The draft ladder as one of the engines measures it (`engine.rungs.measure_ladder`), while the others rest.

        responses: generated with the present weights. None: no worker is up, or it was lost meanwhile. Raises
        EngineError during a rollout.
        """
        self._check_open()
        self._check_idle()
        up = [name for name in self._controller.workers if self._controller.state_of(name) == "up"]
        if not up:
            return None
        limit_s = self.settings.start_timeout_s
        measured: LadderFile | None = self._actors.ask(
            up[0], "measure_ladder", tuple(responses), params, timeout_s=limit_s
        )
        return measured

    def drafter_score(self) -> DrafterScore:
        """How often the engines' own model drafters were right, over all lives of all workers."""
        return self.board.drafter_score

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("this fleet is closed: start another one")

    def _check_idle(self) -> None:
        if self.num_unfinished:
            raise EngineError(f"{self.num_unfinished} responses are running: finish or abandon them first")

    def use_variant(self, variant: Variant | None) -> None:
        """Dispatch the next rollouts another way, for comparison; see `FleetSettings.variant`."""
        self._variant = variant

    def _default_variant(self) -> Variant:
        """Without a KV pool a response that moves is read again: a CPU takes as long for that as to generate it, and on
        a GPU it may have other bits then. So it does not move.
        """
        has_pool = self.engine_settings.kv_pool is not None and self.kv_pool_obstacle is None
        return "even" if has_pool else "sticky"

    @property
    def vllm_engine(self) -> Any:
        """Where a RolloutEngine has its vLLM engine. Raises UnsupportedError: these are in other processes."""
        raise UnsupportedError(
            "a fleet's engines live in processes of their own: use a single engine for tools"
        )

    @property
    def kv_pool_obstacle(self) -> str | None:
        """Why the engines go without the fleet's own KV pool: chunks that move are prefilled again."""
        return self._actors.kv_pool_obstacle

    @property
    def invariance_gap(self) -> str | None:
        """Which layers of the loaded model batch invariance is not ensured for; None: all are, or it was not wanted."""
        return self._actors.invariance_gap

    # -- inside

    def _tell(self, event: Event) -> None:
        now_s, log = time.monotonic(), self._decision_log
        self.chunks.hear(event, now_s)
        actions = self._controller.decide(event) if log is None else log.decide(self._controller, event)
        self.chunks.note(actions, now_s)
        self.helps.note(event, actions, now_s)
        self._act(actions)

    def _tick(self, now_s: float) -> None:
        """Tell the time, not more often than anyone wants to know: it takes a look at every worker."""
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._tell(Tick(now_s))

    def _hear(self, event: Event) -> None:
        if isinstance(event, Reported):
            if (
                event.life == self.board.workers[event.worker].num_losses
            ):  # a life that is over may still tell
                self.board.hear(event.worker, event.report)
        elif isinstance(event, WorkerLost):
            self.board.lose(event.worker, event.life)
        self._tell(event)

    def _act(self, actions: Sequence[Action]) -> None:
        if self._journal is not None:
            self._journal.write([action for action in actions if isinstance(action, Keep)])
        orders: dict[str, list[Order]] = {}
        for action in actions:
            match action:
                case StartWorker(worker, life):
                    self._actors.start(worker, life)
                case StopWorker(worker, life):
                    self.board.lose(worker, life)
                    self._actors.stop(worker, life)
                case LoadWeights(worker, life, version):
                    self._order(orders, [worker])  # a worker with chunks cannot load: cancel them before
                    self._actors.load(worker, life, self._weights, version)
                case TrainDrafter(worker, _, leader):
                    assert self._trainer is not None
                    self._trainer.resume(worker, leader)
                case EndTraining(worker, _, leader):
                    assert self._trainer is not None
                    core_s = self._trainer.pause(worker, leader)
                    self.helps.end_training(worker, core_s, time.monotonic())
                case Disagree(worker, _, message):
                    LOGGER.error("a copy or its original on %s was stopped: %s", worker, message)
                    self.board.workers[worker].num_disagreed += 1
                case (
                    RunChunk(worker)
                    | CancelChunk(worker)
                    | Adopt(worker)
                    | DraftFor(worker)
                    | Rest(worker)
                    | LoseDrafter(worker)
                ):
                    orders.setdefault(worker, []).append(action)
        self._order(orders, list(orders))
        for action in actions:  # what may end the rollout comes last: workers have heard of all else
            match action:
                case Deliver(index, response):
                    self._deliver(index, response)
                case Fail():
                    raise action.error(action.message)

    def _order(self, orders: dict[str, list[Order]], workers: Iterable[str]) -> None:
        """Send, and forget, what has been collected for these workers."""
        for worker in workers:
            if worker in orders:
                self._actors.order(worker, orders.pop(worker), self._params)

    def _deliver(self, index: int, response: Response) -> None:
        if self._kv_pool is not None:
            self._kv_pool.drop(self._requests[index])
        if self._rewards is None:
            self._finished.append(Finished(index, response, None))
        elif response.failure is not None:
            self._settle([self._rewards.fail(index, response)])
        else:
            self._settle(self._rewards.add(index, response))

    def _settle(self, scored: Iterable[Scored]) -> None:
        for one in scored:
            if one.reward.value is None:
                raise EngineError(
                    f"response {one.index} has no reward, {one.reward.failure}: mend that, or set "
                    "rewards.failure_reward to go on with a number"
                )
            self._finished.append(Finished(one.index, one.response, one.reward))

    def _resolve(self, index: int, request: RolloutRequest) -> RolloutRequest:
        """The request with key and group, and no more tokens than the engines take."""
        vocab_size = self._actors.vocab_size
        tokens = (*request.prompt, *request.generated)
        if not request.prompt:
            raise RequestError(f"request {index}: the prompt is empty; begin it with a BOS token")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise RequestError(
                f"request {index}: it has a token id that is not one of the model's {vocab_size}"
            )
        room = self.max_model_len - len(request.prompt)
        if len(request.generated) >= room:
            raise RequestError(
                f"request {index}: {len(tokens)} tokens leave no room to generate in max_model_len="
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        key, group = request.key, request.group
        if key is None:
            key = derive_key(self.engine_settings.run_seed, request.prompt, request.sample)
        if group is None:
            group = prompt_group(request.prompt)
        return replace(request, key=key & MASK, group=group, max_tokens=min(request.max_tokens, room))

    def _states(self) -> set[str]:
        return {self._controller.state_of(name) for name in self._controller.workers}

    def _await_workers(self) -> None:
        """Wait for the first worker, and a little for the others: alone it would take all of a small rollout."""
        begin_s = time.monotonic()
        self._wait_while(lambda: "up" not in self._states())
        until_s = time.monotonic() + _PATIENCE * (time.monotonic() - begin_s)
        self._wait_while(lambda: "starting" in self._states() and time.monotonic() < until_s)

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self.advance()

    def close(self) -> None:
        """End all workers, and Ray if it was started here and no other fleet of this process uses it."""
        self._is_closed = True
        self._made.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_params(params: SamplingParams) -> None:
    """Raise UnsupportedError for what no engine can, and for options that look at more than one chunk of a response."""
    check_params(params)
    if params.structured_outputs is not None:
        raise UnsupportedError(
            "structured_outputs: vLLM's grammar begins anew with every chunk of a response; use a single engine"
        )
    if params.stop:
        raise UnsupportedError(
            f"stop={params.stop!r}: a stop text may lie across two chunks of a response, which run apart; use "
            "stop_token_ids, or a single engine"
        )
    if params.repetition_detection is not None:
        raise UnsupportedError("repetition_detection looks at whole responses: use a single engine")
