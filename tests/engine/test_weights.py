"""New weights reach every kernel of a running engine: tied heads, packed layers, by each of the three ways."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny_model import make_model

from paceline.config import EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import EngineError
from paceline.types import Response, RolloutRequest


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path_factory.mktemp("weights"), tie=request.param, seed=7)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with RolloutEngine(
        folder, EngineSettings(), dtype="float32", max_model_len=512, kv_cache_bytes=1 << 27
    ) as engine:
        yield engine, policy


def rollout(engine: RolloutEngine) -> list[Response]:
    from vllm import SamplingParams

    wanted = [RolloutRequest((1, 5, 9, 13, 7), max_tokens=40, sample=i) for i in range(4)]
    return engine.generate(wanted, SamplingParams(temperature=1.0))


def gap(responses: list[Response], policy: torch.nn.Module) -> float:
    """Largest difference between the engine's log-probabilities and the trainer's."""
    worst = 0.0
    for response in responses:
        tokens = torch.tensor([[*response.request.prompt, *response.tokens]])
        with torch.no_grad():
            scores = torch.log_softmax(policy(tokens).logits.float(), -1)[0]
        start = len(response.request.prompt) - 1
        own = scores[start + torch.arange(len(response.tokens)), tokens[0, start + 1 :]].numpy()
        worst = max(worst, float(np.abs(own - np.array(response.logprobs)).max()))
    return worst


def disturb(policy: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)


def test_push_weights(pair: tuple) -> None:
    engine, policy = pair
    for seed in range(3):
        version = engine.policy_version
        disturb(policy, seed)
        assert gap(rollout(engine), policy) > 0.1, "the control: stale weights must be visible"
        assert engine.push_weights(policy.named_parameters()) == version + 1
        responses = rollout(engine)
        assert gap(responses, policy) < 1e-4
        assert all(r.policy_version == version + 1 for r in responses)


def test_load_weights_parameter_by_parameter(pair: tuple) -> None:
    """What TRL does to a colocated engine; vLLM's own way fails on the CPU."""
    engine, policy = pair
    disturb(policy, 10)
    model = engine.vllm_engine.model_executor.driver_worker.model_runner.model
    for name, weight in policy.named_parameters():
        model.load_weights([(name, weight)])
    engine.reset_prefix_cache()
    assert gap(rollout(engine), policy) < 1e-4


def test_the_last_weights_win_whichever_way_they_came(pair: tuple) -> None:
    """Those of `model.load_weights` wait for a step; nothing runs between them and a push."""
    engine, policy = pair
    model = engine.vllm_engine.model_executor.driver_worker.model_runner.model
    disturb(policy, 11)
    for name, weight in policy.named_parameters():
        model.load_weights([(name, weight)])
    disturb(policy, 12)
    engine.push_weights(policy.named_parameters())
    assert gap(rollout(engine), policy) < 1e-4


def test_reload_weights_by_collective_call(pair: tuple) -> None:
    engine, policy = pair
    disturb(policy, 20)
    engine.vllm_engine.collective_rpc(
        "reload_weights", kwargs={"weights_iterator": iter(policy.named_parameters())}
    )
    engine.reset_prefix_cache()
    assert gap(rollout(engine), policy) < 1e-4


def test_a_part_of_a_packed_layer_is_refused(pair: tuple) -> None:
    """Its other parts would be memory that nobody has written; layers of which nothing comes keep their weights."""
    engine, policy = pair
    disturb(policy, seed=5)
    engine.push_weights(policy.named_parameters())
    part = [(name, weight) for name, weight in policy.named_parameters() if "q_proj" in name]
    with pytest.raises(EngineError, match=r"weights did not come, first '.*layers\.0\.self_attn\.k_proj"):
        engine.push_weights(part)
    with pytest.raises(EngineError, match="push them again"):
        rollout(engine)
    disturb(policy, seed=6)
    engine.push_weights(policy.named_parameters())
    with torch.no_grad():
        policy.model.layers[0].self_attn.o_proj.weight.mul_(1.5)
    engine.push_weights(
        (name, weight) for name, weight in policy.named_parameters() if "layers.0.self_attn.o_proj" in name
    )
    assert gap(rollout(engine), policy) < 1e-4


def test_weights_are_refused_while_responses_run(pair: tuple) -> None:
    from vllm import SamplingParams

    engine, policy = pair
    stream = engine.stream([RolloutRequest((1, 5), max_tokens=30)], SamplingParams(ignore_eos=True))
    next(stream)
    with pytest.raises(EngineError, match="1 responses are running"):
        engine.push_weights(policy.named_parameters())
    stream.close()
    assert engine.num_running() == 0


def test_nothing_is_generated_after_a_push_that_failed(pair: tuple) -> None:
    from vllm import SamplingParams

    engine, policy = pair

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(policy.named_parameters()))
        raise RuntimeError("the connection broke")

    with pytest.raises(RuntimeError, match="connection broke"):
        engine.push_weights(torn())
    with pytest.raises(EngineError, match="push them again"):
        engine.submit(0, RolloutRequest((1, 5), max_tokens=30), SamplingParams())
    with pytest.raises(EngineError, match="push them again"):
        rollout(engine)
    engine.push_weights(policy.named_parameters())
    assert gap(rollout(engine), policy) < 1e-4
