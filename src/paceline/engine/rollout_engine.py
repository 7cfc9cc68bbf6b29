"""RolloutEngine: token ids in, token ids out, on one vLLM engine in this process.

Owns the engine's life, the policy version and the translation between Paceline's requests and vLLM's. Callers: the
command line, the trainers' seams and the benchmarks. One thread at a time; not safe for more.

With `EngineSettings.kv_pool` a response that max_tokens or `abort` cuts leaves its keys and values in the pool before
`stream` yields it or `abort` returns. A request for the same key and prompt that carries the tokens in `generated`, on
any engine of the run with the same `policy_version`, finds them there. `RolloutRequest.keep_kv` and
`abort(.., keep_kv=False)` say where nothing will go on; a response that stops leaves nothing. What was cut and will not
go on is dropped by whoever knows: `KvPool.open(settings.kv_pool).drop(response_identity(key, prompt))`.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import EngineSettings
from paceline.engine.installed import is_cpu_build
from paceline.engine.keys import check_resumed
from paceline.engine.token_outputs import Grown, TokenOutputs
from paceline.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    PacelineError,
    RequestError,
    UnsupportedError,
)
from paceline.garbage import uncollected
from paceline.types import (
    DrafterScore,
    DraftSharingCounters,
    KvPoolCounters,
    Response,
    RolloutRequest,
    StepCosts,
    StepObservation,
)

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams

    from paceline.distillation.packing import Sample
    from paceline.drafting.draft_worker import DraftWorker
    from paceline.drafting.synthetic import Play
    from paceline.drafting.worker_link import WorkerLink
    from paceline.engine.worker import Refusal

FINISH_REASONS = {"stop", "length", "abort", "repetition"}
"""Ways to end that are no failure."""
DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Newly accepted tokens of one response, in order; `response` is set once it has finished."""

    index: int
    """Position of the request in the list that was given to `stream`."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    response: Response | None

    @property
    def failure(self) -> str | None:
        """Why the engine gave this response up, if it did (`Response.failure`)."""
        return None if self.response is None else self.response.failure


@dataclass(slots=True)
class _Pending:
    index: int
    request: RolloutRequest
    internal_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def prepare_environment(threads: int | None = None) -> None:
    """Set what vLLM's CPU backend needs in this process's environment, where the user has not. Run before importing it.

    Without `nobind` the engine pins its threads to the first cores, where a second process collapses it by 10 to 100
    times; without OMP_NUM_THREADS vLLM serves with one thread however many cores there are. On a GPU it shall, so there
    both stay as they are.
    """
    if is_cpu_build() or threads is not None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads or len(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def check_checkpoint(path: str | Path) -> Path:
    """Return a model folder, or raise CheckpointError that says which file is missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"model folder {folder} does not exist: give a local folder in Hugging Face format"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"model folder {folder} has no config.json: it is not in Hugging Face format")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointError(f"model folder {folder} has no weights (*.safetensors or *.bin)")
    return folder


def check_params(params: SamplingParams) -> None:
    """Raise UnsupportedError for options that no rollout has, on one engine or several."""
    if params.n != 1:
        raise UnsupportedError(f"n={params.n}: give one RolloutRequest per sample, n must be 1")
    if params.prompt_logprobs is not None:
        raise UnsupportedError("prompt_logprobs: score prompts with the trainer's model instead")
    if params.logprobs not in {None, 0, 1}:
        raise UnsupportedError(
            f"logprobs={params.logprobs}: a response has the log-probability of each of its tokens and of no others; "
            "leave it unset"
        )


