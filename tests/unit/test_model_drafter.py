"""The small-model drafter on tiny random Qwen2, Qwen3 and Llama checkpoints."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paceline import dice  # noqa: E402
from paceline._decoder import has_octet_dot  # noqa: E402
from paceline.drafting import model as model_module  # noqa: E402
from paceline.drafting import model_cache  # noqa: E402
from paceline.drafting import native_decoder as native_module  # noqa: E402
from paceline.drafting.model import ModelDrafter  # noqa: E402
from paceline.drafting.proposal import (  # noqa: E402
    NUM_CELLS,
    prior_calibration,
)
from paceline.errors import CheckpointError, ConfigError, UnsupportedError  # noqa: E402
from paceline.types import DraftBatch, DraftGrowth, DraftQuery  # noqa: E402

VOCAB = 48
ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
GRID = np.array([1.0, 2.0, np.inf], np.float32)


def save_model(path: Path, architecture: str = "qwen2", seed: int = 0, **overrides: Any) -> Any:
    """A tiny random causal LM with clearly uneven logits, saved to `path`; returned in float32."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    name = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{name}Config")(**(settings | overrides))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(path)
    return model


@pytest.fixture(params=["native", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Drafters run in this form, where they have it."""
    if request.param == "torch":
        monkeypatch.setattr(model_module, "native_decoder", lambda *_: None)
    return str(request.param)


STORAGES: list[native_module.Storage] = ["bfloat16", "int8", "int8-dot"]


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the native form keeps its weights, whatever their number."""
    skip_unless_kept(request.param)
    monkeypatch.setattr(native_module, "INT8_WEIGHTS", sys.maxsize if request.param == "bfloat16" else 0)
    monkeypatch.setattr(native_module, "has_octet_dot", lambda: request.param == "int8-dot")
    return str(request.param)


def skip_unless_kept(storage: native_module.Storage) -> None:
    """Some processors have no dot product of octets."""
    if storage == "int8-dot" and not has_octet_dot():
        pytest.skip("this processor has no dot product of octets")


@dataclass
class Target:
    """The target by brute force: the whole context at once, one request at a time, through the stock model.

    `alone`: through this drafter's forward pass instead; the native form rounds, so it is its own target.
    """

    model: Any
    temperature: float = 1.0
    alone: ModelDrafter | None = None

    def token(self, context: list[int], key: int) -> int:
        return int(
            dice.sample(
                np.ascontiguousarray(self.logits(np.array(context))),
                np.array([key], np.uint64),
                np.array([len(context)], np.int64),
                np.array([self.temperature], np.float32),
            )[0]
        )

    def logits(self, context: np.ndarray) -> Any:
        with torch.inference_mode():
            if self.alone is not None:
                row = np.zeros(1, np.int64)
                return self.alone._forward(row, row, row + len(context), context).numpy()
            return self.model(input_ids=torch.from_numpy(context)[None]).logits[0, -1:].float().numpy()


def save_target(path: Path, form: str, architecture: str = "qwen2", temperature: float = 1.0) -> Target:
    """A model saved to `path`, as the target of its own drafter in this form."""
    model = save_model(path, architecture)
    alone = ModelDrafter(path, max_model_len=2048, max_requests=1) if form == "native" else None
    return Target(model, temperature, alone)


@dataclass
class Rollout:
    """Contexts that grow in a token buffer; the drafter sees views of it."""

    prompts: list[list[int]]
    temperature: float = 1.0
    buffer: np.ndarray = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = np.zeros((len(self.prompts), 2048), np.int32)
        self.lengths = [0] * len(self.prompts)
        for row, prompt in enumerate(self.prompts):
            self.extend(row, prompt)

    def extend(self, row: int, tokens: list[int]) -> None:
        self.buffer[row, self.lengths[row] : self.lengths[row] + len(tokens)] = tokens
        self.lengths[row] += len(tokens)

    def context(self, row: int) -> list[int]:
        return self.buffer[row, : self.lengths[row]].tolist()

    def key(self, row: int) -> int:
        return 0x9E3779B97F4A7C15 * (row + 1) % 2**64

    def query(
        self, rows: Sequence[int], max_tokens: int | list[int] = 64
    ) -> tuple[list[np.ndarray], DraftQuery]:
        query = DraftQuery(
            groups=np.zeros(len(rows), np.int64),
            responses=np.array([1000 + row for row in rows], np.int64),
            keys=np.array([self.key(row) for row in rows], np.uint64),
            positions=np.array([self.lengths[row] for row in rows], np.int64),
            temperatures=np.full(len(rows), self.temperature, np.float32),
            max_tokens=np.broadcast_to(np.array(max_tokens, np.int32), len(rows)).copy(),
        )
        return [self.buffer[row, : self.lengths[row]] for row in rows], query


def draft(
    drafter: ModelDrafter, rollout: Rollout, rows: Sequence[int], depth: int, **options: Any
) -> DraftBatch:
    max_tokens = options.pop("max_tokens", 64)
    settings: dict[str, Any] = {
        "sharpness": 1.0,
        "sharpness_grid": GRID,
        "calibration": np.ones(NUM_CELLS, np.float32),
        "floor": 0.0,
    }
    contexts, query = rollout.query(rows, max_tokens)
    return drafter.draft(contexts, query, depth, **(settings | options))[0]


def random_prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_draft_equals_generate(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "native_decoder", lambda *_: None)
    model = save_model(tmp_path, architecture)
    rollout = Rollout(random_prompts([5, 17, 40]), temperature=0.0)
    batch = draft(ModelDrafter(tmp_path, max_model_len=256, max_requests=4), rollout, [0, 1, 2], 24)
    for row, prompt in enumerate(rollout.prompts):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert batch.tokens[row].tolist() == output[0, len(prompt) :].tolist()
    assert batch.num_tokens.tolist() == [24, 24, 24]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_target_as_its_own_drafter_agrees_through_rollbacks(
    tmp_path: Path, architecture: str, form: str
) -> None:
    target = save_target(tmp_path, form, architecture, temperature=0.8)
    drafter = ModelDrafter(tmp_path, max_model_len=512, max_requests=6)
    rollout = Rollout(random_prompts([3, 30, 9, 14, 1]), temperature=0.8)
    rng = np.random.default_rng(7)
    compared = 0
    for _ in range(12):
        rows = sorted(rng.choice(5, size=rng.integers(1, 6), replace=False).tolist(), key=lambda row: -row)
        batch = draft(drafter, rollout, rows, 5)
        for index, row in enumerate(rows):
            truth = []
            for token in batch.tokens[index].tolist():
                truth.append(target.token(rollout.context(row) + truth, rollout.key(row)))
                assert token == truth[-1]
                compared += 1
            kept = int(rng.integers(0, 6))
            # The verifier keeps some tokens and then takes another one than was drafted: a rejection. Sometimes
            # it goes on with drafts from elsewhere, so that stale tokens lie inside the context.
            other = (truth[kept] + 1) % VOCAB if kept < 5 else int(rng.integers(0, VOCAB))
            elsewhere = rng.integers(0, VOCAB, rng.integers(0, 4)).tolist()
            rollout.extend(row, [*truth[:kept], other, *elsewhere])
    assert compared >= 150


def test_prefill_in_chunks_and_ragged_catch_up(tmp_path: Path, form: str) -> None:
    target = save_target(tmp_path, form)
    drafter = ModelDrafter(tmp_path, max_model_len=2048, max_requests=4)
    rollout = Rollout(random_prompts([1100, 600, 2]))
    first = draft(drafter, rollout, [0, 1, 2], 2)
    for row in range(3):
        assert first.tokens[row, 0] == target.token(rollout.context(row), rollout.key(row))
    for row, count in enumerate([1, 7, 40]):
        rollout.extend(row, random_prompts([count], seed=row)[0])
    second = draft(drafter, rollout, [2, 0, 1], 2)
    for index, row in enumerate([2, 0, 1]):
        assert second.tokens[index, 0] == target.token(rollout.context(row), rollout.key(row))


def test_a_fork_drafts_what_its_context_alone_would(tmp_path: Path, form: str) -> None:
    """Again and again into one row, which keeps what the contexts have in common."""
    save_target(tmp_path, form)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=3)
    fresh = ModelDrafter(tmp_path, max_model_len=256, max_requests=3)
    rollout = Rollout(random_prompts([70, 1]))
    rng = np.random.default_rng(2)
    for cut in (70, 75, 73, 33, 90, 12):
        draft(drafter, rollout, [0], 6)
        common = rollout.context(0)[:cut]
        rollout.lengths[1] = 0
        rollout.extend(1, [*common, int(rng.integers(0, VOCAB))])
        drafter.fork(1000, 1001, cut)
        made = draft(drafter, rollout, [1, 0], 5)
        fresh.forget([1000, 1001])
        assert made.tokens.tolist() == draft(fresh, rollout, [1, 0], 5).tokens.tolist()
        rollout.extend(0, made.tokens[1, :4].tolist())
    drafter.fork(77, 1001, 5)
    assert draft(drafter, rollout, [1], 3).num_tokens.tolist() == [3], "nothing to fork from"


def test_responses_to_one_prompt_share_the_prompt_computation(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_target(tmp_path, form)
    drafter = ModelDrafter(tmp_path, max_model_len=512, max_requests=8)
    prompt = random_prompts([200])[0]
    other = random_prompts([90], seed=2)[0]
    rollout = Rollout([prompt, other, [*prompt, 3], prompt[:150] + [1] * 10, prompt])
    fed = []
    forward = drafter._forward
    monkeypatch.setattr(drafter, "_forward", lambda *args: (fed.append(len(args[3])), forward(*args))[1])
    batch = draft(drafter, rollout, range(5), 1)
    for row in range(5):
        assert batch.tokens[row, 0] == target.token(rollout.context(row), rollout.key(row))
    assert sum(fed) < 200 + 90 + 10 + 10  # both prompts once, the odd tail, one or two tokens per row


def test_eviction_takes_the_least_recently_used_row(tmp_path: Path, form: str) -> None:
    target = save_target(tmp_path, form)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=2)
    rollout = Rollout(random_prompts([12, 13, 14]))
    for rows in ([0, 1], [1], [2], [0], [1, 2]):
        batch = draft(drafter, rollout, rows, 3)
        for index, row in enumerate(rows):
            assert batch.num_tokens[index] == 3
            assert batch.tokens[index, 0] == target.token(rollout.context(row), rollout.key(row))
    assert [drafter._book.row(1000 + row) is None for row in range(3)] == [True, False, False]


def test_more_requests_than_rows_leaves_the_rest_without_draft(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=2)
    rollout = Rollout(random_prompts([12, 13, 14]))
    draft(drafter, rollout, [2], 3)
    assert draft(drafter, rollout, [0, 1, 2], 3).num_tokens.tolist() == [3, 0, 3]


def test_forgotten_rows_are_compacted_and_the_others_stay_right(tmp_path: Path, form: str) -> None:
    target = save_target(tmp_path, form)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4)
    rollout = Rollout(random_prompts([12, 13, 14, 15]))
    first = draft(drafter, rollout, [0, 1, 2, 3], 4)
    drafter.forget([1000, 1002, 999])
    for row in (1, 3):
        rollout.extend(row, first.tokens[row, :2].tolist())
        rollout.extend(row, [target.token(rollout.context(row), rollout.key(row))])
    batch = draft(drafter, rollout, [1, 3], 4)
    assert len(drafter._book) == 2
    for index, row in enumerate((1, 3)):
        truth: list[int] = []
        for token in batch.tokens[index].tolist():
            truth.append(target.token(rollout.context(row) + truth, rollout.key(row)))
            assert token == truth[-1]


