"""Hidden states from a running engine, row by row against a forward pass of transformers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_head import make_head
from drafters import ScriptedPaths
from tiny_model import VOCAB, make_model, scarce_engine

from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
from paceline.distillation.packing import Sample
from paceline.distillation.target import load_model
from paceline.drafting.drafter import is_draft_head
from paceline.drafting.token_states import TokenStates
from paceline.engine.rollout_engine import RolloutEngine
from paceline.engine.state_collector import StateCollector
from paceline.engine.v1.hidden_states import show_layers
from paceline.errors import CheckpointError, ConfigError, UnsupportedError
from paceline.noise import uniform
from paceline.types import Response, RolloutRequest

MAX_TOKENS = 60
EVERYTHING = 1 << 30
LAYERS = 4
FUSED = (1, 2, 3)
"""Layers whose inputs are handed out where an EAGLE-3 head drafts."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied: random models with a tied head all repeat the last token."""
    return make_model(tmp_path_factory.mktemp("target"), layers=LAYERS, tie=False)


@pytest.fixture(scope="module", params=["small model", "EAGLE-3 head"])
def engine(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RolloutEngine]:
    """Every way to draft at once, prompts in pieces, a KV pool, and blocks for seven long responses of eight."""
    drafter = tmp_path_factory.mktemp("drafter")
    if request.param == "small model":
        make_model(drafter, seed=5, tie=False)
    else:
        make_head(drafter, load_model(model_dir), "eagle3")
    folder = Path(tempfile.mkdtemp(prefix="paceline-states-", dir="/dev/shm"))
    settings = EngineSettings(
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
        model_drafter=str(drafter),
        max_draft_tokens=6,
        num_paths=4,
        max_alternatives=8,
        kv_pool=KvPoolSettings(directory=str(folder)),
    )
    with RolloutEngine(model_dir, settings, **scarce_engine(30, layers=LAYERS)) as made:
        yield made
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def target(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine) -> list[Response]:
    """By plain decoding."""
    engine.set_drafting(False)
    responses = run(engine, requests())
    engine.set_drafting(True)
    return responses


def requests(lengths: tuple[int, ...] = (5, 40, 100, 127, 140, 200, 270)) -> list[RolloutRequest]:
    """Two samples of each prompt; the longer ones share whole blocks."""
    rng = np.random.default_rng(8)
    made = []
    for index, length in enumerate(lengths):
        prompt = (1, *rng.integers(3, VOCAB, length - 1).tolist())
        made += [
            RolloutRequest(prompt, MAX_TOKENS, key=100 * index + sample, sample=sample, keep_kv=False)
            for sample in range(2)
        ]
    return made


def run(engine: RolloutEngine, wanted: list[RolloutRequest], *, is_fresh: bool = True) -> list[Response]:
    from vllm import SamplingParams

    if is_fresh:
        engine.reset_prefix_cache()
    return engine.generate(wanted, SamplingParams(temperature=1.0, ignore_eos=True))


def check(target: Any, samples: list[Sample], responses: list[Response]) -> list[int]:
    """Each sample is one response's, up to its last token but one; returns where each begins, by response.

    Of inner layers either all samples have states, or none.
    """
    assert len(samples) == len(responses)
    hidden_size = target.config.hidden_size
    fused = FUSED if samples[0].states.shape[1] > hidden_size else ()
    texts = [(*response.request.prompt, *response.tokens) for response in responses]
    found = {}
    for sample in samples:
        ids = tuple(sample.ids.tolist())
        index = next(i for i, text in enumerate(texts) if i not in found and text[:-1][-len(ids) :] == ids)
        start = found[index] = len(texts[index]) - 1 - len(ids)
        assert sample.num_prompt_tokens == max(len(responses[index].request.prompt) - start, 1)
        with torch.no_grad():
            output = target.model(torch.tensor([texts[index]]), output_hidden_states=True)
        kept = [output.hidden_states[layer] for layer in fused]
        states = torch.cat([*kept, output.last_hidden_state], -1)[0, start:-1]
        assert sample.states.shape == states.shape
        torch.testing.assert_close(sample.states, states, rtol=1e-4, atol=1e-4)
    return [found[index] for index in range(len(responses))]


