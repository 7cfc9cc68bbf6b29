"""The one promise: the tokens (and their log-probabilities, bitwise) are plain decoding's, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from drafters import ScriptedDrafter
from sampling_options import OPTIONS
from tiny_model import VOCAB

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.types import Response, RolloutRequest

MAX_TOKENS = 96
FIXED = BudgetSettings(policy="fixed", fixed_tokens=8)


def requests(prompts: int = 6, samples: int = 4) -> list[RolloutRequest]:
    rng = np.random.default_rng(5)
    made = []
    for prompt in range(prompts):
        tokens = (1, *rng.integers(3, VOCAB, 4 + 9 * prompt).tolist())
        made += [
            RolloutRequest(prompt=tokens, max_tokens=MAX_TOKENS, key=1000 * prompt + sample, sample=sample)
            for sample in range(samples)
        ]
    return made


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RolloutEngine]:
    """An engine that verifies up to eight drafts of every request in every step."""
    settings = EngineSettings(budget=FIXED, max_draft_tokens=16)
    with RolloutEngine(
        model_dir, settings, dtype=request.param, max_model_len=1024, kv_cache_bytes=1 << 28
    ) as made:
        yield made


def run(
    engine: RolloutEngine, wanted: list[RolloutRequest], drafter: object = None, **options: object
) -> list[Response]:
    """Generate with `drafter` in place of the engine's own (None: plain decoding), from an empty cache."""
    from vllm import SamplingParams

    own, engine.scheduler.loop.free.drafter = engine.scheduler.loop.free.drafter, drafter
    try:
        engine.reset_prefix_cache()
        options = {"temperature": 1.0, "max_tokens": MAX_TOKENS, **options}
        return engine.generate(wanted, SamplingParams(**options))
    finally:
        engine.scheduler.loop.free.drafter = own


def assert_same(one: list[Response], other: list[Response]) -> None:
    assert [r.tokens for r in one] == [r.tokens for r in other]
    assert [r.finish_reason for r in one] == [r.finish_reason for r in other]
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(np.float32(a.logprobs), np.float32(b.logprobs)), "logprobs differ bitwise"
        assert np.float32(a.logprobs).tolist() == list(a.logprobs), "not float32, as a fleet packs them"


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine) -> list[Response]:
    return run(engine, requests())


def known(plain: list[Response]) -> dict[int, tuple[int, ...]]:
    return {r.key: (*r.request.prompt, *r.tokens) for r in plain}


def test_plain_decoding_varies_with_the_key(plain: list[Response]) -> None:
    assert len({r.tokens for r in plain}) == len(plain)
    assert all(r.num_draft_tokens == 0 and r.num_steps == len(r.tokens) for r in plain)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_drafts_change_no_token(engine: RolloutEngine, plain: list[Response], right: float) -> None:
    drafted = run(engine, requests(), ScriptedDrafter(known(plain), right, VOCAB))
    assert_same(plain, drafted)
    assert sum(r.num_draft_tokens for r in drafted) > 500
    accepted, tokens = (
        sum(r.num_accepted_tokens for r in drafted),
        sum(len(r.tokens) for r in drafted),
    )
    low, high = {0.0: (0, 0.2), 0.6: (0.2, 0.7), 1.0: (0.7, 1.0)}[right]  # garbage is right one time in 61
    assert low * tokens < accepted < high * tokens
    assert sum(r.num_steps for r in drafted) == tokens - accepted


