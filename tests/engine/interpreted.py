"""vLLM's model runner V2 on a machine without a GPU: its Triton kernels in Triton's interpreter.

Import this before Triton and vLLM, in a process of its own. vLLM wants a `cpu` backend of Triton's, which no wheel has;
the interpreter needs none, so a stand-in serves.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ |= {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import triton.backends
from triton.runtime.interpreter import InterpreterOptions

triton.backends.backends["cpu"] = SimpleNamespace(
    driver=SimpleNamespace(is_active=lambda: False), compiler=None
)
InterpreterOptions.sanitize_overflow = False  # the hash's products overflow on purpose

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402

# Its kernel is too much for the interpreter: vLLM's form in torch stands in.
topk_topp_sampler.HAS_TRITON = False
