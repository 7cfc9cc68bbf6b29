"""What the processor is and can do, from the kernel's own list. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")


def first_cpu() -> Mapping[str, str]:
    """What is said of the first processor, names in small letters; empty where the system says nothing."""
    try:
        with CPU_INFO.open(errors="replace") as file:
            pairs = (line.partition(":") for line in takewhile(str.strip, file))
            return {name.strip().lower(): value.strip() for name, _, value in pairs}
    except OSError:
        return {}


def cpu_features() -> frozenset[str]:
    """Its flags, empty where the system does not say."""
    cpu = first_cpu()
    return frozenset((cpu.get("flags") or cpu.get("features", "")).split())


def best_linear_kernel() -> Literal["paceline", "vllm"]:
    """Whose linear layers are faster here in bfloat16 (engine/linear.py).

    By the processor alone, so that equal machines choose alike: Paceline's on Intel's with AVX-512 and, in what this
    system shows of them, no matrix unit. AMD's have a fast bfloat16 dot product, and vLLM kernels of their own.
    """
    features = cpu_features()
    suits = {"avx512bw", "avx512vl"} <= features and "amx_tile" not in features
    return "paceline" if suits and first_cpu().get("vendor_id") == "GenuineIntel" else "vllm"
