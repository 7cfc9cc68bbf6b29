"""vLLM's model runner V2, for tests: on a GPU where vLLM is built for one, else with its Triton kernels interpreted.

Import this before Triton and vLLM, in a process of its own. vLLM wants a `cpu` backend of Triton's, which no wheel has;
the interpreter needs none, so a stand-in serves.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.engine.installed import is_cpu_build

ON_GPU = not is_cpu_build()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = "bfloat16" if ON_GPU else "float32"

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def memory(num_bytes: int) -> dict[str, Any]:
    """Arguments of an engine whose KV cache shall be so large; on a GPU, so that several can follow one another."""
    if ON_GPU:
        attention = {"attention_backend": "TRITON_ATTN"}  # the tests compare what is read again
        return {"kv_cache_memory_bytes": num_bytes, "gpu_memory_utilization": 0.1, **attention}
    return {"kv_cache_bytes": num_bytes}


if ON_GPU:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # the tests compare bits
else:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends
    import vllm.platforms
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterOptions

    triton.backends.backends["cpu"] = SimpleNamespace(
        driver=SimpleNamespace(is_active=lambda: False), compiler=None
    )
    # The hash's products overflow on purpose, and looking for that takes a third of the time.
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)

    def patch_once() -> None:
        """Let the language stay as the interpreter wants it, which else puts it there anew for every call of a kernel,
        and of each function in it: another third.
        """
        patch, patched = interpreter._patch_lang, set[int]()
        left = SimpleNamespace(restore=lambda: None)

        def patch_lang(function: Any) -> SimpleNamespace:
            if (names := id(function.__globals__)) not in patched:
                patch(function)
                patched.add(names)
            return left

        interpreter._patch_lang = patch_lang

    def remember_number_formats() -> None:
        """The interpreter makes a table of all of them to look one up."""
        look_up, address = cache(interpreter._get_np_dtype), np.dtype(np.uint64)

        def number_format(kind: Any) -> Any:
            scalar = kind.element_ty if kind.is_block() else kind
            return address if scalar.is_ptr() else look_up(scalar)

        interpreter._get_np_dtype = number_format

    def collect_little() -> None:
        """vLLM collects garbage a dozen times for each engine, 0.3 s each in a process with so many objects."""
        collect = gc.collect
        gc.collect = lambda generation=0: collect(0)
        gc.set_threshold(100_000, 50, 100)

    patch_once()
    remember_number_formats()
    collect_little()

    from vllm.v1.sample.ops import topk_topp_sampler

    # Its kernel is too much for the interpreter: vLLM's form in torch stands in.
    topk_topp_sampler.HAS_TRITON = False

    from vllm.platforms.cpu import CpuPlatform

    class OverlappingPlatform(CpuPlatform):
        """Lets steps overlap, as they do on a GPU; vLLM's switches it off."""

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            wanted = vllm_config.scheduler_config.async_scheduling
            super().check_and_update_config(vllm_config)
            vllm_config.scheduler_config.async_scheduling = wanted

    vllm.platforms.current_platform.__class__ = OverlappingPlatform
