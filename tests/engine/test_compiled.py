"""Compiled mode: bitwise plain decoding under drafts, paths, chunks, any batch and new weights; the cache; refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import ScriptedDrafter, ScriptedPaths
from recorded_logits import recorded
from second_engine import SecondEngine
from tiny_model import VOCAB, make_model

from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, InstallError
from paceline.processor import best_linear_kernel
from paceline.types import Response, RolloutRequest

MAX_TOKENS = 48
OWN = "paceline-dot" if best_linear_kernel() == "paceline-dot" else "paceline"
"""The faster ones of Paceline's linear layers here."""
SETTINGS = EngineSettings(
    budget=BudgetSettings(policy="fixed", fixed_tokens=8),
    max_draft_tokens=8,
    num_paths=4,
    max_alternatives=64,
    compiled=True,
)
Digests = dict[tuple[int, int], bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("compiled"), layers=3, hidden=256, seed=3)


@pytest.fixture(
    scope="module", params=[("float32", "vllm"), ("bfloat16", "vllm"), ("bfloat16", OWN)], ids="-".join
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Number format, and whose linear layers."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def dtype(kind: tuple[str, str]) -> str:
    return kind[0]


@pytest.fixture(scope="module")
def engine(
    kind: tuple[str, str], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    dtype, kernel = kind
    pool = KvPoolSettings(directory=str(tmp_path_factory.mktemp("pool")))
    settings = SETTINGS.model_copy(update={"kv_pool": pool, "linear_kernel": kernel})
    with RolloutEngine(folder, settings, dtype=dtype, kv_cache_bytes=1 << 28) as made:
        yield made


def make_requests() -> list[RolloutRequest]:
    """64 of many lengths; beyond about 900 tokens of context the attention kernel's tiles change."""
    rng = np.random.default_rng(11)
    lengths = [3, 17, 130, 400, 1100, 1160, *range(5, 63)]
    return [
        RolloutRequest((1, *rng.integers(3, VOCAB, n - 1).tolist()), max_tokens=MAX_TOKENS, key=100 * n + i)
        for i, n in enumerate(lengths)
    ]


def run(
    engine: RolloutEngine, wanted: list[RolloutRequest], drafter: object = None, **options: object
) -> tuple[list[Response], Digests]:
    """Responses, and digests of the logits behind every token; from an empty cache, None: plain decoding."""
    from vllm import SamplingParams

    own, engine.scheduler.loop.free.drafter = engine.scheduler.loop.free.drafter, drafter
    try:
        engine.reset_prefix_cache()
        with recorded(engine) as found:
            made = engine.generate(
                wanted, SamplingParams(**{"temperature": 1.0, "ignore_eos": True, **options})
            )
        return made, dict(found)
    finally:
        engine.scheduler.loop.free.drafter = own


def assert_same(one: list[Response], other: list[Response]) -> None:
    assert [r.tokens for r in one] == [r.tokens for r in other]
    for a, b in zip(one, other, strict=True):
        tail = np.float32(a.logprobs)[len(a.logprobs) - len(b.logprobs) :]
        assert np.array_equal(tail, np.float32(b.logprobs)), "logprobs differ bitwise"


def assert_within(found: Digests, whole: Digests) -> None:
    assert found
    assert not [name for name, digest in found.items() if digest != whole[name]]


Plain = tuple[list[Response], Digests]


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine) -> Plain:
    assert engine.is_compiled
    return run(engine, make_requests())


def known(responses: list[Response]) -> dict[int, tuple[int, ...]]:
    return {r.key: (*r.request.prompt, *r.tokens) for r in responses}


@pytest.mark.parametrize("right", [0.0, 0.8])
def test_drafts_change_no_bit(engine: RolloutEngine, plain: Plain, right: float) -> None:
    drafted, digests = run(engine, make_requests(), ScriptedDrafter(known(plain[0]), right, VOCAB))
    assert_same(plain[0], drafted)
    assert digests == plain[1]
    assert sum(r.num_draft_tokens for r in drafted) > 500


@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
def test_the_batch_changes_no_bit(engine: RolloutEngine, plain: Plain, count: int) -> None:
    """A step of one token is the one that compiled code gets wrong where nothing is done."""
    for place in (0, 3, 5, 20) if count < 8 else (0,):
        some, digests = run(engine, make_requests()[place : place + count])
        assert_same(plain[0][place : place + count], some)
        assert_within(digests, plain[1])


def test_alternative_paths_change_no_bit(engine: RolloutEngine, plain: Plain) -> None:
    engine.take_observations()
    drafter = ScriptedPaths(known(plain[0]), (0.7, 0.6, 0.8, 0.7), VOCAB)
    drafted, digests = run(engine, make_requests()[:12], drafter)
    assert_same(plain[0][:12], drafted)
    assert_within(digests, plain[1])
    assert sum(step.num_alternatives for step in engine.take_observations()) > 50


def test_chunks_change_no_bit(engine: RolloutEngine, plain: Plain) -> None:
    cut = [
        replace(response.request, generated=response.tokens[: 1 + 7 * index % (MAX_TOKENS - 1)])
        for index, response in enumerate(plain[0])
    ]
    resumed, digests = run(engine, cut, ScriptedDrafter(known(plain[0]), 0.6, VOCAB))
    assert_same(plain[0], resumed)
    assert_within(digests, plain[1])


def test_sampling_options_are_exact_under_drafts(engine: RolloutEngine) -> None:
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}
    base, _ = run(engine, make_requests()[:8], **options)
    assert_same(
        base, run(engine, make_requests()[:8], ScriptedDrafter(known(base), 0.8, VOCAB), **options)[0]
    )


