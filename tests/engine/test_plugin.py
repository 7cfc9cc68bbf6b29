"""Paceline in other people's engines: by engine arguments, and by the environment alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs

from paceline.config import EngineSettings
from paceline.engine import plugin
from paceline.engine.arguments import (
    BLOCK_TOKENS,
    SCHEDULER,
    engine_arguments,
    graph_arguments,
    read_settings,
)
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, UnsupportedError
from paceline.planning.captures import captures_for
from paceline.types import RolloutRequest

PROMPT = [1, 5, 9, 13]

USER = """
import json, sys
from vllm import LLM, SamplingParams
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 27,
          distributed_executor_backend="uni", **options)
params = SamplingParams(temperature=1.0, max_tokens=48, n=3, logprobs=1, logit_bias={3: -1.0}, min_p=0.001)
out = llm.generate([{"prompt_token_ids": [1, 5, 9, 13]}] * 2, params, use_tqdm=False)
seeded = SamplingParams(temperature=1.0, max_tokens=48, seed=77)
one = llm.generate([{"prompt_token_ids": [1, 5, 9, 13]}], seeded, use_tqdm=False)
print("RESULT" + json.dumps({
    "scheduler": str(llm.llm_engine.vllm_config.scheduler_config.scheduler_cls),
    "tokens": [list(c.token_ids) for o in out for c in o.outputs],
    "seeded": list(one[0].outputs[0].token_ids),
    "lengths": [len(c.logprobs) == len(c.token_ids) for o in out for c in o.outputs],
}))
"""


def run_user(model: Path, options: dict[str, object], **environment: str) -> dict[str, object]:
    """Run a plain vLLM program in a fresh process."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
    result = subprocess.run(
        [sys.executable, "-c", USER, str(model), json.dumps(options)],
        env={**base, "VLLM_LOGGING_LEVEL": "INFO", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-4000:]
    return {**json.loads(lines[0][len("RESULT") :]), "log": result.stdout + result.stderr}


@pytest.fixture(scope="module")
def by_environment(model_dir: Path) -> dict[str, object]:
    """A program that does not know of Paceline, with the engine in a process of its own (vLLM's default)."""
    return run_user(
        model_dir,
        {},
        PACELINE="1",
        PACELINE_SETTINGS='{"run_seed": 3}',
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )


def test_the_environment_alone_switches_on(by_environment: dict[str, object]) -> None:
    assert SCHEDULER in str(by_environment["scheduler"])
    tokens = [tuple(t) for t in by_environment["tokens"]]  # type: ignore[attr-defined]
    assert len(tokens) == 6
    assert len(set(tokens)) == 6, "equal prompts must get different keys"
    assert all(by_environment["lengths"])  # type: ignore[arg-type]
    assert "is on: drafter suffix, budget marginal, run seed 3" in str(by_environment["log"])


def test_a_seed_is_a_key(by_environment: dict[str, object], model_dir: Path) -> None:
    from vllm import SamplingParams

    with RolloutEngine(
        model_dir, EngineSettings(), dtype="float32", max_model_len=256, kv_cache_bytes=1 << 27
    ) as engine:
        own = engine.generate([RolloutRequest(tuple(PROMPT), 48, key=77)], SamplingParams(temperature=1.0))
    assert list(own[0].tokens) == by_environment["seeded"]


def test_engine_arguments_give_the_same_tokens(by_environment: dict[str, object], model_dir: Path) -> None:
    settings = EngineSettings(run_seed=3)
    by_arguments = run_user(model_dir, engine_arguments(settings), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert by_arguments["tokens"] == by_environment["tokens"]


def make_args(**changes: object) -> SimpleNamespace:
    base = {
        "scheduler_cls": None,
        "worker_cls": "auto",
        "speculative_config": None,
        "additional_config": {"theirs": 1},
        "async_scheduling": None,
        "enforce_eager": True,
        "max_num_seqs": 64,
        "cudagraph_capture_sizes": None,
        "max_cudagraph_capture_size": None,
        "compilation_config": CompilationConfig(),
        "block_size": None,
    }
    return SimpleNamespace(**{**base, **changes})


def test_switching_on_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SETTINGS", '{"run_seed": 9}')
    args = make_args()
    plugin.switch_on(args)
    assert args.scheduler_cls == SCHEDULER
    assert args.additional_config["theirs"] == 1
    assert read_settings(args).run_seed == 9
    plugin.switch_on(args)  # a Paceline engine already: left alone


def test_what_is_changed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(plugin._LOGGER, "warning", lambda form, *values: said.append(form % values))
    plugin.switch_on(make_args(async_scheduling=True, enforce_eager=False))
    assert [line.split(":")[0] for line in said] == [
        "PACELINE=1 sets async_scheduling=False instead of True",
        "PACELINE=1 sets enforce_eager=True instead of False",
    ]
    assert all(line.split(": ")[1] for line in said)


@pytest.mark.parametrize(
    "chosen",
    [
        {"cudagraph_capture_sizes": [1, 2]},
        {"max_cudagraph_capture_size": 8},
        {"compilation_config": CompilationConfig(max_cudagraph_capture_size=8)},
    ],
)
def test_graphs_are_those_of_the_budget_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, object]
) -> None:
    """As on a GPU, as far as vLLM's arguments; nothing is captured here."""
    monkeypatch.setattr("paceline.engine.compat.is_cpu", lambda: False)
    monkeypatch.setenv("PACELINE_SETTINGS", '{"budget": {"policy": "fixed", "fixed_tokens": 3}}')
    args = make_args()
    plugin.switch_on(args)
    sizes = args.cudagraph_capture_sizes
    assert sizes == list(captures_for(read_settings(args).budget, 32, 64, 6 << 30))
    assert sizes[-1] == 64 * 4
    user = make_args(**chosen)
    plugin.switch_on(user)
    assert user.cudagraph_capture_sizes == chosen.get("cudagraph_capture_sizes")


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("chosen", [None, 64])
def test_blocks_are_short_on_the_cpu_unless_the_user_says(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, chosen: int | None
) -> None:
    monkeypatch.setattr("paceline.engine.compat.is_cpu", lambda: is_cpu)
    args = make_args(block_size=chosen)
    plugin.switch_on(args)
    assert args.block_size == (BLOCK_TOKENS if is_cpu and chosen is None else chosen)


