"""Several draft paths per request: the tokens and log-probabilities of plain decoding, bitwise, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from drafters import ScriptedDrafter, ScriptedPaths
from sampling_options import OPTIONS
from tiny_model import VOCAB, make_model

from paceline.config import BudgetSettings, EngineSettings
from paceline.engine.arguments import parse_settings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, UnsupportedError
from paceline.types import Response, RolloutRequest

MAX_TOKENS = 64
MAX_MODEL_LEN = 320


def make_engine(model_dir: Path, dtype: str, **options: object) -> RolloutEngine:
    settings = EngineSettings(
        budget=BudgetSettings(policy="fixed", fixed_tokens=8),
        max_draft_tokens=8,
        num_paths=4,
        max_alternatives=64,
    )
    return RolloutEngine(
        model_dir, settings, dtype=dtype, max_model_len=MAX_MODEL_LEN, kv_cache_bytes=1 << 28, **options
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[RolloutEngine]:
    """An engine that verifies up to four paths of up to eight tokens of every request in every step."""
    with make_engine(model_dir, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def raw_engine(model_dir: Path) -> Iterator[RolloutEngine]:
    """The same with log-probabilities before temperature and filters."""
    with make_engine(model_dir, "float32", logprobs="raw") as made:
        yield made


def requests(
    lengths: tuple[int, ...] = (5, 20, 60, 100, 118, 127, 128, 180, 246, 290),
) -> list[RolloutRequest]:
    """Two samples of each prompt length; contexts cross blocks, the last ends at the model's."""
    rng = np.random.default_rng(8)
    made = []
    for index, length in enumerate(lengths):
        prompt = (1, *rng.integers(3, VOCAB, length - 1).tolist())
        made += [
            RolloutRequest(prompt=prompt, max_tokens=MAX_TOKENS, key=100 * index + sample, sample=sample)
            for sample in range(2)
        ]
    return made


def run(
    engine: RolloutEngine, wanted: list[RolloutRequest], drafter: object = None, **options: object
) -> list[Response]:
    """Generate with `drafter` in place of the engine's own (None: plain decoding), from an empty cache."""
    from vllm import SamplingParams

    own, engine.scheduler.loop.free.drafter = engine.scheduler.loop.free.drafter, drafter
    try:
        engine.reset_prefix_cache()
        return engine.generate(
            wanted, SamplingParams(**{"temperature": 1.0, "max_tokens": MAX_TOKENS, **options})
        )
    finally:
        engine.scheduler.loop.free.drafter = own


def assert_same(one: list[Response], other: list[Response]) -> None:
    assert [r.tokens for r in one] == [r.tokens for r in other]
    assert [r.finish_reason for r in one] == [r.finish_reason for r in other]
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(np.float32(a.logprobs), np.float32(b.logprobs)), "logprobs differ bitwise"


def known(plain: list[Response]) -> dict[int, tuple[int, ...]]:
    return {r.key: (*r.request.prompt, *r.tokens) for r in plain}


def steps(responses: list[Response]) -> int:
    return sum(r.num_steps for r in responses)


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine) -> list[Response]:
    return run(engine, requests())


@pytest.fixture(scope="module")
def single(engine: RolloutEngine, plain: list[Response]) -> Callable[[float], list[Response]]:
    """The same with a single path of which so large a share is right."""

    @cache
    def generate(right: float) -> list[Response]:
        return run(engine, requests(), ScriptedPaths(known(plain), (right,), VOCAB))

    return generate