def test_rows_that_cannot_draft_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=4)
    rollout = Rollout(random_prompts([12, 63, 64, 80]))
    batch = draft(drafter, rollout, [0, 1, 2, 3], 8, max_tokens=[3, 9, 9, 9])
    assert batch.num_tokens.tolist() == [3, 1, 0, 0]
    monkeypatch.setattr(drafter, "_forward", None)
    assert draft(drafter, rollout, [0, 1], 8, max_tokens=0).num_tokens.tolist() == [0, 0]
    assert draft(drafter, rollout, [], 8).num_tokens.tolist() == []


@pytest.mark.parametrize("idle_keys", [0, 10**9])
def test_rows_that_end_early_leave_the_others_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_keys: int
) -> None:
    """Whether idle rows between two are read along or cut out."""
    monkeypatch.setattr(model_cache, "IDLE_KEYS", idle_keys)
    save_model(tmp_path)
    rollout = Rollout(random_prompts([12, 13, 700, 15, 16]))
    full = draft(ModelDrafter(tmp_path, max_model_len=1024, max_requests=8), rollout, range(5), 6)
    limits = [2, 6, 6, 1, 4]
    batch = draft(
        ModelDrafter(tmp_path, max_model_len=1024, max_requests=8), rollout, range(5), 6, max_tokens=limits
    )
    assert batch.num_tokens.tolist() == limits
    for row, limit in enumerate(limits):
        assert batch.tokens[row, :limit].tolist() == full.tokens[row, :limit].tolist()


