"""What the processor is and can do, from the kernel's own list. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")
LinearKernel = Literal["paceline", "paceline-dot", "vllm"]


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


def best_linear_kernel() -> LinearKernel:
    """Which linear layers are the fastest here in bfloat16 (engine/linear.py).

    By the processor alone, so that equal machines choose alike. Where what this system shows of it has AVX-512 and no
    matrix unit, Paceline's: on Intel's by float32 multiply-adds, on AMD's, which have a fast one, by the dot product.
    By multiply-adds too where it has AVX2 alone, with which oneDNN does not multiply bfloat16.
    """
    features, vendor = cpu_features(), first_cpu().get("vendor_id")
    if {"avx2", "fma"} <= features and not {"avx512f", "avx_ne_convert"} & features:
        return "paceline"
    if not {"avx512bw", "avx512vl"} <= features or "amx_tile" in features:
        return "vllm"
    if vendor == "GenuineIntel":
        return "paceline"
    return "paceline-dot" if vendor == "AuthenticAMD" and "avx512_bf16" in features else "vllm"