@contextmanager
def _little_to_collect() -> Iterator[None]:
    """While vLLM builds an engine it collects all garbage six times, 0.3 s each with the objects of so many modules:
    once is enough. It freezes the heap itself at the end, and thaws it when the engine shuts down.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    except BaseException:
        gc.unfreeze()
        raise


class RolloutEngine:
    """A vLLM engine that generates responses with the shared dice.

    Args:
        model: folder of the target in Hugging Face format.
        settings: Paceline's settings; None runs plain vLLM, without Paceline's scheduler, worker or dice.
        max_model_len: longest prompt plus response, tokens.
        max_num_seqs: most responses that decode at once.
        kv_cache_bytes: memory of the KV cache (CPU backend).
        logprobs: "processed" (after temperature and filters, what an RL trainer needs) or "raw".
        vllm_arguments: any other argument of vLLM's EngineArgs. Plain vLLM is eager on the CPU unless
            `enforce_eager=False` is among them; with settings `EngineSettings.compiled` decides. On the CPU KV blocks
            have 32 tokens unless `block_size` is among them, plain vLLM's too.

    Raises CheckpointError, ConfigError or InstallError before the engine starts.
    """

    def __init__(
        self,
        model: str | Path,
        settings: EngineSettings | None = None,
        *,
        dtype: str = "auto",
        max_model_len: int = 2048,
        max_num_seqs: int = 128,
        kv_cache_bytes: int = DEFAULT_KV_BYTES,
        logprobs: str = "processed",
        **vllm_arguments: Any,
    ) -> None:
        folder = check_checkpoint(model)
        prepare_environment()
        with uncollected():  # and no longer: vLLM may fork workers, and they would stay so
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            from paceline.engine.arguments import (
                GRAPH_ARGUMENTS,
                cache_arguments,
                check_vllm_arguments,
                engine_arguments,
                graph_arguments,
            )
            from paceline.engine.compat import allow_exact_options, is_cpu
            from paceline.engine.compiled import check_compiler, mend_cache

        allow_exact_options()
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "logprobs_mode": f"{logprobs}_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
            **cache_arguments(),
        }
        if is_cpu():
            arguments |= {
                "kv_cache_memory_bytes": kv_cache_bytes,
                "distributed_executor_backend": "uni",
                "enforce_eager": True,
            }
        if settings is not None:
            check_vllm_arguments(vllm_arguments, "vllm_arguments")
            arguments |= engine_arguments(settings)
            if not vllm_arguments.keys() & set(GRAPH_ARGUMENTS):
                arguments |= graph_arguments(settings, max_num_seqs)
        arguments |= vllm_arguments
        if not arguments["disable_log_stats"]:
            raise UnsupportedError(
                "disable_log_stats=False: steps are read without vLLM's output processor, which makes its statistics; "
                "take_observations() and the fleet's metrics_port have Paceline's"
            )
        if is_cpu() and not arguments["enforce_eager"]:
            check_compiler()
            mend_cache()
        self.settings = settings
        self.max_model_len = max_model_len
        self.policy_version = 0
        self.drafter_version = 0
        self._is_torn = False
        with _little_to_collect():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.vocab_size: int = self._engine.model_config.get_vocab_size()
        self._invariance_gap: str | None = (
            None if settings is None else self._engine.collective_rpc("describe_invariance_gap")[0]
        )
        self._outputs = TokenOutputs(self._engine)
        self._tickets = itertools.count()
        self._pending: dict[str, _Pending] = {}  # by vLLM's internal id

    # -- generation

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        on_failure: Literal["raise", "deliver"] = "raise",
    ) -> list[Response]:
        """Generate all requests and return their responses in the same order.

        Args:
            requests: what to generate; checked before the first token is.
            params: vLLM's sampling options for all of them. `n` must be 1 (give a request per sample); `max_tokens`
                and `seed` come from the requests.
            on_failure: what becomes of a response that has no next token (its options leave none to draw, or the model
                gives NaN). "raise" EngineError and abort the others, or go on with the others and "deliver" it as far
                as it came, with `finish_reason` "error" and `failure` saying why.

        Raises RequestError or UnsupportedError before any work, EngineError when the engine has died.
        """
        responses: list[Response | None] = [None] * len(requests)
        for event in self.stream(requests, params, on_failure=on_failure):
            if event.response is not None:
                responses[event.index] = event.response
        return [self._present(response) for response in responses]

    @staticmethod
    def _present(response: Response | None) -> Response:
        if response is None:
            raise EngineError(
                "the engine ended without finishing every response; generate the missing ones again"
            )
        return response

    def stream(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        on_failure: Literal["raise", "deliver"] = "raise",
    ) -> Generator[TokenEvent, None, None]:
        """Generate all requests, yielding newly accepted tokens as each engine step ends; arguments as of `generate`.

        Leaving the iterator early aborts what is still running; ask `partial()` before that what it has.
        """
        self._check(requests, params)
        started: list[str] = []
        try:
            for index, request in enumerate(requests):
                started.append(self._submit(index, request, params))
            while self._pending:
                for grown in self._step():
                    # What a request brought that was aborted while this step's others were handed out is dropped.
                    if grown.request in self._pending:
                        event = self._take(grown)
                        if event.failure is not None and on_failure == "raise":
                            raise EngineError(f"response {event.index} {event.failure}")
                        yield event
        finally:
            self._abort([name for name in started if name in self._pending], keep_kv=False)

    def submit(self, index: int, request: RolloutRequest, params: SamplingParams) -> None:
        """Add one request to those that run; `step` reports it under `index`, which no other one may have.

        With `step` the open form of `stream`, for who gets requests while others run. Raises as `generate` does.
        """
        self._check_whole()
        check_params(params)
        self._check_request(index, request, params)
        self._submit(index, request, params)

    def step(self) -> list[TokenEvent]:
        """Run one engine step and return what it brought; a response that failed is delivered, and the others go on.

        Raises EngineError when the engine has died; any other error of vLLM's comes as it is.
        """
        return [self._take(grown) for grown in self._step() if grown.request in self._pending]

    def abort(self, indices: Iterable[int], *, keep_kv: bool = True) -> None:
        """Stop the running requests at these positions of the list given to `stream`; what they have is dropped.

        keep_kv: with a KV pool, keep keys and values for whoever goes on with the responses.
        """
        wanted = set(indices)
        names = [name for name, pending in self._pending.items() if pending.index in wanted]
        self._abort(names, keep_kv)

    def adopt(self, index: int, start: int, tokens: Sequence[int]) -> None:
        """Another engine has generated these tokens of a running request, from index `start` of its response on.

        They become drafts, so that this engine catches up without taking anything on trust. An index that does not run
        is ignored, as everything is without `EngineSettings.adopt_leads`.
        """
        pending = next((one for one in self._pending.values() if one.index == index), None)
        live = None if pending is None else self.scheduler.live.get(pending.internal_id)
        if pending is not None and live is not None:
            self.scheduler.loop.adopt(live.response, len(pending.request.prompt) + start, tokens)

    def _abort(self, names: list[str], keep_kv: bool) -> None:
        if not names:
            return
        if self._kv_pool is not None and keep_kv:
            self._kv_pool.keep(names)
        self._outputs.abort(names)
        for name in names:
            del self._pending[name]

    def partial(self) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and log-probabilities so far of every running request, by its position in the list."""
        return {p.index: (tuple(p.tokens), tuple(p.logprobs)) for p in self._pending.values()}

    def _check(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> None:
        if self._pending:
            raise RequestError(
                f"{len(self._pending)} responses are still running: finish or abort them first"
            )
        self._check_whole()
        check_params(params)
        for index, request in enumerate(requests):
            self._check_request(index, request, params)

    def _check_whole(self) -> None:
        if self._is_torn:
            raise EngineError(
                "the last push_weights failed, so the engine may have weights of two versions: push them again"
            )

    def _check_request(self, index: int, request: RolloutRequest, params: SamplingParams) -> None:
        self._check_tokens(index, request)
        if request.generated:
            check_resumed(params, f"request {index}: {len(request.generated)} generated tokens")
        length = len(request.prompt) + len(request.generated)
        if not request.prompt:
            raise RequestError(f"request {index}: the prompt is empty; begin it with a BOS token")
        if length >= self.max_model_len:
            raise RequestError(
                f"request {index}: {length} tokens leave no room to generate in max_model_len="
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if request.max_tokens <= len(request.generated):
            raise RequestError(
                f"request {index}: max_tokens={request.max_tokens} is already reached by "
                f"{len(request.generated)} generated tokens"
            )

    def _check_tokens(self, index: int, request: RolloutRequest) -> None:
        tokens = (*request.prompt, *request.generated)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"request {index}: token id {wrong} is not one of the model's {self.vocab_size} tokens; "
                "encode the prompt with the model's own tokenizer"
            )

    def _submit(self, index: int, request: RolloutRequest, params: SamplingParams) -> str:
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        own = params.clone()
        # vLLM's own copy would be checked anew: min_tokens is that of the whole response, max_tokens what is left.
        own.skip_clone = True
        carried = len(request.generated)
        own.max_tokens = request.max_tokens - carried
        own.min_tokens = min(own.min_tokens, request.max_tokens)
        if self.settings is None:  # else Paceline's scheduler counts what is carried
            own.min_tokens = max(own.min_tokens - carried, 0)
        own.logprobs = 0  # of the token itself
        own.output_kind = RequestOutputKind.DELTA
        own.detokenize = bool(own.stop)
        if self.settings is not None:
            own.extra_args = {**(own.extra_args or {}), **self._keys(request)}
        name = str(next(self._tickets))
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.prompt, *request.generated]}
        if (salt := self._cache_salt()) is not None:
            prompt["cache_salt"] = salt
        try:
            with self._telling_death():
                internal = self._outputs.add(name, prompt, own)
        except PacelineError:
            raise
        except (
            ValueError,
            VLLMValidationError,
        ) as error:  # vLLM's own words for options that it does not take
            raise RequestError(f"request {index}: {error}") from error
        self._pending[internal] = _Pending(index, request, internal)
        return internal

    def _keys(self, request: RolloutRequest) -> dict[str, int]:
        assert self.settings is not None
        from paceline.dice import derive_key
        from paceline.engine.keys import prompt_group

        key = request.key
        if key is None:
            key = derive_key(self.settings.run_seed, request.prompt, request.sample)
        group = request.group if request.group is not None else prompt_group(request.prompt)
        made = {"paceline_key": key, "paceline_group": group, "paceline_generated": len(request.generated)}
        if self._kv_pool is not None:
            made |= {"paceline_policy_version": self.policy_version, "paceline_keep_kv": int(request.keep_kv)}
        return made

    def _cache_salt(self) -> str | None:
        from paceline.engine.kv.backend import cache_salt

        return cache_salt(self.settings.kv_pool, self.policy_version) if self.settings is not None else None

    def _step(self) -> Iterator[Grown]:
        with self._telling_death():
            yield from self._outputs.step()

    def _ask_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What each of vLLM's workers answers. Raises EngineError when the engine has died."""
        with self._telling_death():
            answers: list[Any] = self._engine.collective_rpc(method, args=args, kwargs=kwargs)
            return answers

    @contextmanager
    def _telling_death(self) -> Iterator[None]:
        """Raises EngineError for what vLLM raises once its engine has died; any other error comes as it is."""
        try:
            yield
        except Exception as error:
            if not self._has_died(error):
                raise
            raise EngineError(
                f"the engine has died ({type(error).__name__}: {error}): responses that were delivered stay; build the "
                f"engine anew and generate the {len(self._pending)} others on it"
            ) from error

    def _has_died(self, error: Exception) -> bool:
        """Whether the process of vLLM's engine has ended, or that of one of its workers."""
        from vllm.v1.engine.exceptions import EngineDeadError

        executor = getattr(self._engine, "model_executor", None)  # None: in the other process
        return isinstance(error, EngineDeadError) or getattr(executor, "is_failed", False)

    def _take(self, grown: Grown) -> TokenEvent:
        pending = self._pending[grown.request]
        pending.tokens += grown.tokens
        pending.logprobs += grown.logprobs
        response = None
        if grown.finish_reason is not None:
            del self._pending[grown.request]
            response = self._finish(pending, grown.finish_reason)
        return TokenEvent(pending.index, grown.tokens, grown.logprobs, response)

    def _finish(self, pending: _Pending, reason: str) -> Response:
        request = pending.request
        live = self.scheduler.finished.pop(pending.internal_id, None) if self.settings is not None else None
        failure = None
        if reason not in FINISH_REASONS:
            cause = live.failure if live and live.failure else "the engine reported an internal error"
            failure = f"ended with {reason!r}: {cause}"
        return Response(
            request=request,
            tokens=(*request.generated, *pending.tokens),
            logprobs=tuple(pending.logprobs),
            finish_reason=reason,
            key=live.key if live else 0,
            group=live.group if live else request.group or 0,
            policy_version=self.policy_version,
            num_draft_tokens=live.num_draft_tokens if live else 0,
            num_accepted_tokens=live.num_accepted_tokens if live else 0,
            num_steps=live.num_steps if live else len(pending.tokens),
            failure=failure,
        )

    # -- weights and memory

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> int:
        """Load new weights of the policy into the running engine and forget what the old ones left behind.

        Args:
            weights: (name, tensor) in the checkpoint's names. Layers of which nothing comes keep theirs; of one that
                vLLM keeps as one tensor (queries, keys and values; gate and up; experts) all have to come.
            version: the trainer's number for them; None counts on. Workers that share drafts or a KV pool (which
                requires it) need the same number for the same weights, one that joined late too; 0 is the checkpoint's.

        Returns the new policy version. Raises EngineError while responses are running: their key-value cache belongs
        to the old weights. If it fails midway, nothing is generated until weights have been pushed again.
        """
        if version is None and self.settings is not None and self.settings.kv_pool is not None:
            raise ConfigError(
                "push_weights without a version on an engine with a KV pool: workers that count for themselves may "
                "give different weights one number; pass version=, the trainer's number for these weights"
            )
        self._check_idle()
        self._is_torn = True
        if self._engine.vllm_config.parallel_config.world_size > 1:  # other processes are sent neither
            weights = [
                (name, tensor.detach().cpu()) for name, tensor in weights
            ]  # generators nor device tensors
        self._ask_workers("reload_weights", weights_iterator=iter(weights))
        self._is_torn = False
        return self.set_policy_version(self.policy_version + 1 if version is None else version)

    def set_policy_version(self, version: int) -> int:
        """Say which version the weights are after an update by another way than `push_weights`, once it is complete.

        Forgets what the old weights left behind. Until then an engine with a KV pool neither loads nor saves. Returns
        the version. Raises EngineError while responses are running.
        """
        self._check_idle()
        self.reset_prefix_cache()
        if self.settings is not None:
            self._ask_workers("name_policy_version", version)
            self.scheduler.loop.use_epoch(version << 20)  # cache resets count on from there
        self.policy_version = version
        return version

    def push_drafter(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Load new weights of the model drafter between two steps, also while responses run; the tokens are the same.

        weights: by the checkpoint's names, all of them, tied copies optional. Returns the new drafter version. Raises
        UnsupportedError where no model drafts inside this engine, or one without a checkpoint of its own (`mtp`),
        CheckpointError for weights that do not fit or are not finite; the old ones then go on.
        """
        self._check_model_drafter()
        refusals: list[Refusal | None] = self._ask_workers("reload_drafter", weights)
        if (refusal := next(filter(None, refusals), None)) is not None:
            kind, why = refusal
            raise kind(why)
        self.scheduler.loop.renew_model()
        self.drafter_version += 1
        return self.drafter_version

    def use_drafter(self, place: int, played: Play | None = None) -> None:
        """Draft with another of the engine's models from now on: 0 is `model_drafter`, then come `further_drafters`.

        What was learned of the one before is forgotten. played: with another acceptance rate than its own, to measure
        what a drafter gains at it (engine/rungs.py). Raises EngineError while responses are running, ConfigError for a
        place that has no model, UnsupportedError where none drafts inside this engine, or with model runner V2.
        """
        self._check_idle()
        if self.settings is None or self.settings.model_drafter is None or self.settings.draft_worker:
            raise UnsupportedError(
                "no model drafts inside this engine: start it with model_drafter, and without draft_worker"
            )
        if self._engine.vllm_config.use_v2_model_runner:
            raise UnsupportedError(
                "vLLM's model runner V2 has one draft model: use_drafter is for V1, the CPU's"
            )
        if not 0 <= place <= len(self.settings.further_drafters):
            raise ConfigError(
                f"drafter {place}: the engine has a model_drafter, 0, and {len(self.settings.further_drafters)} "
                "further_drafters"
            )
        self._ask_workers("use_drafter", place, played)
        self.scheduler.loop.renew_model(place)

    def drop_drafter(self) -> None:
        """Draft without the model drafter until weights are pushed to it: those that it has are no good."""
        self._check_model_drafter()
        self.scheduler.loop.watch.drop()

    def drafter_score(self) -> DrafterScore:
        """How often the engine's own model drafter was right; zeros without one."""
        return DrafterScore() if self.settings is None else self.scheduler.loop.drafter_score()

    def collect_states(self, share: float, max_bytes: int) -> None:
        """Keep the target's last hidden states of a share of the responses, for the training of draft heads.

        share: chosen by the responses' keys; 0: keep none, which costs a step nothing. max_bytes: of all that is kept;
        beyond it whole responses go, finished ones first. Raises ConfigError for values out of range, UnsupportedError
        on an engine without Paceline's settings.
        """
        if self.settings is None:
            raise UnsupportedError("hidden states are read from engines with Paceline's settings")
        self._ask_workers("collect_states", share, max_bytes)

    def take_samples(self) -> list[Sample]:
        """What `collect_states` has kept since the last call, of finished and of running responses.

        A sample holds the tokens that this engine has computed: it begins behind what came from the prefix cache or the
        KV pool, and ends before the last token, which no step has read. A running response goes on in a further sample.
        """
        samples: list[Sample] = self._ask_workers("take_samples")[0]
        return samples

    def collection_s(self) -> float:
        """Time that steps have spent on keeping hidden states since `collect_states` began it."""
        seconds: float = self._ask_workers("collection_s")[0]
        return seconds

    def _check_model_drafter(self) -> None:
        settings = self.settings
        if settings is None or settings.model_drafter is None or settings.draft_worker or settings.draft_help:
            raise UnsupportedError(
                "no model drafts inside this engine, or others draft with its model too: start it with model_drafter, "
                "and without draft_worker and draft_help"
            )

    def _check_idle(self) -> None:
        if self._pending:
            raise EngineError(
                f"{len(self._pending)} responses are running: finish or abort them before new weights"
            )

    def reset_prefix_cache(self) -> None:
        """Forget cached key-value blocks and the suffix trees of all groups."""
        with self._telling_death():
            self._engine.reset_prefix_cache()

    def set_drafting(self, wanted: bool) -> None:
        """Switch drafting off, for plain decoding on the same engine, or on again; the tokens are the same.

        Raises EngineError while responses are running, UnsupportedError on an engine without Paceline's settings.
        """
        if self._pending:
            raise EngineError(f"{len(self._pending)} responses are running: finish or abort them first")
        if self.settings is None:
            raise UnsupportedError("this engine was started without Paceline's settings: it never drafts")
        self.scheduler.loop.set_drafting(wanted)

    def kv_pool_counters(self) -> KvPoolCounters:
        """What this engine has done with the KV pool; zeros without one, or with another backend than our own."""
        if self._kv_pool is None:
            return KvPoolCounters()
        counters: KvPoolCounters = self._kv_pool.counters()
        return counters

    def draft_sharing_counters(self) -> DraftSharingCounters:
        """What this engine has told the draft servers and heard from them; zeros without any."""
        if self.settings is None:
            return DraftSharingCounters()
        counters: DraftSharingCounters = self.scheduler.loop.sharing_counters()
        return counters

    @property
    def draft_addresses(self) -> tuple[str, ...]:
        """Where other workers may draft for this engine with each of its model drafters, by place in the settings;
        empty: nowhere (`EngineSettings.draft_help`).
        """
        return tuple(link.settings.address for link in self._doors)

    def make_draft_workers(self) -> list[DraftWorker]:
        """What drafts for other engines with each of this one's model drafters, which are loaded once more."""
        from paceline.drafting.draft_worker import load_worker

        return [load_worker(link.settings) for link in self._doors]

    def lose_drafter(self) -> None:
        """Whoever drafted for this engine does so no more."""
        for link in self._doors:
            link.let_go()

    @property
    def _doors(self) -> Sequence[WorkerLink]:
        """This engine's end of other workers' help, by drafter."""
        is_open = self.settings is not None and self.settings.draft_help
        return self.scheduler.loop.ahead.links if is_open else ()

    def step_costs(self) -> StepCosts | None:
        """What steps cost and bring, as measured lately; None before any was, or without Paceline's settings."""
        if self.settings is None:
            return None
        costs: StepCosts | None = self.scheduler.loop.step_costs()
        return costs

    @property
    def kv_pool_obstacle(self) -> str | None:
        """Why this engine goes without a KV pool that is not required; None where it has it, or is to have none."""
        obstacle: str | None = self.scheduler.kv_pool_obstacle if self.settings is not None else None
        return obstacle

    @property
    def invariance_gap(self) -> str | None:
        """Which layers of the loaded model batch invariance is not ensured for; None: all are, or it was not wanted."""
        return self._invariance_gap

    # -- inside

    @property
    def _kv_pool(self) -> Any:
        """The scheduler's end of the KV connector; None without a KV pool of our own."""
        return self.scheduler.kv_pool if self.settings is not None else None

    @property
    def scheduler(self) -> Any:
        """Paceline's scheduler (with `settings`), or vLLM's."""
        return self._engine.engine_core.engine_core.scheduler

    @property
    def is_compiled(self) -> bool:
        """Whether the target runs compiled."""
        from paceline.engine.compiled import is_compiled

        return is_compiled(self._engine.vllm_config)

    @property
    def vllm_engine(self) -> Any:
        """The vLLM engine, for what this class does not cover."""
        return self._engine

    def take_observations(self) -> list[StepObservation]:
        """Engine steps measured since the last call (at most the latest 16384)."""
        if self.settings is None or not self.scheduler.observations:
            return []
        kept = list(self.scheduler.observations)
        self.scheduler.observations.clear()
        return kept

    def num_running(self) -> int:
        """Responses that have not finished."""
        return len(self._pending)

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        self._engine.engine_core.shutdown()

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
