"""Responses that move between engines through the KV pool: plain decoding's tokens, and next to no prefill."""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from second_engine import Outcome, SecondEngine, generate
from tiny_model import VOCAB

from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
from paceline.engine.arguments import BLOCK_TOKENS
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import ConfigError, EngineError, RequestError, UnsupportedError
from paceline.kvpool import response_identity
from paceline.types import Response, RolloutRequest

MAX_TOKENS = 260
CHUNK_TOKENS = 70
MAX_MODEL_LEN = 512


def requests() -> list[RolloutRequest]:
    """Prompts and chunks end at every kind of place in a block."""
    rng = np.random.default_rng(3)
    lengths = (3, 40, 57, 58, 59, 120, 127, 128, 129, 200)
    return [
        RolloutRequest((1, *rng.integers(3, VOCAB, length - 1).tolist()), MAX_TOKENS, key=100 + index)
        for index, length in enumerate(lengths)
    ]


@dataclass
class Pair:
    here: RolloutEngine
    there: SecondEngine
    folder: Path
    plain: list[Response]
    """Of `requests`, without drafts, in one piece."""

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kv"))

    def cut(self, wanted: list[RolloutRequest], length: int = CHUNK_TOKENS) -> list[RolloutRequest]:
        """Generate so many tokens of each response here and return what is left to do."""
        limited = [replace(request, max_tokens=length) for request in wanted]
        done = generate(self.here, limited, ignore_eos=True).responses
        return [replace(r, generated=response.tokens) for r, response in zip(wanted, done, strict=True)]


