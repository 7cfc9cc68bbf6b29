"""A scenario: one YAML file that says what is simulated, in which systems, and what is claimed about them elsewhere.

Owns the schema and what is built from it. The presets in `presets/` are such files, so every constant of a paper's
set-up stands beside its source, and a user's own cluster is described in the same words. Called by
`paceline simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from paceline.config import Section
from paceline.config_file import apply_override, read_yaml, validate
from paceline.errors import ConfigError
from paceline.planning.latency_profile import AffineLatency, PiecewiseLatency, StepLatency
from paceline.planning.profile_fit import load_fits
from paceline.sim import systems
from paceline.sim.acceptance_model import AcceptanceProcess
from paceline.sim.costs import Drafter, EngineCosts
from paceline.sim.paceline_system import PacelineOptions, PacelineStage, paceline
from paceline.sim.step import Ageing, Phases, System
from paceline.sim.systems import Setup
from paceline.sim.workload import (
    LengthDistribution,
    LogNormalLengths,
    Workload,
    draw_workload,
    read_histogram,
)

PRESETS = Path(__file__).parent / "presets"
MOST_TOKENS = (1 << 31) - 1
"""Of a prompt or a response."""
MOST_DRAFT_TOKENS = 128
"""Of one draft (`BudgetSettings.max_draft_tokens`)."""


class Lengths(Section):
    """Response lengths: a log-normal distribution, or a histogram."""

    median_tokens: float | None = Field(default=None, gt=0.0, le=MOST_TOKENS)
    """Log-normal: the median."""
    sigma: float = Field(default=1.0, ge=0.0)
    """Log-normal: standard deviation of the logarithm; p90 = median x exp(1.28 sigma)."""
    histogram: str | None = None
    """JSON file (gzip-compressed or not) of pairs [length, probability], alone or under the key `output_tokens`."""
    scale: float = Field(default=1.0, gt=0.0)
    """Factor on the histogram's lengths."""
    group_correlation: float = Field(default=0.6, ge=0.0, le=1.0)
    """How alike the responses to one prompt are, 0 to 1 (Gaussian copula)."""

    @model_validator(mode="after")
    def _one_source(self) -> Lengths:
        if (self.median_tokens is None) == (self.histogram is None):
            raise ValueError("give either median_tokens or histogram")
        if self.histogram is None and self.scale != 1.0:
            raise ValueError(
                f"scale {self.scale:g} is a factor on a histogram's lengths: leave it out, and change median_tokens"
            )
        return self


class Engine(Section):
    """One worker of the baseline."""

    gpus: int = Field(default=1, ge=1)
    step_ms: tuple[tuple[float, float], ...] = ()
    """Pairs (tokens of a step, milliseconds) without attention; straight between them."""
    context_ns_per_token: float = Field(default=0.0, ge=0.0)
    """Nanoseconds of a step per token of context, all requests together."""
    profile: str | None = None
    """File of `paceline profile` in place of both; counts from the scenario's folder."""
    prefill_us_per_token: float = Field(default=0.0, ge=0.0)
    """Microseconds per token of a prompt, or of a context that is computed again."""
    kv_tokens: int = Field(default=1 << 40, ge=1)
    """Tokens of context that fit into KV memory."""
    max_requests: int = Field(default=1 << 30, ge=1)
    """Requests at once at most."""
    kv_load_us_per_token: float | None = Field(default=None, ge=0.0)
    """Microseconds per token of KV that moves between workers (chunks, racers); unset: it is computed again."""
    data_parallel: int = Field(default=1, ge=1)
    """Ranks that requests are spread over and that wait for each other in every step (expert parallelism)."""

    @model_validator(mode="after")
    def _steps_ascend(self) -> Engine:
        if bool(self.step_ms) == (self.profile is not None):
            raise ValueError("give either step_ms or profile")
        if not self.step_ms:
            return self
        tokens, ms = zip(*self.step_ms, strict=True)
        if list(tokens) != sorted(set(tokens)) or list(ms) != sorted(ms) or tokens[0] < 0 or ms[0] <= 0.0:
            raise ValueError("step_ms: tokens must ascend, and milliseconds be positive and never fall")
        return self


