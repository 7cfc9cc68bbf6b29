"""The tables that scripts/fill_numbers.py writes whole, each made from a result file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from statistics import fmean
from typing import Any

from paceline.sim.scenario import load_scenario

Rows = Callable[[str], list[dict[str, Any]]]
"""`Results.rows`: the rows of a source such as `papers` or `papers.systems`."""

SYSTEMS = ("vanilla speculation", "SpecActor", "Seer", "TLT", "Paceline")
WITH_BARS = (
    "decoupled", "decoupled_parts", "decoupled_costs", "decoupled_avx2", "racing", "racing_long", "racing_cheap",
)  # fmt: skip
"""Results whose bars have a table."""
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
    """Group rollouts, compiled: vLLM's best tuned speculation and Paceline, times as fast as plain vLLM."""
    return _list_cases(rows("speed"))


def list_intel_speed(rows: Rows) -> str:
    """The same on another kind of processor; the small cases with rivals tuned there."""
    return _list_cases([*rows("speed_intel_few"), *rows("speed_intel")])


def list_bars(rows: Rows) -> str:
    """What was to be reached and what was."""
    return _list_bars(rows("speed.bars"))


def list_prose_bars(rows: Rows) -> str:
    """The same with the prose pair."""
    return _list_bars(rows("speed_prose.bars"))


