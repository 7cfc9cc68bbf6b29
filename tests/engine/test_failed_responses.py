"""A response that has no next token ends alone, with an error; the others get the tokens that they would have had."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafters import ScriptedDrafter, ScriptedPaths
from tiny_model import VOCAB, make_model
from vllm.v1.request import RequestStatus

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.rollout_engine import RolloutEngine, TokenEvent
from paceline.errors import EngineError
from paceline.integrations.trl.generation import EngineGeneration
from paceline.types import Response, RolloutRequest

POISON = VOCAB - 1
"""A token whose embedding is NaN in the model of this file."""
GOOD = [RolloutRequest((1, 5, 9 + i), 40, key=100 + i) for i in range(4)]
LAST = 2


@pytest.fixture(scope="module")
def poisoned_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual random model, which turns NaN behind one token and never says that token by itself."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path_factory.mktemp("poisoned"), tie=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(poisoned_dir: Path) -> Iterator[RolloutEngine]:
    settings = EngineSettings(
        budget=BudgetSettings(policy="fixed", fixed_tokens=8), max_draft_tokens=8, num_paths=2
    )
    with RolloutEngine(
        poisoned_dir, settings, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 23
    ) as made:
        yield made


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 1.0, "logit_bias": {POISON: -100.0}} | options))


@pytest.fixture(scope="module")
def alone(engine: RolloutEngine) -> list[Response]:
    engine.set_drafting(False)
    made = engine.generate(GOOD, params())
    engine.set_drafting(True)
    return made


def finish(engine: RolloutEngine) -> dict[int, Response]:
    events: list[TokenEvent] = []
    while engine.num_running():
        events += engine.step()
    return {event.index: event.response for event in events if event.response is not None}


def draft_from(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, known: list[Response]) -> None:
    future = {r.key: (*r.request.prompt, *r.tokens) for r in known}
    monkeypatch.setattr(engine.scheduler.loop.free, "drafter", ScriptedDrafter(future, 0.9, POISON))


@pytest.mark.parametrize("drafts", [False, True])
def test_options_that_leave_no_token_end_one_response(
    engine: RolloutEngine, alone: list[Response], monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    if drafts:
        draft_from(engine, monkeypatch, alone)
    else:
        monkeypatch.setattr(engine.scheduler.loop.free, "drafter", None)
    for index, request in enumerate(GOOD):
        engine.submit(index, request, params())
    engine.step()
    nothing = params(allowed_token_ids=[LAST], stop_token_ids=[LAST], min_tokens=1)
    engine.submit(9, RolloutRequest((1, 6), 20, key=9), nothing)
    ended = finish(engine)
    assert ended[9].finish_reason == "error"
    assert ended[9].tokens == ()
    assert "leave no token to draw; loosen allowed_token_ids" in str(ended[9].failure)
    assert [ended[i].tokens for i in range(len(GOOD))] == [r.tokens for r in alone]
    assert [ended[i].logprobs for i in range(len(GOOD))] == [r.logprobs for r in alone]
    assert any(ended[i].num_accepted_tokens for i in range(len(GOOD))) == drafts


def test_who_scores_a_prompt_and_gets_no_token_ends_alone(
    engine: RolloutEngine, alone: list[Response]
) -> None:
    """vLLM's scheduler has no place for log-probabilities of a prompt without a token behind it."""
    for index, request in enumerate(GOOD):
        engine.submit(index, request, params())
    vllm = engine.vllm_engine
    nothing = params(allowed_token_ids=[LAST], stop_token_ids=[LAST], min_tokens=1, prompt_logprobs=1)
    vllm.add_request("scored", {"prompt_token_ids": [1, 6]}, nothing)
    ended = finish(engine)
    assert [ended[i].tokens for i in range(len(GOOD))] == [r.tokens for r in alone]
    assert not vllm.has_unfinished_requests()


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_response_keeps_what_it_had_and_drafts_do_not_move_its_end(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, right: float
) -> None:
    request, word = RolloutRequest((1, 7), 20, key=77), chr(33 + 9 - 3)
    options = params(logit_bias=None, allowed_token_ids=[9], bad_words=[3 * word])
    [plain] = engine.generate([request], options, on_failure="deliver")
    assert (plain.tokens, plain.finish_reason) == ((9, 9), "error")
    known = {77: (1, 7, *[9] * 10)}
    monkeypatch.setattr(engine.scheduler.loop.free, "drafter", ScriptedDrafter(known, right, POISON))
    [drafted] = engine.generate([request], options, on_failure="deliver")
    assert (drafted.tokens, drafted.logprobs) == (plain.tokens, plain.logprobs)
    assert drafted.failure == plain.failure