RIGHTS = {
    "alternative right": (0.0, 1.0),
    "both partly right": (0.7, 0.7),
    "four partly right": (0.7, 0.6, 0.8, 0.7),
    "last right": (0.5, 0.0, 0.5, 1.0),
    "garbage": (0.0, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", RIGHTS)
def test_paths_change_no_token(
    engine: RolloutEngine, plain: list[Response], single: Callable[[float], list[Response]], name: str
) -> None:
    rights = RIGHTS[name]
    engine.take_observations()
    drafted = run(engine, requests(), ScriptedPaths(known(plain), rights, VOCAB))
    seen = engine.take_observations()
    assert_same(plain, drafted)
    assert sum(s.num_alternatives for s in seen) > len(seen)
    assert sum(s.num_draft_tokens for s in seen) == sum(r.num_draft_tokens for r in drafted)
    if max(rights) == 0.0:
        return
    assert_same(plain, single(rights[0]))
    assert steps(drafted) < 0.85 * steps(single(rights[0]))


def test_responses_reach_the_models_length(plain: list[Response]) -> None:
    longest = max(len(r.request.prompt) + len(r.tokens) for r in plain)
    assert longest == MAX_MODEL_LEN
    assert any(len(r.tokens) == MAX_TOKENS for r in plain)


def test_few_requests_at_a_time(engine: RolloutEngine, plain: list[Response]) -> None:
    drafter = ScriptedPaths(known(plain), (0.5, 0.9, 0.6), VOCAB)
    for index in (0, 9, 13, 19):
        assert_same(plain[index : index + 1], run(engine, requests()[index : index + 1], drafter))


def test_chunks_change_no_token(engine: RolloutEngine, plain: list[Response]) -> None:
    whole = [response for response in plain if len(response.tokens) > 2]
    cut = [
        replace(r.request, generated=r.tokens[: 1 + 5 * index % (len(r.tokens) - 1)])
        for index, r in enumerate(whole)
    ]
    resumed = run(engine, cut, ScriptedPaths(known(plain), (0.3, 0.9), VOCAB))
    assert [r.tokens for r in resumed] == [r.tokens for r in whole]
    for before, after in zip(whole, resumed, strict=True):
        tail = np.float32(before.logprobs)[-len(after.logprobs) :]
        assert np.array_equal(tail, np.float32(after.logprobs))


CASES: dict[str, dict[str, object]] = {
    **{name: options for name, options in OPTIONS.items() if name not in {"top-k", "top-p", "min-p"}},
    "bad words": {"bad_words": ["(", "*+", ",-"]},
    "stop strings": {"stop": ["0", "7A"]},
}


@pytest.mark.parametrize("name", CASES)
def test_sampling_options_hold_on_every_path(engine: RolloutEngine, name: str) -> None:
    wanted = requests((5, 40, 120))
    base = run(engine, wanted, **CASES[name])
    drafted = run(engine, wanted, ScriptedPaths(known(base), (0.4, 0.8, 0.6), VOCAB), **CASES[name])
    assert_same(base, drafted)
    assert steps(drafted) < 0.75 * steps(base)


def top_logprobs(engine: RolloutEngine, drafter: object) -> list[list[dict[int, tuple[float, int]]]]:
    """Log-probability and rank of the sampled and the three likeliest tokens at every position of six responses."""
    from vllm import SamplingParams

    own, engine.scheduler.loop.free.drafter = engine.scheduler.loop.free.drafter, drafter
    found: list[list[dict[int, tuple[float, int]]]] = [[] for _ in range(6)]
    try:
        for index, request in enumerate(requests((5, 100, 126))):
            params = SamplingParams(temperature=0.8, top_k=30, max_tokens=MAX_TOKENS, logprobs=3)
            params.extra_args = {"paceline_key": request.key}
            engine.vllm_engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, params)
        while engine.vllm_engine.has_unfinished_requests():
            for output in engine.vllm_engine.step():
                if output.finished:
                    found[int(output.request_id)] = [
                        {token: (entry.logprob, entry.rank) for token, entry in place.items()}
                        for place in output.outputs[0].logprobs
                    ]
    finally:
        engine.scheduler.loop.free.drafter = own
    return found


def test_top_processed_logprobs_are_those_of_plain_decoding(engine: RolloutEngine) -> None:
    check_top_logprobs(engine)


def test_top_raw_logprobs_are_those_of_plain_decoding(raw_engine: RolloutEngine) -> None:
    check_top_logprobs(raw_engine)


def check_top_logprobs(engine: RolloutEngine) -> None:
    wanted = requests((5, 100, 126))
    base = run(engine, wanted, temperature=0.8, top_k=30)
    engine.reset_prefix_cache()
    expected = top_logprobs(engine, None)
    assert sum(map(len, expected)) == sum(len(r.tokens) for r in base)
    engine.reset_prefix_cache()
    assert top_logprobs(engine, ScriptedPaths(known(base), (0.2, 0.9, 0.7), VOCAB)) == expected


def test_suffix_paths_change_no_token_and_are_accepted_more(engine: RolloutEngine) -> None:
    wanted = [
        replace(r, key=1000 * r.key + sample, group=5) for r in requests((30,))[:1] for sample in range(12)
    ]
    base = run(engine, wanted)
    loop = engine.scheduler.loop
    single = loop._settings
    taken = []
    for num_paths in (1, 4):
        loop._settings = single.model_copy(update={"num_paths": num_paths})
        try:
            drafted = run(engine, wanted, loop.free.drafter)
        finally:
            loop._settings = single
        assert_same(base, drafted)
        taken.append(steps(drafted))
    assert taken[1] < taken[0]


def test_aborted_requests_disturb_no_one(engine: RolloutEngine, plain: list[Response]) -> None:
    from vllm import SamplingParams

    own = engine.scheduler.loop.free.drafter
    engine.scheduler.loop.free.drafter = ScriptedPaths(known(plain), (0.3, 0.9, 0.5), VOCAB)
    pool = engine.scheduler.kv_cache_manager.block_pool
    left = dict(enumerate(plain))
    try:
        engine.reset_prefix_cache()
        found: dict[int, Response] = {}
        params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)
        for count, event in enumerate(engine.stream(requests(), params)):
            if event.response is not None:
                found[event.index] = event.response
            if count == 45:
                running = sorted(set(left) - set(found))
                engine.abort(running[::3])
                for index in running[::3]:
                    del left[index]
            if set(left) <= set(found):
                break
        assert len(left) < len(plain)
        assert_same([plain[i] for i in sorted(left)], [found[i] for i in sorted(left)])
    finally:
        engine.scheduler.loop.free.drafter = own
    assert engine.scheduler.spare_blocks.ids
    engine.reset_prefix_cache()
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_spare_blocks_yield_to_requests() -> None:
    from vllm.v1.core.block_pool import BlockPool

    from paceline.engine.multipath.spare_blocks import SpareBlocks

    pool = BlockPool(num_gpu_blocks=81, enable_caching=True, hash_block_size=16)
    spare = SpareBlocks(pool, 8)
    assert spare.hold(demand=72) == 8
    assert len(set(spare.ids)) == 8
    assert pool.get_num_free_blocks() == 72
    assert spare.hold(demand=73) == 0
    assert spare.ids == []
    assert pool.get_num_free_blocks() == 80
    assert len(SpareBlocks(pool, 1000)._pool.blocks) == 81
    assert SpareBlocks(pool, 1000).hold(demand=0) == 10


