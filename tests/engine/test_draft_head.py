"""Draft heads in the engine: plain decoding's tokens, and acceptance as it was measured, disturbed or not."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_head import make_head
from safetensors.torch import load_file
from tiny_model import VOCAB, make_model, scarce_engine
from trained_head import DEPTH, POLICY, draw_prompts, learn, load_target

from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
from paceline.distillation.export import export
from paceline.distillation.measuring import Dice, measure
from paceline.distillation.target import choose_layers, load_model, read_samples, share
from paceline.drafting.drafter import read_fused_layers
from paceline.drafting.head import HeadDrafter
from paceline.engine.arguments import engine_arguments, graph_arguments
from paceline.engine.model_steering import ModelSteering
from paceline.engine.model_watch import ModelWatch
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import CheckpointError, ConfigError
from paceline.types import Response, RolloutRequest


def generate(engine: RolloutEngine, wanted: list[RolloutRequest], **options: object) -> list[Response]:
    from vllm import SamplingParams

    return engine.generate(wanted, SamplingParams(**{"temperature": 1.0, **options}))


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RolloutEngine]:
    """An untrained head beside the suffix tree and its paths; prompts in pieces, few blocks."""
    layers = 2 if request.param == "eagle" else 4
    target = make_model(tmp_path_factory.mktemp("target"), layers=layers, tie=False)
    head = tmp_path_factory.mktemp("head")
    make_head(head, load_model(target), request.param)
    settings = EngineSettings(
        model_drafter=str(head),
        budget=BudgetSettings(policy="fixed", fixed_tokens=4),
        max_draft_tokens=6,
        num_paths=4,
        max_alternatives=8,
        compiled=request.param == "eagle3",
    )
    with RolloutEngine(target, settings, **scarce_engine(30, layers=layers)) as made:
        yield made


def test_tokens_are_those_of_plain_decoding(tiny: RolloutEngine) -> None:
    """In chunks, preempted, out of the prefix cache, and with new weights every so often."""
    from vllm import SamplingParams

    rng = np.random.default_rng(3)
    prompts = [(1, *rng.integers(3, VOCAB, 190 + 7 * i).tolist()) for i in range(8)]
    wanted = [RolloutRequest(p, 240, key=10 * i + s) for s in range(2) for i, p in enumerate(prompts)]
    tiny.set_drafting(False)
    plain = generate(tiny, wanted, ignore_eos=True)
    tiny.set_drafting(True)
    preemptions, score = tiny.scheduler.num_preemptions, tiny.drafter_score()
    assert tiny.settings is not None
    weights = load_file(Path(str(tiny.settings.model_drafter)) / "model.safetensors")
    tokens = {}
    for number, event in enumerate(tiny.stream(wanted, SamplingParams(temperature=1.0, ignore_eos=True))):
        if number % 400 == 399:
            tiny.push_drafter({name: weight * 0.9 for name, weight in weights.items()})
        if event.response is not None:
            tokens[event.index] = event.response.tokens
    assert [tokens[index] for index in range(len(wanted))] == [r.tokens for r in plain]
    assert tiny.scheduler.num_preemptions > preemptions
    assert (tiny.drafter_score() - score).tried > 50


def test_the_bandit_steers_a_head(tiny: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts as deep as the strategies say, beside two paths of the suffix tree."""
    rng = np.random.default_rng(4)
    wanted = [  # of which the last go on alone for a while
        RolloutRequest((1, *rng.integers(3, VOCAB, 20).tolist()), 40 + 15 * key, key=key) for key in range(6)
    ]
    tiny.set_drafting(False)
    plain = generate(tiny, wanted)
    tiny.set_drafting(True)
    depths, draft = [], HeadDrafter.draft

    def spy(self: HeadDrafter, step: object, query: object, depth: int, **options: object) -> object:
        made, growth = draft(self, step, query, depth, **options)  # type: ignore[arg-type]
        depths.append((depth, growth.num_levels))
        return made, growth

    monkeypatch.setattr(HeadDrafter, "draft", spy)
    monkeypatch.setattr(
        ModelSteering, "advance", lambda *_: True
    )  # whether the head pays or not, and is dead or not
    monkeypatch.setattr(ModelWatch, "observe", lambda *_: None)
    monkeypatch.setattr("paceline.planning.bandit.move_threshold", lambda state, *_: state)
    loop = tiny.scheduler.loop
    loop.watch.renew()
    before, strategies = loop.policy_state, ((5, 2, 6), (3, 1, 6), (1, 1, 1))
    loop.use_budget(
        BudgetSettings(
            policy="bandit", bandit_strategies=strategies, bandit_batch_sizes=(1, 4), bandit_epsilon=0.3
        )
    )
    try:
        tokens = [r.tokens for r in generate(tiny, wanted)]
    finally:
        loop.use_budget(BudgetSettings(policy="fixed", fixed_tokens=4), before)
    assert tokens == [r.tokens for r in plain]
    assert {depth for depth, _ in depths} == {5, 3, 1}
    assert all(levels <= depth for depth, levels in depths)


