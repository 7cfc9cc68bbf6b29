"""The draft head against its network in training: the same drafts, whatever was rolled back, missed or shared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from draft_head import make_head
from safetensors.torch import load_file, save_file
from tiny_target import VOCAB, make_samples, tiny_target

from paceline import dice
from paceline.distillation.methods import MethodName
from paceline.distillation.networks import DraftHead, Shared
from paceline.distillation.packing import Sample, pack_samples
from paceline.distillation.target import share
from paceline.drafting import head as head_module
from paceline.drafting.drafter import is_draft_head, read_architectures, read_fused_layers
from paceline.drafting.head import HeadDrafter, TargetEnds
from paceline.drafting.head_layer import NativeLayer
from paceline.drafting.proposal import NUM_CELLS
from paceline.drafting.token_states import TokenStates
from paceline.errors import CheckpointError, ConfigError
from paceline.types import DraftOrder, DraftQuery

MAX_LEN = 96
DEPTH = 5
GRID = np.array([1.0], np.float32)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


@pytest.fixture(params=["eagle", "eagle3"])
def method(request: pytest.FixtureRequest) -> MethodName:
    return request.param  # type: ignore[no-any-return]


def ends(shared: Shared) -> TargetEnds:
    return TargetEnds(
        shared.config.hidden_size,
        shared.config.vocab_size,
        lambda ids: F.embedding(ids, shared.embedding),
        lambda hidden: F.linear(hidden, shared.head),
    )


def load(folder: Path, target: Any, **options: Any) -> HeadDrafter:
    return HeadDrafter(
        folder, ends(share(target)), **{"max_model_len": MAX_LEN, "max_requests": 4, **options}
    )


def step_of(parts: Sequence[tuple[int, Sample, int, int]]) -> TokenStates:
    """(response, its sample, first token, tokens) of each request."""
    slices = [slice(start, start + count) for _, _, start, count in parts]
    ids = [sample.ids.numpy().astype(np.int32) for _, sample, _, _ in parts]
    return TokenStates(
        responses=np.array([part[0] for part in parts], np.int64),
        starts=np.array([part[2] for part in parts], np.int64),
        counts=np.array([part[3] for part in parts], np.int64),
        ids=np.concatenate([row[s] for row, s in zip(ids, slices, strict=True)]),
        next_ids=np.concatenate([np.append(row, 0)[1:][s] for row, s in zip(ids, slices, strict=True)]),
        states=torch.cat([part[1].states[s] for part, s in zip(parts, slices, strict=True)]),
    )


def query_of(step: TokenStates, wanted: Sequence[int], depth: int) -> DraftQuery:
    chosen = np.asarray(wanted, np.int64)
    return DraftQuery(
        groups=np.zeros(len(chosen), np.int64),
        responses=step.responses[chosen],
        keys=step.responses[chosen].astype(np.uint64) * np.uint64(77),
        positions=(step.starts + step.counts)[chosen] + 1,
        temperatures=np.full(len(chosen), 0.7, np.float32),
        max_tokens=np.full(len(chosen), depth, np.int32),
    )


def draft(
    drafter: HeadDrafter, step: TokenStates, wanted: Sequence[int], depth: int = DEPTH
) -> list[list[int]]:
    """Drafts of the step's requests with these places, behind the token that follows their last state."""
    query = query_of(step, wanted, depth)
    made, growth = drafter.draft(
        step,
        query,
        depth,
        sharpness=1.0,
        sharpness_grid=GRID,
        calibration=np.ones(NUM_CELLS, np.float32),
        floor=0.0,
    )
    assert growth.num_levels == (int(made.num_tokens.max(initial=0)))
    return [made.tokens[row, :count].tolist() for row, count in enumerate(made.num_tokens.tolist())]