def test_a_full_cache_falls_back_to_one_path(model_dir: Path) -> None:
    """Where KV memory is short, responses take it all and alternatives wait."""
    settings = EngineSettings(
        budget=BudgetSettings(policy="fixed", fixed_tokens=8), max_draft_tokens=8, num_paths=2
    )
    wanted = requests((100, 110, 120))
    with RolloutEngine(
        model_dir, settings, dtype="float32", max_model_len=256, kv_cache_bytes=9 << 18, block_size=128
    ) as small:
        pool = small.scheduler.kv_cache_manager.block_pool
        assert 8 < pool.num_gpu_blocks < 24
        base = run(small, wanted)
        small.take_observations()
        drafted = run(small, wanted, ScriptedPaths(known(base), (0.2, 0.9), VOCAB))
        assert_same(base, drafted)
        batches = {s.num_requests: s.num_alternatives for s in small.take_observations()}
        assert batches[max(batches)] == 0


def test_engines_that_were_not_tried_are_refused(tmp_path: Path, model_dir: Path) -> None:
    import json

    make_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="num_paths=1"):
        make_engine(tmp_path, "float32")
    alone = {"num_paths": 2, "drafter": "none", "model_drafter": "somewhere"}
    assert parse_settings(alone).num_paths == 2
    for settings in ({"num_paths": 2, "drafter": "lookup"}, {**alone, "draft_worker": True}):
        with pytest.raises(ConfigError, match="num_paths=1"):
            parse_settings(settings)


def test_drafters_of_one_path_still_serve(engine: RolloutEngine, plain: list[Response]) -> None:
    engine.take_observations()
    assert_same(plain, run(engine, requests(), ScriptedDrafter(known(plain), 0.7, VOCAB)))
    assert sum(s.num_alternatives for s in engine.take_observations()) == 0
