"""Runs vLLM's heads on the target's hidden states on model runner V2, coupled to it, and writes what they made as JSON.

Argument: file to write. All weights are random, and the targets' distributions so flat that any drafter which draws
with the target's dice is often right, and one with other dice once in `VOCAB` times: no head has to be trained.
"""

from __future__ import annotations

from interpreted import DTYPE, memory  # first: it prepares Triton

# isort: split
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_head import make_head
from drafters import ScriptedDrafter
from safetensors.torch import load_file, save_file
from tiny_model import VOCAB, make_model, make_predicting_model
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

import paceline.engine.v2.speculator as speculator_module
from paceline import dice
from paceline.config import MTP, BudgetSettings, EngineSettings
from paceline.distillation.methods import MethodName
from paceline.distillation.networks import DraftHead
from paceline.distillation.packing import Sample, pack_samples
from paceline.distillation.target import choose_layers
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import CheckpointError
from paceline.types import RolloutRequest

MAX_TOKENS = 16
MAX_DRAFTS = 4
LAYERS = 4
FUSED = choose_layers(LAYERS)
SIZES: dict[str, Any] = {"dtype": DTYPE, "max_model_len": 128, "max_num_seqs": 8}
PARAMS = SamplingParams(temperature=1.0, logprobs=0)
REQUESTS = [RolloutRequest((1, 5, 9 + index), MAX_TOKENS, key=index * 7919) for index in range(4)]


def flatten(folder: Path) -> Path:
    """Make all tokens about as likely."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= 0.1
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def decode_plainly(target: Path) -> list[tuple[int, ...]]:
    """Plain vLLM's tokens, with each request's key for a seed."""
    with RolloutEngine(target, None, enforce_eager=True, **memory(1 << 24), **SIZES) as engine:
        for index, request in enumerate(REQUESTS):
            prompt = {"prompt_token_ids": list(request.prompt)}
            params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=request.key)
            engine.vllm_engine.add_request(str(index), prompt, params)
        made = {}
        while engine.vllm_engine.has_unfinished_requests():
            made |= {int(o.request_id): tuple(o.outputs[0].token_ids) for o in engine.vllm_engine.step()}
    return [made[index] for index in range(len(REQUESTS))]


def compare_states(samples: list[Sample], model: Any, texts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Collected hidden states beside those of a forward pass of transformers. texts: prompts and responses."""
    worst, begins = 0.0, []
    for sample in samples:
        ids = tuple(sample.ids.tolist())
        [text] = [text for text in texts if text[:-1][-len(ids) :] == ids]
        begins.append(len(text) - 1 - len(ids))
        with torch.no_grad():
            output = model.model(torch.tensor([text]), output_hidden_states=True)
        layers = [*(output.hidden_states[layer] for layer in FUSED), output.last_hidden_state]
        states = torch.cat(layers, -1)[0, begins[-1] : -1]
        worst = max(worst, float((states - sample.states.float()).abs().max()))
    prompts = [sample.num_prompt_tokens for sample in samples]
    return {"worst": worst, "begins": begins, "prompts": prompts, "samples": len(samples)}


def give_embedding(head: Path, model: Any) -> None:
    """Put a copy of the target's embedding into a head's checkpoint, as some published ones have it."""
    file = head / "model.safetensors"
    weights = load_file(file)
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(weights, file, metadata={"format": "pt"})