def test_the_bandits_strategies_change_no_token(
    engine: RolloutEngine, plain: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to sixteen drafts of a request, in batches of every bucket, whether that pays or not."""
    monkeypatch.setattr("paceline.planning.bandit.move_threshold", lambda state, *_: state)
    loop = engine.scheduler.loop
    before = loop.policy_state
    loop.use_budget(BudgetSettings(policy="bandit", bandit_epsilon=0.2))
    try:
        for count in (2, 6, 12, 24):
            drafter = ScriptedDrafter(known(plain), 0.95, VOCAB, width=16)
            assert_same(plain[:count], run(engine, requests()[:count], drafter))
        learned = loop.policy_state.budget.bandit
    finally:
        loop.use_budget(FIXED, before)
    assert all(any(arms) for arms in learned.trials), "a bucket was never drafted for"
    assert max(trial.verified for trial in chain(*learned.trials[0])) > 8


def test_suffix_drafts_change_no_token(engine: RolloutEngine, plain: list[Response]) -> None:
    drafted = run(engine, requests(), engine.scheduler.loop.free.drafter)
    assert_same(plain, drafted)
    assert sum(r.num_accepted_tokens for r in drafted) > 0


def test_batch_size_changes_no_token(engine: RolloutEngine, plain: list[Response]) -> None:
    wanted = requests()
    alone = [run(engine, [request])[0] for request in wanted[::5]]
    assert_same(plain[::5], alone)
    odd = ScriptedDrafter(known(plain), 0.6, VOCAB)
    assert_same(plain[:7], run(engine, wanted[:7], odd))


def test_chunks_change_no_token(engine: RolloutEngine, plain: list[Response]) -> None:
    """A response that is cut after any number of tokens and submitted again goes on as if nothing had happened."""
    cut = [
        replace(response.request, generated=response.tokens[: 1 + 7 * index % (len(response.tokens) - 1)])
        for index, response in enumerate(plain)
        if len(response.tokens) > 2
    ]
    whole = [response for response in plain if len(response.tokens) > 2]
    resumed = run(engine, cut, ScriptedDrafter(known(plain), 0.6, VOCAB))
    assert [r.tokens for r in resumed] == [r.tokens for r in whole]
    for before, after in zip(whole, resumed, strict=True):
        tail = np.float32(before.logprobs)[-len(after.logprobs) :]
        assert np.array_equal(tail, np.float32(after.logprobs))


@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_options_are_exact_under_drafts(engine: RolloutEngine, name: str) -> None:
    wanted = requests(3, 3)
    base = run(engine, wanted, **OPTIONS[name])
    drafted = run(engine, wanted, ScriptedDrafter(known(base), 0.7, VOCAB), **OPTIONS[name])
    assert_same(base, drafted)
    assert sum(r.num_accepted_tokens for r in drafted) > 0


@pytest.mark.parametrize("name", ["min tokens", "penalties", "stop token"])
def test_options_count_what_was_generated_before_a_cut(engine: RolloutEngine, name: str) -> None:
    """As another program resumes: by `paceline_generated` in the request's extra_args, with the same options."""
    from vllm import SamplingParams

    for request, whole in zip(requests(3, 2), run(engine, requests(3, 2), **OPTIONS[name]), strict=True):
        cut = len(whole.tokens) // 2
        options = SamplingParams(
            temperature=1.0,
            max_tokens=MAX_TOKENS - cut,
            extra_args={"paceline_key": request.key, "paceline_generated": cut},
            **OPTIONS[name],
        )
        prompt = {"prompt_token_ids": [*request.prompt, *whole.tokens[:cut]]}
        engine.vllm_engine.add_request("resumed", prompt, options)
        tokens: list[int] = []
        while engine.vllm_engine.has_unfinished_requests():
            tokens = [token for out in engine.vllm_engine.step() for token in out.outputs[0].token_ids]
        assert (*whole.tokens[:cut], *tokens) == whole.tokens


def test_options_do_what_they_say(engine: RolloutEngine) -> None:
    wanted = requests(2, 2)
    biased = run(engine, wanted, logit_bias={9: -100.0, 2: -100.0})
    assert all(9 not in r.tokens and len(r.tokens) == MAX_TOKENS for r in biased)
    allowed = run(engine, wanted, allowed_token_ids=[2, 7, 8])
    assert all(set(r.tokens) <= {2, 7, 8} for r in allowed)
    long = run(engine, wanted, min_tokens=50)
    assert all(len(r.tokens) >= 50 for r in long)


def named_logprobs(engine: RolloutEngine, drafter: object) -> dict[str, list[object]]:
    """Tokens and log-probabilities of requests past RolloutEngine, as a server sends them; every second names ids."""
    from vllm import SamplingParams

    own, engine.scheduler.loop.free.drafter = engine.scheduler.loop.free.drafter, drafter
    try:
        for index, request in enumerate(requests(3, 2)):
            named = (
                {"logprob_token_ids": [5, 9 + index, 40][: 1 + index // 2]} if index % 2 else {"logprobs": 2}
            )
            options = SamplingParams(
                temperature=1.0,
                max_tokens=40,
                ignore_eos=True,
                extra_args={"paceline_key": request.key},
                **named,
            )
            engine.vllm_engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, options)
        found: dict[str, list[object]] = {}
        while engine.vllm_engine.has_unfinished_requests():
            for output in engine.vllm_engine.step():
                [made] = output.outputs
                values = [{id: (x.logprob, x.rank) for id, x in at.items()} for at in made.logprobs]
                found[output.request_id] = list(zip(made.token_ids, values, strict=True))
        return found
    finally:
        engine.scheduler.loop.free.drafter = own


@pytest.mark.parametrize("right", [0.0, 0.7])
def test_logprobs_of_named_ids_are_exact_under_drafts(engine: RolloutEngine, right: float) -> None:
    base = named_logprobs(engine, None)
    for index in (1, 3, 5):
        wanted = {5, 9 + index, 40} if index > 3 else {5, 9 + index} if index > 1 else {5}
        assert all({token, *wanted} == set(values) for token, values in base[str(index)])
    futures = {
        request.key: (*request.prompt, *(token for token, _ in base[str(index)]))
        for index, request in enumerate(requests(3, 2))
    }
    assert named_logprobs(engine, ScriptedDrafter(futures, right, VOCAB)) == base


def test_bad_words_are_exact_under_drafts(engine: RolloutEngine) -> None:
    wanted = requests(3, 3)
    free = run(engine, wanted)
    pair = [chr(33 + t - 3) for t in free[0].tokens[4:6] if t > 2]
    options = {"bad_words": ["".join(pair)]}
    base = run(engine, wanted, **options)
    assert base[0].tokens != free[0].tokens
    assert_same(base, run(engine, wanted, ScriptedDrafter(known(base), 0.7, VOCAB), **options))


def test_stop_strings_end_at_the_same_token(engine: RolloutEngine) -> None:
    wanted = requests(3, 3)
    free = run(engine, wanted)
    stops = [chr(33 + r.tokens[10] - 3) for r in free if len(r.tokens) > 11 and r.tokens[10] > 2]
    options = {"stop": stops[:2]}
    base = run(engine, wanted, **options)
    assert any(len(a.tokens) < len(b.tokens) for a, b in zip(base, free, strict=True))
    assert_same(base, run(engine, wanted, ScriptedDrafter(known(base), 0.9, VOCAB), **options))
