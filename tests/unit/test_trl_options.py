"""Options of TRL's configurations that would do nothing are refused, each by its name and with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.integrations.trl.options import ENGINES, NOT_SAMPLING, REFUSED, check_generation, check_options

trl = pytest.importorskip("trl", reason="TRL is not installed")

VALUES: dict[str, Any] = {
    "vllm_tensor_parallel_size": 2,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 1024,
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_server_base_url": "http://node:8000",
    "vllm_server_host": "node",
    "vllm_server_port": 9000,
    "vllm_server_timeout": 10.0,
    "vllm_group_port": 9001,
    "ds3_gather_for_generation": False,
    "cache_implementation": "static",
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_batch_tokens": 64},
    "use_transformers_paged": True,
}


def configure(kind: str, **given: Any) -> Any:
    made = getattr(trl, kind)(output_dir="unused", use_cpu=True, bf16=False, use_vllm=True)
    for name, value in given.items():  # set afterwards: TRL's own checks of a combination are not the subject
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
def test_options_that_are_left_alone_pass(kind: str) -> None:
    check_options(configure(kind, temperature=0.7, trust_remote_code=True, beta=0.1, num_generations=4))


@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
@pytest.mark.parametrize("name", [*ENGINES, *REFUSED])
def test_an_option_that_would_do_nothing_is_refused(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* in {kind}: .*leave .* away") as refused:
        check_options(configure(kind, **{name: VALUES[name]}))
    if name in ENGINES:
        assert f"{ENGINES[name]}={VALUES[name]!r}" in str(refused.value)


@pytest.mark.parametrize("name", [name for name in NOT_SAMPLING if name not in {"n", "logprobs"}])
def test_a_sampling_option_that_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"generation_kwargs\['{name}'\] = 3: .*leave it away"):
        check_options(configure("GRPOConfig", generation_kwargs={name: 3}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 2}, "num_generations"),
        ({"logprobs": 5}, "sampled token's log-probability alone"),
        ({"frequency_penalti": 0.1}, "no such option"),
        ({"extra_args": {"paceline_key": 3}}, "paceline_key: .*run_seed"),
    ],
)
def test_values_that_would_do_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_generation(given)


def test_values_that_say_what_happens_anyway_pass() -> None:
    check_generation({"n": 1, "logprobs": 0, "min_tokens": 3, "extra_args": {"their_own": 1}})


def test_a_recipe_is_refused_before_an_engine_starts() -> None:
    from paceline.training.recipe import Recipe
    from paceline.training.trl_arguments import trainer_arguments

    fields = {"task": {"name": "countdown"}, "model": "policy", "steps": 4}
    recipe = Recipe.model_validate({**fields, "trl": {"vllm_enable_sleep_mode": True}})
    with pytest.raises(ConfigError, match="vllm_enable_sleep_mode=True"):
        trainer_arguments(recipe, Path("unused"), on_cpu=True)
