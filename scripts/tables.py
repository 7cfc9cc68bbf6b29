"""The tables that scripts/fill_numbers.py writes whole, each made from a result file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.sim.scenario import load_scenario

Rows = Callable[[str], list[dict[str, Any]]]
"""`Results.rows`: the rows of a source such as `papers` or `papers.systems`."""

SYSTEMS = ("vanilla speculation", "SpecActor", "Seer", "TLT", "Paceline")
TECHNIQUES = ("divided", "budget", "coupled", "decoupled", "single-path")


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def signed_percent(share: float | None) -> str:
    """`+4 %`, `0`, or nothing where there is no number."""
    if share is None:
        return ""
    rounded = round(100 * share)
    return f"{rounded:+d} %" if rounded else "0"


def in_presets(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The presets of the rows: SpecActor's, Seer's, TLT's, each in the order of their names."""
    papers = ("specactor", "seer", "tlt")
    return sorted({row["preset"] for row in rows}, key=lambda p: (papers.index(p.partition("-")[0]), p))


def list_claims(rows: Rows) -> str:
    """Every published number beside ours."""
    claims = rows("papers")
    lines = []
    for preset in in_presets(claims):
        title = load_scenario(preset).title
        for row in (row for row in claims if row["preset"] == preset):
            claim = f"{row['claim']} ({row['source']})"
            ours = f"{row['ours']:.0f}" if row["ours"] >= 100 else f"{row['ours']:.2f}"
            differences = (signed_percent(row["difference"]), signed_percent(row["gain_difference"]))
            lines.append((title, claim, row["published"], ours, *differences, row["standing"]))
            title = ""
    head = ("preset", "claim", "published", "ours", "difference", "of the gain", "")
    return format_table(head, lines)


def list_counts(rows: Rows) -> str:
    """How many predictions hold."""
    names = {"latest": "each paper's latest version", "earlier": "earlier versions"}
    lines = [
        (
            names[row["versions"]],
            str(row["predictions"]),
            str(row["within_15"]),
            str(row["gains"]),
            str(row["gains_within_25"]),
        )
        for row in rows("papers.counts")
    ]
    head = ("", "predictions", "within 15 %", "of them gains", "the gain within 25 %")
    return format_table(head, lines)


def list_systems(rows: Rows) -> str:
    """Every system on every preset, times as fast as veRL."""
    return _list_speedups(rows("papers.systems"), {name: name for name in SYSTEMS})


def list_techniques(rows: Rows) -> str:
    """Paceline with some of its techniques, times as fast as veRL."""
    names = {name: f"Paceline, {name}" for name in TECHNIQUES}
    return _list_speedups(rows("papers.systems"), {**names, "Paceline": "Paceline"})


def list_plans(rows: Rows) -> str:
    """What Paceline's plan chose on each preset, over what."""
    systems = rows("papers.systems")
    notes = {row["preset"]: row["note"] for row in systems if row["system"] == "Paceline"}
    return "\n".join(f"* {load_scenario(p).title}: {notes[p]}." for p in in_presets(systems))


def list_live(rows: Rows) -> str:
    """Live rollouts and the same ones simulated."""
    lines = [
        (
            f"{row['case']}, {'drafts' if row['drafts'] else 'plain'}",
            f"{row['measured_s']:.1f}",
            f"{row['simulated_s']:.1f}",
            signed_percent(row["error"]) + (" (cancels)" if row["cancels"] else ""),
            f"{row['acceptance_length']:.2f}",
            f"{row['simulated_length']:.2f}",
            signed_percent(row["rounds_error"]),
            signed_percent(row["round_error"]),
        )
        for row in rows("simulated_live")
    ]
    lengths = ("acceptance length", "simulated", "error of the rounds", "of the time of each")
    return format_table(("rollouts", "measured s", "simulated s", "error", *lengths), lines)