class Acceptance(Section):
    """How often a drafter's tokens are accepted (sim/acceptance_model.py)."""

    level: float = Field(gt=0.0, lt=1.0)
    """Probability that a draft token is accepted if those before it were, of the median response."""
    warm_level: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The same once a group's suffix tree knows many siblings; unset: siblings teach nothing."""
    half_siblings: float = Field(default=4.0, gt=0.0)
    """Siblings that bring half of the rise."""
    between: float = Field(default=0.4, ge=0.0)
    """Standard deviation of logit p between responses."""
    within: float = Field(default=0.2, ge=0.0)
    """Standard deviation of logit p between segments of 1024 tokens of one response."""
    shared: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the variance between responses that all drafters have in common."""


class DrafterSection(Section):
    """Something that drafts."""

    name: str
    base_ms: float = Field(default=0.0, ge=0.0)
    """Milliseconds to draft one token, however few requests."""
    per_request_us: float = Field(default=0.0, ge=0.0)
    """Microseconds each request adds to that."""
    engine_ms: float | None = Field(default=None, gt=0.0)
    """base_ms where the model runs inside the target's engine, on its devices and in its steps; unset: the same."""
    attached: bool = False
    """Whether it needs the target's hidden states, and so never drafts on devices of its own (EAGLE)."""
    acceptance: Acceptance
    tree_level: float | None = Field(default=None, gt=0.0, lt=1.0)
    """acceptance.level if a drafter's second choice counts too (draft trees); unset: it drafts lines only."""

    @model_validator(mode="after")
    def _tree_above_line(self) -> DrafterSection:
        if self.tree_level is not None and self.tree_level < self.acceptance.level:
            raise ValueError(
                f"tree_level {self.tree_level} is below acceptance.level {self.acceptance.level}"
            )
        return self


class PhasesSection(Section):
    """What else a training step does, as shares of the first system's step."""

    prepare_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    learn_share: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _leave_room(self) -> PhasesSection:
        if self.prepare_share + self.learn_share >= 1.0:
            raise ValueError("prepare_share + learn_share must be below 1: the rest is the rollout")
        return self


class SpecActorSection(Section):
    """SpecActor's parameters."""

    first_window: int = Field(default=3, ge=1)
    """w before algorithm 1 plans it."""
    first_draft_gpus: int = Field(default=1, ge=1)
    """GPUs of a drafter before algorithm 1 plans them."""
    naive_draft_gpus: int = Field(default=4, ge=1)
    """GPUs of a drafter in naive disaggregation."""
    max_window: int = Field(default=16, ge=1)
    max_batch: int = Field(default=16, ge=1)
    """b_max, responses a racing worker takes."""
    reconfigure_rounds: float = Field(default=1000.0, gt=0.0)
    deploy_s: float = Field(default=1.0, ge=0.0)
    """Until a free worker runs another drafter."""


class SeerSection(Section):
    """Seer's parameters."""

    chunk_tokens: int = Field(default=8192, ge=1)
    request_tokens: int = Field(default=8, ge=0, le=MOST_DRAFT_TOKENS)
    """Longest draft of a request."""
    batch_tokens: int = Field(default=256, ge=0)
    """Draft tokens of a batch, shared by its requests."""
    min_probability: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Path probability below which a token is not verified."""
    fixed_window: int = Field(default=3, ge=1)
    """Draft length where nothing adapts."""


Depth = Annotated[int, Field(ge=0, le=MOST_DRAFT_TOKENS)]


class TltSection(Section):
    """TLT's parameters."""

    max_batch: int = Field(default=32, ge=1)
    """Requests of a worker up to which it speculates."""
    strategies: tuple[tuple[Depth, Annotated[int, Field(ge=0)]], ...] = Field(
        default=((10, 64), (10, 48), (10, 32), (10, 16)), min_length=1
    )
    """(draft depth, tokens to verify)."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 3, 8), min_length=1)
    """Smallest batch of each number of tokens to verify, the largest number first."""


class AgeingSection(Section):
    """What a policy update costs small-model drafters, and what training on idle workers gives back."""

    lost: float = Field(default=0.0, ge=0.0)
    """Of the logit of their acceptance, per policy update."""
    session_s: float = Field(default=60.0, gt=0.0)
    """Worker seconds of training that win it back."""


class PacelineSection(Section):
    """Paceline's parameters."""

    variant: Literal["even", "context", "sticky"] = "even"
    """Of the dispatcher (`planning/dispatch.py`)."""
    chunk_tokens: int = Field(default=8192, ge=1)
    max_draft_tokens: int = Field(default=16, ge=1, le=127)
    max_batch: int = Field(default=16, ge=1)
    dice_logit: float = Field(default=0.07, ge=0.0)
    """What the shared dice add to the logit of model drafters' acceptance."""
    deploy_s: float = Field(default=1.0, ge=0.0)