def test_growth_leaves_prefill_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4)
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("paceline.drafting.model.time.perf_counter", lambda: next(clock))
    contexts, query = Rollout(random_prompts([100, 13])).query([0, 1])
    table = np.ones(NUM_CELLS, np.float32)
    options: dict[str, Any] = {"sharpness": 1.0, "sharpness_grid": GRID, "calibration": table, "floor": 0.0}
    assert drafter.draft(contexts, query, 3, **options)[1] == DraftGrowth(3, 6, 6.0)
    assert drafter.draft(contexts, query, 0, **options)[1] == DraftGrowth()


def test_all_rows_end_where_a_level_costs_more_than_it_promises(tmp_path: Path) -> None:
    save_model(tmp_path)
    rollout = Rollout(random_prompts([9, 13]))
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4)
    table = np.full(NUM_CELLS, 0.5, np.float32)  # path probabilities 1/2, 1/4, .. of both rows
    costs = np.array([0.0, 0.1, 0.3], np.float32)  # two rows at 1/4 promise 0.5, at 1/8 only 0.25
    batch = draft(drafter, rollout, [0, 1], 16, calibration=table, level_costs=costs)
    assert batch.num_tokens.tolist() == [3, 3]


def test_floor_stops_a_path_after_the_token_that_crosses_it(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4)
    rollout = Rollout(random_prompts([12, 13]))
    halves = np.full(NUM_CELLS, 0.5, np.float32)
    batch = draft(drafter, rollout, [0, 1], 8, calibration=halves, floor=0.2)
    assert batch.num_tokens.tolist() == [3, 3]
    assert batch.path_probability[0, :4].tolist() == [0.5, 0.25, 0.125, 0.0]