def list_speed(rows: Rows) -> str:
    """Group rollouts, compiled: vLLM's best tuned speculation and Paceline, times as fast as plain vLLM.

    The small cases are of a later run, with rivals tuned on its machine.
    """
    return _list_cases([*rows("speed_few"), *(row for row in rows("speed") if row["case"] == "8x16")])


def list_prose_speed(rows: Rows) -> str:
    """The same with the prose pair."""
    return _list_cases(rows("speed_prose"))


def list_drafting(rows: Rows) -> str:
    """Acceptance length, draft tokens per step and time per token of drafters on recorded responses."""
    made = rows("drafting")
    lines = []
    for case in dict.fromkeys(row["case"] for row in made):
        found = {row["system"]: row for row in made if row["case"] == case}
        cells = [
            f"{row['acceptance_length']:.2f} ({row['drafted_per_step']:.1f}; {row['us_per_token']:.1f})"
            for row in map(found.__getitem__, DRAFTERS)
        ]
        lines.append((RECORDED[case], *cells))
    return format_table(("recorded responses", *DRAFTERS.values()), lines)


def _list_cases(rows: Sequence[dict[str, Any]]) -> str:
    compiled = [row for row in rows if row["mode"] == "compiled"]
    found = {(row["case"], row["system"]): row for row in compiled}
    lines = []
    for case in dict.fromkeys(row["case"] for row in compiled):
        full, suffix = found[case, "paceline"], found[case, "paceline_suffix"]
        rival = found[case, full["best_rival"]]
        lines.append(
            (
                case.replace("x", " x "),
                f"{rival['normalised']:.2f} ({rival['system'].replace('_', ' ')})",
                f"{suffix['ratio']:.2f}",
                f"**{full['ratio']:.2f}**{_show_range(full['ratio_range'])}",
                f"{full['over_best_rival']:.2f}",
                # a bound below what was reached is an error of the clock's
                f"{full['clairvoyant']:.2f}" if full["clairvoyant"] > full["ratio"] else "",
                "" if full["tail_ratio"] is None else f"{full['tail_ratio']:.1f}",
            )
        )
    head = (
        "prompts x responses",
        "vLLM's best own speculation",
        "Paceline, suffix trees alone",
        "Paceline",
        "over vLLM's best",
        "best possible with this drafter",
        "Paceline's tail",
    )
    return format_table(head, lines)


def _show_range(ends: Sequence[float]) -> str:
    """Nothing for a single repetition."""
    low, high = ends
    return f" ({low:.2f} to {high:.2f})" if low < high else ""


def _list_speedups(systems: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """columns: from the head of a column to the system in it."""
    found = {(row["preset"], row["system"]): f"{row['speedup']:.2f}" for row in systems}
    lines = [
        (load_scenario(preset).title, *(found.get((preset, name), "") for name in columns.values()))
        for preset in in_presets(systems)
    ]
    return format_table(("preset", *columns), lines)


DRAFTERS = {
    "arctic default": "Arctic, defaults",
    "arctic best": "Arctic, factor 4, no floor",
    "paceline suffix": "Paceline",
    "paceline, groups apart": "without shared counts",
    "n-gram lookup": "n-gram lookup",
}
RECORDED = {
    "grpo_gsm8k_tools_64x16:8": "GRPO step, 8 groups of 16",
    "grpo_gsm8k_tools_64x16:64": "GRPO step, 64 groups of 16",
    "thinking_deepseek_r1_glm:24": "thinking, 24 groups",
    "aiw_qwen_distill_14b:6:16": "logic puzzles, 6 groups of 16",
}
TABLES: dict[str, Callable[[Rows], str]] = {
    "speed": list_speed,
    "speed_prose": list_prose_speed,
    "papers.claims": list_claims,
    "papers.counts": list_counts,
    "papers.systems": list_systems,
    "papers.techniques": list_techniques,
    "papers.plans": list_plans,
    "simulated_live": list_live,
    "drafting": list_drafting,
}
