"""The scheduler's edges: what it forgets, what it hands to the budget, and requests that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import EngineSettings
from paceline.dice import derive_key
from paceline.engine.arguments import check_engine
from paceline.engine.rollout import RolloutEngine
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
    assert not scheduler.loop.drafter._groups
    assert not scheduler.live
    assert not scheduler.finished


def test_a_full_batch_expects_no_prefill(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seen = engine.scheduler, []
    propose = scheduler.loop.propose

    def watch(query: Any, num_other_tokens: int, *args: Any) -> Any:
        seen.append((len(scheduler.running), len(scheduler.waiting), num_other_tokens))
        return propose(query, num_other_tokens, *args)

    monkeypatch.setattr(scheduler.loop, "propose", watch)
    engine.generate(requests(6), params(ignore_eos=True, min_tokens=20))
    full = [others for running, waiting, others in seen if running == 2 and waiting]
    assert len(full) > 10
    assert sum(full) <= 3  # a step in which one request prefills and the other decodes
    assert any(waiting and others for running, waiting, others in seen if running < 2)


def test_an_impossible_resumption_fails_alone(engine: RolloutEngine) -> None:
    output = run_alone(engine, params(extra_args={"paceline_generated": 4}))
    assert output.outputs[0].finish_reason == "error"
    assert len(engine.generate(requests(2), params())) == 2


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
        (None, "use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_modes_that_cannot_work_are_refused(
    section: str | None, name: str, value: object, remedy: str
) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(enable_prompt_embeds=False),
        use_v2_model_runner=False,
    )
    check_engine(config)
    setattr(config if section is None else getattr(config, section), name, value)
    with pytest.raises(UnsupportedError, match=remedy):
        check_engine(config)