def test_acceptance_is_the_calibration_of_the_cell(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=8)
    rollout = Rollout(random_prompts([12, 13, 14, 15, 16]))
    table = np.linspace(0.1, 1.0, NUM_CELLS, dtype=np.float32)
    batch = draft(drafter, rollout, list(range(5)), 6, calibration=table)
    np.testing.assert_array_equal(batch.acceptance, table[batch.cells])
    assert len(np.unique(batch.cells)) > 5


def test_probes_are_what_each_sharpness_would_have_drafted(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=32)
    rollout = Rollout(random_prompts([12] * 30))
    probes = draft(drafter, rollout, list(range(30)), 1).probes
    for column, sharpness in enumerate(GRID.tolist()):
        batch = draft(drafter, rollout, list(range(30)), 1, sharpness=sharpness)
        assert batch.tokens[:, 0].tolist() == probes[:, column].tolist()
    assert (probes[:, 0] != probes[:, 2]).any()


@pytest.mark.parametrize("sharpness", [1.0, 1.5, np.inf])
def test_proposals_are_sampled_and_weighed_as_defined(sharpness: float) -> None:
    rng = np.random.default_rng(3)
    logits = (2 * rng.standard_normal((12, 90))).astype(np.float32)
    keys, positions = rng.integers(0, 2**63, 12).astype(np.uint64), rng.integers(1, 999, 12)
    temperatures = np.resize(np.array([1.0, 0.7, 0.0], np.float32), 12)
    logits[4, 7] = np.nan
    logits[5], logits[5, 3] = -np.inf, 1.0  # one id alone can be drawn
    native = dice.propose(logits.copy(), keys, positions, temperatures, sharpness)
    tokens = dice.sample(logits, keys, positions, temperatures / np.float32(sharpness))
    assert native[0].tolist() == tokens.tolist()
    tokens, rest = np.maximum(tokens, 0), logits.copy()
    scale = np.where(temperatures > 0, temperatures, np.float32(1.0))
    np.put_along_axis(rest, tokens[:, None], -np.inf, 1)
    rivals = dice.sample(rest, keys, positions, temperatures)
    assert native[3].tolist() == rivals.tolist()
    rivals = np.maximum(rivals, 0)
    noise = np.where(temperatures > 0, dice.gumbel(keys, positions, np.stack([tokens, rivals])), 0)
    own, rival = (np.take_along_axis(logits, ids[:, None], 1)[:, 0] / scale for ids in (tokens, rivals))
    total = np.logaddexp.reduce(logits / scale[:, None], axis=1)
    drawn = np.arange(12) != 4
    alone = np.arange(12) == 5
    margin = np.where(alone, np.inf, own - rival + noise[0] - noise[1])
    assert native[0][4] == dice.NO_TOKEN
    np.testing.assert_allclose(native[1][drawn], (own - total)[drawn], atol=1e-5)
    np.testing.assert_allclose(native[2][drawn], margin[drawn], atol=1e-5)
    assert native[1][4] == native[2][4] == 0