def test_a_draft_models_weights_survive_a_deep_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """On V2, where nobody loads them again; what the user keeps is kept too."""
    monkeypatch.setenv("PACELINE_SETTINGS", '{"model_drafter": "drafter"}')
    monkeypatch.setattr("paceline.engine.arguments._check_head", lambda *_: None)
    for is_v2, kept in ((True, ["lm_head.*", "draft.*"]), (False, ["lm_head.*"])):
        monkeypatch.setattr("paceline.engine.compat.uses_v2", lambda is_v2=is_v2: is_v2)
        args = make_args(sleep_preserve_parameter_names=["lm_head.*"])
        plugin.switch_on(args)
        assert args.sleep_preserve_parameter_names == kept


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(compiled=False)])
def test_engines_without_graphs_are_given_no_sizes(
    monkeypatch: pytest.MonkeyPatch, settings: EngineSettings
) -> None:
    monkeypatch.setattr("paceline.engine.compat.is_cpu", lambda: settings.compiled is None)
    assert graph_arguments(settings, 64) == {}


@pytest.mark.parametrize(
    ("is_v2", "settings", "kept"),
    [
        (True, {}, True),
        (True, {"model_drafter": "small"}, True),
        (True, {"model_drafter": "small", "draft_worker": True}, False),
        (False, {}, False),
    ],
)
def test_steps_overlap_where_the_user_says_so_and_they_can(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool, settings: dict[str, object], kept: bool
) -> None:
    monkeypatch.setenv("PACELINE_SETTINGS", json.dumps(settings))
    monkeypatch.setattr("paceline.engine.arguments._check_head", lambda *_: None)
    monkeypatch.setattr("paceline.engine.compat.uses_v2", lambda: is_v2)
    for wanted in (True, None):
        args = make_args(async_scheduling=wanted, sleep_preserve_parameter_names=[])
        plugin.switch_on(args)
        assert args.async_scheduling is bool(wanted and kept)


@pytest.mark.parametrize(
    "changes",
    [{"scheduler_cls": "x.Y"}, {"worker_cls": "x.Y"}, {"speculative_config": {"method": "ngram"}}],
)
def test_foreign_engines_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        plugin.switch_on(make_args(**changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PACELINE", "maybe", "use 1 or 0"),
        ("PACELINE_SETTINGS", "{", "not JSON"),
        ("PACELINE_SETTINGS", "[]", "JSON object"),
        ("PACELINE_SETTINGS", '{"run_sed": 1}', "run_sed"),
        ("PACELINE_SETTINGS", '{"max_draft_tokens": 500}', "max_draft_tokens=500: must be at most 127"),
    ],
)
def test_wrong_environments_are_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        plugin.is_switched_on() if name == "PACELINE" else plugin.settings_from_environment()


def test_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE", "0")
    assert not plugin.is_switched_on()
    monkeypatch.delenv("PACELINE")
    assert not plugin.is_switched_on()


def test_settings_are_needed() -> None:
    with pytest.raises(ConfigError, match="engine_arguments"):
        read_settings(SimpleNamespace(additional_config={}))


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """vLLM's arguments of an engine in a process with PACELINE=1."""
    monkeypatch.setenv("PACELINE", "1")
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    plugin.register()
    return EngineArgs


def test_an_engine_that_pools_is_left_alone(switched_on: type[EngineArgs], model_dir: Path) -> None:
    """A reward model beside the policy."""
    for runner, is_on in (("pooling", False), ("generate", True), ("auto", True)):
        config = switched_on(str(model_dir), runner=runner, max_model_len=64).create_engine_config()
        assert (config.scheduler_config.scheduler_cls == SCHEDULER) == is_on
        assert (config.speculative_config is not None) == is_on


def test_with_lora_drafts_are_as_long_as_vllm_has_room_for(
    switched_on: type[EngineArgs], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(plugin._LOGGER, "warning", lambda form, *values: said.append(form % values))
    args = switched_on(
        str(model_dir), max_model_len=64, enable_lora=True, max_num_seqs=64, max_num_batched_tokens=640
    )
    config = args.create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 9
    assert read_settings(config).max_draft_tokens == 9
    assert any("at most 9 tokens" in line for line in said)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):  # no room for any draft
        switched_on(
            str(model_dir), max_model_len=64, enable_lora=True, max_num_seqs=64, max_num_batched_tokens=64
        ).create_engine_config()
