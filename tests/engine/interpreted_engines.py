"""Runs engines on model runner V2, on a GPU or in Triton's interpreter, and writes what they generated as JSON.

Arguments: target, drafter, file to write. The interpreter decides some 40 rows a second; so all requests, with their
different options, share one batch.
"""

from __future__ import annotations

from interpreted import DEVICE, DTYPE, ON_GPU, memory  # first: it prepares Triton

# isort: split
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafters import ScriptedDrafter
from safetensors.torch import load_file, save_file
from sampling_options import OPTIONS
from tiny_model import VOCAB, make_model
from vllm import LLM, SamplingParams
from waits import watch

from paceline.commands.doctor.gpu_parts import generate_ours, generate_plain
from paceline.commands.doctor.invariance_check import write_model
from paceline.config import BudgetSettings, EngineSettings, KvPoolSettings
from paceline.engine import plugin
from paceline.engine.profiling import Shape, measure_steps
from paceline.engine.rollout_engine import RolloutEngine
from paceline.engine.v2.ahead import NOTHING, continue_drafts, table_of
from paceline.engine.v2.checks import throw_dice, time_verifying
from paceline.engine.v2.runner import KeyedRunnerV2
from paceline.engine.v2.sampler import CheckedSampler, accept
from paceline.errors import UnsupportedError
from paceline.types import RolloutRequest