def test_with_all_drafters_and_paths(engine: RolloutEngine, plain: list[Response], target: Any) -> None:
    """Two paths of the suffix tree's place, the second better than the first, so that alternatives win too."""
    known = {r.key: (*r.request.prompt, *r.tokens) for r in plain}
    own, engine.scheduler.loop.free.drafter = (
        engine.scheduler.loop.free.drafter,
        ScriptedPaths(known, (0.5, 0.9), VOCAB, width=6),
    )
    engine.collect_states(1.0, EVERYTHING)
    engine.take_observations()
    try:
        responses = run(engine, requests())
    finally:
        engine.scheduler.loop.free.drafter = own
    steps = engine.take_observations()
    assert [r.tokens for r in responses] == [r.tokens for r in plain]
    assert sum(step.num_accepted_tokens for step in steps) > 100
    assert sum(step.num_accepted_tokens for step in steps) < sum(step.num_draft_tokens for step in steps)
    assert sum(step.num_alternatives for step in steps) > 10
    samples = engine.take_samples()
    starts = check(target, samples, responses)
    assert starts[0] == starts[2] == 0
    width = (
        1 + len(FUSED) * is_draft_head(Path(str(engine.settings.model_drafter)))
    ) * target.config.hidden_size
    assert {sample.states.shape[1] for sample in samples} == {width}


def test_what_comes_from_the_prefix_cache_has_no_rows(
    engine: RolloutEngine, plain: list[Response], target: Any
) -> None:
    run(engine, requests(), is_fresh=True)
    engine.take_samples()
    responses = run(engine, requests()[-4:], is_fresh=False)
    assert [r.tokens for r in responses] == [r.tokens for r in plain[-4:]]
    assert max(check(target, engine.take_samples(), responses)) >= 128


def test_preempted_responses(engine: RolloutEngine, target: Any) -> None:
    """What is computed again takes the place of what was there."""
    before = engine.scheduler.num_preemptions
    prompts = requests(tuple(range(200, 240, 5)))[::2]
    responses = run(engine, [replace(r, max_tokens=250, key=7000 + i) for i, r in enumerate(prompts)])
    assert engine.scheduler.num_preemptions > before
    assert min(check(target, engine.take_samples(), responses)) == 0


def test_moved_responses(engine: RolloutEngine, plain: list[Response], target: Any) -> None:
    """Rows begin behind what the KV pool gave; with the pool's part gone, at the first token."""
    cut = [replace(request, max_tokens=23, keep_kv=True) for request in requests()]
    begun = run(engine, cut)
    engine.take_samples()
    todo = [
        replace(request, generated=response.tokens)
        for request, response in zip(requests(), begun, strict=True)
    ]
    responses = run(engine, todo)
    assert [r.tokens for r in responses] == [r.tokens for r in plain]
    starts = check(target, engine.take_samples(), responses)
    assert starts == [len(request.prompt) + 22 for request in requests()]
    responses = run(engine, todo)
    assert check(target, engine.take_samples(), responses)[0] == 0


def test_a_running_response_goes_on_in_a_further_sample(
    engine: RolloutEngine, plain: list[Response], target: Any
) -> None:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    engine.collect_states(1.0, EVERYTHING)
    parts: list[Sample] = []
    for number, _ in enumerate(
        engine.stream(requests()[:1], SamplingParams(temperature=1.0, ignore_eos=True))
    ):
        if number in (1, 3, 5):  # not near the end: one token alone is nothing to learn from
            parts += engine.take_samples()
    parts += engine.take_samples()
    assert len(parts) == 4
    whole = Sample(torch.cat([part.ids for part in parts]), 5, torch.cat([part.states for part in parts]))
    assert check(target, [whole], plain[:1]) == [0]