def expect(
    head: DraftHead,
    response: int,
    sample: Sample,
    stop: int,
    begin: int = 0,
    behind: Sequence[int] = (),
) -> list[int]:
    """What a chain drafts behind the token at `stop`, all keys computed anew; the head's context begins at `begin`.

    behind: the first draft tokens, where they are given.
    """
    ids = sample.ids[begin : stop + 1].long()
    drafted: list[int] = []
    for step in range(DEPTH):
        states = torch.zeros(len(ids), sample.states.shape[1])
        states[: stop - begin] = sample.states[begin:stop]
        pack = pack_samples([Sample(ids, 1, states)])
        with torch.no_grad():
            hidden = list(head.unroll(pack, step + 1))[step][stop - begin - 1]
            logits = head.logits(hidden[None]).contiguous().numpy()
        key, position = np.array([response * 77], np.uint64), np.array([stop + 1 + step], np.int64)
        token, *_ = dice.propose(logits, key, position, np.array([0.7], np.float32), 1.0)
        drafted.append(behind[step] if step < len(behind) else int(token[0]))
        ids = torch.cat([ids, torch.tensor(drafted[-1:])])
    return drafted


def test_drafts_are_those_of_the_network(tmp_path: Path, target: Any, method: MethodName) -> None:
    """Ragged prompts, one of them unfinished at first, and steps of one to four tokens over self-fed keys."""
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    samples = make_samples(target, [60, 52, 70])
    step = step_of([(5, samples[0], 0, 9), (6, samples[1], 0, 14), (7, samples[2], 0, 11)])
    assert draft(drafter, step, [0, 1]) == [expect(head, 5, samples[0], 9), expect(head, 6, samples[1], 14)]
    at, random = [9, 14, 11], np.random.default_rng(0)
    for _ in range(8):
        counts = random.integers(1, 5, 3).tolist()
        order = random.permutation(3).tolist()
        step = step_of([(5 + r, samples[r], at[r], counts[r]) for r in order])
        at = [start + count for start, count in zip(at, counts, strict=True)]
        assert draft(drafter, step, [0, 1, 2]) == [expect(head, 5 + r, samples[r], at[r]) for r in order]


def test_branches_are_those_of_the_network(tmp_path: Path, target: Any, method: MethodName) -> None:
    """Left deeper first, and nothing of them is in the way of the next step."""
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    samples, at = make_samples(target, [60, 52]), [9, 14]
    step = step_of([(5, samples[0], 0, 9), (6, samples[1], 0, 14)])
    for _ in range(3):
        chains = draft(drafter, step, [0, 1])
        assert chains == [expect(head, 5 + r, samples[r], at[r]) for r in range(2)]
        for levels in ((3, 2), (1, 0), (0, 4)):
            shared = [chain[:level] for chain, level in zip(chains, levels, strict=True)]
            others = [(chain[level] + 7) % VOCAB for chain, level in zip(chains, levels, strict=True)]
            drafted = [[*tokens, other] for tokens, other in zip(shared, others, strict=True)]
            counts = np.array([len(tokens) for tokens in drafted])
            query = query_of(step, [0, 1], DEPTH)
            query = replace(
                query,
                positions=query.positions + counts,
                max_tokens=(query.max_tokens - counts).astype(np.int32),
            )
            order = DraftOrder(DEPTH, 1.0, np.ones(NUM_CELLS, np.float32), 0.0, np.zeros(1, np.float32))
            made, _ = drafter.draft_behind(query, [np.array(tokens, np.int32) for tokens in drafted], order)
            for row, tokens in enumerate(drafted):
                found = [*tokens, *made.tokens[row, : made.num_tokens[row]].tolist()]
                assert found == expect(head, 5 + row, samples[row], at[row], behind=tokens)
        step = step_of([(5 + r, samples[r], at[r], 2 + r) for r in range(2)])
        at = [at[r] + 2 + r for r in range(2)]


