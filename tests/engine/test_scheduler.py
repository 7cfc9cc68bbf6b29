"""The scheduler's edges: what it forgets, what it hands to the budget, and requests that cannot run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny_model import VOCAB
from vllm.exceptions import VLLMClientError
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from paceline.config import EngineSettings
from paceline.dice import derive_key
from paceline.engine import arguments
from paceline.engine.arguments import check_engine
from paceline.engine.compat import PauseState, _check_exact
from paceline.engine.rollout_engine import RolloutEngine
from paceline.engine.scheduler import LiveBatch, PacelineScheduler, ScheduledResponse
from paceline.engine.waiting import front_of
from paceline.errors import UnsupportedError
from paceline.types import RolloutRequest

PROMPT = (1, 5, 9, 13)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RolloutEngine]:
    settings = EngineSettings(run_seed=3, drafter="lookup")
    with RolloutEngine(
        model_dir,
        settings,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        kv_cache_bytes=1 << 27,
        seed=5,
    ) as made:
        yield made


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 1.0, "max_tokens": 20} | options))


def run_alone(engine: RolloutEngine, options: Any) -> Any:
    """One request past RolloutEngine, as another program would send it; its last output."""
    vllm = engine.vllm_engine
    vllm.add_request("alone", {"prompt_token_ids": list(PROMPT)}, options)
    outputs: list[Any] = []
    while vllm.has_unfinished_requests():
        outputs += vllm.step()
    return outputs[-1]


def requests(count: int) -> list[RolloutRequest]:
    return [RolloutRequest((*PROMPT, 3 + i // 2), 20 + 7 * i, sample=i % 2) for i in range(count)]


def test_nothing_is_kept_of_responses_that_have_ended(engine: RolloutEngine) -> None:
    engine.generate(requests(8), params())
    scheduler = engine.scheduler
    assert not scheduler.loop.free.drafter._groups
    assert not scheduler.live
    assert not scheduler.finished
    assert not scheduler.loop.free._numbers
    assert not scheduler.loop.free._running


def test_a_step_is_told_the_prefill_tokens_that_it_will_have(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, told = engine.scheduler, []
    propose = scheduler.loop.propose

    def watch(query: Any, num_other_tokens: int, *args: Any) -> Any:
        told.append((len(scheduler.observations), num_other_tokens))
        return propose(query, num_other_tokens, *args)

    monkeypatch.setattr(scheduler.loop, "propose", watch)
    engine.take_observations()
    rng = np.random.default_rng(1)
    longer = [
        RolloutRequest((*PROMPT, *rng.integers(3, VOCAB, 40 * i).tolist()), 20 + 7 * i) for i in range(5)
    ]
    longer += [replace(longer[4], sample=1)]  # its prompt's first block is in the prefix cache by then
    engine.generate(longer, params(ignore_eos=True, min_tokens=20))
    steps = list(scheduler.observations)
    found = [(others, steps[at].num_prefill_tokens) for at, others in told]
    assert [others for others, _ in found] == [prefill for _, prefill in found]
    assert sum(prefill > 30 for _, prefill in found) >= 3
    assert sum(prefill == 0 for _, prefill in found) > 20


def a_waiting_request(num_tokens: int, **state: Any) -> Any:
    return SimpleNamespace(
        **({"num_tokens": num_tokens, "num_computed_tokens": 0, "status": RequestStatus.WAITING} | state)
    )


def a_scheduler(
    running: list[Any], waiting_lengths: Sequence[int], num_free_blocks: int
) -> PacelineScheduler:
    """A scheduler of 500 tokens a step that has these requests, without an engine."""
    made = object.__new__(PacelineScheduler)
    pool = SimpleNamespace(get_num_free_blocks=lambda: num_free_blocks)
    vars(made).update(
        running=running,
        waiting=[a_waiting_request(length) for length in waiting_lengths],
        kv_holding_waiting=[],
        num_waiting_for_streaming_input=0,
        max_num_active_reqs=16,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1200, long_prefill_token_threshold=0),
        adaptive_long_prefill_threshold=False,
        max_num_scheduled_tokens=500,
        kv_cache_manager=SimpleNamespace(
            block_pool=pool, prefix_cache_lookup_enabled=lambda request: False, watermark_blocks=0
        ),
        _pause_state=PauseState.UNPAUSED,
        kv_pool=None,
        block_size=128,
    )
    return made


@pytest.mark.parametrize(
    ("threshold", "is_adaptive", "told"),
    [(0, False, 496), (100, False, 204), (100, True, 346), (400, False, 496)],
)
def test_long_prompts_are_told_as_vllm_divides_them(threshold: int, is_adaptive: bool, told: int) -> None:
    decoding = [SimpleNamespace(num_tokens=40 + i, num_computed_tokens=39 + i) for i in range(4)]
    chunked = SimpleNamespace(num_tokens=5000, num_computed_tokens=600)
    scheduler = a_scheduler([*decoding, chunked], waiting_lengths=(3000, 4), num_free_blocks=1000)
    scheduler.scheduler_config.long_prefill_token_threshold = threshold
    scheduler.adaptive_long_prefill_threshold = is_adaptive
    assert scheduler._num_other_tokens(4, [chunked]) == told


def test_the_pool_is_asked_for_what_has_blocks_to_go_to_and_no_more() -> None:
    scheduler = a_scheduler([], waiting_lengths=(640, 640, 640, 640), num_free_blocks=13)
    asked: list[Any] = []

    def look_up(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        asked.append(request)
        return request.num_tokens - num_computed_tokens - 1, False

    scheduler.kv_pool = SimpleNamespace(get_num_new_matched_tokens=look_up)
    assert scheduler._num_other_tokens(0, []) == 2
    assert asked == scheduler.waiting[:2]


def test_requests_that_wait_for_something_else_are_not_told() -> None:
    scheduler = a_scheduler([], waiting_lengths=(40, 50), num_free_blocks=99)
    scheduler.waiting[0].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler.kv_holding_waiting = [
        a_waiting_request(70, num_computed_tokens=69, status=RequestStatus.WAITING_FOR_STREAMING_REQ),
        a_waiting_request(90, num_computed_tokens=60),  # a session that goes on
    ]
    scheduler.num_waiting_for_streaming_input = 1
    assert scheduler._num_other_tokens(0, []) == 50 + 30
    scheduler.max_num_active_reqs = 2
    assert scheduler._num_other_tokens(0, []) == 30


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_new_requests_are_not_told_where_none_is_admitted(state: PauseState) -> None:
    """A trainer that has the engine drain before new weights: what runs on is the tail, where drafts pay most."""
    scheduler = a_scheduler([], waiting_lengths=(40, 50), num_free_blocks=99)
    scheduler.kv_holding_waiting = [a_waiting_request(90, num_computed_tokens=60)]
    assert scheduler._num_other_tokens(0, []) == 40 + 50 + 30
    scheduler._pause_state = state
    assert scheduler._num_other_tokens(0, []) == 30


def test_blocks_that_vllm_keeps_free_admit_nobody() -> None:
    scheduler = a_scheduler([], waiting_lengths=(128, 128), num_free_blocks=4)
    assert scheduler._num_other_tokens(0, []) == 256
    scheduler.kv_cache_manager.watermark_blocks = 2
    assert scheduler._num_other_tokens(0, []) == 128


@dataclass
class Waiting:
    """A request that counts how often it is compared."""

    priority: int
    compared: ClassVar[int] = 0

    def __lt__(self, other: Waiting) -> bool:
        Waiting.compared += 1
        return self.priority < other.priority


def test_a_draft_ends_where_the_response_must() -> None:
    scheduler = a_scheduler([], waiting_lengths=(), num_free_blocks=0)
    vars(scheduler).update(max_model_len=100, num_spec_tokens=8)
    lengths = [(20, 0), (20, 15), (20, 19), (20, 20), (90, 2), (97, 2), (99, 3), (100, 4)]
    ready: list[Any] = [
        SimpleNamespace(num_tokens=known, num_output_tokens=made, max_tokens=20) for known, made in lengths
    ]
    scheduler._positions = np.array([known for known, _ in lengths])
    expected = [max(min(8, 100 - known - 1, 20 - made - 1), 0) for known, made in lengths]
    assert scheduler._room(ready).tolist() == expected == [8, 4, 0, 0, 8, 2, 0, 0]


def test_a_batch_is_that_of_the_responses_that_draft_now() -> None:
    scheduler = a_scheduler([], waiting_lengths=(), num_free_blocks=0)
    scheduler.live = {
        str(i): ScheduledResponse(i, i // 2, 2**63 + i, temperature=i / 4, drafts_allowed=True)
        for i in range(6)
    }
    scheduler._batch = LiveBatch.of([])
    for queried in (["0", "1", "2"], ["0", "1", "2"], ["1", "2"], ["1", "5"], []):
        scheduler._queried = queried
        found, before = scheduler._live_batch(), scheduler._batch
        numbers = [int(name) for name in queried]
        assert found.numbers.tolist() == numbers
        assert found.groups.tolist() == [i // 2 for i in numbers]
        assert found.keys.tolist() == [2**63 + i for i in numbers]
        assert found.temperatures.tolist() == [i / 4 for i in numbers]
        assert scheduler._live_batch() is before


def test_a_look_at_a_priority_queue_costs_what_it_shows() -> None:
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    for priority in np.random.default_rng(0).permutation(5000).tolist():
        queue.add_request(Waiting(priority))
    Waiting.compared = 0
    assert [request.priority for request in front_of(queue, 20)] == list(range(20))
    assert Waiting.compared < 500
    assert len(queue) == 5000
    assert [request.priority for request in front_of(queue, 6000)] == list(range(5000))
    assert list(front_of(create_request_queue(SchedulingPolicy.PRIORITY), 3)) == []
    assert list(front_of(deque([1, 2, 3]), 2)) == [1, 2]


def test_a_look_at_the_prefix_cache_tells_nobody(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that listens to KV events would hear of a waiting request's blocks in every step."""
    manager, told = engine.scheduler.kv_cache_manager, []
    prompt = (1, *np.random.default_rng(2).integers(3, VOCAB, 130).tolist())
    engine.generate([RolloutRequest(prompt, 2)], params())
    monkeypatch.setattr(manager, "enable_kv_cache_events", True)
    monkeypatch.setattr(
        manager.coordinator,
        "emit_cached_block_events",
        lambda request, blocks: told.append(request.request_id),
    )
    wanted = [RolloutRequest(prompt, 20 + 9 * i, sample=i) for i in range(5)]
    engine.generate(wanted, params(ignore_eos=True, extra_args={"kv_cache_report_mode": "full"}))
    assert len(told) == len(set(told)) == 5