def poisoned_drafter(path: Path, poison: int, **options: Any) -> ModelDrafter:
    """A drafter that gives NaN behind one token of a context."""
    model = save_model(path, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    model.save_pretrained(path)
    return ModelDrafter(path, max_model_len=64, max_requests=8, **options)


@pytest.mark.parametrize("form", ["native", "lean", "transformers"])
def test_nan_costs_its_own_response_its_drafts_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A row that ends in NaN is used again, beside longer ones, whose masked keys must not be NaN."""
    if form != "native":
        monkeypatch.setattr(model_module, "native_decoder", lambda *_: None)
    if form == "transformers":
        monkeypatch.setattr(model_module, "lean_decoder", lambda *_: None)
    poison = VOCAB - 2
    drafter = poisoned_drafter(tmp_path, poison)
    prompts = [[3, 4, 5], [7, 8, poison, 9, 10, 11, 12, 13, 14, 15, 16], [5, 6, 7], list(range(20, 40))]
    rollout = Rollout(prompts)
    alone = draft(drafter, rollout, [0, 2, 3], 6)
    drafter.forget([1000, 1002, 1003])
    for _ in range(2):
        batch = draft(drafter, rollout, [0, 3, 1], 6)
        assert batch.num_tokens.tolist() == [6, 6, 0]
        assert batch.tokens[:2].tolist() == alone.tokens[[0, 2]].tolist()
    drafter.forget([1001])
    assert draft(drafter, rollout, [0, 2, 3], 6).tokens.tolist() == alone.tokens.tolist()
    assert draft(drafter, rollout, [1], 6).num_tokens.tolist() == [0]


@pytest.mark.parametrize("form", ["native", "transformers"])
def test_a_drafted_token_that_gives_nan_ends_its_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form != "native":
        monkeypatch.setattr(model_module, "lean_decoder", lambda *_: None)
    model = save_model(tmp_path, tie_word_embeddings=False)
    rollout = Rollout([[3, 14], [1, 2] * 10])
    sound = ModelDrafter(tmp_path, max_model_len=64, max_requests=8)
    expected = draft(sound, rollout, [0, 1], 6).tokens
    poison = int(expected[0, 2])
    assert poison not in [1, 2, 3, 14, *expected[0, :2].tolist(), *expected[1].tolist()]
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    model.save_pretrained(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=8)
    for _ in range(2):
        batch = draft(drafter, rollout, [0, 1], 6)
        assert batch.num_tokens.tolist() == [3, 6]
        assert batch.tokens.tolist() == [[*expected[0, :3].tolist(), -1, -1, -1], expected[1].tolist()]
    rollout.extend(0, [4])  # the target decided otherwise, and the row goes on behind what was NaN
    assert draft(drafter, rollout, [0, 1], 2).num_tokens.tolist() == [2, 2]


def test_reloaded_weights_are_tried_for_every_response(tmp_path: Path) -> None:
    drafter = poisoned_drafter(tmp_path, 7)
    rollout = Rollout([[7, 8]])
    assert draft(drafter, rollout, [0], 2).num_tokens.tolist() == [0]
    sound = save_model(tmp_path / "sound", tie_word_embeddings=False)
    drafter.reload(sound.state_dict().items())
    assert draft(drafter, rollout, [0], 2).num_tokens.tolist() == [2]


def test_margin_and_confidence_cells_order_acceptance(tmp_path: Path) -> None:
    """A perturbed copy of the target accepts more often in cells that the prior ranks higher."""
    target = Target(save_model(tmp_path / "target"))
    noisy = save_model(tmp_path / "noisy")
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    noisy.save_pretrained(tmp_path / "noisy")
    drafter = ModelDrafter(tmp_path / "noisy", max_model_len=256, max_requests=300)
    rollout = Rollout(random_prompts([8] * 300))
    batch = draft(drafter, rollout, list(range(300)), 1, calibration=prior_calibration())
    accepted = np.array(
        [batch.tokens[row, 0] == target.token(rollout.context(row), rollout.key(row)) for row in range(300)]
    )
    estimate = batch.acceptance[:, 0]
    sure = estimate > np.median(estimate)
    assert 0.3 < accepted.mean() < 1.0
    assert accepted[sure].mean() > accepted[~sure].mean() + 0.1


def test_reload_swaps_weights_and_drops_the_cache(tmp_path: Path) -> None:
    save_model(tmp_path / "old", seed=0)
    new = save_model(tmp_path / "new", seed=3)
    drafter = ModelDrafter(tmp_path / "old", max_model_len=256, max_requests=4)
    rollout = Rollout(random_prompts([12, 13]))
    draft(drafter, rollout, [0, 1], 4)
    drafter.reload(new.named_parameters())
    batch = draft(drafter, rollout, [0, 1], 4)
    fresh = draft(ModelDrafter(tmp_path / "new", max_model_len=256, max_requests=4), rollout, [0, 1], 4)
    assert batch.tokens.tolist() == fresh.tokens.tolist()


def test_reload_refuses_other_weights_before_changing_any(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4)
    rollout = Rollout(random_prompts([12]))
    before = draft(drafter, rollout, [0], 4).tokens.tolist()
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    first = next(iter(weights))
    with pytest.raises(CheckpointError, match=r"no weight 'model\.other'"):
        drafter.reload([*weights.items(), ("model.other", torch.zeros(1))])
    with pytest.raises(CheckpointError, match="has shape"):
        drafter.reload([*weights.items(), (first, torch.zeros(3, 3))])
    with pytest.raises(CheckpointError, match="not sent"):
        drafter.reload(list(weights.items())[1:])
    assert draft(drafter, rollout, [0], 4).tokens.tolist() == before


def test_two_drafters_keep_their_caches_apart(tmp_path: Path) -> None:
    save_model(tmp_path / "a", seed=0)
    save_model(tmp_path / "b", seed=1)
    rollout = Rollout(random_prompts([12, 20]))
    alone = [
        draft(
            ModelDrafter(tmp_path / name, max_model_len=64, max_requests=2), rollout, [0, 1], 6
        ).tokens.tolist()
        for name in "ab"
    ]
    both = [ModelDrafter(tmp_path / name, max_model_len=64, max_requests=2) for name in "ab"]
    assert [draft(drafter, rollout, [0, 1], 6).tokens.tolist() for drafter in both] == alone


def test_bfloat16_checkpoint_drafts(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4, dtype="bfloat16")
    rollout = Rollout(random_prompts([12, 30]))
    assert draft(drafter, rollout, [0, 1], 4).num_tokens.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_requests": 0}, ConfigError, "max_requests is 0"),
        ({"max_model_len": 0}, ConfigError, "max_model_len is 0"),
        ({"dtype": "int3"}, ConfigError, "'int3': choose one of"),
        ({"vocab_size": 64}, CheckpointError, "48 ids, the target's 64: choose"),
    ],
)
def test_settings_that_cannot_work(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    save_model(tmp_path)
    with pytest.raises(error, match=message):
        ModelDrafter(tmp_path, **({"max_model_len": 64, "max_requests": 2} | arguments))


def test_checkpoints_that_cannot_work(tmp_path: Path) -> None:
    size = {"max_model_len": 64, "max_requests": 2}
    with pytest.raises(CheckpointError, match=r"nowhere: no drafter checkpoint there"):
        ModelDrafter(tmp_path / "nowhere", **size)
    save_model(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cut: the drafter checkpoint cannot be loaded"):
        ModelDrafter(tmp_path / "cut", **size)
    save_model(tmp_path / "window", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(UnsupportedError, match="sliding window of 16 tokens"):
        ModelDrafter(tmp_path / "window", **size)
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(CheckpointError, match=r"mamba: .*choose a full-attention decoder"):
        ModelDrafter(tmp_path / "mamba", **size)


def test_token_outside_the_vocabulary_is_a_tokenizer_error(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=2)
    with pytest.raises(CheckpointError, match="token id 48 of a context"):
        draft(drafter, Rollout([[1, 2, 48]]), [0], 2)


def test_padding_ids_of_a_larger_target_are_no_error(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=200)
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=2, vocab_size=201)
    made = draft(drafter, Rollout([[1, 2, 200], [1, 2, 199]]), [0, 1], 2)
    assert made.num_tokens.min() > 0
    with pytest.raises(CheckpointError, match="token id 201 of a context"):
        draft(drafter, Rollout([[1, 2, 201]]), [0], 2)


def test_draft_refuses_a_bad_sharpness_and_a_foreign_table(tmp_path: Path) -> None:
    save_model(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=2)
    with pytest.raises(ConfigError, match="sharpness is 0"):
        draft(drafter, Rollout([[1, 2]]), [0], 2, sharpness=0.0)
    with pytest.raises(ConfigError, match="calibration table"):
        draft(drafter, Rollout([[1, 2]]), [0], 2, calibration=np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", {}), ("llama", {"attention_bias": True, "tie_word_embeddings": False}), ("qwen2", {})],
)
def test_the_lean_form_drafts_what_transformers_drafts(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path, architecture, **overrides)
    with torch.no_grad():  # biases are zero and norms one in a fresh model; neither would be missed
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.rand_like(tensor))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(model_module, "native_decoder", lambda *_: None)
    made = []
    for form in ("lean", "transformers"):
        drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=4)
        assert drafter._lean is not None
        if form == "transformers":
            drafter._lean = None
        rollout = Rollout(random_prompts([40, 9, 23]))
        made.append(draft(drafter, rollout, range(3), 12))
    assert made[0].tokens.tolist() == made[1].tokens.tolist()
    assert made[0].cells.tolist() == made[1].cells.tolist()


@pytest.mark.parametrize("sharpness", [1.0, 1.5, np.inf])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_native_draft_grows_as_one_in_python_over_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharpness: float, temperature: float, num_threads: int
) -> None:
    """Floors, limits, level costs, padding ids, several passes; each form goes on from its own cache."""
    save_model(tmp_path, "llama", vocab_size=200)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    drafters = [ModelDrafter(tmp_path, max_model_len=128, max_requests=80, vocab_size=201) for _ in "ab"]
    forward = drafters[1]._native.logits
    drafters[1]._native = None
    monkeypatch.setattr(drafters[1], "_forward", forward)
    table = np.random.default_rng(0).permutation(prior_calibration() ** 0.2)
    costs = np.linspace(0.5, 20, 81, dtype=np.float32)
    rollout = Rollout(random_prompts([5 + row % 7 for row in range(80)]), temperature=temperature)
    lengths = set()
    for round_ in range(3):
        options = {"floor": 0.3, "level_costs": costs if round_ else None}
        limits = np.random.default_rng(round_).integers(0, 12, 80).tolist()
        made = [
            draft(
                one,
                rollout,
                range(80),
                9,
                sharpness=sharpness,
                calibration=table,
                max_tokens=limits,
                **options,
            )
            for one in drafters
        ]
        for name in ("tokens", "num_tokens", "acceptance", "cells", "rivals", "probes"):
            np.testing.assert_array_equal(getattr(made[0], name), getattr(made[1], name))
        for name in ("tokens", "cached", "certain"):
            np.testing.assert_array_equal(getattr(drafters[0]._book, name), getattr(drafters[1]._book, name))
        lengths |= set(made[0].num_tokens.tolist())
        for row in range(80):
            rollout.extend(row, [*made[0].tokens[row, : min(row % 4, made[0].num_tokens[row])].tolist(), 200])
    assert len(lengths) > 5


@pytest.mark.usefixtures("storage")
def test_sharing_the_work_among_threads_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows share each product and attention, many are shared out; prompts too."""
    save_model(
        tmp_path,
        "llama",
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2100,
    )
    made: list[list[torch.Tensor]] = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        native = ModelDrafter(tmp_path, max_model_len=256, max_requests=40)._native
        assert native is not None
        rng, logits = np.random.default_rng(0), []
        for num_rows, start, count in ((1, 0, 200), (1, 200, 2), (5, 0, 40), (40, 0, 3)):
            ids = rng.integers(0, 2100, num_rows * count)
            rows, starts, counts = np.arange(num_rows), np.full(num_rows, start), np.full(num_rows, count)
            logits.append(native.logits(rows, starts, counts, ids))
        made.append(logits)
    for alone, shared in zip(*made, strict=True):
        assert torch.equal(alone, shared)


def test_logits_do_not_depend_on_what_shares_the_pass(tmp_path: Path, storage: str) -> None:
    """Rows are few or many, in one tile or two, and inputs no multiple of a group's."""
    save_model(tmp_path, "llama", hidden_size=80, intermediate_size=176, vocab_size=150)
    native = ModelDrafter(tmp_path, max_model_len=64, max_requests=35)._native
    assert native is not None
    counts = np.random.default_rng(0).integers(1, 4, 35)
    ids = np.random.default_rng(1).integers(0, 150, int(counts.sum()))
    ends = np.cumsum(counts)
    rows, none = np.arange(35), np.zeros(35, np.int64)
    alone = [
        native.logits(rows[at : at + 1], none[:1], counts[at : at + 1], ids[ends[at] - counts[at] : ends[at]])
        for at in range(35)
    ]
    for number in (2, 3, 7, 16, 33, 35):
        made = native.logits(rows[:number], none[:number], counts[:number], ids[: ends[number - 1]])
        assert torch.equal(made, torch.cat(alone[:number]))


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 70},
        {"head_dim": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 80},
        {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 176},
        {
            "head_dim": 128,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "attention_bias": True,
        },
    ],
    ids=str,
)
def test_the_native_form_gives_the_logits_of_transformers(
    tmp_path: Path, sizes: dict[str, Any], storage: str
) -> None:
    """Ragged pieces on rows of many lengths, one token and several, in the middle of what the row has."""
    stock = save_model(tmp_path, "llama", **sizes)
    drafter = ModelDrafter(tmp_path, max_model_len=256, max_requests=9)
    assert drafter._native is not None
    prompts = random_prompts([1, 2, 15, 16, 17, 33, 100, 200, 64])
    rows = np.arange(9)
    with torch.inference_mode():
        for begin, end in ((0.0, 0.6), (0.6, 0.9), (0.9, 1.0)):
            starts = np.array([int(begin * len(prompt)) for prompt in prompts])
            counts = np.array([int(end * len(prompt)) for prompt in prompts]) - starts
            fed = counts > 0
            pieces = [
                prompt[start : start + count]
                for prompt, start, count in zip(prompts, starts, counts, strict=True)
            ]
            ids = np.array([token for piece in pieces for token in piece], np.int64)
            made = drafter._forward(rows[fed], starts[fed], counts[fed], ids)
        for row, logits in zip(rows[fed], made, strict=True):
            expected = stock(input_ids=torch.tensor([prompts[row]])).logits[0, -1]
            room = {"bfloat16": 0.05, "int8": 0.15, "int8-dot": 0.15}[storage] * float(expected.abs().max())
            torch.testing.assert_close(logits, expected, rtol=0.0, atol=room)