def _by_size(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of cases such as 2x4, those of fewer responses first, in whatever order they were measured."""
    return sorted(rows, key=lambda row: prod(map(int, row["case"].split("x"))))


def _list_bars(bars: Sequence[dict[str, Any]]) -> str:
    lines = []
    for bar in _by_size(bars):
        share = bar["needed"] < 1
        numbers = (f"{100 * x:.0f} %" if share else f"{x:.2f}" for x in (bar["needed"], bar["reached"]))
        lines.append(
            (bar["case"].replace("x", " x "), bar["bar"], *numbers, "met" if bar["met"] else "missed")
        )
    return format_table(("case", "what", "aimed at", "reached", ""), lines)


def list_bounds(rows: Rows) -> str:
    """How much is left above Paceline, and in the tail."""
    return _list_bounds(rows("speed"))


def list_prose_bounds(rows: Rows) -> str:
    """The same with the prose pair."""
    return _list_bounds(rows("speed_prose"))


def _list_bounds(rows: Sequence[dict[str, Any]]) -> str:
    compiled = {(row["case"], row["system"]): row for row in _by_size(rows) if row["mode"] == "compiled"}
    lines = []
    for case in dict.fromkeys(case for case, _ in compiled):
        full, off = compiled[case, "paceline"], compiled[case, "paceline_off"]
        figures = [compiled[case, full["best_rival"]]["normalised"], off["ratio"], full["ratio"]]
        figures += [full[name] for name in BOUNDS]
        lines.append((case.replace("x", " x "), *("" if one is None else f"{one:.2f}" for one in figures)))
    return format_table(
        ("case", "best rival", "Paceline without drafts", "Paceline", *BOUNDS.values()), lines
    )


def list_prose_speed(rows: Rows) -> str:
    """The same with the prose pair."""
    return _list_cases(rows("speed_prose"))


def list_budget(rows: Rows) -> str:
    """Every budget policy over the batch size, times as fast as plain vLLM."""
    return _list_policies(rows("budget"))


def list_prose_budget(rows: Rows) -> str:
    """The same with the prose pair."""
    return _list_policies(rows("budget_prose"))


def _list_policies(rows: Sequence[dict[str, Any]]) -> str:
    found = {(row["batch"], row["policy"]): row for row in rows if row["policy"] != "plain"}
    policies = list(dict.fromkeys(policy for _, policy in found))
    lines = []
    for batch in dict.fromkeys(batch for batch, _ in found):
        cells = [found[batch, policy] for policy in policies]
        lines.append((str(batch), *(f"{row['ratio']:.2f}{_show_range(row['ratio_range'])}" for row in cells)))
    return format_table(("responses", *(POLICIES.get(policy, policy) for policy in policies)), lines)


def list_replay(rows: Rows) -> str:
    """What a change of the drafter and one of the limit are worth to each policy, on the same responses."""
    made = [row for row in rows("replay") if row["policy"] in REPLAYED]
    lines = []
    for drafter, limit in dict.fromkeys((row["drafter"], row["limit"]) for row in made):
        found = {row["policy"]: row for row in made if (row["drafter"], row["limit"]) == (drafter, limit)}
        cells = [f"{found[name]['ratio']:.2f} ({found[name]['tail_ratio']:.2f})" for name in REPLAYED]
        older = drafter.startswith("older")
        lines.append(("traces only" if older else "the shipped one", str(limit), *cells))
    return format_table(("drafter", "limit", *REPLAYED.values()), lines)


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


def list_scheduling(rows: Rows) -> str:
    """Orders of dispatch on a live fleet."""
    made = rows("fleet")
    has_means = all("mean_ratio" in row for row in made)
    lines = [
        (
            f"`{row['case']}`",
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}{_show_range(row['ratio_range'])}",
            f"{row['over_oracle']:.2f}",
            *((f"{row['mean_ratio']:.2f}",) if has_means else ()),
            f"{row['tail_s']:.1f}",
            f"{row['tail_ratio']:.2f}",
            f"{row['preemptions']:,d}",
            "yes" if row["equal"] else "no",
        )
        for row in made
    ]
    means = ("time until a response is finished, against `group`",) if has_means else ()
    tail = ("tail s", "tail against `group`", "preempted", "tokens equal")
    return format_table(("variant", "tokens/s", "against `group`", "against `oracle`", *means, *tail), lines)


def list_simulated_scheduling(rows: Rows) -> str:
    """Orders of dispatch against the oracle, simulated."""
    made, lines = rows("scheduling"), []
    for preset in in_presets(made):
        title = load_scenario(preset).title
        for row in (row for row in made if row["preset"] == preset):
            cells = [
                text
                for name in ("context", "even")
                for text in (
                    f"{row[f'{name}_over_group']:.2f}",
                    f"{row[f'{name}_over_oracle']:.2f} ({row[f'{name}_least_over_oracle']:.2f})",
                )
            ]
            lines.append((title, str(row["groups_per_worker"]), *cells))
            title = ""
    orders = [
        f"`{name}` {over}" for name in ("context", "even") for over in ("over groups", "over the oracle")
    ]
    return format_table(("preset", "groups per worker", *orders), lines)


def list_driver_load(rows: Rows) -> str:
    """The share of a core that a fleet costs its driver, Ray's part included."""
    found = {row["case"]: row["value"] for row in rows("driver_load")}
    own = found["64 workers x 128 chunks at 100 ms"] / 100
    ray = found["Ray brings a report of 128 growths"] * 1e-6 * REPORTS_PER_S
    lines = [
        ("Paceline: reports read, heard and journalled", f"{own:.0%}"),
        (f"Ray: {REPORTS_PER_S} reports a second brought", f"{ray:.0%}"),
        ("both", f"**{own + ray:.0%}**"),
    ]
    return format_table(("the driver's processor time", "of one core"), lines)


def list_decisions(rows: Rows) -> str:
    """What each decision takes beside the limit that we set for it."""
    lines = [
        (
            row["case"],
            f"{row['ms']:.3g}",
            f"{row['limit_ms']:g}",
            "yes" if row["ms"] <= row["limit_ms"] else "**no**",
        )
        for row in rows("decisions")
    ]
    return format_table(("decision", "ms", "limit", "met"), lines)


def tell_control(rows: Rows) -> str:
    """What diverges without batch invariance; that it is not known, while no file has rows of the control."""
    control = [row for row in rows("exactness") if row.get("invariant") is False]
    if not control:
        return "How often that happens without invariance has to be measured again."
    if not any(row["logits_different"] for row in control):
        tokens = sum({row["dtype"]: row["tokens"] for row in control}.values())
        return (
            f"How often depends on processor, model and batch: in our last run without invariance ({tokens:,d} tokens "
            "on the CPU, `benchmarks/exactness.py`) vLLM's own kernels gave the same bits in every batch, so it shows "
            "none."
        )
    if not any(row["diverged_tokens"] for row in control):
        logits = dict.fromkeys((row["dtype"] for row in control), 0)
        for row in control:
            logits[row["dtype"]] = max(logits[row["dtype"]], row["logits_different"])
        tokens = {row["dtype"]: row["tokens"] for row in control}
        told = [f"{count:,d} of {tokens[dtype]:,d} tokens in {dtype}" for dtype, count in logits.items()]
        return (
            "How often depends on processor, model and batch: in our last run without invariance, with vLLM's own "
            f"kernels, behind up to {' and '.join(told)} logits differed in some bit, and no token did (on the "
            "CPU, `benchmarks/exactness.py`)."
        )
    worst = {
        dtype: max((row for row in control if row["dtype"] == dtype), key=lambda row: row["per_million"])
        for dtype in dict.fromkeys(row["dtype"] for row in control)
    }
    parts = [
        f"{row['per_million']:.0f} of a million tokens in {dtype} ({row['diverged_tokens']:,d} of {row['tokens']:,d})"
        for dtype, row in worst.items()
    ]
    return (
        f"Without invariance, and with vLLM's linear kernels, up to {' and '.join(parts)} came behind a place where a "
        "response parted ways with plain decoding (on the CPU, `benchmarks/exactness.py`)."
    )


def _list_cases(rows: Sequence[dict[str, Any]]) -> str:
    compiled = [row for row in _by_size(rows) if row["mode"] == "compiled"]
    found = {(row["case"], row["system"]): row for row in compiled}
    lines = []
    for case in dict.fromkeys(row["case"] for row in compiled):
        full, suffix = found[case, "paceline"], found[case, "paceline_suffix"]
        rival = found[case, full["best_rival"]]
        lines.append(
            (
                case.replace("x", " x "),
                f"{rival['normalised']:.2f}{_show_range(rival['normalised_range'])}, "
                f"{rival['system'].replace('_', ' ')}",
                f"{suffix['ratio']:.2f}{_show_range(suffix['ratio_range'])}",
                f"**{full['ratio']:.2f}**{_show_range(full['ratio_range'])}",
                f"{full['normalised']:.2f}{_show_range(full['normalised_range'])}",
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
        "*normalised*",
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


BOUNDS = {
    "without_waste": "without waste",
    "clairvoyant_paid": "clairvoyant, paid",
    "clairvoyant": "clairvoyant",
    "tail_ratio": "Paceline's tail",
    "without_waste_tail": "tail without waste",
    "clairvoyant_tail": "clairvoyant tail",
}
DRAFTERS = {
    "arctic default": "Arctic, defaults",
    "arctic best": "Arctic, factor 4, no floor",
    "paceline suffix": "Paceline",
    "paceline, groups apart": "without shared counts",
    "n-gram lookup": "n-gram lookup",
}
POLICIES = {"off": "without drafts", "suffix only": "suffix trees alone", "marginal": "with the model"}
"""Heads of columns; other policies have their names."""
REPLAYED = {
    "fixed": "five tokens fixed",
    "suffix only": "budget, suffix trees alone",
    "marginal": "budget",
    "free drafts": "budget, drafts free",
    "clairvoyant": "clairvoyant",
}
REPORTS_PER_S = 640
"""Of 64 workers, ten times a second."""
RECORDED = {
    "grpo_gsm8k_tools_64x16:8": "GRPO step, 8 groups of 16",
    "grpo_gsm8k_tools_64x16:64": "GRPO step, 64 groups of 16",
    "thinking_deepseek_r1_glm:24": "thinking, 24 groups",
    "aiw_qwen_distill_14b:6:16": "logic puzzles, 6 groups of 16",
}


def list_gpu(rows: Rows) -> str:
    """The first rollouts on a GPU."""
    lines = []
    for row in rows("gpu"):
        if row["system"] != "plain":
            tokens = f"{row['tokens_per_step']:.1f}"
            lines.append((row["case"], row["system"], f"{row['ratio']:.2f}", tokens, row.get("equal", "")))
    return format_table(
        ("case", "system", "over plain vLLM", "tokens a step", "tokens equal to plain vLLM's"), lines
    )


def list_decoupled(rows: Rows, source: str) -> str:
    """Decoupled speculation part by part: tokens per second over those of the pair coupled on one core."""
    return _list_variants(rows(source), "system", "running", "ratio", "responses")


def list_auto(rows: Rows, source: str) -> str:
    """One engine that chooses where its drafter drafts, beside what it could be: tokens per second."""
    found = {(row["cost"], row["running"], row["system"]): row for row in rows(source)}
    lines = []
    for cost, running, system in found:
        if system == "auto":
            row = found[cost, running, system]
            others = ("plain", "suffix only", "decoupled", "coupled, two threads", "auto")
            speeds = (f"{found[cost, running, other]['tokens_per_s']:.0f}" for other in others)
            over = f"{row['over_best']:.2f}{_show_range(row['over_best_range'])}"
            lines.append((f"{cost:g}", str(running), *speeds, over, f"{row['share_ahead']:.0%}"))
    heads = ("plain", "suffix only", "decoupled", "two threads", "auto", "auto over the best", "steps ahead")
    return format_table(("D/V, about", "responses", *heads), lines)


def list_planned(rows: Rows) -> str:
    """What the planner expects and what was measured: tokens per second."""
    lines = []
    for row in rows("planned"):
        low, high = row["measured_range"]
        measured = f"{row['measured']:.0f} ({low:.0f} to {high:.0f})"
        error = f"{100 * row['error']:+.0f} %"
        lines.append((row["system"], str(row["running"]), f"{row['planned']:.0f}", measured, error))
    return format_table(("", "responses", "planned", "measured", "planned over measured"), lines)


def list_racing(rows: Rows, source: str) -> str:
    """Help for stragglers: how many times as fast as without help a rollout comes from the last short response to the
    end; and how often anybody helped, in all repetitions.
    """
    return _list_variants(rows(source), "case", "stragglers", "tail_ratio", "stragglers")


def _list_variants(
    rows: Sequence[dict[str, Any]], variant: str, size: str, value: str, size_name: str
) -> str:
    """A line for each variant, a column for each size and drafter cost."""
    found = {(row[variant], row["cost"], row[size]): row for row in rows}
    cases = sorted({(cost, count) for _, cost, count in found})
    lines = []
    for name in dict.fromkeys(name for name, *_ in found):
        cells = [found.get((name, *case)) for case in cases]
        lines.append((str(name), *("" if one is None else _show_variant(one, value) for one in cells)))
    heads = (f"{size_name}: {count}, D/V {cost:g}" for cost, count in cases)
    return format_table(("", *heads), lines)


def _show_variant(row: dict[str, Any], value: str) -> str:
    shown = f"{row[value]:.2f}{_show_range(row['ratio_range'])}"
    return f"{shown}, {row['helps']}" if row.get("helps") else shown


def list_named_bars(rows: Rows, source: str) -> str:
    """What was to be reached and what was."""
    lines = [
        (bar["case"], f"{bar['needed']:.2f}", f"{bar['reached']:.2f}", "met" if bar["met"] else "missed")
        for bar in rows(source)
    ]
    return format_table(("what", "aimed at", "reached", ""), lines)


def list_drafter_losses(rows: Rows) -> str:
    """Networks and losses after equal training time: acceptance length and agreement on both pairs."""
    pairs = {"Countdown": "drafter_losses", "prose": "drafter_losses_prose"}
    found = {
        (pair, row["system"], row["loss"], row["steps"]): row
        for pair, file in pairs.items()
        for row in rows(file)
    }
    lines = []
    for key in dict.fromkeys(key[1:] for key in found):
        system, loss, steps = key
        cells = [found.get((pair, *key)) for pair in pairs]
        shown = ((f"{c['acceptance_length']:.2f}", f"{c['agreement']:.3f}") if c else ("", "") for c in cells)
        lines.append((system, loss.replace("_", " "), str(steps or ""), *itertools.chain(*shown)))
    heads = (f"{pair}: {what}" for pair in pairs for what in ("acceptance length", "agreement"))
    return format_table(("network", "loss", "fed steps", *heads), lines)


GROWTH_S = (5, 10, 20, 40, 60, 120, 240, 360, 480, 600)
"""Idle core-seconds after which the curve is shown."""
GROWTH_STEPS = 20
"""Of a run, over which the acceptance that engines met is averaged."""


def list_growth(rows: Rows) -> str:
    """How a drafter grew with the idle time that it was given."""
    curve = rows("drafter_growth.curve")
    lines = []
    for seconds in GROWTH_S:
        at = next((place for place, point in enumerate(curve) if point["idle_core_s"] >= seconds), None)
        if at is None:
            break
        around = [
            point["acceptance"] for point in curve[max(at - GROWTH_STEPS // 2, 0) : at + GROWTH_STEPS // 2]
        ]
        met = [acceptance for acceptance in around if acceptance is not None]
        point = curve[at]
        numbers = (f"{point['trained_s']:.0f}", f"{point['agreement']:.2f}" if point["agreement"] else "")
        lines.append((str(seconds), str(point["step"]), *numbers, f"{fmean(met):.2f}" if met else ""))
    heads = ("idle core-seconds", "step of the run", "of these training", "agreement")
    return format_table((*heads, "accepted in the engines"), lines)


def list_grown(rows: Rows) -> str:
    """What has grown beside drafters that were trained offline."""
    lines = [
        (
            row["system"],
            f"{row['core_s']:.0f}" if row["core_s"] else "",
            f"{row['acceptance_length']:.2f}",
            f"{row['agreement']:.3f}",
            f"{row['of_grown']:.2f}",
        )
        for row in rows("drafter_growth")
    ]
    return format_table(("drafter", "core-seconds", "acceptance length", "agreement", "grown over it"), lines)


def list_drift(rows: Rows) -> str:
    """A policy that moves away: acceptance lengths of a head that goes on learning and of one that does not."""
    lines = [
        (
            str(row["part"]),
            f"{row['adaptive']:.2f}",
            f"{row['frozen']:.2f}",
            f"{row['ratio']:.2f}",
            " to ".join("" if rate is None else f"{100 * rate:.0f} %" for rate in row["solve_rate"]),
            f"{row['idle_core_s']:.0f}",
        )
        for row in rows("drafter_drift")
    ]
    return format_table(
        ("third", "goes on learning", "frozen", "ratio", "solve rate", "idle core-seconds"), lines
    )


def list_kinds(rows: Rows) -> str:
    """Kinds of drafters beside one target."""
    return _list_kinds(rows("drafter_kinds"))


def list_grown_kinds(rows: Rows) -> str:
    """A grown drafter beside the final policy of its run."""
    return _list_kinds(rows("drafter_grown"))


def _list_kinds(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        (
            str(row["batch"]),
            row["system"],
            f"{row['over_suffix']:.2f}{_show_range(row['over_suffix_range'])}",
            f"{row['over_plain']:.2f}",
            f"{row['acceptance_length']:.2f}",
            "" if row["ms_per_token"] is None else f"{row['ms_per_token']:.2f}",
            f"{100 * row['share']:.0f} %" if row["share"] else "",
        )
        for row in rows
    ]
    heads = ("responses", "drafter", "over suffix trees alone", "over no drafts", "acceptance length")
    return format_table((*heads, "ms a draft token", "share of the time"), lines)


TABLES: dict[str, Callable[[Rows], str]] = {
    "speed": list_speed,
    "speed_intel": list_intel_speed,
    "speed.bars": list_bars,
    "speed.bounds": list_bounds,
    "speed_prose": list_prose_speed,
    "speed_prose.bars": list_prose_bars,
    "speed_prose.bounds": list_prose_bounds,
    "budget": list_budget,
    "budget_prose": list_prose_budget,
    "replay": list_replay,
    "papers.claims": list_claims,
    "papers.counts": list_counts,
    "papers.systems": list_systems,
    "papers.techniques": list_techniques,
    "papers.plans": list_plans,
    "simulated_live": list_live,
    "drafting": list_drafting,
    "fleet": list_scheduling,
    "scheduling": list_simulated_scheduling,
    "driver_load": list_driver_load,
    "decisions": list_decisions,
    "exactness.control": tell_control,
    **{
        source: partial(list_decoupled, source=source)
        for source in ("decoupled", "decoupled_parts", "decoupled_costs")
    },
    **{source: partial(list_auto, source=source) for source in ("decoupled_auto", "decoupled_avx2")},
    "planned": list_planned,
    **{source: partial(list_racing, source=source) for source in ("racing", "racing_long", "racing_cheap")},
    **{f"{source}.bars": partial(list_named_bars, source=f"{source}.bars") for source in WITH_BARS},
    "gpu": list_gpu,
    "drafter_losses": list_drafter_losses,
    "drafter_growth": list_grown,
    "drafter_growth.curve": list_growth,
    "drafter_drift": list_drift,
    "drafter_kinds": list_kinds,
    "drafter_grown": list_grown_kinds,
}
