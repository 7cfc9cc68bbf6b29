"""`make install` on machines unlike this one: another Python, a missing compiler, an index with CUDA builds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module
    spec.loader.exec_module(module)
    return module


def test_any_supported_python_is_used_and_a_complete_one_first(script: ModuleType) -> None:
    def found(command: str, minor: int, **has: bool) -> Any:
        given = {"has_venv": True, "has_headers": True} | has
        return script.Interpreter(command, (3, minor), **given)

    old, new = found("python3", 10), found("python3.14", 14)
    bare, whole = found("python3.11", 11, has_headers=False), found("python3.13", 13)
    assert script.choose([None, old, whole]) is whole
    assert script.choose([old, bare, whole]) is whole
    assert script.choose([bare, new]) is bare
    with pytest.raises(script.InstallationError, match=r"python3 is 3\.10, python3\.14 is 3\.14"):
        script.choose([old, new, None])
    with pytest.raises(script.InstallationError, match="none runs"):
        script.choose([None])


def test_this_python_is_seen_as_it_is(script: ModuleType) -> None:
    seen = script.probe(sys.executable)
    assert seen.version == sys.version_info[:2]
    assert seen.is_supported
    assert seen.lacks == []
    assert script.probe("/no/such/python") is None
    assert script.probe("true") is None


def test_headers_are_found_where_python_was_built_with_them(script: ModuleType, tmp_path: Path) -> None:
    """Python from deadsnakes, as on Ubuntu 22.04, names a folder below /usr/local in its paths that is not there."""
    patch = (
        "import sysconfig; paths = sysconfig.get_paths; "
        "sysconfig.get_paths = lambda *given: {**paths(*given), 'include': '/usr/local/include/not/there'}"
    )
    python = tmp_path / "python3.11"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{patch}$2"\n')
    python.chmod(0o755)
    assert script.probe(str(python)).has_headers


def test_an_environment_that_no_longer_runs_is_named(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/false")
    with pytest.raises(script.InstallationError, match=f"remove {tmp_path}, then try again"):
        script.prepare(tmp_path, sys.executable)


def test_an_environment_of_another_python_is_named(script: ModuleType, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    for wanted in (None, sys.executable, str(tmp_path / "venv" / "bin" / "python")):
        assert script.prepare(tmp_path / "venv", wanted) == str(tmp_path / "venv" / "bin" / "python")
    other = tmp_path / "python3.12"
    seen = {"version": [3, 12], "home": "/opt/other", "has_venv": True, "has_headers": True}
    other.write_text(f"#!/bin/sh\necho '{json.dumps(seen)}'\n")
    other.chmod(0o755)
    with pytest.raises(script.InstallationError, match=r"is 3\.12 of /opt/other: run 'make clean'"):
        script.prepare(tmp_path / "venv", str(other))
    with pytest.raises(script.InstallationError, match="/no/such is no Python that runs"):
        script.prepare(tmp_path / "venv", "/no/such")


def test_an_environment_without_pip_gets_it(script: ModuleType, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = str(tmp_path / "bin" / "python")
    for _ in range(2):
        script.ensure_pip(python)
        subprocess.run([python, "-m", "pip", "--version"], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("os_release", "missing", "command"),
    [
        (
            'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"',
            ["headers", "venv"],
            "apt-get install python3.12-dev python3.12-venv",
        ),
        ("ID=debian", ["compiler", "make"], "apt-get install g++ make"),
        (
            'ID="rocky"\nID_LIKE="rhel centos fedora"',
            ["compiler", "headers"],
            "dnf install gcc-c++ python3.12-devel",
        ),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"', ["headers"], "zypper install python312-devel"),
        ("ID=arch", ["compiler"], "pacman -S gcc"),
        ("ID=alpine", ["make"], "apk add make"),
        ("ID=plan9", ["compiler"], "your system's package manager"),
    ],
)
def test_what_is_missing_is_named_with_its_package(
    script: ModuleType, os_release: str, missing: list[str], command: str
) -> None:
    said = script.tell_missing(missing, (3, 12), script.family(os_release))
    assert command in said
    for name in missing:
        assert script.WORDS[name].format(v="3.12") in said


def test_a_machine_without_a_compiler_is_told_so(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script.compiles(os.environ)
    assert not script.compiles({"CXX": "false"})
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(script.InstallationError, match="missing: a C\\+\\+20 compiler"):
        script.prepare(tmp_path / "venv", sys.executable)
    assert not (tmp_path / "venv").exists()


def wheel(folder: Path, name: str, version: str, needs: list[str]) -> None:
    """An empty wheel with these requirements."""
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def fresh(tmp_path: Path) -> list[str]:
    """pip of an empty environment."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    return [str(tmp_path / "venv" / "bin" / "python"), "-m", "pip", "install", "-q"]