SETTINGS = {
    "float32": EngineSettings(budget=BudgetSettings(policy="fixed", fixed_tokens=6), max_draft_tokens=6),
    "bfloat16": EngineSettings(
        budget=BudgetSettings(policy="fixed", fixed_tokens=6),
        max_draft_tokens=6,
        num_paths=2,
    ),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Pair]:
    """Two engines on one pool, whose memory holds two or three entries; the others are on disk.

    The float32 pair also drafts with a small model, the other one verifies two paths per request.
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-kv-", dir="/dev/shm"))
    pool = KvPoolSettings(
        directory=str(folder / "memory"),
        memory_bytes=1 << 20,
        disk_directory=str(folder / "disk"),
        disk_bytes=1 << 27,
    )
    changes: dict[str, object] = {"kv_pool": pool}
    if request.param == "float32":
        changes["model_drafter"] = str(model_dir)
    settings = SETTINGS[request.param].model_copy(update=changes)
    options = {"dtype": request.param, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 1 << 27}
    there = SecondEngine(model_dir, settings, **options)
    try:
        with RolloutEngine(model_dir, settings, **options) as here:
            here.set_drafting(False)
            plain = generate(here, [replace(r, keep_kv=False) for r in requests()], ignore_eos=True).responses
            here.set_drafting(True)
            there.ready()
            yield Pair(here, there, folder, plain)
    finally:
        there.close()
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def empty_pool(pair: Pair) -> Iterator[None]:
    yield
    for file in pair.files():
        file.unlink()


def assert_ends_as(plain: list[Response], moved: list[Response]) -> None:
    assert [r.tokens for r in moved] == [r.tokens for r in plain]
    for whole, rest in zip(plain, moved, strict=True):
        tail = np.float32(whole.logprobs)[len(whole.logprobs) - len(rest.logprobs) :]
        assert np.array_equal(tail, np.float32(rest.logprobs)), "logprobs differ bitwise"


def head(response: Response, length: int) -> Response:
    return replace(response, tokens=response.tokens[:length], logprobs=response.logprobs[:length])


def test_responses_that_move_with_every_chunk_are_plain_decoding(pair: Pair) -> None:
    todo, engines = requests(), (pair.here, pair.there)
    before = pair.there.generate([], ignore_eos=True).counters
    drafted = 0
    for turn, end in enumerate(range(CHUNK_TOKENS, MAX_TOKENS + CHUNK_TOKENS, CHUNK_TOKENS)):
        chunk = [replace(request, max_tokens=min(end, MAX_TOKENS)) for request in todo]
        engine = engines[turn % 2]
        outcome: Outcome
        if isinstance(engine, RolloutEngine):
            outcome = generate(engine, chunk, ignore_eos=True)
        else:
            outcome = engine.generate(chunk, ignore_eos=True)
        if turn:
            assert outcome.prefilled == len(todo), "one token of each moved response"
        drafted += sum(response.num_accepted_tokens for response in outcome.responses)
        todo = [replace(r, generated=made.tokens) for r, made in zip(todo, outcome.responses, strict=True)]
        assert_ends_as([head(response, end) for response in pair.plain], outcome.responses)
    assert drafted > 0
    there = pair.there.generate([], ignore_eos=True).counters
    assert there.hits - before.hits == 2 * len(todo)
    assert there.misses == before.misses
    assert pair.here.kv_pool_counters().demoted > 0


def test_the_control_wrong_keys_and_values_would_show(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engine.kv.blocks import KvBlocks

    read = KvBlocks.read
    monkeypatch.setattr(KvBlocks, "read", lambda self, block: [bytes(len(p)) for p in read(self, block)])
    todo = pair.cut(requests())
    moved = pair.there.generate(todo, ignore_eos=True).responses
    assert all(one.tokens != other.tokens for one, other in zip(moved, pair.plain, strict=True))


def test_aborted_responses_go_on_elsewhere(pair: Pair) -> None:
    from vllm import SamplingParams

    pair.here.reset_prefix_cache()
    free = pair.here.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before, wanted = free(), requests()
    stream = pair.here.stream(wanted, SamplingParams(temperature=1.0, ignore_eos=True))
    for _ in range(25 * len(wanted)):
        next(stream)
    halves = {index: tokens for index, (tokens, _) in pair.here.partial().items()}
    pair.here.abort(range(len(wanted)))
    assert not list(stream)
    if pair.here.scheduler.spare_blocks is not None:
        pair.here.scheduler.spare_blocks.release()
    assert free() == before
    assert not pair.here.scheduler.requests
    assert len(pair.files()) == len(wanted)
    moved = [replace(wanted[index], generated=tokens) for index, tokens in sorted(halves.items())]
    outcome = pair.there.generate(moved, ignore_eos=True)
    assert outcome.prefilled == len(moved)
    assert_ends_as(pair.plain, outcome.responses)


def test_what_will_not_go_on_is_not_kept(pair: Pair) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, ignore_eos=True)
    wanted = requests()[:3]
    generate(pair.here, [replace(r, max_tokens=20, keep_kv=False) for r in wanted], ignore_eos=True)
    for event in pair.here.stream(wanted, params):
        if event.index == 0:
            pair.here.abort([0, 1], keep_kv=False)
            break
    assert not pair.files()


def test_a_last_chunk_that_is_not_kept_takes_the_older_entry_along(pair: Pair) -> None:
    todo = pair.cut(requests()[:3])
    assert len(pair.files()) == 3
    last = [replace(r, max_tokens=CHUNK_TOKENS + 20, keep_kv=False) for r in todo]
    assert_ends_as(
        [head(r, CHUNK_TOKENS + 20) for r in pair.plain[:3]],
        generate(pair.here, last, ignore_eos=True).responses,
    )
    assert not pair.files()


@pytest.mark.parametrize(("wanted", "kept"), [(0, 0), (1, 0), (2, 1)])
def test_an_abort_that_nobody_announced_keeps_nothing_unless_asked_to(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wanted: int, kept: int
) -> None:
    """What a client that goes away looks like to the engine."""
    from vllm import SamplingParams

    keys = RolloutEngine._keys
    monkeypatch.setattr(RolloutEngine, "_keys", lambda *of: {**keys(*of), "paceline_keep_kv": wanted})
    stream = pair.here.stream(requests()[:1], SamplingParams(temperature=1.0, ignore_eos=True))
    next(stream)
    pair.here.vllm_engine.abort_request(list(pair.here._pending), internal=True)
    assert len(pair.files()) == kept
    stream.close()


def test_a_response_that_fills_the_model_leaves_nothing(pair: Pair) -> None:
    request = replace(requests()[9], max_tokens=MAX_MODEL_LEN)
    [response] = generate(pair.here, [request], ignore_eos=True).responses
    assert response.finish_reason == "length"
    assert len(response.tokens) == MAX_MODEL_LEN - len(request.prompt)
    assert not pair.files()


def test_a_response_that_ends_leaves_nothing(pair: Pair) -> None:
    """By EOS or a stop token, which the engine's core sees, and by a stop string, which it does not."""
    [todo] = pair.cut(requests()[1:2])
    whole = pair.plain[1].tokens
    assert len(pair.files()) == 1
    end = next(p for p in range(CHUNK_TOKENS + 5, MAX_TOKENS) if 2 < whole[p] not in whole[CHUNK_TOKENS:p])
    [response] = generate(pair.here, [todo], stop_token_ids=[whole[end]], ignore_eos=True).responses
    assert (response.finish_reason, response.tokens) == ("stop", whole[: end + 1])
    assert not pair.files()
    end = next(p for p in range(5, MAX_TOKENS) if 2 < whole[p] not in whole[:p])
    stop = chr(33 + whole[end] - 3)
    saves = pair.here.kv_pool_counters().saves
    [response] = generate(pair.here, requests()[1:2], stop=[stop], ignore_eos=True).responses
    assert (response.finish_reason, response.tokens) == ("stop", whole[: end + 1])
    assert not pair.files()
    assert pair.here.kv_pool_counters().saves == saves


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_without_its_entry_a_response_is_prefilled(pair: Pair, damage: str) -> None:
    todo = pair.cut(requests())
    victim = response_identity(todo[3].key or 0, todo[3].prompt)
    [file] = [file for file in pair.files() if file.stem == victim]
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    before = pair.there.generate([], ignore_eos=True).counters
    outcome = pair.there.generate(todo, ignore_eos=True)
    assert outcome.prefilled == len(todo) - 1 + len(todo[3].prompt) + CHUNK_TOKENS
    assert outcome.counters.misses - before.misses == 1
    assert outcome.counters.corrupt - before.corrupt == (damage != "remove")
    assert_ends_as(pair.plain, outcome.responses)