Quantity = Literal["rollout", "step", "tail", "tail_cut", "idle_share", "preemptions", "rollout_s", "tail_s"]
"""rollout, step, tail: time of `over` divided by that of `of`. tail_cut: 1 - tail of `of` / tail of `over`. The others:
the number of `of` itself."""


Standing = Literal["predicted", "fitted", "implied"]
"""What a number says about the simulator. predicted: all inputs were fixed before it was looked at. fitted: constants,
or the model itself, were chosen after it. implied: it follows from other claims (a product of stages, a rollout and
its share of a step), so it says nothing that they do not."""


class Claim(Section):
    """A number that somebody published, to stand beside ours."""

    text: str
    of: str
    over: str | None = None
    quantity: Quantity = "rollout"
    paper: float
    """The published number; the nearest end of a range that ours lies outside of is compared."""
    paper_to: float | None = None
    """The other end, if it is a range."""
    source: str
    standing: Standing = "predicted"
    note: str = ""
    where: tuple[str, ...] = ()
    """key=value changes of the scenario that the claim is about, such as another number of GPUs."""


class Scenario(Section):
    """Everything that is simulated."""

    title: str
    extends: str | None = None
    """A preset or file whose values hold where this one says nothing."""
    gpus: int = Field(ge=1)
    groups: int = Field(ge=1)
    group_size: int = Field(ge=1)
    prompt_tokens: int = Field(default=512, ge=1, le=MOST_TOKENS)
    max_tokens: int = Field(ge=1, le=MOST_TOKENS)
    lengths: Lengths
    engine: Engine
    models: tuple[DrafterSection, ...] = ()
    """Small-model drafters, the best first."""
    suffix: DrafterSection | None = None
    """Suffix trees shared by the group."""
    lookup: DrafterSection | None = None
    """n-gram look-up, or a suffix tree, in the response alone."""
    phases: PhasesSection = PhasesSection()
    steps: int = Field(default=1, ge=1)
    """Training steps in a row; means are shown."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    mean_context_tokens: int = Field(default=2048, ge=0)
    """At which plans are made."""
    vanilla_window: int = Field(default=4, ge=1)
    """Draft tokens of vanilla speculation."""
    ngram_window: int = Field(default=4, ge=1)
    ageing: AgeingSection = AgeingSection()
    specactor: SpecActorSection = SpecActorSection()
    seer: SeerSection = SeerSection()
    tlt: TltSection = TltSection()
    paceline: PacelineSection = PacelineSection()
    systems: tuple[str, ...] = ("veRL", "Paceline")
    """By name, the baseline first."""
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        if self.gpus < self.engine.gpus:
            raise ValueError(f"gpus={self.gpus} hold no engine of {self.engine.gpus}")
        for name in self.systems:
            if name not in SYSTEMS:
                raise ValueError(f"system {name!r}: there are {', '.join(SYSTEMS)}")
            lacking = [field for field in SYSTEMS[name][1] if not getattr(self, field)]
            if lacking:
                raise ValueError(f"system {name!r} needs {' and '.join(lacking)}")
        for claim in self.claims:
            for one in (claim.of, claim.over):
                if one is not None and one not in SYSTEMS:
                    raise ValueError(f"claim {claim.text!r} is about {one!r}: there are {', '.join(SYSTEMS)}")
        return self

    def length_distribution(self) -> LengthDistribution:
        """Where its lengths come from. Raises ConfigError for a file that is no histogram."""
        if self.lengths.median_tokens is not None:
            return LogNormalLengths(self.lengths.median_tokens, self.lengths.sigma)
        assert self.lengths.histogram is not None
        return read_histogram(Path(self.lengths.histogram)).scaled(self.lengths.scale)

    def draw(self, distribution: LengthDistribution, step: int) -> Workload:
        """The workload of a training step."""
        return draw_workload(
            distribution,
            self.groups,
            self.group_size,
            self.prompt_tokens,
            self.max_tokens,
            self.lengths.group_correlation,
            self.seed + 7919 * step,
        )

    def setup(self) -> Setup:
        """What its systems share."""
        engine = self.engine
        costs = EngineCosts(
            num_gpus=engine.gpus,
            step=_step_latency(engine),
            prefill_token_s=1e-6 * engine.prefill_us_per_token,
            kv_tokens=engine.kv_tokens,
            max_requests=engine.max_requests,
            kv_load_token_s=_microseconds(engine.kv_load_us_per_token),
            num_ranks=engine.data_parallel,
        )
        return Setup(
            num_gpus=self.gpus,
            engine=costs,
            num_responses=self.groups * self.group_size,
            group_size=self.group_size,
            models=tuple(_drafter(one, "model") for one in self.models),
            group_drafter=_drafter(self.suffix, "free") if self.suffix else None,
            lookup=_drafter(self.lookup, "free") if self.lookup else None,
            mean_context_tokens=self.mean_context_tokens,
            ageing=Ageing(self.ageing.lost, self.ageing.session_s),
        )

    def phases_of(self, baseline_rollout_s: float) -> Phases:
        """Prepare and learn, from the rollout time of the first system."""
        rest = 1.0 - self.phases.prepare_share - self.phases.learn_share
        step_s = baseline_rollout_s / rest
        return Phases(step_s * self.phases.prepare_share, step_s * self.phases.learn_share)


def load_scenario(source: str, overrides: Sequence[str] = ()) -> Scenario:
    """A preset by name, or a file; files that overrides name count from the current folder. Raises ConfigError."""
    fields = _read(find_scenario(source))
    for override in overrides:
        apply_override(fields, override)
    return validate(Scenario, fields, f"scenario {source}")


def find_scenario(source: str, folder: Path = Path()) -> Path:
    """The file of a preset, or the file of this name in `folder`. Raises ConfigError if there is neither."""
    preset, path = PRESETS / f"{source}.yaml", folder / source
    if preset.exists():
        return preset
    if path.is_file():
        return path
    raise ConfigError(
        f"{source!r} is neither a scenario file nor a preset; there are {', '.join(preset_names())}"
    )


_REPLACED: dict[str, dict[str, tuple[str, ...]]] = {
    "lengths": {"median_tokens": ("histogram", "scale"), "histogram": ("median_tokens",)},
    "engine": {"step_ms": ("profile",), "profile": ("step_ms",)},
}
"""By section and key of a file: what of the one that it extends no longer holds."""


def _read(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    fields = read_yaml(path, "scenario", f"{PRESETS}")
    for section, key in (("lengths", "histogram"), ("engine", "profile")):
        holder = fields.get(section)
        if isinstance(holder, dict) and isinstance(name := holder.get(key), str):
            holder[key] = str(path.resolve().parent / Path(name).expanduser())
    if not isinstance(base := fields.get("extends"), str):
        return fields
    found = find_scenario(base, path.parent)
    if found.resolve() in (path.resolve(), *(one.resolve() for one in extending)):
        raise ConfigError(f"scenario {path} extends itself through {base!r}: name another one")
    inherited = _read(found, (path, *extending))
    for section, replaced in _REPLACED.items():
        own, theirs = fields.get(section), inherited.get(section)
        if isinstance(own, dict) and isinstance(theirs, dict):
            gone = {key for one in own for key in replaced.get(one, ())}
            inherited[section] = {k: v for k, v in theirs.items() if k not in gone}
    return _merged(inherited, fields)


def _merged(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `fields`, section by section; lists are replaced."""
    both = dict(base)
    for key, value in fields.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def preset_names() -> list[str]:
    """The presets that are shipped."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def build_system(name: str, scenario: Scenario) -> System:
    """The system of this name."""
    return SYSTEMS[name][0](scenario)


def _step_latency(engine: Engine) -> StepLatency:
    if engine.profile is not None:
        return load_fits(Path(engine.profile))[1].model
    return StepLatency(_curve(engine.step_ms), 1e-9 * engine.context_ns_per_token)


def _curve(pairs: tuple[tuple[float, float], ...]) -> AffineLatency | PiecewiseLatency:
    if len(pairs) == 1:
        return AffineLatency(1e-3 * pairs[0][1], 0.0)
    tokens, ms = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    if tokens[0] > 0.0:
        tokens, ms = np.append(0.0, tokens), np.append(ms[0], ms)
    return PiecewiseLatency(tokens, 1e-3 * ms)


def _drafter(section: DrafterSection, kind: Literal["model", "free"]) -> Drafter:
    a = section.acceptance
    process = AcceptanceProcess(
        level=a.level,
        warm_level=a.warm_level,
        half_siblings=a.half_siblings,
        between=a.between,
        within=a.within,
        shared=a.shared,
    )
    slope_s = 1e-6 * section.per_request_us
    return Drafter(
        name=section.name,
        token=AffineLatency(1e-3 * section.base_ms, slope_s),
        acceptance=process,
        kind=kind,
        engine_token=None if section.engine_ms is None else AffineLatency(1e-3 * section.engine_ms, slope_s),
        is_attached=section.attached,
        tree_level=section.tree_level,
    )


def _microseconds(value: float | None) -> float | None:
    return None if value is None else 1e-6 * value


def _specactor(stage: systems.Stage) -> Callable[[Scenario], System]:
    def build(scenario: Scenario) -> System:
        s = scenario.specactor
        options = systems.SpecActorOptions(
            acceptance=scenario.models[0].acceptance.level,
            first_window=s.first_window,
            first_draft_gpus=s.first_draft_gpus,
            naive_draft_gpus=s.naive_draft_gpus,
            max_window=s.max_window,
            max_batch=s.max_batch,
            reconfigure_rounds=s.reconfigure_rounds,
            deploy_s=s.deploy_s,
        )
        return systems.specactor(scenario.setup(), options, stage)

    return build


def _seer(stage: systems.SeerStage) -> Callable[[Scenario], System]:
    return lambda scenario: systems.seer(
        scenario.setup(), systems.SeerOptions(**scenario.seer.model_dump()), stage
    )


def _tlt(is_adaptive: bool) -> Callable[[Scenario], System]:
    return lambda scenario: systems.tlt(
        scenario.setup(), systems.TltOptions(**scenario.tlt.model_dump()), is_adaptive
    )


def _paceline(stage: PacelineStage) -> Callable[[Scenario], System]:
    return lambda scenario: paceline(
        scenario.setup(), PacelineOptions(**scenario.paceline.model_dump()), stage
    )


SYSTEMS: dict[str, tuple[Callable[[Scenario], System], tuple[str, ...]]] = {
    "veRL": (lambda s: systems.verl(s.setup()), ()),
    "veRL (2x)": (lambda s: systems.verl_twice(s.setup()), ()),
    "RLHFuse": (lambda s: systems.rlhfuse(s.setup()), ()),
    "vanilla speculation": (lambda s: systems.vanilla(s.setup(), s.vanilla_window), ("models",)),
    "n-gram": (lambda s: systems.ngram(s.setup(), s.ngram_window), ("lookup",)),
    "SpecActor, naive": (_specactor("naive"), ("models",)),
    "SpecActor, decoupled": (_specactor("decoupled"), ("models",)),
    "SpecActor, reconfigured": (_specactor("reconfigured"), ("models",)),
    "SpecActor, best-of-N": (_specactor("best-of-N"), ("models",)),
    "SpecActor": (_specactor("full"), ("models",)),
    "Seer, divided": (_seer("divided"), ()),
    "Seer, context": (_seer("context"), ()),
    "Seer, oracle": (_seer("oracle"), ()),
    "Seer, no-adaptation": (_seer("no-adaptation"), ("suffix",)),
    "Seer, no-group-context": (_seer("no-group-context"), ("lookup",)),
    "Seer": (_seer("full"), ("suffix",)),
    "TLT, static drafter": (_tlt(False), ("models",)),
    "TLT": (_tlt(True), ("models",)),
    "Paceline, divided": (_paceline("divided"), ()),
    "Paceline, budget": (_paceline("budget"), ()),
    "Paceline, helped": (_paceline("helped"), ("models",)),
    "Paceline, single-path": (_paceline("single-path"), ("models",)),
    "Paceline, coupled": (_paceline("coupled"), ()),
    "Paceline, decoupled": (_paceline("decoupled"), ("models",)),
    "Paceline": (_paceline("full"), ()),
}
"""By name: how it is built, and the fields of a scenario that it cannot do without."""


def as_row(scenario: Scenario) -> dict[str, Any]:
    """The scenario as plain values, for a result file."""
    return scenario.model_dump(mode="json")