def test_pip_is_asked_which_torch_it_would_fetch(
    script: ModuleType, fresh: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, cpu = tmp_path / "cuda", tmp_path / "cpu"
    for folder in (cuda, cpu):
        folder.mkdir()
    wheel(cuda, "torch", "2.13.0", ["numpy", 'nvidia-cublas==13; platform_system == "Linux"'])
    wheel(cpu, "torch", "2.13.0+cpu", ["numpy"])
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cpu))
    assert not script.would_be_cuda(fresh, "torch==2.13.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cuda))
    assert script.would_be_cuda(fresh, "torch==2.13.0")
    subprocess.run([*fresh, "--no-deps", str(next(cpu.iterdir()))], check=True)
    assert not script.would_be_cuda(fresh, "torch==2.13.0")  # the CPU build is there: it stays


class PlainIndex(BaseHTTPRequestHandler):
    """A package index that says nothing about its one wheel but where it is."""

    wheel: Path
    num_sent = 0

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        body, status = self.wheel.read_bytes(), 200
        kind = "application/octet-stream"
        if self.path.endswith("/"):
            body, kind = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode(), "text/html"
        elif (asked := self.headers.get("Range")) is not None:
            begin, end = asked.removeprefix("bytes=").split("-")
            body, status = body[int(begin) : int(end) + 1], 206
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)
            PlainIndex.num_sent += len(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


def test_no_wheel_is_fetched_to_learn_what_it_needs(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the newest pip, which the installation gets first: older ones fetch whatever they are asked about."""
    newest = [sys.executable, "-m", "pip", "install", "-q", "--ignore-installed"]
    wheel(tmp_path, "torch", "2.13.0", ["nvidia-cublas==13"])
    [PlainIndex.wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(PlainIndex.wheel, "a") as file:
        file.writestr("libtorch.so", os.urandom(1 << 22))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with ThreadingHTTPServer(("127.0.0.1", 0), PlainIndex) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        assert script.would_be_cuda(newest, "torch==2.13.0")
        server.shutdown()
    assert PlainIndex.num_sent < 1 << 20


@pytest.mark.parametrize("cuda", [True, False])
def test_the_cpu_build_is_taken_before_the_lock(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    calls: list[list[str]] = []
    needs = ["nvidia-nccl-cu13==2"] if cuda else ["triton"]
    report = {"install": [{"metadata": {"requires_dist": needs}}]}

    def run(command: list[str], **options: Any) -> Any:
        if "install" in command:
            calls.append(command[5:])
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(report))

    monkeypatch.setattr(subprocess, "run", run)
    script.install("python")
    lock = script.LOCK.read_text()
    taken = ["--no-deps", "--index-url", script.CPU_INDEX, script.find_torch(lock)]
    assert (taken in calls) == cuda
    assert calls[-2] == ["--no-deps", "-r", str(script.LOCK)]
    assert calls[-1][-2:] == ["-e", str(ROOT)]


def test_no_index_is_named_where_packages_are_listed() -> None:
    for path in [*(ROOT / "requirements").iterdir(), ROOT / "pyproject.toml"]:
        text = path.read_text()
        assert "index-url" not in text
        assert "find-links" not in text