def test_entries_of_another_policy_version_do_not_match(pair: Pair) -> None:
    todo = pair.cut(requests()[:3])
    outcome = pair.there.generate(todo, policy_version=1, ignore_eos=True)
    assert outcome.prefilled == sum(len(r.prompt) + CHUNK_TOKENS for r in todo)
    assert_ends_as(pair.plain[:3], outcome.responses)


def test_a_response_that_stays_needs_the_pool_for_its_end_only(pair: Pair) -> None:
    """Its last block, and the one before where drafts of its last step filled that: vLLM has not cached it yet."""
    from vllm import SamplingParams

    todo = pair.cut(requests())
    before = pair.here.kv_pool_counters()
    pair.here.take_observations()
    responses = pair.here.generate(todo, SamplingParams(temperature=1.0, ignore_eos=True))
    prefilled = sum(step.num_prefill_tokens for step in pair.here.take_observations())
    assert prefilled == len(todo)
    loaded = pair.here.kv_pool_counters().loaded_bytes - before.loaded_bytes
    steps_over = [
        0 < (len(r.prompt) + CHUNK_TOKENS - 1) % BLOCK_TOKENS < 7 for r in todo
    ]  # a step has at most 7 tokens
    assert 0 < sum(steps_over) < len(todo)
    most = len(todo) + sum(steps_over)
    assert loaded <= most * pair.here.scheduler.kv_pool._worker.blocks.block_bytes
    assert_ends_as(pair.plain, responses)


def test_a_failing_pool_costs_time_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kvpool import tier

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    before = pair.here.kv_pool_counters().failed_writes
    monkeypatch.setattr(tier.Part, "write", full)
    todo = pair.cut(requests()[:2])
    assert pair.here.kv_pool_counters().failed_writes == before + 2
    assert not list(pair.folder.rglob("*.part"))
    assert_ends_as(pair.plain[:2], pair.there.generate(todo, ignore_eos=True).responses)


def test_new_weights_end_the_part_of_what_runs(pair: Pair) -> None:
    from vllm import SamplingParams

    stream = pair.here.stream(requests()[:1], SamplingParams(temperature=1.0, ignore_eos=True))
    next(stream)
    pair.here.scheduler.reset_prefix_cache(reset_running_requests=True)
    next(stream)
    pair.here.abort([0])
    assert not pair.files()