def swap(engine: RolloutEngine, speculator: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Push other weights of the head between two steps of a rollout, and some that it cannot take.

    The head's embedding is the target's own, and has to stay what it was.
    """
    refused = []
    for wrong in ({"fc.weight": weights["fc.weight"]}, weights | {"fc.weight": weights["fc.weight"] / 0}):
        try:
            engine.push_drafter(wrong)
        except CheckpointError as error:
            refused.append(str(error))
    states = torch.randn(3, weights["fc.weight"].shape[1], dtype=speculator.dtype, device=speculator.device)
    engine.reset_prefix_cache()
    for index, request in enumerate(REQUESTS):
        engine.submit(index, request, PARAMS)
    found: dict[int, Any] = {}
    for step in range(200):
        if step == 3:
            engine.push_drafter({name: weight * 0.5 for name, weight in weights.items()})
        found |= {e.index: e.response.tokens for e in engine.step() if e.response is not None}
        if not engine.num_running():
            break
    fused = speculator.model.combine_hidden_states(states).float().cpu()
    expected = states.float().cpu() @ (0.5 * weights["fc.weight"].float()).T
    difference = float((fused - expected).abs().max() / expected.abs().max())
    tokens = [found[i] for i in range(len(REQUESTS))]
    return {"tokens": tokens, "refused": refused, "difference": difference, "lent": sorted(speculator._lent)}


@contextmanager
def recording() -> Iterator[dict[tuple[int, int], int]]:
    """The first draft token that was made behind so many tokens, by key and that number."""
    judge, found = speculator_module._judge, dict[tuple[int, int], int]()

    def record(made: Any, keys: Any, temperatures: Any) -> Any:
        firsts = zip(keys.tolist(), made.positions.tolist(), made.tokens[:, 0].tolist(), strict=True)
        found.update({(key, position): token for key, position, token in firsts})
        return judge(made, keys, temperatures)

    speculator_module._judge = record
    try:
        yield found
    finally:
        speculator_module._judge = judge


def share_as_trained(
    network: DraftHead, samples: list[Sample], texts: list[tuple[int, ...]], made: dict[tuple[int, int], int]
) -> tuple[int, int]:
    """(drafts that are what the network in training proposes from these states with the same dice, all of them)."""
    compared = right = 0
    for sample in samples:
        ids = tuple(sample.ids.tolist())
        [key] = [r.key for r, text in zip(REQUESTS, texts, strict=True) if text[: len(ids)] == ids]
        with torch.no_grad():
            [hidden] = network.unroll(pack_samples([sample]), 1)
            logits = network.logits(hidden).float().numpy()
        for position in range(sample.num_prompt_tokens + 1, len(ids) + 1):
            if (token := made.get((key, position))) is not None:
                noise = dice.gumbel(np.uint64(key), position, np.arange(VOCAB))
                compared += 1
                right += int(np.argmax(logits[position - 2] + noise)) == token
    return right, compared


def draft(engine: RolloutEngine) -> dict[str, Any]:
    """Tokens of the requests, and what was drafted."""
    responses = engine.generate(REQUESTS, PARAMS)
    steps = engine.take_observations()
    return {
        "tokens": [response.tokens for response in responses],
        "model": sum(step.num_model_tokens for step in steps),
        "drafted": sum(step.num_draft_tokens for step in steps),
        "accepted": sum(step.num_accepted_tokens for step in steps),
    }


def compare(
    target: Path, drafter: str, plain: list[tuple[int, ...]], network: DraftHead | None = None
) -> dict[str, Any]:
    """Tokens with the drafts of a drafter: alone, and beside others that are mostly wrong.

    plain: without drafts. network: the head in training.
    """
    settings = EngineSettings(
        model_drafter=drafter,
        drafter="none",
        max_draft_tokens=MAX_DRAFTS,
        budget=BudgetSettings(policy="fixed", fixed_tokens=MAX_DRAFTS),
        draft_floor=0.0,
    )
    made: dict[str, Any] = {"plain": plain}
    with RolloutEngine(target, settings, **memory(1 << 24), **SIZES) as engine:
        runner = engine.vllm_engine.model_executor.driver_worker.worker.model_runner
        made["speculator"] = [cls.__name__ for cls in type(runner.speculator).__mro__]
        known = {r.key: (*r.prompt, *t) for r, t in zip(REQUESTS, plain, strict=True)}
        for name, other in (("alone", None), ("mixed", ScriptedDrafter(known, 0.3, VOCAB, MAX_DRAFTS))):
            engine.reset_prefix_cache()
            engine.scheduler.loop.free.drafter = other
            engine.collect_states(1.0 if name == "mixed" else 0.0, 1 << 20)
            with recording() as firsts:
                made[name] = draft(engine)
        if network is not None:
            texts = [
                (*r.prompt, *tokens) for r, tokens in zip(REQUESTS, made["mixed"]["tokens"], strict=True)
            ]
            samples = engine.take_samples()
            made["as trained"] = share_as_trained(network, samples, texts, firsts)
        if runner.speculator.method == "eagle3":
            model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
            made["states"] = compare_states(samples, model, texts)
            made["swap"] = swap(engine, runner.speculator, load_file(Path(drafter, "model.safetensors")))
    with RolloutEngine(target, settings, async_scheduling=True, **memory(1 << 24), **SIZES) as engine:
        made["overlapped"] = draft(engine)
    return made


def main(file: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        target = flatten(make_predicting_model(Path(folder, "predicting")))
        made = {"mtp": compare(target, MTP, decode_plainly(target))}
        target = flatten(make_model(Path(folder, "target"), layers=LAYERS, tie=False))
        model, plain = AutoModelForCausalLM.from_pretrained(target), decode_plainly(target)
        methods: tuple[MethodName, ...] = ("eagle", "eagle3")
        for method in methods:
            network = make_head(Path(folder, method), model, method)
            if method == "eagle3":
                give_embedding(Path(folder, method), model)
            made[method] = compare(target, str(Path(folder, method)), plain, network)
    Path(file).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