def test_keys_and_values_go_on_in_another_engine_and_process(
    engine: RolloutEngine, plain: Plain, dtype: str, folder: Path, tmp_path: Path
) -> None:
    """The second engine has another folder of the same architecture, other settings and length: it loads from cache."""
    copy = shutil.copytree(folder, tmp_path / "next checkpoint", copy_function=shutil.copy2)
    settings = engine.settings.model_copy(update={"num_paths": 1, "run_seed": 99})
    second = SecondEngine(copy, settings, dtype=dtype, max_model_len=1600, kv_cache_bytes=1 << 28)
    try:
        wanted = make_requests()[:8]
        halves = [replace(request, max_tokens=MAX_TOKENS // 2) for request in wanted]
        first, _ = run(engine, halves)
        second.ready()
        cut = [replace(r, generated=half.tokens) for r, half in zip(wanted, first, strict=True)]
        outcome = second.generate(cut, ignore_eos=True)
        assert_same(plain[0][:8], outcome.responses)
        assert outcome.counters.hits == len(cut)
        assert outcome.num_loaded == 1
    finally:
        second.close()


def test_new_weights_reach_compiled_code(
    engine: RolloutEngine, plain: Plain, folder: Path, dtype: str
) -> None:
    """The last test of the engine: it has other weights afterwards."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    stale = gap(plain[0][:6], policy)
    engine.push_weights(policy.named_parameters(), version=1)
    pushed, digests = run(engine, make_requests()[:6])
    limit = 1e-4 if dtype == "float32" else 0.2
    assert stale > 5 * limit, "the control: stale weights must be visible"
    assert gap(pushed, policy) < limit
    alone = [run(engine, [request])[1] for request in make_requests()[:6]]
    for found in alone:
        assert_within(found, digests)


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


def test_a_missing_compiler_is_named_before_the_engine_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for settings, arguments in ((SETTINGS, {}), (None, {"enforce_eager": False})):
        with pytest.raises(InstallError, match=r"no-such-compiler is not there.*--eager"):
            RolloutEngine(folder, settings, **arguments)


def test_the_mode_has_one_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"enforce_eager: set EngineSettings\.compiled"):
        RolloutEngine(folder, SETTINGS, enforce_eager=False)