MAX_TOKENS = 32
BLOCK_BYTES = 32 * 2 * 2 * 64 * (2 if ON_GPU else 4)
"""Of the target's KV cache on a CPU: tokens x layers x (K, V) x head x bytes; on a GPU a block is half of that."""
LOADING_S = 120.0
SIZES: dict[str, Any] = {"dtype": DTYPE, "max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True}
OURS = {name: value for name, value in SIZES.items() if name != "enforce_eager"}
"""Where settings say whether code is compiled."""
FIXED: dict[str, Any] = {
    "max_draft_tokens": 4,
    "budget": BudgetSettings(policy="fixed", fixed_tokens=4),
    "compiled": False if ON_GPU else None,
}

CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "another sample": {},
    **OPTIONS,
    "min tokens": {"min_tokens": 16, "logit_bias": {2: 3.0}},
    "bad words": {"bad_words": ["&'", "3"]},
}
KEYS = {name: (index - 3) * 0x1234_5678_9ABC_DEF for index, name in enumerate(CASES)}
"""Seeds of vLLM's: 64 bits with a sign."""
FEW, HALF = tuple(CASES)[:4], tuple(CASES)[::2]
PROMPTS = {name: [1, 5, 9, 13 + index // 3] for index, name in enumerate(CASES)}


def decode(
    engine: RolloutEngine, carried: dict[str, list[int]] | None = None, names: Iterable[str] = CASES
) -> dict[str, Any]:
    """Tokens and log-probabilities of requests. carried: what they have generated earlier."""
    for name in names:
        options, before = CASES[name], (carried or {}).get(name, [])
        params = SamplingParams(
            **{"temperature": 1.0, "logprobs": 2, **options},
            max_tokens=MAX_TOKENS - len(before),
            seed=KEYS[name],
        )
        if engine.settings is not None:
            params.extra_args = {"paceline_generated": len(before)}
        engine.vllm_engine.add_request(name, {"prompt_token_ids": PROMPTS[name] + before}, params)
    found = {}
    while engine.vllm_engine.has_unfinished_requests():
        for output in engine.vllm_engine.step():
            [made] = output.outputs
            logprobs = [sorted((id, x.logprob) for id, x in at.items()) for at in made.logprobs]
            found[output.request_id] = {"tokens": list(made.token_ids), "logprobs": logprobs}
    return found


def run(
    engine: RolloutEngine,
    drafter: Any,
    carried: dict[str, list[int]] | None = None,
    names: Iterable[str] = CASES,
) -> dict[str, Any]:
    """Decode with `drafter` for the model-free one, from an empty cache; with the numbers of drafts."""
    engine.reset_prefix_cache()
    engine.take_observations()
    engine.scheduler.loop.free.drafter, own = drafter, engine.scheduler.loop.free.drafter
    responses = decode(engine, carried, names)
    told = getattr(engine.scheduler.loop.free.drafter, "num_tokens", 0)
    engine.scheduler.loop.free.drafter = own
    steps = engine.take_observations()
    numbers = {
        name: sum(getattr(step, name) for step in steps)
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_model_tokens")
    }
    return {"responses": responses, "told": told, **numbers}


def count_early(engine: RolloutEngine) -> list[int]:
    """Fills with a number for each step whose drafts were begun while vLLM handed out the tokens of the one before."""
    begun: list[int] = []
    draft_early = engine.scheduler.loop.draft_early

    def note(*args: Any) -> None:
        begun.append(len(begun))
        draft_early(*args)

    engine.scheduler.loop.draft_early = note
    return begun


def move(engine: RolloutEngine) -> dict[str, Any]:
    """Cut two responses, which leave their keys and values in the pool, and resume them from an empty cache."""
    names, params = ("temperature 1", "another sample"), SamplingParams(temperature=1.0)
    wanted = [RolloutRequest(tuple(PROMPTS[n]), MAX_TOKENS, key=KEYS[n] % (1 << 64)) for n in names]
    cut = engine.generate([replace(request, max_tokens=12) for request in wanted], params)
    engine.reset_prefix_cache()
    rest = [replace(request, generated=done.tokens) for request, done in zip(wanted, cut, strict=True)]
    responses = engine.generate(rest, params)
    found = {name: {"tokens": list(whole.tokens)} for name, whole in zip(names, responses, strict=True)}
    return {"responses": found, "hits": engine.kv_pool_counters().hits}


def refusal(engine: RolloutEngine) -> str:
    """What an engine on V2 says to what V1 alone can do."""
    try:
        engine.use_drafter(0)
    except UnsupportedError as error:
        return str(error)
    return ""


def abort_some(engine: RolloutEngine) -> dict[str, Any]:
    """Two responses of which others are aborted while a step is under way, and one more that comes then."""
    params = SamplingParams(temperature=1.0)
    names = ("temperature 1", "another sample")
    wanted = [RolloutRequest(tuple(PROMPTS[n]), MAX_TOKENS, key=KEYS[n] % (1 << 64)) for n in names]
    engine.reset_prefix_cache()
    found: dict[str, Any] = {}
    for index in range(6):
        engine.submit(index, replace(wanted[0], key=index), params)
    engine.submit(10, wanted[0], params)
    for step in range(200):
        if step == 5:
            engine.abort(range(4))
            engine.submit(11, wanted[1], params)
        if step == 7:
            engine.abort((4, 5))
        for event in engine.step():
            if event.response is not None:
                found[names[event.index - 10]] = {"tokens": list(event.response.tokens)}
        if not engine.num_running():
            break
    return {"responses": found}


STEP = "execute_model", "sample_tokens"
"""A runner's whole step; what it drafted is taken after it, and waited for then."""


def profile_first() -> None:
    """Let runners do what they do on a GPU to measure memory, and not on a CPU: run before there is a KV cache."""
    initialize = KeyedRunnerV2.initialize_kv_cache

    def run_first(runner: Any, *args: Any, **kwargs: Any) -> None:
        runner._dummy_run(8, skip_attn=True, is_profile=True)
        initialize(runner, *args, **kwargs)

    KeyedRunnerV2.initialize_kv_cache = run_first


def runner_of(engine: RolloutEngine) -> Any:
    """V2's, in this process."""
    return engine.vllm_engine.model_executor.driver_worker.worker.model_runner


def wait_on_purpose(runner: Any) -> None:
    """Let the runner's `put_drafts` wait for the device in two ways, so that a test can show that both are seen."""
    put = runner.put_drafts

    def wait(drafts: Any) -> None:
        put(drafts)
        tokens = runner.req_states.draft_tokens[0]
        tokens[0].item()
        tokens[tokens > 0]

    runner.put_drafts = wait


def draft_for_a_sample(engine: RolloutEngine, drafter: Any) -> dict[str, Any]:
    """Decode while the model drafter is asked to draft for two requests of each step; with the rows of its levels."""
    loop, speculator = engine.scheduler.loop, runner_of(engine).speculator
    order, levels, rows = loop.order, speculator._multi_step_decode, []

    def sample() -> Any:
        wanted = order()
        return None if wanted is None else replace(wanted, most_requests=2)

    def count(*args: Any) -> None:
        run_model = speculator._run_model
        speculator._run_model = lambda *inputs: rows.append(len(inputs[0])) or run_model(*inputs)
        try:
            levels(*args)
        finally:
            del speculator._run_model

    loop.order, speculator._multi_step_decode = sample, count
    made = run(engine, drafter, names=FEW)
    del loop.order, speculator._multi_step_decode
    return {**made, "rows": rows}


def accept_at_random() -> list[Any]:
    """(what `accept` returns, what it should) of ragged requests."""
    random = np.random.default_rng(3)
    cases = []
    for _ in range(20):
        numbers = random.integers(0, 7, 3)
        drawn = [random.integers(0, 3, n + 1).tolist() for n in numbers]
        without = [(random.random(n + 1) < 0.1).tolist() for n in numbers]
        inputs = [[9, *random.integers(-1, 3, n).tolist()] for n in numbers]
        first_rows = torch.tensor([0, *np.cumsum(numbers + 1)], dtype=torch.int32)
        flat = torch.tensor([*chain(*drawn)]), torch.tensor([*chain(*inputs)], dtype=torch.int32)
        on_device = [x.to(DEVICE) for x in (flat[0], torch.tensor([*chain(*without)]), flat[1], first_rows)]
        tokens, counts, missing = accept(*on_device, 6)
        got = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        lengths = [
            next((i for i, t in enumerate(given[1:]) if row[i] != t or none[i]), len(row) - 1)
            for row, given, none in zip(drawn, inputs, without, strict=True)
        ]
        ends = [none[n] for none, n in zip(without, lengths, strict=True)]
        expected = [
            [*row[:n], 0 if end else row[n]] for row, n, end in zip(drawn, lengths, ends, strict=True)
        ]
        cases.append(([got, missing.tolist()], [expected, ends]))
    return cases


class NothingDrawn(CheckedSampler):
    """Checks what is drawn from a row of NaN, one without a token and a good one, numbers beyond the vocabulary."""

    class Theirs:
        def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
            rows = torch.zeros(3, VOCAB, device=DEVICE)
            rows[0, 1], rows[1] = torch.nan, -torch.inf
            return torch.tensor([VOCAB, 1 << 40, 3], device=DEVICE), rows


def draw_nothing() -> list[Any]:
    """(tokens, whether they are none)"""
    sampler = type("Sampler", (NothingDrawn, NothingDrawn.Theirs), {})()
    sampler.missing = []
    drawn, _ = sampler.sample()
    return [drawn.tolist(), sampler.missing[0].tolist()]


def continue_at_random() -> list[Any]:
    """(what `continue_drafts` writes, what it should) of paths that go on behind what was decided, or do not."""
    random = np.random.default_rng(5)
    cases = []
    for case in range(30):
        count, rows, num_paths = 4, random.permutation(6)[:4], 1 + case % 3
        known, lengths = random.integers(0, 3, (6, 30)), random.integers(8, 30, 6)
        starts = lengths[rows] - random.integers(0, 5, count)
        shown = random.integers(1, num_paths + 1)  # a step may have fewer paths
        keeps = random.random(count) < 0.5
        num_tokens = random.integers(0, 8, (count, shown))
        tokens = random.integers(0, 3, (count, shown, 7))
        for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            for path in range(shown):
                if random.random() < 0.6:
                    tokens[i, path, : lengths[row] - start] = known[row, start : lengths[row]]
        target = np.full((6, 3), 7)
        expected = target.copy()
        for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            decided = known[row, start : lengths[row]].tolist()
            paths = [tokens[i, path, : num_tokens[i, path]].tolist() for path in range(shown)]
            num_decided = len(decided)
            rests = [path[num_decided:] for path in paths if path[:num_decided] == decided]
            rest = next(filter(None, rests), [])[:3]
            if rest or not keeps[i]:
                expected[row] = [*rest, *[NOTHING] * (3 - len(rest))]
        table = table_of(rows, starts, keeps, num_tokens, tokens, 3, num_paths)
        written = torch.tensor(target, device=DEVICE)
        inputs = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (table, known, lengths)]
        continue_drafts(written, *inputs, num_paths)
        cases.append((written.tolist(), expected.tolist()))
    return cases


POISON = VOCAB - 1
"""A token whose embedding is NaN in the model of `fail`."""


def fail(**overlap: bool) -> dict[str, Any]:
    """Responses beside some that have no next token, with drafts that make the model give NaN and without."""
    folder = make_model(Path(tempfile.mkdtemp()), tie=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    params = SamplingParams(temperature=1.0, logit_bias={POISON: -100.0})
    stuck = SamplingParams(allowed_token_ids=[2], stop_token_ids=[2], min_tokens=1)
    good = [RolloutRequest((1, 5, 9 + i), 20, key=100 + i) for i in range(3)]
    settings = EngineSettings(**FIXED)
    found: dict[str, Any] = {}
    with RolloutEngine(folder, settings, **overlap, **memory(1 << 20), **OURS) as engine:
        known: dict[int, tuple[int, ...]] = {}
        for name in ("alone", "without drafts", "with drafts"):
            engine.reset_prefix_cache()
            engine.scheduler.loop.free.drafter = (
                ScriptedDrafter(known, 0.8, VOCAB, 4, POISON) if name == "with drafts" else None
            )
            for index, request in enumerate(good):
                engine.submit(index, request, params)
            if name != "alone":
                engine.submit(8, RolloutRequest((1, 6), 20, key=8), stuck)
                engine.submit(9, RolloutRequest((1, POISON), 20, key=9), params)
            events = []
            while engine.num_running():
                events += engine.step()
            ended = {event.index: event.response for event in events if event.response is not None}
            known = {ended[i].key: (*ended[i].request.prompt, *ended[i].tokens) for i in range(len(good))}
            found[name] = {
                index: {"tokens": made.tokens, "failure": made.failure and str(made.failure)}
                for index, made in ended.items()
            }
        found["preemptions"] = engine.scheduler.num_preemptions
        found["accepted"] = sum(step.num_accepted_tokens for step in engine.take_observations())
    return found


def replay_graphs(target: str, model: str, known: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    """Compiled engines, whose steps replay CUDA graphs: plain vLLM, and Paceline with and without drafts."""
    sizes = {**OURS, **memory(1 << 26)}
    with RolloutEngine(target, None, **sizes) as engine:
        made: dict[str, Any] = {"plain": {"responses": decode(engine)}}
    settings = EngineSettings(**{**FIXED, "compiled": True, "model_drafter": model})
    with RolloutEngine(target, settings, **sizes) as engine:
        manager, kinds = runner_of(engine).cudagraph_manager, Counter[str]()
        dispatch = manager.dispatch

        def count(*args: Any, **kwargs: Any) -> Any:
            chosen = dispatch(*args, **kwargs)
            kinds[chosen.cg_mode.name] += 1
            return chosen

        manager.dispatch = count
        for name, drafter in (
            ("none", None),
            ("scripted", ScriptedDrafter(known, 0.8, VOCAB, 4)),
            ("mixed", engine.scheduler.loop.free.drafter),
        ):
            kinds.clear()
            made[name] = {**run(engine, drafter), "graphs": dict(kinds)}
    return made


def examine() -> dict[str, Any]:
    """What `paceline doctor --gpu` asks a GPU, asked of the interpreter."""
    folder = Path(tempfile.mkdtemp())
    write_model(folder)
    requests = [RolloutRequest((1, 5, 9, 13 + sample), 9, key=50 + sample) for sample in range(2)]
    plain = generate_plain(folder, requests, DTYPE)
    made = {"plain": plain, **generate_ours(folder, requests, DTYPE)}
    return {
        "tokens": {name: [response.tokens for response in responses] for name, responses in made.items()},
        "drafted": {name: sum(r.num_draft_tokens for r in responses) for name, responses in made.items()},
        "dice": asdict(throw_dice(DEVICE, **({} if ON_GPU else {"num_rows": 12, "vocab_size": 3000}))),
    }


def main(target: str, drafter: str, file: str) -> None:
    made: dict[str, Any] = {
        "accept": accept_at_random(),
        "continue": continue_at_random(),
        "nothing drawn": draw_nothing(),
        "doctor": examine(),
    }
    made |= {"fail": fail(), "overlapped fail": fail(async_scheduling=True)}
    with RolloutEngine(target, None, **memory(1 << 26), **SIZES) as engine:
        plain = decode(engine)
    made["plain"] = {"responses": plain}
    with RolloutEngine(drafter, None, **memory(1 << 26), **SIZES) as engine:
        made["other weights"] = {"responses": decode(engine, names=FEW)}
    speculation = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 4}
    with RolloutEngine(target, None, speculative_config=speculation, **memory(1 << 26), **SIZES) as engine:
        waits = watch(runner_of(engine), *STEP)
        decode(engine, names=FEW)
        made["plain vLLM waits"] = sorted(waits)
    known = {KEYS[n] % (1 << 64): (*PROMPTS[n], *plain[n]["tokens"]) for n in CASES}
    settings = EngineSettings(**FIXED)
    if not ON_GPU:
        profile_first()
    with RolloutEngine(target, settings, **memory(1 << 26), **OURS) as engine:
        runner = runner_of(engine)
        made["runner"] = [cls.__module__ for cls in type(runner).__mro__]
        made["none"] = run(engine, None)
        made["suffix"] = run(engine, engine.scheduler.loop.free.drafter)
        made["garbage"] = run(engine, ScriptedDrafter(known, 0.0, VOCAB, 4))
        made["scripted"] = run(engine, ScriptedDrafter(known, 0.8, VOCAB, 4))
        cut = {n: plain[n]["tokens"][: 5 + i % 7] for i, n in enumerate(CASES)}
        made["resumed"] = {"cut": cut, **run(engine, ScriptedDrafter(known, 0.8, VOCAB, 4), cut)}
        engine.push_weights(load_file(Path(drafter) / "model.safetensors").items())
        made["pushed"] = {"responses": decode(engine, names=FEW)}
    with RolloutEngine(target, settings, async_scheduling=True, **memory(1 << 26), **OURS) as engine:
        made["overlap"] = [cls.__module__ for cls in type(engine.scheduler).__mro__]
        made["overlapped"] = run(engine, None)
        begun = count_early(engine)
        made["overlapped suffix"] = {**run(engine, engine.scheduler.loop.free.drafter), "early": len(begun)}
        made["overlapped garbage"] = run(engine, ScriptedDrafter(known, 0.0, VOCAB, 9))
        made["overlapped scripted"] = run(engine, ScriptedDrafter(known, 0.9, VOCAB, 9))
        made["overlapped resumed"] = {"cut": cut, **run(engine, ScriptedDrafter(known, 0.9, VOCAB, 9), cut)}
        made["overlapped aborted"] = abort_some(engine)
    branching = settings.model_copy(update={"num_paths": 4, "max_alternatives": 64})
    with RolloutEngine(target, branching, async_scheduling=True, **memory(1 << 26), **OURS) as engine:
        made["overlapped branches"] = run(engine, engine.scheduler.loop.free.drafter)
    with_model = settings.model_copy(update={"model_drafter": drafter})
    with RolloutEngine(target, with_model, async_scheduling=True, **memory(1 << 26), **OURS) as engine:
        made["overlapped model"] = run(engine, None, names=HALF)
        made["overlapped mixed"] = run(engine, engine.scheduler.loop.free.drafter, names=HALF)
    with RolloutEngine(target, settings, async_scheduling=True, **memory(12 * BLOCK_BYTES), **OURS) as engine:
        made["overlapped scarce"] = run(engine, ScriptedDrafter(known, 0.9, VOCAB, 12))
        made["overlapped scarce"]["preemptions"] = engine.scheduler.num_preemptions
    pool = KvPoolSettings(directory=f"{file}.pool", memory_bytes=1 << 24)
    settings = settings.model_copy(update={"model_drafter": drafter, "kv_pool": pool})
    with RolloutEngine(target, settings, **memory(1 << 26), **OURS) as engine:
        runner = runner_of(engine)
        made["model"] = run(engine, None, names=HALF)
        made["mixed"] = run(engine, engine.scheduler.loop.free.drafter, names=HALF)
        made["sample"] = draft_for_a_sample(engine, None)
        made["moved"] = move(engine)
        waits = watch(runner, *STEP)
        made["watched"] = run(engine, engine.scheduler.loop.free.drafter, names=FEW)
        made["waits"] = sorted(waits)
        wait_on_purpose(runner)
        run(engine, engine.scheduler.loop.free.drafter, names=FEW[:1])
        made["waits on purpose"] = sorted(waits)
        made["verifying"] = asdict(time_verifying(runner, 2, 3, 1500, 1))
        points = measure_steps(engine, [Shape(2, 1, 8), Shape(2, 3, 8)], 1)
        made["steps"] = [(point.tokens_per_request, point.step_s) for point in points]
        made["refused"] = refusal(engine)
        weights = load_file(Path(drafter) / "model.safetensors")
        engine.push_drafter({name: weight.flip(0) for name, weight in weights.items()})
        made["swapped"] = run(engine, None, names=FEW[:2])
    settings = settings.model_copy(update={"kv_pool": None, "draft_worker": True, "draft_window": 4})
    with RolloutEngine(target, settings, **memory(1 << 26), **OURS) as engine:
        until = time.monotonic() + LOADING_S
        while not run(engine, None, names=FEW[:1])["num_model_tokens"] and time.monotonic() < until:
            pass  # the worker is still loading its model
        made["worker"] = run(engine, None, names=FEW)
        made["worker and suffix"] = run(engine, engine.scheduler.loop.free.drafter, names=FEW)
    os.environ |= {"PACELINE": "1", "PACELINE_SETTINGS": json.dumps({"max_draft_tokens": 4})}
    plugin.register()
    llm = LLM(
        target,
        **{"kv_cache_memory_bytes": 1 << 26, **(memory(1 << 26) if ON_GPU else {})},
        distributed_executor_backend="uni",
        **SIZES,
    )
    wanted = [
        SamplingParams(**{"temperature": 1.0, **CASES[n]}, max_tokens=MAX_TOKENS, seed=KEYS[n]) for n in FEW
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[n]} for n in FEW], wanted, use_tqdm=False)
    made["environment"] = {n: list(o.outputs[0].token_ids) for n, o in zip(FEW, outputs, strict=True)}
    if ON_GPU:
        made["compiled"] = replay_graphs(target, drafter, known)
    Path(file).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