def weights(model_dir: Path, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return [(name, weight.detach() * scale) for name, weight in policy.named_parameters()]


def update(engine: RolloutEngine, way: str, new: list[tuple[str, torch.Tensor]]) -> None:
    if way == "reload_weights":
        engine.vllm_engine.collective_rpc(way, kwargs={"weights_iterator": iter(new)})
        return
    model = engine.vllm_engine.model_executor.driver_worker.model_runner.model
    for name, weight in new:
        model.load_weights([(name, weight)])


@pytest.mark.parametrize("way", ["reload_weights", "load_weights"])
def test_an_update_that_nobody_named_ends_all_part_in_the_pool(pair: Pair, model_dir: Path, way: str) -> None:
    """Entries of the old weights are not loaded under their old number, nothing of the new ones is saved under it."""
    todo = pair.cut(requests()[:3])
    before = pair.here.kv_pool_counters()
    try:
        update(pair.here, way, weights(model_dir, 0.9))
        moved = generate(pair.here, todo, ignore_eos=True)
        assert moved.prefilled == sum(len(r.prompt) + CHUNK_TOKENS for r in todo)
        assert (moved.counters.hits, moved.counters.saves) == (before.hits, before.saves)
        for file in pair.files():
            file.unlink()
        assert_ends_as(generate(pair.here, todo, ignore_eos=True).responses, moved.responses)
        assert all(a.tokens != b.tokens for a, b in zip(moved.responses, pair.plain, strict=False))
        pair.here.set_policy_version(1)
        again = pair.cut(requests()[:3])
        assert len(pair.files()) == 3
        whole = generate(pair.here, [replace(r, keep_kv=False) for r in requests()[:3]], ignore_eos=True)
        assert not pair.files()
        pair.cut(requests()[:3])
        moved = generate(pair.here, again, ignore_eos=True)
        assert moved.prefilled == 3
        assert_ends_as(whole.responses, moved.responses)
    finally:
        pair.here.push_weights(weights(model_dir), version=0)
    assert_ends_as(pair.plain[:3], generate(pair.here, requests()[:3], ignore_eos=True).responses)


def test_an_update_that_fails_midway_ends_all_part_until_the_next(
    pair: Pair, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.engine.kv.connector import worker_end
    from paceline.engine.worker import PacelineWorker

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the trainer went away")

    monkeypatch.setattr(PacelineWorker.__base__, "reload_weights", fail)
    with pytest.raises(OSError, match="went away"):
        pair.here.push_weights(weights(model_dir), version=1)
    monkeypatch.undo()
    end = worker_end()
    assert end is not None
    assert (end.policy_version, pair.here.policy_version) == (None, 0)
    with pytest.raises(EngineError, match="push them again"):
        pair.cut(requests()[:1])
    assert pair.here.push_weights(weights(model_dir), version=0) == 0
    assert_ends_as(pair.plain[:1], generate(pair.here, requests()[:1], ignore_eos=True).responses)


def test_workers_that_share_a_pool_do_not_count_for_themselves(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="version="):
        pair.here.push_weights(iter([]))


def test_a_request_of_another_version_takes_no_part(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever serves over HTTP names the version per request, perhaps before the engine has it."""
    monkeypatch.setattr(pair.here, "policy_version", 1)
    pair.cut(requests()[:1])
    assert not pair.files()


def test_runs_have_entries_of_their_own(pair: Pair) -> None:
    from paceline.engine.kv.connector import name_layout, worker_end

    end = worker_end()
    assert end is not None
    config = pair.here.vllm_engine.vllm_config
    names = {name_layout(config, end.blocks, run) for run in (None, "a", "b")}
    assert len(names) == 3
    assert pair.here.scheduler.kv_pool._layout in names


def test_engines_of_other_bits_have_entries_of_their_own(pair: Pair) -> None:
    from paceline.engine.kv.connector import name_layout, worker_end

    end = worker_end()
    assert end is not None
    config = copy.copy(pair.here.vllm_engine.vllm_config)
    own, names = config.additional_config, set()
    for invariant, kernel in itertools.product((False, True), ("paceline", "paceline-dot", "vllm")):
        config.additional_config = own | {"paceline_invariant": invariant, "paceline_linear": kernel}
        names.add(name_layout(config, end.blocks, None))
    assert len(names) == 6


def test_a_process_has_one_pool(pair: Pair) -> None:
    from paceline.engine.compat import worker_connector

    with pytest.raises(UnsupportedError, match="a process of its own"):
        worker_connector().register_kv_caches({})


def test_a_worker_elsewhere_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engine.kv import connector

    monkeypatch.setattr(connector, "worker_connector", lambda: None)
    with pytest.raises(UnsupportedError, match="distributed_executor_backend='uni'"):
        connector.find_worker()


@pytest.mark.parametrize(
    ("workers", "groups", "window", "named"),
    [(2, 1, None, "2 workers"), (1, 2, None, "2 KV cache groups"), (1, 1, 64, r"limits \[64, None\]")],
)
def test_engines_whose_blocks_cannot_be_moved_are_refused(
    pair: Pair, workers: int, groups: int, window: int | None, named: str
) -> None:
    from paceline.engine.kv.connector import check_kv_pool

    [group] = pair.here.scheduler.kv_cache_config.kv_cache_groups
    spec = replace(group.kv_cache_spec, sliding_window=window)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups)
    parallel = SimpleNamespace(world_size=workers, decode_context_parallel_size=1)
    with pytest.raises(UnsupportedError, match=named):
        check_kv_pool(SimpleNamespace(parallel_config=parallel), config)


def test_other_backends_get_a_salt_and_insist_on_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    monkeypatch.setattr(RolloutEngine, "_cache_salt", lambda self: "paceline:run:3")
    stream = pair.here.stream(requests()[:1], SamplingParams(temperature=1.0))
    next(stream)
    [running] = pair.here.scheduler.requests.values()
    assert running.cache_salt == "paceline:run:3"
    stream.close()
    pool = KvPoolSettings(backend="LMCacheMPConnector", namespace="run")
    scheduler = SimpleNamespace(settings=EngineSettings(kv_pool=pool))
    check = type(pair.here.scheduler)._check_salt
    check(scheduler, running)
    with pytest.raises(RequestError, match="cache_salt"):
        check(scheduler, SimpleNamespace(cache_salt=None))