@pytest.mark.parametrize("octets", STORAGES[1:])
def test_every_group_of_inputs_has_a_scale_of_its_own(tmp_path: Path, octets: native_module.Storage) -> None:
    """Channels of very different size, as in large models: a scale for a whole output would drown the small ones."""
    skip_unless_kept(octets)
    stock = save_model(tmp_path, "llama", hidden_size=192, intermediate_size=176)
    with torch.no_grad():
        for layer in stock.model.layers:
            layer.input_layernorm.weight[:64] *= 1000.0
            layer.self_attn.q_proj.weight[:, :64] /= 1000.0
            layer.self_attn.k_proj.weight[:, :64] /= 1000.0
            layer.mlp.down_proj.weight[:, :64] *= 1000.0
            layer.mlp.up_proj.weight[:64] /= 1000.0
            layer.self_attn.v_proj.weight[:, :64] = 0.0
    stock.save_pretrained(tmp_path)
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=1)
    ids = np.array(random_prompts([40])[0])
    row = np.zeros(1, np.int64)
    with torch.inference_mode():
        expected = stock(input_ids=torch.from_numpy(ids)[None]).logits[0, -1]
    made = []
    kept: list[native_module.Storage] = ["bfloat16", octets]
    for storage in kept:
        native = native_module.NativeDecoder(drafter._lean, VOCAB, 2, 1, storage=storage)
        made.append(native.logits(row, row, row + len(ids), ids)[0])
    spread = float(expected.std())
    errors = [float((one - expected).pow(2).mean().sqrt()) / spread for one in made]
    assert (
        0 < errors[1] < 8 * errors[0] < 0.4
    )  # 8 bits are rounded five times as much; one scale would give noise


