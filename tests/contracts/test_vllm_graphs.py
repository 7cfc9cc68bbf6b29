"""The CUDA graphs that vLLM would capture, by its own list: how many there are, and which serves a ragged step.

Nothing is captured here: the list is made when an engine starts, before any capture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils

from paceline.config import BudgetSettings
from paceline.engine.v2.runner import KeyedRunnerV2, compile_for_draft_slots
from paceline.planning.captures import GRAPH_BYTES, GRAPHS_PER_SIZE, captures_for

ASSETS = Path(__file__).parents[2] / "assets"
MAX_DRAFTS = 32
RAGGED = {
    "num_reqs": 5,
    "num_tokens": 37,
    "uniform_token_count": None,
    "num_active_loras": 0,
    "max_query_len": 9,
}
"""A step in which requests verify up to 8 draft tokens."""
BACKEND = type("TheirBackend", (), {})

ListGraphs = Callable[..., Any]


@pytest.fixture
def runner_of(monkeypatch: pytest.MonkeyPatch) -> ListGraphs:
    """Makes Paceline's runner over a stand-in for vLLM's, which lists graphs as vLLM does."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: False)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)

    def make(
        sizes: tuple[int, ...],
        max_requests: int,
        support: AttentionCGSupport,
        mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    ) -> Any:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=max_requests),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=max(sizes)
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False),
            num_speculative_tokens=MAX_DRAFTS,
        )
        builder = SimpleNamespace(
            get_cudagraph_support=lambda *_: support, get_varlen_cudagraph_max_query_len=lambda *_: None
        )
        group = SimpleNamespace(backend=BACKEND, kv_cache_spec=None, get_metadata_builder=lambda _: builder)

        class TheirRunner:
            vllm_config, device, attn_groups, fast_prefill = config, None, [[group]], None
            scheduler_config = SimpleNamespace(async_scheduling=False)
            model_state = SimpleNamespace(get_additional_cg_support=lambda: (AttentionCGSupport.ALWAYS, None))

            kv_caches: ClassVar[list[Any]] = []

            def initialize_kv_cache(self: Any, kv_cache_config: Any) -> None:
                manager = cudagraph_utils.ModelCudaGraphManager
                self.cudagraph_manager = manager(config, None, mode, 1 + MAX_DRAFTS)

        runner: Any = type("OurRunner", (KeyedRunnerV2, TheirRunner), {})()
        runner.initialize_kv_cache(SimpleNamespace(num_blocks=1, kv_cache_groups=[]))
        runner.cudagraph_manager._graphs_captured = True
        return runner

    return make


@pytest.mark.parametrize("policy", ["marginal", "bandit", "thresholds", "fixed"])
@pytest.mark.parametrize("max_requests", [1, 8, 64, 256])
@pytest.mark.parametrize("memory_bytes", [1 << 30, 6 << 30])
@pytest.mark.parametrize("support", [AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH])
def test_all_that_vllm_captures_is_within_the_memory(
    runner_of: ListGraphs, policy: str, max_requests: int, memory_bytes: int, support: AttentionCGSupport
) -> None:
    budget = BudgetSettings.model_validate({"policy": policy})
    sizes = captures_for(budget, MAX_DRAFTS, max_requests, memory_bytes)
    listed = runner_of(sizes, max_requests, support).cudagraph_manager._capture_descs
    num_graphs = sum(map(len, listed.values()))
    assert num_graphs * GRAPH_BYTES <= memory_bytes
    assert num_graphs <= GRAPHS_PER_SIZE * len(sizes)
    if support is AttentionCGSupport.ALWAYS:
        assert num_graphs == GRAPHS_PER_SIZE * len(sizes)


def test_ragged_steps_run_in_full_graphs_where_the_attention_replays_them(runner_of: ListGraphs) -> None:
    manager = runner_of((8, 40, 80), 64, AttentionCGSupport.ALWAYS).cudagraph_manager
    graph = manager.dispatch(**RAGGED)
    assert (graph.cg_mode, graph.num_tokens) == (CUDAGraphMode.FULL, 40)
    with_prefill = manager.dispatch(**{**RAGGED, "max_query_len": None})
    assert (with_prefill.cg_mode, with_prefill.num_tokens) == (CUDAGraphMode.PIECEWISE, 40)


def test_a_ragged_graph_is_replayed_with_metadata_for_its_longest_query() -> None:
    """On an H100 a step without drafts went wrong with metadata for its own longest query, of one token."""

    class TheirRunner:
        scheduler_config = SimpleNamespace(async_scheduling=False)

        def prepare_inputs(self, scheduled: Any, batch: Any, graph: Any, loras: int) -> Any:
            return SimpleNamespace(max_query_len=None)  # vLLM takes the step's

    runner: Any = type("OurRunner", (KeyedRunnerV2, TheirRunner), {})()
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens={})
    for longest in (33, None):
        made = runner.prepare_inputs(scheduled, None, SimpleNamespace(max_query_len=longest), 0)
        assert made.max_query_len == longest


def test_compiled_code_takes_a_draft_models_steps() -> None:
    """Loading the draft model computes the configuration that it shares with the target anew."""
    from vllm.config import replace
    from vllm.engine.arg_utils import EngineArgs

    drafter = {
        "method": "draft_model",
        "model": str(ASSETS / "countdown-drafter"),
        "num_speculative_tokens": 4,
    }
    config = EngineArgs(
        str(ASSETS / "countdown-policy"), max_num_seqs=64, max_model_len=512, speculative_config=drafter
    ).create_engine_config()
    most = config.scheduler_config.max_num_batched_tokens + 64
    compile_for_draft_slots(config.compilation_config, most)
    drafts = replace(config, model_config=config.speculative_config.draft_model_config)
    assert config.compilation_config.get_compile_ranges()[-1].end < most, "vLLM keeps what was set before"
    compile_for_draft_slots(config.compilation_config, most)
    for one in (config, drafts):
        assert one.compilation_config.get_compile_ranges()[-1].end == most


def test_with_other_attention_full_graphs_are_of_steps_without_drafts(
    runner_of: ListGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own are of steps in which every request has 33 tokens, as those of Paceline seldom do."""
    manager = runner_of((8, 40, 80), 64, AttentionCGSupport.UNIFORM_BATCH).cudagraph_manager
    assert manager.dispatch(**RAGGED).cg_mode == CUDAGraphMode.PIECEWISE
    plain = {**RAGGED, "num_reqs": 37, "uniform_token_count": 1, "max_query_len": 1}
    graph = manager.dispatch(**plain)
    assert (graph.cg_mode, graph.num_tokens, graph.num_reqs) == (CUDAGraphMode.FULL, 40, 40)
    assert "TheirBackend cannot replay requests of 1 to 33 tokens each" in caplog.text


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_graphs_of_other_kinds_are_left_as_they_are(runner_of: ListGraphs, mode: CUDAGraphMode) -> None:
    manager = runner_of((8, 40, 80), 64, AttentionCGSupport.ALWAYS, mode).cudagraph_manager
    assert not manager.varlen_decode
    assert manager.dispatch(**RAGGED).cg_mode == mode
