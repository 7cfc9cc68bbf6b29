"""`paceline simulate`: rollouts of a cluster that need not exist, in several systems, beside what papers claim."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.commands.inputs.options import check_writable
from paceline.errors import ConfigError
from paceline.record.whole_file import write_text
from paceline.sim.comparison import ClaimResult, SystemResult, judge_claims, run_systems
from paceline.sim.scenario import (
    PRESETS,
    SYSTEMS,
    Scenario,
    as_row,
    find_scenario,
    load_scenario,
    preset_names,
)
from paceline.terminal.tables import make_table

RESULT_VERSION = 1


def simulate(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="PRESET|FILE", help="A shipped preset, or a YAML file like one."),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Simulate these only, the baseline first; may be repeated."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Change a value of the scenario; may be repeated."
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="KEY.PATH=V1,V2,...",
            help="Simulate every value (all combinations if repeated), and compare.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the comparison here.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results here.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the scenario file and do nothing else.")
    ] = False,
) -> None:
    """Simulate a rollout on a cluster that need not exist, and compare systems.

    Without an argument, lists the presets. Example: paceline simulate specactor-dapo-32b --html dapo.html
    """
    if scenario is None:
        Console().print(presets_table())
        return
    if show:
        if override or what_if or system:
            raise ConfigError("--show prints the file as it is: leave out --set, --what-if and --system")
        typer.echo(_read_text(find_scenario(scenario)))
        return
    for option, path in (("--html", html), ("--json", json_file)):
        if path is not None:
            check_writable(option, path)
    changes = list(override or ())
    loaded = load_scenario(scenario, changes)
    names = _names(loaded, system)
    if what_if:
        if html is not None:
            raise ConfigError("--html draws one scenario: leave out --what-if, or use --json")
        _sweep(scenario, changes, names, what_if, json_file)
        return
    results, claims = run_scenario(scenario, loaded, changes, names)
    _show_results(loaded.title, results)
    if claims:
        Console().print(claims_table(claims))
    if json_file is not None:
        _write_json(json_file, loaded, results, claims)
    if html is not None:
        from paceline.report.simulation_page import build_simulation_page

        build_simulation_page(html, loaded.title, results, claims, _facts(loaded))
        typer.echo(f"picture: {html}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the scenario {path}: {reason}; see {PRESETS}") from error


def run_scenario(
    source: str, scenario: Scenario, changes: Sequence[str], names: Sequence[str]
) -> tuple[dict[str, SystemResult], list[ClaimResult]]:
    """The scenario's systems, and where claims are about a changed one, their systems there. source: what it was
    loaded from; changes: the overrides."""
    console = Console(stderr=True)
    with console.status("simulating") as status:
        results = run_systems(scenario, names, lambda name: status.update(f"simulating {name}"))
        variants: dict[tuple[str, ...], Mapping[str, SystemResult]] = {}
        for where in sorted({claim.where for claim in scenario.claims if claim.where}):
            wanted = {n for c in scenario.claims if c.where == where for n in (c.of, c.over)} & set(names)
            if not wanted:
                continue
            changed = load_scenario(source, [*changes, *where])
            ordered = [name for name in names if name in {names[0], *wanted}]
            variants[where] = run_systems(
                changed,
                ordered,
                lambda name, at=where: status.update(f"{name}, {at[0]}"),  # type: ignore[misc]
            )
    return results, judge_claims(scenario, results, variants)


def _names(scenario: Scenario, chosen: Sequence[str] | None) -> list[str]:
    for name in chosen or ():
        if name not in SYSTEMS:
            raise ConfigError(f"--system {name!r}: there are {', '.join(map(repr, SYSTEMS))}")
    names = list(dict.fromkeys(chosen or scenario.systems))
    for name in names:
        lacking = [field for field in SYSTEMS[name][1] if not getattr(scenario, field)]
        if lacking:
            raise ConfigError(f"--system {name!r} needs {' and '.join(lacking)} in the scenario")
    return names


def presets_table() -> Table:
    """One row per shipped scenario."""
    table = make_table(("preset", "what"), ("responses", "GPUs"), title="presets: paceline simulate PRESET")
    for name in preset_names():
        loaded = load_scenario(name)
        table.add_row(name, loaded.title, str(loaded.groups * loaded.group_size), str(loaded.gpus))
    return table


def results_table(title: str, results: Mapping[str, SystemResult]) -> Table:
    """One row per system."""
    columns = ("s", "x", "step\nx", "tail\ns", "idle\n%", "AL", "waste\n%", "pre-\nempt")
    caption = (
        "s: the rollout; x: over the first system; step: the whole training step; tail: from 90 % finished; idle: of "
        "the workers' time; AL: acceptance length, tokens per request and step; waste: of the draft tokens; pre-empt: "
        "requests that lost their memory"
    )
    table = make_table(("system",), columns, title=title, caption=caption)
    baseline = next(iter(results.values()))
    for one in results.values():
        wasted = f"{100 * one.wasted_tokens / one.drafted_tokens:.0f}" if one.drafted_tokens else ""
        table.add_row(
            one.name,
            f"{one.rollout_s:.0f}",
            f"{baseline.rollout_s / one.rollout_s:.2f}",
            f"{baseline.step_s / one.step_s:.2f}",
            f"{one.tail_s:.0f}",
            f"{100 * one.idle_share:.0f}",
            f"{one.acceptance_length:.2f}",
            wasted,
            f"{one.preemptions:.0f}" if one.preemptions else "",
        )
    return table


def _show_results(title: str, results: Mapping[str, SystemResult]) -> None:
    console = Console()
    console.print(results_table(title, results))
    for one in results.values():
        if one.note:
            console.print(f"{one.name}: {one.note}", highlight=False)


def claims_table(claims: Sequence[ClaimResult]) -> Table:
    """One row per published number."""
    table = make_table(
        ("claim",),
        ("published", "ours", "diff."),
        title="published numbers and ours",
        caption="*: no prediction (fitted, or implied by others)",
    )
    for one in claims:
        claim = one.claim
        high = f"-{claim.paper_to:g}" if claim.paper_to is not None else ""
        text = claim.text + ("" if claim.standing == "predicted" else " *")
        table.add_row(text, f"{claim.paper:g}{high}", one.ours_text, one.difference_text)
    return table


def _sweep(
    source: str, changes: Sequence[str], names: Sequence[str], what_if: Sequence[str], target: Path | None
) -> None:
    axes = [_read_axis(text) for text in what_if]
    keys = [key for key, _ in axes]
    table = make_table((*keys, "system"), ("rollout s", "x"), title="what if", caption=f"x: over {names[0]}")
    rows: list[dict[str, Any]] = []
    points = []
    for values in itertools.product(*(values for _, values in axes)):
        chosen = [f"{key}={value}" for (key, _), value in zip(axes, values, strict=True)]
        points.append((values, chosen, load_scenario(source, [*changes, *chosen])))
    for values, chosen, scenario in points:
        results = run_systems(scenario, names)
        base = results[names[0]].rollout_s
        for place, name in enumerate(names):
            found = results[name].rollout_s
            where = ("",) * len(values) if place else values
            table.add_row(*where, name, f"{found:.0f}", f"{base / found:.2f}")
        table.add_section()
        rows += [{"what_if": chosen, **_row(one)} for one in results.values()]
    Console().print(table)
    if target is not None:
        write_text(json.dumps({"version": RESULT_VERSION, "rows": rows}, indent=1) + "\n", target, "--json")


def _read_axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not key.strip() or not found:
        raise ConfigError(f"--what-if {text}: write it as key.path=value,value, such as gpus=64,128,256")
    return key.strip(), found


def _row(one: SystemResult) -> dict[str, Any]:
    """A system's result as plain values."""
    row = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "last"}
    workers = [
        {"busy_s": c.busy_s, "generated_tokens": c.generated_tokens, "intervals": c.intervals}
        for c in one.last.counters
    ]
    ends = sorted(one.last.end_s.tolist())
    return {**row, "end_s": [round(value, 3) for value in ends], "workers": workers}


def _write_json(
    target: Path, scenario: Scenario, results: Mapping[str, SystemResult], claims: Sequence[ClaimResult]
) -> None:
    found = {
        "version": RESULT_VERSION,
        "scenario": as_row(scenario),
        "systems": [_row(one) for one in results.values()],
        "claims": [
            {**one.claim.model_dump(mode="json"), "ours": one.ours, "difference": one.difference}
            for one in claims
        ],
    }
    write_text(json.dumps(found, indent=1) + "\n", target, "--json")


def _facts(scenario: Scenario) -> dict[str, Any]:
    return {
        "GPUs": scenario.gpus,
        "responses": scenario.groups * scenario.group_size,
        "group size": scenario.group_size,
        "longest response": scenario.max_tokens,
        "steps": scenario.steps,
        "seed": scenario.seed,
    }