def test_nan_ends_one_response(
    engine: RolloutEngine, alone: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_from(engine, monkeypatch, alone)
    for index, request in enumerate(GOOD):
        engine.submit(index, request, params())
    engine.submit(9, RolloutRequest((1, POISON), 20, key=9), params())
    ended = finish(engine)
    assert ended[9].finish_reason == "error"
    assert "the model gave NaN for its next token" in str(ended[9].failure)
    assert [ended[i].tokens for i in range(len(GOOD))] == [r.tokens for r in alone]


def test_a_failure_is_raised_unless_it_shall_be_delivered(
    engine: RolloutEngine, alone: list[Response]
) -> None:
    wanted = [*GOOD[:2], RolloutRequest((1, POISON), 20, key=9)]
    with pytest.raises(EngineError, match="response 2 ended with 'error': the model gave NaN"):
        engine.generate(wanted, params())
    assert engine.num_running() == 0
    one, two, failed = engine.generate(wanted, params(), on_failure="deliver")
    assert [one.tokens, two.tokens] == [r.tokens for r in alone[:2]]
    assert failed.finish_reason == "error"
    events = list(engine.stream(wanted, params(), on_failure="deliver"))
    assert [event.index for event in events if event.failure is not None] == [2]


def test_a_trainer_of_ones_own_gets_a_failure_with_the_others(engine: RolloutEngine) -> None:
    trainer: Any = SimpleNamespace(model=SimpleNamespace(training=True), state=SimpleNamespace(global_step=0))
    generation = EngineGeneration(
        trainer=trainer,
        engine=engine,
        run_seed=0,
        model=None,
        accelerator=SimpleNamespace(num_processes=1),
        processing_class=None,
        max_completion_length=2,
        temperature=2.0,
        generation_kwargs={"allowed_token_ids": [9, POISON]},
    )
    made = generation.generate([[1, 7 + i] for i in range(12)], None, 1)[1]
    assert {row[0] for row in made} == {9, POISON}
    for row, response in zip(made, generation.responses, strict=True):
        assert (response.failure is not None) == (row == [POISON])


@pytest.mark.parametrize("drafts", [False, True])
def test_nan_does_not_outlive_its_response(
    engine: RolloutEngine, alone: list[Response], monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    """More responses than the cache has blocks: the blocks of those that ended in NaN are used again."""
    monkeypatch.setattr(engine.scheduler.loop.free, "drafter", None)
    if drafts:
        draft_from(engine, monkeypatch, alone)
    poisoned = [RolloutRequest((1, 6 + i, 7, POISON), 20, key=i) for i in range(24)]
    engine.reset_prefix_cache()
    failed = engine.generate(poisoned, params(), on_failure="deliver")
    assert {r.finish_reason for r in failed} == {"error"}
    for _ in range(4):
        again = engine.generate(GOOD, params())
        assert [r.tokens for r in again] == [r.tokens for r in alone]
        assert [r.logprobs for r in again] == [r.logprobs for r in alone]


@pytest.mark.parametrize("rights", [(0.0,), (0.7,), (0.0, 1.0), (0.7, 0.7)])
def test_a_rejected_draft_that_is_nan_changes_nothing(
    engine: RolloutEngine, alone: list[Response], monkeypatch: pytest.MonkeyPatch, rights: tuple[float, ...]
) -> None:
    """Neither for the response whose draft it was, whichever path it was on, nor for others that get its blocks."""
    future = {r.key: (*r.request.prompt, *r.tokens) for r in alone}
    poisonous = ScriptedPaths(future, rights, VOCAB, lowest=POISON)
    engine.reset_prefix_cache()
    for drafter in (poisonous, None, poisonous, None):
        monkeypatch.setattr(engine.scheduler.loop.free, "drafter", drafter)
        engine.take_observations()
        for _ in range(3):
            again = engine.generate(GOOD, params())
            assert [r.tokens for r in again] == [r.tokens for r in alone]
            assert [r.logprobs for r in again] == [r.logprobs for r in alone]
        assert any(r.num_draft_tokens for r in again) == (drafter is poisonous)
        alternatives = sum(step.num_alternatives for step in engine.take_observations())
        assert (alternatives > 0) == (drafter is poisonous and len(rights) > 1)


def test_a_spoilt_step_is_not_drafted_again(
    engine: RolloutEngine, alone: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response in a batch that has not changed for many steps."""
    withdrawn: list[int] = []
    withdraw = engine.scheduler._withdraw

    def count(name: str, num_tokens: int) -> None:
        withdrawn.append(steps)
        withdraw(name, num_tokens)

    monkeypatch.setattr(engine.scheduler, "_withdraw", count)
    monkeypatch.setattr(engine.scheduler.loop.free, "drafter", ScriptedDrafter({}, 0.0, VOCAB, lowest=POISON))
    draft = engine.scheduler.loop.free.drafter.draft
    engine.reset_prefix_cache()
    engine.submit(0, GOOD[0], params())
    steps, events = 0, []
    nothing = ScriptedDrafter({}, 0.0, VOCAB, width=0).draft
    while engine.num_running():
        monkeypatch.setattr(engine.scheduler.loop.free.drafter, "draft", draft if steps >= 10 else nothing)
        events += engine.step()
        steps += 1
    [made] = [event.response for event in events if event.response is not None]
    assert made.tokens == alone[0].tokens
    assert len(withdrawn) > 3
    assert all(later - earlier > 1 for earlier, later in pairwise(withdrawn)), withdrawn


def test_nan_of_an_aborted_response_does_not_outlive_it(
    engine: RolloutEngine, alone: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted after the step that gives NaN has run, and before the scheduler hears of it."""
    monkeypatch.setattr(engine.scheduler.loop.free, "drafter", None)
    update = engine.scheduler.update_from_output

    def abort_first(*args: Any) -> Any:
        poisoned = [name for name in engine.scheduler.requests if engine.scheduler.live[name].key < 24]
        engine.scheduler.finish_requests(poisoned, RequestStatus.FINISHED_ABORTED)
        return update(*args)

    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "update_from_output", abort_first)
        for index in range(24):
            engine.submit(index, RolloutRequest((1, 6 + index, 7, POISON), 20, key=index), params())
        engine.step()
    assert not engine.scheduler.requests
    engine.abort(list(range(24)), keep_kv=False)
    for _ in range(4):
        again = engine.generate(GOOD, params())
        assert [r.tokens for r in again] == [r.tokens for r in alone]
        assert [r.logprobs for r in again] == [r.logprobs for r in alone]


def test_the_command_says_by_its_exit_code_that_responses_failed(poisoned_dir: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [1, token, 9]}) + "\n" for token in (5, POISON)))
    options = ["--out", out, "--max-tokens", "4", "--dtype", "float32", "--kv-cache-gib", "0.05", "--eager"]
    words = [sys.executable, "-m", "paceline.cli", "rollout", poisoned_dir, prompts, *options]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 failed (their lines say why)" in done.stderr.replace("\n", " ")
    reasons = {line["id"]: line["finish_reason"] for line in map(json.loads, out.read_text().splitlines())}
    assert reasons == {1: "length", 2: "error"}
