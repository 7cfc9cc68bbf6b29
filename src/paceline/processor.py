"""What the processor can do, from the kernel's own list. Imports neither torch nor vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")


def cpu_features() -> frozenset[str]:
    """Flags of the first processor, empty where the system does not say."""
    return frozenset(_first("flags").split() or _first("features").split())


def best_linear_kernel() -> Literal["paceline", "vllm"]:
    """Whose linear layers are faster here in bfloat16 (engine/linear.py).

    By the processor alone, so that equal machines choose alike: Paceline's on Intel's with AVX-512 and, in what this
    system shows of them, no matrix unit. AMD's have a fast bfloat16 dot product, and vLLM kernels of their own.
    """
    features = cpu_features()
    suits = "avx512bw" in features and "avx512vl" in features and "amx_tile" not in features
    return "paceline" if suits and _first("vendor_id") == "GenuineIntel" else "vllm"


def _first(name: str) -> str:
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.lower().startswith(name)), "")