def test_off_again(engine: RolloutEngine) -> None:
    engine.collect_states(0.0, EVERYTHING)
    run(engine, requests()[:2])
    assert engine.take_samples() == []
    for share, size in ((1.5, 10), (-0.1, 10), (0.5, 0)):
        with pytest.raises(ConfigError, match="share"):
            engine.collect_states(share, size)


def test_targets_that_have_not_what_a_head_reads_are_refused(model_dir: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    make_head(head, load_model(model_dir), "eagle3")
    shallow = make_model(tmp_path / "shallow", layers=2, tie=False)
    with pytest.raises((CheckpointError, RuntimeError), match="layers 0 to 1"):
        RolloutEngine(shallow, EngineSettings(model_drafter=str(head)), **scarce_engine(30))
    with pytest.raises(UnsupportedError, match="EAGLE-3"):
        show_layers(torch.nn.Linear(2, 2), (1,), 4)


def test_other_engines_have_none(model_dir: Path) -> None:
    engine = object.__new__(RolloutEngine)
    engine.settings = None
    with pytest.raises(UnsupportedError, match="hidden states"):
        engine.collect_states(1.0, EVERYTHING)


def step_of(responses: list[int], starts: list[int], counts: list[int]) -> TokenStates:
    total = sum(counts)
    return TokenStates(
        np.array(responses, np.int64),
        np.array(starts, np.int64),
        np.array(counts, np.int64),
        np.arange(total, dtype=np.int32),
        np.arange(total, dtype=np.int32) + 1,
        torch.ones(total, 4),
    )


def add(collector: StateCollector, step: TokenStates) -> None:
    collector.add(step, np.ones(len(step.responses), np.int64))


def test_a_bound_drops_whole_responses_that_grew_least_lately() -> None:
    collector = StateCollector(1.0, 16 * 20)  # 20 bytes a token
    add(collector, step_of([1, 2], [0, 0], [5, 5]))
    add(collector, step_of([2], [5], [2]))
    add(collector, step_of([3], [0], [4]))
    assert collector.num_bytes == 16 * 20
    add(collector, step_of([2], [7], [1]))
    assert collector.num_bytes == 12 * 20, "a quarter is free"
    add(collector, step_of([3], [4], [2]))
    assert sorted(sample.num_tokens for sample in collector.take()) == [6, 8]
    assert collector.num_bytes == 0
    add(collector, step_of([4], [0], [40]))
    assert collector.num_bytes == 0
    assert collector.take() == []
    add(collector, step_of([5], [0], [0]))  # a step that was withdrawn
    assert collector.take() == []


def test_rows_are_sorted_by_response_and_the_newest_of_a_position_counts() -> None:
    collector = StateCollector(1.0, 10_000)
    add(collector, step_of([7, 3], [0, 4], [3, 2]))
    add(collector, step_of([3, 7], [6, 1], [1, 4]))
    three, seven = sorted(collector.take(), key=lambda sample: sample.num_tokens)
    assert three.ids.tolist() == [3, 4, 0]
    assert seven.ids.tolist() == [0, 1, 2, 3, 4], "of token 1 the newer row, which is the second of its step"
    assert seven.num_prompt_tokens == 1


def test_rows_that_leave_a_gap_begin_anew_and_nan_is_left_out() -> None:
    collector = StateCollector(1.0, 10_000)
    add(collector, step_of([1], [0], [4]))
    add(collector, step_of([1], [9], [3]))
    assert [sample.num_tokens for sample in collector.take()] == [3]
    add(collector, step_of([1], [0], [4]))
    broken = step_of([1], [4], [2])
    broken.states[1] = torch.nan
    add(collector, broken)
    assert collector.take() == []


def test_a_share_is_chosen_by_key() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    chosen = StateCollector(0.1, 10).chosen(keys)
    assert chosen.sum() == pytest.approx(2000, rel=0.1)
    assert np.array_equal(chosen, uniform(0, 0, keys) < 0.1)
    assert np.histogram(uniform(0, 0, keys), 10, (0, 1))[0].min() > 1800