@pytest.mark.usefixtures("storage")
def test_a_weight_that_is_nan_gives_nan(tmp_path: Path) -> None:
    stock = save_model(tmp_path, "llama", tie_word_embeddings=False)
    with torch.no_grad():
        stock.lm_head.weight[5, 3] = torch.nan
    stock.save_pretrained(tmp_path)
    row = np.zeros(1, np.int64)
    with torch.inference_mode():
        logits = ModelDrafter(tmp_path, max_model_len=64, max_requests=1)._forward(row, row, row + 1, row)
    assert logits[0].isnan().nonzero().tolist() == [[5]]


def test_a_model_too_large_for_a_cache_is_kept_in_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, kept = save_model(tmp_path, "llama"), []
    monkeypatch.setattr(native_module, "NativeDecoder", lambda *_, storage: kept.append(storage))
    count = sum(
        one.numel() for name, one in stock.named_parameters() if "norm" not in name and "bias" not in name
    )
    for limit, has_dot in ((count, True), (count, False), (count + 1, True)):
        monkeypatch.setattr(native_module, "INT8_WEIGHTS", limit)
        monkeypatch.setattr(native_module, "has_octet_dot", lambda has_dot=has_dot: has_dot)
        ModelDrafter(tmp_path, max_model_len=64, max_requests=1)
    assert kept == ["int8-dot", "int8", "bfloat16"]


