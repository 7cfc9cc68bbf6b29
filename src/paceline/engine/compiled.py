"""Compiled mode: the target's forward pass through torch.compile, from a cache that outlives the process.

Compiled and eager logits differ in the last bits, so a run keeps to one of the two (`EngineSettings.compiled`). Each is
bitwise batch-invariant for itself on the CPU (invariance.py). Called by arguments.py before the engine starts and by
the worker around the first forward pass, which compiles or loads.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from paceline.engine.installed import is_cpu_build
from paceline.errors import InstallError
from paceline.processor import LinearKernel

MIN_TOKENS = 2
"""Fewest tokens of a compiled batch-invariant step. torch.compile takes sizes 0 and 1 for constants: for one row it
would make other code, and cut the measure for single rows out of the graph where there is one."""


def check_compiler() -> None:
    """Raise InstallError where torch.compile finds no C++ compiler. On the CPU it needs one even to load from cache."""
    compiler = os.environ.get("CXX", "g++")
    if is_cpu_build() and shutil.which(compiler) is None:
        raise InstallError(
            f"compiled mode needs a C++ compiler, and {compiler} is not there: install it (Debian, Ubuntu: apt install "
            "g++) or name one in CXX; or set compiled=False (recipe: engine.compiled: false, commands: --eager)"
        )


def is_compiled(vllm_config: Any) -> bool:
    """Whether an engine runs compiled code."""
    from vllm.config import CompilationMode

    return bool(vllm_config.compilation_config.mode != CompilationMode.NONE)


def mend_cache() -> None:
    """Let every process find and load what vLLM has compiled for the CPU. Idempotent, once per process.

    vLLM 0.32 ends loading with `finalize_loading`, which only the code that it splits for CUDA graphs has; on the CPU
    it fails, warns and compiles anew. It compiles with `cpp.dynamic_threads`, but its key holds torch's process-wide
    value, which it sets by an environment variable: torch has read it by then, and only child processes see it.
    """
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Loaded
    from torch._inductor import config

    if not hasattr(Loaded, "finalize_loading"):
        Loaded.finalize_loading = lambda self, vllm_config: None
    config.cpp.dynamic_threads = True


@contextmanager
def cached_by_architecture(vllm_config: Any, fused_layers: tuple[int, ...]) -> Iterator[None]:
    """While inside, the key of vLLM's compile cache leaves out what has no say in the code.

    That is Paceline's settings (a run's seed, folders, ports) and, for models whose code depends on their config.json
    alone, the model's folder and max_model_len: the next checkpoint of a training run does not compile again.

    fused_layers: those whose inputs the code hands out (v1/hidden_states.py).
    """

    def compute_hash(include_version: bool = True) -> str:
        bare = copy.copy(vllm_config)
        bare.__dict__.pop("compute_hash", None)
        bare.additional_config = {
            "paceline_invariant": is_invariant(vllm_config),
            "paceline_linear": linear_kernel(vllm_config),
            "paceline_fused_layers": fused_layers,
        }
        bare.speculative_config = None  # our proposer's, which names the target once more
        if _depends_on_config_alone(vllm_config.model_config):
            bare.model_config = copy.copy(vllm_config.model_config)
            bare.model_config.model = ""
            bare.model_config.max_model_len = 0
        return str(bare.compute_hash(include_version))

    vllm_config.__dict__["compute_hash"] = compute_hash
    try:
        yield
    finally:
        del vllm_config.__dict__["compute_hash"]


def is_invariant(vllm_config: Any) -> bool:
    """Whether the batch-invariance measures of the CPU are on."""
    return bool(_chosen(vllm_config, "paceline_invariant", False))


def linear_kernel(vllm_config: Any) -> LinearKernel:
    """Whose kernels linear layers get where they can (linear.py)."""
    return cast("LinearKernel", _chosen(vllm_config, "paceline_linear", "vllm"))


def _chosen(vllm_config: Any, name: str, default: Any) -> Any:
    settings = vllm_config.additional_config
    return settings.get(name, default) if isinstance(settings, dict) else default


def _depends_on_config_alone(model: Any) -> bool:
    """False where scales of a quantized checkpoint, or the context length, may be constants of the code."""
    return model.quantization is None and not model.use_mla and "longrope" not in str(model.hf_config)