def test_a_head_drafts_in_the_engine_alone(tiny: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny.settings is not None
    folder = tiny.settings.model_drafter
    for where in ({"draft_worker": True}, {"draft_help": True}):
        with pytest.raises(ConfigError, match="draft head"):
            engine_arguments(model_drafter=folder, **where)


def test_on_v2_heads_are_vllms(tiny: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours by their weights and layers; published ones, whose weights may be in another file, by their class."""
    monkeypatch.setattr("paceline.engine.compat.uses_v2", lambda: True)
    assert tiny.settings is not None

    def method(folder: Path | str | None) -> str:
        return str(engine_arguments(model_drafter=str(folder))["speculative_config"]["method"])

    fused = read_fused_layers(Path(str(tiny.settings.model_drafter)))
    assert method(tiny.settings.model_drafter) == ("eagle3" if fused else "eagle")
    for architecture, expected in (
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("EagleLlamaForCausalLM", "eagle"),
        ("Qwen2ForCausalLM", "draft_model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert method(tmp_path) == expected


def test_graphs_of_a_head_take_their_part_of_the_memory(
    tiny: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a drafter without graphs do not: a draft worker's, or a small model's."""
    monkeypatch.setattr("paceline.engine.compat.is_cpu", lambda: False)
    assert tiny.settings is not None
    drafters: dict[str, Any] = {
        "none": {},
        "head": {"model_drafter": tiny.settings.model_drafter},
        "model": {"model_drafter": str(tmp_path)},
        "worker": {"model_drafter": str(tmp_path), "draft_worker": True},
    }
    counts = {
        name: len(graph_arguments(EngineSettings(**drafter), 64)["cudagraph_capture_sizes"])
        for name, drafter in drafters.items()
    }
    assert counts["none"] == counts["model"] == counts["worker"] > counts["head"] > 0


def test_a_head_of_another_target_is_refused_at_the_start(tiny: RolloutEngine, tmp_path: Path) -> None:
    other = make_model(tmp_path / "target", hidden=64)
    with pytest.raises((CheckpointError, RuntimeError), match="hidden size 128"):
        RolloutEngine(other, tiny.settings, dtype="float32", max_model_len=128, kv_cache_bytes=1 << 26)


@dataclass
class Trained:
    """The Countdown policy with a head that has learned a little of it, drafting DEPTH tokens in every step."""

    engine: RolloutEngine
    head: Path
    network: object
    requests: list[RolloutRequest]

    def accepted(self, responses: list[Response]) -> tuple[int, int]:
        """(tokens, steps)"""
        tokens = sum(len(r.tokens) - len(r.request.generated) for r in responses)
        return tokens, sum(r.num_steps for r in responses)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    head = tmp_path_factory.mktemp("trained")
    trainer, made = learn(load_target(), "eagle")
    export(trainer.tensors(), made, head, "huggingface", str(POLICY))
    folder = Path(tempfile.mkdtemp(prefix="paceline-head-", dir="/dev/shm"))
    settings = EngineSettings(
        drafter="none",
        model_drafter=str(head),
        max_draft_tokens=DEPTH,
        sharpness=1.0,
        budget=BudgetSettings(policy="fixed", fixed_tokens=DEPTH),
        kv_pool=KvPoolSettings(directory=str(folder)),
    )
    requests = [
        RolloutRequest(tuple(prompt), 160, key=1000 * index + sample)
        for index, prompt in enumerate(draw_prompts(40))
        for sample in range(4)
    ]
    patch = pytest.MonkeyPatch()
    patch.setattr(ModelSteering, "advance", lambda *_: True)
    patch.setattr(ModelSteering, "limits", lambda *_: (0.0, np.zeros(1, np.float32), None))
    with RolloutEngine(POLICY, settings, dtype="float32", max_model_len=320, max_num_seqs=64) as engine:
        yield Trained(engine, head, trainer.network, requests)
    patch.undo()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(trained: Trained) -> list[Response]:
    return generate(trained.engine, [replace(r, keep_kv=False) for r in trained.requests])


@pytest.mark.slow
def test_acceptance_is_as_measured(trained: Trained, undisturbed: list[Response]) -> None:
    trained.engine.set_drafting(False)
    plain = generate(trained.engine, [replace(r, keep_kv=False) for r in trained.requests])
    trained.engine.set_drafting(True)
    assert [r.tokens for r in plain] == [r.tokens for r in undisturbed]
    target = load_target()
    written = [(torch.tensor([*r.request.prompt, *r.tokens]), len(r.request.prompt)) for r in undisturbed]
    samples = read_samples(target, written, choose_layers(4), 4096)
    thrown = [(sample, Dice(r.key, 1.0)) for sample, r in zip(samples, undisturbed, strict=True)]
    worth = measure(trained.network, share(target), thrown, DEPTH)
    tokens, steps = trained.accepted(undisturbed)
    decided = len(undisturbed)  # the first token of a response, in the step that ends its prompt
    assert worth.acceptance_length > 1.3
    assert (tokens - decided) / (steps - decided) == pytest.approx(worth.acceptance_length, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [4, 24, 48])
def test_moved_responses_are_accepted_as_often(
    trained: Trained, undisturbed: list[Response], cut: int
) -> None:
    """Their keys and values come from the KV pool; the head has no state of what lies before the move."""
    engine = trained.engine
    engine.reset_prefix_cache()
    begun = generate(engine, [replace(r, max_tokens=cut, keep_kv=True) for r in trained.requests])
    engine.reset_prefix_cache()
    going_on = [index for index, response in enumerate(begun) if response.finish_reason == "length"]
    todo = [
        replace(trained.requests[index], generated=begun[index].tokens, keep_kv=False) for index in going_on
    ]
    before = engine.kv_pool_counters().hits
    moved = generate(engine, todo)
    assert engine.kv_pool_counters().hits - before == len(todo)
    assert [r.tokens for r in moved] == [undisturbed[index].tokens for index in going_on]
    tokens, steps = trained.accepted(moved)
    whole = trained.accepted([undisturbed[index] for index in going_on])
    first = trained.accepted([begun[index] for index in going_on])
    length = (whole[0] - first[0]) / (whole[1] - first[1])
    print(f"cut {cut}: {len(todo)} moved, {tokens / steps:.4f} against {length:.4f}")
    assert tokens / steps > 0.95 * length


@pytest.mark.slow
def test_swapped_weights_are_accepted_as_often(trained: Trained, undisturbed: list[Response]) -> None:
    """Every response's context begins anew, every 20 steps or so."""
    from vllm import SamplingParams

    weights = load_file(trained.head / "model.safetensors")
    trained.engine.reset_prefix_cache()
    responses: dict[int, Response] = {}
    wanted = [replace(r, keep_kv=False) for r in trained.requests]
    for number, event in enumerate(trained.engine.stream(wanted, SamplingParams(temperature=1.0))):
        if number % 1200 == 1199:
            trained.engine.push_drafter(weights)
        if event.response is not None:
            responses[event.index] = event.response
    assert [responses[i].tokens for i in range(len(wanted))] == [r.tokens for r in undisturbed]
    (tokens, steps), whole = trained.accepted(list(responses.values())), trained.accepted(undisturbed)
    print(f"swapped: {tokens / steps:.4f} against {whole[0] / whole[1]:.4f}")
    assert tokens / steps > 0.95 * whole[0] / whole[1]