def test_a_context_begins_anew_behind_missing_states(tmp_path: Path, target: Any, method: MethodName) -> None:
    """Moved, prefix-cached or drafted for without it: the first state that comes is the first of its context."""
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    [sample] = make_samples(target, [60])
    step = step_of([(5, sample, 20, 3)])
    assert draft(drafter, step, [0]) == [expect(head, 5, sample, 23, begin=20)]
    assert draft(drafter, step_of([(5, sample, 23, 2)]), [0]) == [expect(head, 5, sample, 25, begin=20)]
    assert draft(drafter, step_of([(5, sample, 30, 2)]), [0]) == [expect(head, 5, sample, 32, begin=30)]


def test_a_rest_is_read_before_the_next_draft(
    tmp_path: Path, target: Any, method: MethodName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each response as far back as the steps that were kept go without a gap."""
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    one, other = make_samples(target, [60, 60])
    drafter.watch(step_of([(5, one, 0, 6), (6, other, 0, 9)]))
    drafter.watch(step_of([(6, other, 9, 1), (5, one, 6, 3)]))
    step = step_of([(5, one, 9, 2), (6, other, 10, 1)])
    assert draft(drafter, step, [0, 1]) == [expect(head, 5, one, 11), expect(head, 6, other, 11)]
    drafter.watch(step_of([(5, one, 11, 1), (6, other, 11, 4)]))
    drafter.watch(step_of([(6, other, 15, 1)]))  # the other one waited
    step = step_of([(6, other, 16, 2), (5, one, 12, 1)])
    assert draft(drafter, step, [0, 1]) == [expect(head, 6, other, 18), expect(head, 5, one, 13)]
    drafter.watch(step_of([(5, one, 13, 2)]))
    assert draft(drafter, step_of([(5, one, 20, 2)]), [0]) == [expect(head, 5, one, 22, begin=20)]
    monkeypatch.setattr(head_module, "MISSED_TOKENS", 3)
    drafter.watch(step_of([(6, other, 30, 9)]))
    assert draft(drafter, step_of([(6, other, 39, 1)]), [0]) == [expect(head, 6, other, 40, begin=36)]
    for at in range(40, 58):
        drafter.watch(step_of([(6, other, at, 1)]))
    assert draft(drafter, step_of([(6, other, 58, 1)]), [0]) == [expect(head, 6, other, 59, begin=42)]


def test_what_is_computed_again_replaces_what_was_there(
    tmp_path: Path, target: Any, method: MethodName
) -> None:
    """A preempted response, or one whose step was withdrawn, goes back; far back, everything is new."""
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    [sample, other] = make_samples(target, [60, 60])
    draft(drafter, step_of([(5, other, 0, 20)]), [0])
    assert draft(drafter, step_of([(5, sample, 0, 12)]), [0]) == [expect(head, 5, sample, 12)]
    draft(drafter, step_of([(5, sample, 12, 8)]), [0])
    assert draft(drafter, step_of([(5, sample, 15, 2)]), [0]) == [expect(head, 5, sample, 17)]
    draft(drafter, step_of([(5, sample, 40, 2)]), [0])
    assert draft(drafter, step_of([(5, sample, 17, 2)]), [0]) == [expect(head, 5, sample, 19, begin=17)]


def test_rows_move_when_a_response_ends(tmp_path: Path, target: Any, method: MethodName) -> None:
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    samples = make_samples(target, [60, 60, 60])
    draft(drafter, step_of([(5 + i, samples[i], 0, 10 + i) for i in range(3)]), [0, 1, 2])
    drafter.forget([5, 999])
    step = step_of([(7, samples[2], 12, 2), (6, samples[1], 11, 1)])
    assert draft(drafter, step, [0, 1]) == [expect(head, 7, samples[2], 14), expect(head, 6, samples[1], 12)]


def test_the_native_layer_drafts_nearly_always_as_the_network(tmp_path: Path, method: MethodName) -> None:
    """It rounds; a draft behind other keys than the network's would hardly ever be the same one. Steps that go on, go
    back or miss tokens, rows that move, a response with NaN and new weights.
    """
    target = tiny_target(width=16)
    heads = [make_head(tmp_path / str(seed), target, method, seed=seed) for seed in (1, 2)]
    drafter = load(tmp_path / "1", target)
    assert isinstance(drafter._decoder.layer, NativeLayer)
    samples = {5 + r: sample for r, sample in enumerate(make_samples(target, [90, 90, 90, 90]))}
    samples[9] = make_samples(target, [90], seed=7)[0]
    samples[9].states[:] = torch.nan
    begins, at, random = dict.fromkeys(samples, 0), dict.fromkeys(samples, 0), np.random.default_rng(0)
    head, same, count = heads[0], 0, 0
    for number in range(24):
        told = random.permutation([5, 6, 7, 8, 9])[: random.integers(1, 5)].tolist()
        parts = []
        for response in told:
            start = max(at[response] + int(random.choice([0, 0, 0, -2, 3])), 0)
            if not begins[response] < start <= at[response]:
                begins[response] = start  # all before it is missing
            at[response] = start + int(random.integers(1, 4))
            parts.append((response, samples[response], start, at[response] - start))
        made = draft(drafter, step_of(parts), range(len(told)))
        for response, found in zip(told, made, strict=True):
            if response == 9:
                assert found == []
                continue
            expected = expect(head, response, samples[response], at[response], begin=begins[response])
            same, count = same + (found == expected), count + 1
        if number % 6 == 5:
            gone = int(random.choice([5, 6]))
            drafter.forget([gone])
            at[gone] = begins[gone] = 0
        if number == 12:
            drafter.reload(load_file(tmp_path / "2" / "model.safetensors").items())
            head, begins = heads[1], dict(at)
    assert count > 30
    assert same >= 0.8 * count


def test_new_weights_begin_anew(tmp_path: Path, target: Any, method: MethodName) -> None:
    make_head(tmp_path / "old", target, method)
    other = make_head(tmp_path / "new", target, method, seed=2)
    drafter = load(tmp_path / "old", target)
    [sample] = make_samples(target, [60])
    draft(drafter, step_of([(5, sample, 0, 10)]), [0])
    weights = load_file(tmp_path / "new" / "model.safetensors")
    for broken in ({**weights, "x": weights["fc.weight"]}, {"fc.weight": weights["fc.weight"]}):
        with pytest.raises(CheckpointError):
            drafter.reload(broken.items())
    drafter.reload(weights.items())
    assert draft(drafter, step_of([(5, sample, 10, 3)]), [0]) == [expect(other, 5, sample, 13, begin=10)]


def test_nan_stays_with_its_response(tmp_path: Path, target: Any, method: MethodName) -> None:
    head = make_head(tmp_path, target, method)
    drafter = load(tmp_path, target)
    [good, bad] = make_samples(target, [60, 60])
    bad.states[4] = torch.nan
    step = step_of([(5, bad, 0, 10), (6, good, 0, 10)])
    assert draft(drafter, step, [0, 1]) == [[], expect(head, 6, good, 10)]
    step = step_of([(5, bad, 10, 2), (6, good, 10, 1)])
    assert draft(drafter, step, [0, 1]) == [
        expect(head, 5, bad, 12, begin=10),
        expect(head, 6, good, 11),
    ]


def test_limits_end_drafts(tmp_path: Path, target: Any, method: MethodName) -> None:
    make_head(tmp_path, target, method)
    drafter = load(tmp_path, target, max_model_len=24)
    [sample] = make_samples(target, [60])
    assert [len(row) for row in draft(drafter, step_of([(5, sample, 0, 20)]), [0])] == [3]
    assert draft(drafter, step_of([(5, sample, 20, 1)]), [0], depth=0) == [[]]
    assert draft(drafter, step_of([(6, sample, 0, 8)]), []) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 64}, "hidden size"),
        ({"vocab": 40}, "vocabulary size"),
        ({"drop": "fc.weight"}, "no weight 'fc.weight'"),
        ({"add": "embed_tokens.weight"}, "embed_tokens.weight"),
        ({"cut": "layers.0.mlp.up_proj.weight"}, "shape"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, target: Any, change: dict[str, Any], message: str
) -> None:
    make_head(tmp_path, target)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    if name := change.get("drop"):
        del weights[name]
    if name := change.get("add"):
        weights[name] = torch.ones(2)
    if name := change.get("cut"):
        weights[name] = weights[name][:-1].clone()
    save_file(weights, file)
    shared = ends(share(target))
    fake = TargetEnds(change.get("hidden", 32), change.get("vocab", VOCAB), shared.embed, shared.logits)
    with pytest.raises(CheckpointError, match=message):
        HeadDrafter(tmp_path, fake, max_model_len=MAX_LEN, max_requests=4)


def test_what_counts_as_a_head(tmp_path: Path, target: Any) -> None:
    make_head(tmp_path / "eagle", target)
    make_head(tmp_path / "eagle3", target, "eagle3")
    target.save_pretrained(tmp_path / "model")
    found = [is_draft_head(tmp_path / name) for name in ("eagle", "eagle3", "model", "nothing")]
    assert found == [True, True, False, False]
    with pytest.raises(ConfigError, match="max_requests"):
        load(tmp_path / "eagle", target, max_requests=0)


def test_a_configuration_that_no_decoder_takes_is_none(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"architectures": ["caf\xe9"]}')
    assert read_architectures(tmp_path) == ()
    file.write_bytes(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert read_architectures(tmp_path) == ()
    with pytest.raises(CheckpointError, match=r"the configuration of the draft head cannot be read .*again"):
        read_fused_layers(tmp_path)


@pytest.mark.parametrize("inside", [True, False])
def test_the_configuration_says_which_layers_a_head_fuses(tmp_path: Path, target: Any, inside: bool) -> None:
    """Where vLLM's model runner V1 looks for them, or where V2 does."""
    make_head(tmp_path / "eagle", target)
    make_head(tmp_path, target, "eagle3")
    assert read_fused_layers(tmp_path / "eagle") == ()
    assert read_fused_layers(tmp_path) == (1, 2, 3)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    fused = config.pop("eagle_config")
    assert [config.pop(name) for name in fused] == [[1, 2, 3]]

    def name(layers: list[int]) -> None:
        named = {"eagle_aux_hidden_state_layer_ids": layers}
        file.write_text(json.dumps({**config, **({"eagle_config": named} if inside else named)}))

    name([1, 2, 3])
    assert read_fused_layers(tmp_path) == (1, 2, 3)
    for layers in ([2, 1, 3], [1, 1, 2], [0, 1, 2]):
        name(layers)
        with pytest.raises(CheckpointError, match="must ascend, from 1 on"):
            read_fused_layers(tmp_path)
    name([1, 2])
    with pytest.raises(CheckpointError, match="shape"):
        load(tmp_path, target)
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="an EAGLE head has none"):
        load(tmp_path, target)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_fused_layers(tmp_path)


@pytest.mark.parametrize(
    "positions",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    ],
)
def test_a_head_drafts_with_the_positions_that_it_has_learned_with(
    tmp_path: Path, positions: dict[str, Any]
) -> None:
    """Training computes the angles of a pack, drafting those of the longest response."""
    made = tiny_target()
    made.config.max_position_embeddings = 32
    made.config.rope_parameters = {"rope_theta": 10000.0, **positions}
    head = make_head(tmp_path / "head", made)
    drafter = load(tmp_path / "head", made, max_model_len=1024)
    learned, _ = head.rotary(torch.empty(0), torch.arange(20)[None])
    drafted = drafter._decoder._layer_shape.cos[:20, 0]
    torch.testing.assert_close(drafted, learned[0, :, : drafted.shape[1]])