def test_sizes_without_a_native_form_keep_the_lean_one(tmp_path: Path) -> None:
    save_model(tmp_path / "odd", "llama", intermediate_size=72)
    save_model(tmp_path / "even", "llama")
    odd = ModelDrafter(tmp_path / "odd", max_model_len=64, max_requests=2)
    assert odd._native is None
    assert odd._lean is not None
    even = ModelDrafter(tmp_path / "even", max_model_len=64, max_requests=2, dtype="bfloat16")
    assert even._native is not None


def test_the_native_form_refuses_what_would_leave_its_arrays(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    drafter = ModelDrafter(tmp_path, max_model_len=64, max_requests=2)
    one = np.ones(1, np.int64)
    for row, start, token in ((2, 0, 0), (0, 64, 0), (0, 0, VOCAB), (-1, 0, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            drafter._forward(row * one, start * one, one, token * one)


def test_a_model_without_a_lean_form_runs_through_transformers(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    assert ModelDrafter(tmp_path, max_model_len=256, max_requests=4)._lean is None


def test_new_weights_reach_the_lean_form(tmp_path: Path) -> None:
    save_model(tmp_path / "old", "llama", seed=0)
    fresh = save_model(tmp_path / "new", "llama", seed=1)
    drafter = ModelDrafter(tmp_path / "old", max_model_len=256, max_requests=4)
    drafter.reload(fresh.named_parameters())
    rollout = Rollout(random_prompts([40, 9]))
    expected = draft(ModelDrafter(tmp_path / "new", max_model_len=256, max_requests=4), rollout, range(2), 8)
    assert draft(drafter, rollout, range(2), 8).tokens.tolist() == expected.tokens.tolist()


def test_short_contexts_take_little_memory_where_huge_pages_are_given_unasked(tmp_path: Path) -> None:
    """Each row has a stretch of its own for the longest context: with pages of 2 MiB it would take most of that."""
    config = save_model(tmp_path).config
    gc.collect()  # other tests' drafters: their memory would be given back meanwhile
    before = without_huge_pages()
    drafter = ModelDrafter(tmp_path, max_model_len=2048, max_requests=64)
    assert drafter._native is not None
    store = 64 * 2048 * config.num_key_value_heads * config.head_dim * 2  # bytes of a layer's keys
    assert without_huge_pages() - before >= 2 * config.num_hidden_layers * store


def without_huge_pages() -> int:
    """Bytes of this process's mappings that never have huge pages."""
    total, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if name == "Size:":
            size = 1024 * int(rest[0])
        elif name == "VmFlags:" and "nh" in rest:
            total += size
    return total