def test_an_impossible_resumption_fails_alone(engine: RolloutEngine) -> None:
    output = run_alone(engine, params(extra_args={"paceline_generated": 4}))
    assert output.outputs[0].finish_reason == "error"
    assert len(engine.generate(requests(2), params())) == 2


def test_what_is_not_given_may_be_null(engine: RolloutEngine) -> None:
    """As clients fill in what they leave open; the batch has penalties, for which carried tokens are read."""
    extra = {"paceline_generated": None, "paceline_key": None, "paceline_sample": None}
    output = run_alone(engine, params(extra_args=extra, presence_penalty=0.5, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"


def test_weights_may_change_under_a_response_whose_options_are_null(engine: RolloutEngine) -> None:
    vllm = engine.vllm_engine
    options = params(extra_args={"paceline_generated": None}, ignore_eos=True)
    vllm.add_request("alone", {"prompt_token_ids": list(PROMPT)}, options)
    vllm.step()
    assert vllm.reset_prefix_cache(reset_running_requests=True)
    outputs: list[Any] = []
    while vllm.has_unfinished_requests():
        outputs += vllm.step()
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_no_tokens_asked_for_by_name_are_none(engine: RolloutEngine) -> None:
    """vLLM accepts it; beside requests that name some it once ended the engine."""
    vllm = engine.vllm_engine
    for name, ids in (("none", []), ("one", [5])):
        vllm.add_request(
            name, {"prompt_token_ids": list(PROMPT)}, params(logprob_token_ids=ids, ignore_eos=True)
        )
    last: dict[str, Any] = {}
    while vllm.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in vllm.step()}
    assert {name: one.finish_reason for name, one in last.items()} == {"none": "length", "one": "length"}
    assert all(5 in of for of in last["one"].logprobs)


def test_a_request_whose_seed_is_none_fails_alone(engine: RolloutEngine) -> None:
    """vLLM makes one of such a seed where n > 1: it adds to the parent's."""
    wanted = params()
    wanted.seed = 1 << 64
    request = SimpleNamespace(
        request_id="x", prompt_token_ids=[1, 5], sampling_params=wanted, use_structured_output=False,
        max_tokens=4, cache_salt=None,
    )  # fmt: skip
    given_up: list[str] = []
    scheduler = SimpleNamespace(
        keys=engine.scheduler.keys, _next_response=1 << 40, live={}, _tell=lambda *_: None,
        _check_salt=lambda _: None, _give_up=lambda name, why: given_up.append(why),
    )  # fmt: skip
    PacelineScheduler._open(scheduler, request)
    assert len(given_up) == 1
    assert list(scheduler.live) == ["x"]


def test_responses_that_run_through_a_change_of_policy_are_drafted_for_again(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asynchronous trainers have it: `reset_running_requests`. Refused resets change nothing either."""
    alone = engine.generate(requests(2), params())
    told: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    loop = engine.scheduler.loop
    begin = loop.open

    def note(group: int, response: int, prompt: Any, generated: Any, *args: Any, **options: Any) -> None:
        told.append((tuple(prompt), tuple(generated)))
        begin(group, response, prompt, generated, *args, **options)

    monkeypatch.setattr(loop, "open", note)
    for index, request in enumerate(requests(2)):
        engine.submit(index, request, params())
    events = [event for _ in range(4) for event in engine.step()]
    for is_forced in (False, True):
        told.clear()
        assert engine.vllm_engine.reset_prefix_cache(reset_running_requests=is_forced) == is_forced
        assert [prompt for prompt, _ in told] == [request.prompt for request in requests(2)]
        for (_, generated), response in zip(told, alone, strict=True):
            assert 0 < len(generated) < len(response.tokens)
            assert generated == response.tokens[: len(generated)]
        events += [event for _ in range(2) for event in engine.step()]
    engine.take_observations()
    while engine.num_running():
        events += engine.step()
    made = {event.index: event.response for event in events if event.response is not None}
    assert [made[index].tokens for index in range(2)] == [response.tokens for response in alone]
    assert not loop._unbegun
    assert not loop.free._numbers


def test_what_is_refused_is_told_to_clients_of_a_server(engine: RolloutEngine) -> None:
    """vLLM's server answers its own errors with their words, and all others with an internal error."""
    for options in ({"thinking_token_budget": 5}, {"extra_args": {"paceline_key": "x"}}):
        with pytest.raises(VLLMClientError, match=r"thinking_token_budget|paceline_key"):
            run_alone(engine, params(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids has 1025 tokens.*room for 1024"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025"),
        ({"stop_token_ids": list(range(128)), "min_tokens": 1}, "stop_token_ids has 128.*room for 120"),
        ({"prompt_logprob_token_ids": [[1]], "extra_args": {"paceline_generated": 1}}, "not resumed"),
    ],
)
def test_v2_has_room_for_so_much_of_a_request(options: dict[str, Any], message: str) -> None:
    config = SimpleNamespace(use_v2_model_runner=True)
    _check_exact(params(stop_token_ids=list(range(128))), config)
    with pytest.raises(UnsupportedError, match=message):
        _check_exact(params(**options), config)


class Letters:
    """A tokenizer with a token for each character."""

    max_token_id = 255

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def test_v2_has_room_for_so_many_tokens_of_bad_words() -> None:
    config = SimpleNamespace(use_v2_model_runner=True)
    fitting = params(bad_words=[f"{n:0128}" for n in range(8)])
    _check_exact(fitting, config, Letters())
    assert fitting.bad_words_token_ids is None, "the caller's options stay as they are"
    long = params(bad_words=[f"{n:0129}" for n in range(8)])
    with pytest.raises(UnsupportedError, match=r"bad_words has 1032 tokens.*room for 1024.*give fewer"):
        _check_exact(long, config, Letters())
    _check_exact(long, SimpleNamespace(use_v2_model_runner=False), Letters())
    with pytest.raises(VLLMClientError, match=r"129.*max number is 128"):
        _check_exact(params(bad_words=list(map(str, range(129)))), config, Letters())


def test_engines_with_other_seeds_derive_other_keys(engine: RolloutEngine) -> None:
    engine.scheduler.finished.clear()
    run_alone(engine, params(extra_args={"paceline_sample": 6}))
    [live] = engine.scheduler.finished.values()
    assert live.key == derive_key(derive_key(3, [0], 5), PROMPT, 6)


def test_more_input_of_a_session_keeps_the_key(engine: RolloutEngine) -> None:
    live = SimpleNamespace(key=11, response=4)
    wanted = params(seed=7, extra_args={"paceline_key": 9, "theirs": 1})
    request = SimpleNamespace(sampling_params=wanted)
    engine.scheduler._go_on(request, live)
    assert request.sampling_params.extra_args == {"theirs": 1, "paceline_key": 11, "paceline_response": 4}
    assert request.sampling_params.seed is None
    assert wanted.seed == 7


def test_a_thinking_budget_is_refused(engine: RolloutEngine) -> None:
    with pytest.raises(UnsupportedError, match="thinking_token_budget=5"):
        run_alone(engine, params(thinking_token_budget=5))


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("scheduler_config", "async_scheduling", True, "async_scheduling=False"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size=1"),
        ("model_config", "enable_prompt_embeds", True, "enable_prompt_embeds=False"),
        ("speculative_config", "method", "ngram_gpu", "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_modes_that_cannot_work_are_refused(section: str, name: str, value: object, remedy: str) -> None:
    config = make_config()
    check_engine(config)
    setattr(getattr(config, section), name, value)
    with pytest.raises(UnsupportedError, match=remedy):
        check_engine(config)


def test_installed_logits_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses those that an argument names, and would leave these out without a word."""
    installed = {"vllm.logits_processors": [SimpleNamespace(name="only_seven")]}
    monkeypatch.setattr(arguments, "entry_points", lambda group: installed.get(group, []))
    with pytest.raises(UnsupportedError, match=r"\['only_seven'\] process logits"):
        check_engine(make_config())


def test_ranks_that_schedule_by_their_own_clocks_are_refused() -> None:
    config = make_config()
    config.parallel_config.distributed_executor_backend = "external_launcher"
    check_engine(config)
    config.parallel_config.world_size = 2
    with pytest.raises(UnsupportedError, match="distributed_executor_backend='mp'"):
        check_engine(config)


def test_v1_is_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.compat.is_cpu", lambda: False)
    check_engine(make_config(use_v2_model_runner=True))
    with pytest.raises(UnsupportedError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        check_engine(make_config())


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("model_config", "use_fp64_gumbel", True, "use_fp64_gumbel=False"),
        ("model_config", "enable_trace_replay", True, "enable_trace_replay=False"),
        ("parallel_config", "enable_batch_sharded_sampling", True, "enable_batch_sharded_sampling=False"),
        ("parallel_config", "data_parallel_size", 2, "data_parallel_size=1"),
        (None, "watermark_config", object(), "no watermark_config"),
        (None, "additional_config", {"num_paths": 2}, "num_paths=1"),
        (None, "additional_config", {"compiled": True}, "compiled unset"),
        (None, "additional_config", {"draft_worker": "auto"}, "draft_worker=True or False"),
        (None, "additional_config", {"model_drafter_dtype": "bfloat16"}, "model_drafter_dtype='auto'"),
    ],
)
def test_what_v2_cannot_do_exactly_is_refused(
    section: str | None, name: str, value: object, remedy: str
) -> None:
    drafter = {"model_drafter": "folder"}
    config = make_config(use_v2_model_runner=True, additional_config={"paceline": drafter})
    check_engine(config)
    if isinstance(value, dict):
        value = {"paceline": drafter | value}
    setattr(config if section is None else getattr(config, section), name, value)
    with pytest.raises(UnsupportedError, match=remedy):
        check_engine(config)


def test_threads_are_moved_in_one_process_alone() -> None:
    config = make_config(additional_config={"paceline": {"model_drafter": "small", "draft_worker": "auto"}})
    check_engine(config)
    config.parallel_config.world_size = 2
    with pytest.raises(UnsupportedError, match="in the engine's own process"):
        check_engine(config)


def test_steps_overlap_on_v2_where_drafts_need_no_known_token() -> None:
    config = make_config(use_v2_model_runner=True, scheduler_config=SimpleNamespace(async_scheduling=True))
    config.speculative_config.method = "ngram_gpu"
    check_engine(config)
    config.additional_config = {"paceline": {"model_drafter": "small"}}
    check_engine(config)
    for name, value in (
        ("draft_worker", True),
        ("adopt_leads", True),
        ("budget", {"policy": "bandit"}),
        ("kv_pool", {"directory": "/dev/shm/x"}),
    ):
        config.additional_config = {"paceline": {"model_drafter": "small", name: value}}
        with pytest.raises(UnsupportedError, match="async_scheduling=False"):
            check_engine(config)


def test_a_scheduler_of_somebody_elses_says_that_it_does_not_overlap_steps() -> None:
    class Theirs(PacelineScheduler):
        pass

    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    with pytest.raises(UnsupportedError, match="Theirs does not let steps overlap"):
        Theirs(vllm_config=config)


def make_config(**changes: object) -> SimpleNamespace:
    """As much of vLLM's configuration as `check_engine` looks at."""
    base = {
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1,
            enable_batch_sharded_sampling=False,
            distributed_executor_backend="mp",
            world_size=1,
            data_parallel_size=1,
        ),
        "model_config": SimpleNamespace(
            enable_prompt_embeds=False, use_fp64_gumbel=False, enable_trace_replay=False
        ),
        "speculative_config": SimpleNamespace(method="custom_class"),
        "watermark_config": None,
        "additional_config": {"paceline": {}},
        "use_v2_model_runner": False,
    }
    return SimpleNamespace(**{**base, **changes})
