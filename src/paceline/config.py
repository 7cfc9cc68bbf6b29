"""The configuration tree: pydantic models, unknown keys refused, a docstring under each field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.processor import LinearKernel, best_linear_kernel


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RecordConfig(Section):
    """How finely a run is recorded (`record.jsonl`)."""

    bucket_ms: float = Field(default=50.0, ge=0.0)
    """Engine steps are merged into samples of about this many milliseconds; 0 records every step."""
    sync_s: float = Field(default=5.0, ge=0.0)
    """Seconds after which the disk is asked to keep what was written; a power cut loses at most so much."""
    decisions: bool = False
    """Log what was decided, and on what grounds, into `decisions/` of the run folder, for `paceline replay`."""


_PHRASES = (
    ("Value error, ", ""),
    ("Extra inputs are not permitted", "no such setting: correct its name or remove it"),
    ("Input should be", "must be"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    (", unable to parse string as an integer", ""),
    (", unable to parse string as a number", ""),
)
"""What pydantic says, and what we say."""


def describe(error: ValidationError) -> str:
    """One line for a refused configuration: each field, the value it had and the limit."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}={item['input']!r}: {describe_limit(item)}"
        if item["loc"]
        else describe_limit(item)
        for item in error.errors()
    )


def describe_limit(item: Mapping[str, Any]) -> str:
    """What a value must be. item: one of `ValidationError.errors()`."""
    text = str(item["msg"])
    for theirs, ours in _PHRASES:
        text = text.replace(theirs, ours)
    return text


MOST_DRAFT_TOKENS = 127
"""Longest draft of one request in one step. vLLM refuses more than 128 tokens."""
MOST_DRAFT_WINDOW = MOST_DRAFT_TOKENS // 2
"""Of a draft worker, which has up to two windows of a response under way."""
MTP = "mtp"
"""As a model drafter: the prediction layers that the target's own checkpoint brings (multi-token prediction)."""


def name_drafters(folders: Sequence[str]) -> tuple[str, ...]:
    """What these drafters are called: their folders' names, or the folders where these are not unique."""
    names = tuple(Path(folder).name for folder in folders)
    return names if len(set(names)) == len(names) else tuple(folders)


class EngineSettings(Section):
    """What the engine plug-in does; carried to the engine process in vLLM's `additional_config["paceline"]`."""

    run_seed: int = 0
    """Seed of the run: keys of requests that bring neither key nor seed are derived from it."""

    drafter: Literal["suffix", "lookup", "none"] = "suffix"
    """Model-free drafter: the group's suffix tree, n-gram lookup in the own response, or none."""

    model_drafter: str | None = None
    """Folder of a small Hugging Face causal LM with the target's tokenizer, or of a draft head of the target (its
    weights tell); or `mtp` (on GPUs): the prediction layers in the target's own checkpoint. It drafts with the same
    dice."""

    model_drafter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the model drafter's weights. `auto` is the fastest: on a CPU a draft head's are kept in bfloat16
    or 8 bits by Paceline's own kernels, and in any format that is named by torch."""

    draft_worker: bool | Literal["auto"] = False
    """Run the model drafter in a process of its own, which drafts ahead while the target verifies
    (docs/draft-worker.md). For a drafter that takes a tenth of the target's time or more, where a core is free. `auto`:
    inside the engine too, and whichever is faster drafts; the engine computes with all of its threads while the one
    inside drafts, else with one less. Only under the `marginal` budget; it stays inside under any other."""

    further_drafters: tuple[str, ...] = Field(default=(), max_length=3)
    """Folders of further small models. With `draft_worker` each drafts in a process of its own for every response, and
    the drafts meet in its draft tree; where two propose the same token, the one that is named first is believed.
    Without, the engine drafts with one model at a time (`use_drafter`), in training runs with the one of which the
    draft ladder promises most; with `FleetSettings.help` a free worker may draft for it with another one."""

    draft_help: bool = False
    """Let other workers draft ahead for this engine, with the model drafter or a further one; a fleet switches it on
    (`FleetSettings.help`)."""

    adopt_leads: bool = False
    """Take over what another engine has generated of a response that both generate, as drafts that are all but certain;
    a fleet switches it on (`FleetSettings.help`)."""

    draft_window: int = Field(default=8, ge=1, le=MOST_DRAFT_WINDOW)
    """Draft worker: w. After w tokens of a response that the target has not decided it drafts up to w more. With
    `reconfigure_steps` only until the first plan."""

    draft_branches: int = Field(default=16, ge=0, le=256)
    """Draft worker: likely corrections, of all responses together, behind which it drafts while the target verifies, so
    that after a rejection the next draft is there already. Batches of more responses get none. 0: never."""

    reconfigure_steps: int = Field(default=1000, ge=0)
    """Draft worker: decode steps after which the window of each response, and whether it is drafted for ahead, is
    planned anew from measured times and acceptance; also when the batch has changed by a quarter. 0: never."""

    draft_by_turns: bool = False
    """Draft worker: it drafts w tokens of every response, then a step verifies them, by turns: a drafter that was
    merely moved to another device (SpecActor's naive disaggregation). For comparison alone."""

    max_draft_tokens: int = Field(default=32, ge=1, le=MOST_DRAFT_TOKENS)
    """Longest draft of one request in one step."""

    num_paths: int = Field(default=1, ge=1, le=8)
    """Draft paths per request, verified by row expansion; more than one is used only in small batches. Needs a drafter
    that proposes several: the suffix drafter, a model drafter inside the engine, or both, each so many. On model runner
    V2 none is verified beside another: where steps overlap the device goes on with the path that has come true."""

    max_alternatives: int = Field(default=16, ge=1, le=256)
    """Draft paths beyond one per request that a step has at most; on V1 each lays claim to one block of KV cache."""

    draft_floor: float = Field(default=0.05, ge=0.0, lt=1.0)
    """A draft ends where the probability that all of it is accepted falls below this."""

    suffix_depth: int = Field(default=24, ge=2, le=256)
    """Longest context, in tokens, that the suffix tree counts."""

    suffix_threads: int = Field(default=1, ge=1, le=64)
    """Threads that draft from the suffix trees, from 32 requests on. They wait for each other: use several only where
    as many processors are idle."""

    suffix_memory_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Memory bound of all suffix trees; whole groups are dropped, least recently used first. The lookup drafter's bound
    too, for its texts and its one index of their n-grams together: the n-grams noted longest ago go first, prompts'
    included, and where the texts alone take more than half of it, everything is forgotten at once."""

    draft_servers: tuple[str, ...] = ()
    """Addresses of draft servers (`paceline draft-server`), the same for every worker: responses of a group draft from
    what all workers have generated. Needs the suffix drafter."""

    draft_secret_file: str | None = None
    """File with a secret of 16 to 64 bytes: that of the draft servers, and of workers that draft for each other."""

    draft_interface: str | None = None
    """Network interface (eth0), or its address, on which workers on other machines reach this engine to draft for it
    (`draft_help`). Needs `draft_secret_file`. Unset: workers on the same machine alone."""

    sharpness: float | None = Field(default=None, gt=0.0)
    """Fixed exponent on the drafter's distribution (inf: greedy); unset: learned online for each drafter."""

    batch_invariant: bool | None = None
    """Bitwise the same logits in every batch. Unset: on for the CPU, left to vLLM's own switch on a GPU."""

    linear_kernel: LinearKernel = Field(default_factory=best_linear_kernel)
    """Whose kernels the linear layers of a bfloat16 target use on a CPU. Paceline's are batch-invariant by themselves;
    `paceline-dot` uses the bfloat16 dot product, which the processor must have, and has an attention kernel too.
    Unset: the fastest by the processor on which the settings are made. They differ in the last bits: all workers of a
    run, and its resumptions, need the same."""

    compiled: bool | None = None
    """Run the target through torch.compile: more tokens per second, for a first start of a minute and later ones from
    vLLM's compile cache. Compiled and eager logits differ in the last bits: all workers of a run, and its resumptions,
    need the same mode. Unset: eager on the CPU, vLLM's default on a GPU; commands and recipes compile by default."""

    graph_memory_bytes: int = Field(default=6 << 30, ge=1 << 20)
    """On a GPU: most memory of CUDA graphs, which are captured for the step sizes that the budget uses
    (planning/captures.py), each size in two graphs. 6 GiB are 52 graphs, by an estimate."""

    budget: BudgetSettings = Field(default_factory=lambda: BudgetSettings())
    """How many drafted tokens are verified in each step."""

    decision_log: str | None = None
    """Folder in which every engine process, and a fleet's controller, logs its decisions for `paceline replay`. Unset:
    nowhere. A run folder's is switched on by `record.decisions`."""

    kv_pool: KvPoolSettings | None = None
    """Where responses that go on later, perhaps on another worker, leave their keys and values. Unset: nowhere; a
    response that goes on elsewhere is prefilled again."""

    @property
    def model_drafters(self) -> tuple[str, ...]:
        """All model drafters, the first one first; none without `model_drafter`."""
        return () if self.model_drafter is None else (self.model_drafter, *self.further_drafters)

    @property
    def drafter_folders(self) -> tuple[str, ...]:
        """Those of them that are in folders of their own."""
        return tuple(name for name in self.model_drafters if name != MTP)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """What the model drafters are called."""
        return name_drafters(self.model_drafters)

    @property
    def chooses_drafter(self) -> bool:
        """Whether the engine has several model drafters, of which one drafts at a time."""
        return bool(self.further_drafters) and not self.draft_worker

    @property
    def drafts_inside(self) -> bool:
        """Whether the engine loads the model drafter, if there is one."""
        return self.draft_worker is not True

    @property
    def most_ahead(self) -> int:
        """Undecided tokens of a response that a draft worker drafts, until they are planned anew."""
        return self.draft_window if self.draft_by_turns else 2 * self.draft_window

    @model_validator(mode="after")
    def _sharing_fits(self) -> EngineSettings:
        if self.draft_servers and self.drafter != "suffix":
            raise ValueError(
                f"draft_servers need drafter='suffix', which alone drafts from other responses, not {self.drafter!r}"
            )
        return self

    @model_validator(mode="after")
    def _worker_fits(self) -> EngineSettings:
        if self.draft_worker and self.model_drafter is None:
            raise ValueError(
                "draft_worker needs a model_drafter, the model that it drafts with: give its folder"
            )
        if self.draft_help and (self.model_drafter is None or self.draft_worker):
            raise ValueError("draft_help needs a model_drafter, and no draft_worker of the engine's own")
        if self.draft_interface is not None and self.draft_secret_file is None:
            raise ValueError(
                f"draft_interface {self.draft_interface!r} lets other machines in: give a draft_secret_file too"
            )
        if self.draft_interface in ("*", "0.0.0.0", "::", "[::]"):
            raise ValueError(
                f"draft_interface {self.draft_interface!r} is no address that others can reach: name one interface "
                "(eth0), or its address"
            )
        if self.further_drafters and self.model_drafter is None:
            raise ValueError(
                f"further_drafters {list(self.further_drafters)} need a model_drafter, which is the first"
            )
        if MTP in self.model_drafters and (self.draft_worker or self.draft_help or self.further_drafters):
            raise ValueError(
                f"the drafter {MTP!r} is a part of the target, which drafts in the engine, as the only model: switch "
                "draft_worker and draft_help off, without further_drafters, or give the folder of a small model"
            )
        if self.draft_worker == "auto" and self.further_drafters:
            raise ValueError(
                f"draft_worker='auto' chooses where one model drafts, not which: remove further_drafters "
                f"{list(self.further_drafters)}, or set draft_worker to true"
            )
        if self.draft_by_turns and self.draft_worker == "auto":
            raise ValueError("draft_by_turns is for a worker that always drafts: set draft_worker to true")
        if self.draft_by_turns and (not self.draft_worker or self.further_drafters):
            raise ValueError(
                "draft_by_turns is for an engine with one draft worker: set draft_worker, and no others"
            )
        if len({self.model_drafter, *self.further_drafters}) <= len(self.further_drafters):
            raise ValueError(
                f"further_drafters {list(self.further_drafters)} name a folder twice, or the model_drafter's: the same "
                "model would draft the same tokens"
            )
        return self

    @model_validator(mode="after")
    def _strategies_fit(self) -> EngineSettings:
        if self.budget.policy != "bandit":
            return self
        for depth, paths, verified in self.budget.bandit_strategies:
            if depth > self.max_draft_tokens or paths > self.num_paths:
                raise ValueError(
                    f"bandit_strategies ({depth}, {paths}, {verified}) needs {depth} draft tokens on {paths} paths, "
                    f"but max_draft_tokens={self.max_draft_tokens} and num_paths={self.num_paths}: raise these, to 127 "
                    "and 8 at most, or lower the strategy"
                )
        return self

    @model_validator(mode="after")
    def _paths_fit(self) -> EngineSettings:
        drafts_inside = self.model_drafter is not None and not (self.draft_worker or self.draft_help)
        if self.num_paths > 1 and self.drafter != "suffix" and not drafts_inside:
            raise ValueError(
                f"num_paths={self.num_paths} needs drafter='suffix', not {self.drafter!r}, or a model_drafter inside "
                "the engine, which propose several paths: set num_paths=1"
            )
        return self


class BudgetSettings(Section):
    """Which draft tokens one engine step verifies (planning/budget.py)."""

    policy: Literal["marginal", "bandit", "thresholds", "fixed", "off"] = "marginal"
    """marginal: the set with the best expected tokens per second under the measured step time; bandit: TLT's
    bucketed epsilon-greedy bandit; thresholds: Seer's limits per request and batch; fixed: a length; off."""
    max_draft_tokens: int = Field(default=32, ge=0, le=128)
    """Longest draft verified per request and step, for every policy, as far as the engine's own `max_draft_tokens`
    reaches; vLLM takes at most 128."""

    min_gain: float = Field(default=0.01, ge=0.0, le=1.0)
    """marginal: expected gain in tokens per second below which nothing is verified (0.01 = 1 %)."""
    fair: bool = True
    """marginal: a request that has gained fewer tokens per step than others weighs more, as the last one ends the
    rollout; false: most tokens of the batch together."""
    max_growth: float = Field(default=1.5, gt=1.0, le=4.0)
    """marginal: a step may exceed the largest step measured so far by this factor: bounds a trial's cost."""
    refresh_steps: int = Field(default=256, ge=8)
    """marginal: engine steps after which an unused alternative (no drafts, or some) is measured again."""

    fixed_tokens: int = Field(default=4, ge=0, le=128)
    """fixed: draft tokens per request."""

    threshold_request_tokens: int = Field(default=12, ge=0, le=128)
    """thresholds: draft tokens one request may take."""
    threshold_batch_tokens: int = Field(default=24, ge=0)
    """thresholds: draft tokens the batch may take; divided by the batch size, the length per request."""
    threshold_min_probability: float = Field(default=0.3, ge=0.0, le=1.0)
    """thresholds: draft tokens with a lower path probability are dropped."""

    bandit_strategies: tuple[tuple[int, int, int], ...] = (
        (16, 1, 16), (12, 1, 16), (8, 1, 16), (4, 1, 16),
        (12, 1, 8), (8, 1, 8), (5, 1, 8),
        (8, 1, 4), (6, 1, 4), (4, 1, 4),
        (4, 1, 2), (3, 1, 2), (2, 1, 2),
    )  # fmt: skip
    """bandit: triples (draft depth, draft paths per request, draft tokens to verify per request), grouped by the third
    number. A model drafter drafts no deeper than the first."""
    bandit_batch_sizes: tuple[int, ...] = (1, 4, 8, 16)
    """bandit: smallest batch size of each group of strategies, the group that verifies most first."""
    bandit_elastic_threshold: int = Field(default=32, ge=0)
    """bandit: batch size from which on nothing is drafted, until measured times tell a better one."""
    bandit_epsilon: float = Field(default=0.05, ge=0.0, le=1.0)
    """bandit: share of the steps that try a random strategy."""
    bandit_window: int = Field(default=32, ge=1, le=1024)
    """bandit: rewards kept per strategy."""
    bandit_seed: int = Field(default=0, ge=0)
    """bandit: seed of its random choices."""

    @model_validator(mode="after")
    def _bandit_fits(self) -> BudgetSettings:
        groups = len({verified for *_, verified in self.bandit_strategies})
        sizes = list(self.bandit_batch_sizes)
        for depth, paths, verified in self.bandit_strategies:
            if depth < 0 or paths < 1 or verified < 0:
                raise ValueError(
                    f"bandit_strategies ({depth}, {paths}, {verified}): give a draft depth and tokens to verify of at "
                    "least 0, and at least one draft path"
                )
            if self.policy == "bandit" and depth > self.max_draft_tokens:
                raise ValueError(
                    f"bandit_strategies ({depth}, {paths}, {verified}) drafts deeper than "
                    f"max_draft_tokens={self.max_draft_tokens}: raise that, to 128 at most, or lower the draft depth"
                )
        if groups == 0 or len(sizes) != groups or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(
                f"bandit_batch_sizes {sizes}: name ascending sizes from 1, one for each of the {groups} "
                "numbers of tokens to verify"
            )
        return self


class KvPoolSettings(Section):
    """The KV pool, the same for every worker of a run (docs/kv-pool.md)."""

    backend: Literal["paceline", "LMCacheMPConnector", "MooncakeStoreConnector"] = "paceline"
    """paceline: this project's own, for the workers of one machine. Or a KV connector of vLLM's for a cluster; only
    those that tell entries apart by the request's cache salt, which carries the policy version."""

    directory: str | None = None
    """paceline: directory of the entries in memory, for example /dev/shm/my-run. For this run alone: the first worker
    to open it and the last to close it empty it."""

    memory_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """paceline: most bytes in `directory`; the least urgent entries move to disk, or are dropped."""

    disk_directory: str | None = None
    """paceline: directory of the entries that do not fit into memory, on a local disk; unset: they are dropped."""

    disk_bytes: int = Field(default=0, ge=0)
    """paceline: most bytes in `disk_directory`; the least urgent entries are dropped."""

    namespace: str | None = None
    """Name of the run, the same for all its workers; runs of one store or directory must differ in it."""

    required: bool = True
    """paceline: an engine whose keys and values cannot be moved refuses to start; false: it does without the pool, as a
    fleet's engines do with the pool that the fleet makes itself."""

    kv_transfer_config: dict[str, Any] = Field(default_factory=dict)
    """Other backends: fields of vLLM's KVTransferConfig, passed through (kv_connector_extra_config, kv_port, ..)."""

    @model_validator(mode="after")
    def _backend_fits(self) -> KvPoolSettings:
        if self.backend == "paceline":
            return self._check_own()
        if self.directory is not None or self.disk_directory is not None:
            raise ValueError(f"directory and disk_directory are for backend='paceline', not {self.backend!r}")
        if not self.namespace:
            raise ValueError(
                f"backend={self.backend!r} needs a namespace, the run's name: another run's policy version 3 has other "
                "weights"
            )
        named = self.kv_transfer_config.get("kv_connector", self.backend)
        if named != self.backend:
            raise ValueError(f"kv_transfer_config names kv_connector={named!r}, backend is {self.backend!r}")
        return self

    def _check_own(self) -> KvPoolSettings:
        if not self.directory:
            raise ValueError("backend='paceline' needs a directory, for example /dev/shm/my-run")
        if (self.disk_directory is None) != (self.disk_bytes == 0):
            raise ValueError(
                f"disk_directory={self.disk_directory!r} and disk_bytes={self.disk_bytes} belong together: set both or "
                "none"
            )
        if self.disk_directory is not None:
            memory, disk = Path(self.directory).resolve(), Path(self.disk_directory).resolve()
            if memory == disk or memory in disk.parents or disk in memory.parents:
                raise ValueError(
                    f"directory={self.directory!r} and disk_directory={self.disk_directory!r} are one, or one is in "
                    "the other: give two that lie apart"
                )
        if self.kv_transfer_config:
            raise ValueError("kv_transfer_config is for other backends than 'paceline'")
        return self


EngineSettings.model_rebuild()  # its sections are all there: classes derived from it are complete too


class RewardSettings(Section):
    """Rewards while rolling out: a pool of reward workers (fleet/rewards.py)."""

    workers: int = Field(default=1, ge=1, le=1024)
    """Reward workers; each is a process that scores one response at a time."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """A call that takes longer is given up, and its worker killed and replaced."""
    max_crashes: int = Field(default=2, ge=0)
    """How many times a response whose reward worker died is scored again: the worker may have been killed from
    outside. A call that raised or took too long is not repeated."""
    failure_reward: float | None = Field(default=0.0, allow_inf_nan=False)
    """Reward of a response that could not be scored or has failed; null: the rollout stops with an error."""


OnFailure: TypeAlias = Literal["deliver", "raise"]
"""What becomes of a response that fails."""

Variant: TypeAlias = Literal["even", "context", "no-context", "oracle", "sticky", "group"]
"""How responses are dispatched; `planning/dispatch.py` says what each means."""


_ROLES = re.compile(r"(?P<verifiers>\d+) verifiers? \+ (?P<drafters>\d+) drafters?")


class FleetSettings(Section):
    """Divided rollout over several engines (fleet/). Nothing here changes a token."""

    workers: int = Field(default=2, ge=1, le=4096)
    """Engines, each in a Ray actor."""
    variant: Variant | None = None
    """Order of responses, planning/dispatch.py. even: who has the fewest tokens, those expected to become long ahead;
    context: Seer's; no-context: divided, in order of submission; oracle: by true lengths, which must be given; sticky:
    a response stays on one worker; group: a group stays on one worker, undivided. Unset: even with a KV
    pool; without one, where a response that moves is read again, sticky."""
    chunk_tokens: int = Field(default=8192, ge=1)
    """Longest chunk; after it a response may go on elsewhere."""
    guard_interval: int = Field(default=16, ge=0)
    """context, sticky: every how many responses one comes from the group that ran least, 0: never."""
    address: str | None = None
    """Ray cluster to join, `HOST:PORT` or `auto`; unset: Ray is started on this machine for the fleet alone."""
    cpus_per_worker: float = Field(default=1.0, ge=0.0)
    """CPUs that Ray sets aside for an engine, which also has so many threads."""
    gpus_per_worker: float | None = Field(default=None, ge=0.0)
    """GPUs that Ray sets aside for an engine; unset: the tensor parallel size, 0 where vLLM is built for the CPU."""
    resources_per_worker: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources that a node must have to get an engine."""
    roles: str = "auto"
    """auto: every worker verifies, and may help another one when it falls free (`help`). "N verifiers + M
    drafters": N of the workers verify, the last M draft ahead for them from the first token on, each for its share, and
    take chunks only when no verifier is left."""
    help: Literal["none", "auto", "draft", "copy", "take"] = "none"
    """What a worker does that falls free while others still generate: nothing, or whatever of the following makes the
    one that is predicted to end last end soonest, if anything does (docs/fleet.md). draft: draft ahead for it; needs
    `EngineSettings.model_drafter` without `draft_worker`, and all workers on one machine or
    `EngineSettings.draft_interface`. copy: generate its longest response too, the first to end wins. take: go on with
    some of its responses. auto: any of the three."""
    draft_server: bool = True
    """Start a draft server for the fleet unless `EngineSettings.draft_servers` names some. Needs the suffix drafter;
    on a cluster, joined by address or connected with several nodes, none is started."""
    kv_pool_gib: float = Field(default=1.0, ge=0.0)
    """Shared memory in which chunks leave keys and values for the next worker, so that nothing is prefilled twice
    (docs/kv-pool.md); at most half of what is free, 0: none. On a cluster, and for the variants `sticky` and `group`,
    none is made; `EngineSettings.kv_pool` names one of your own. Engines that cannot have one do without."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port at which the driver serves metrics for Prometheus (`/metrics`); 0: a free one, unset: none."""
    metrics_host: str | None = Field(default=None, min_length=1)
    """Address at which it serves them; unset: 127.0.0.1; 0.0.0.0: every address of the machine, for a Prometheus
    elsewhere. Needs `metrics_port`."""
    progress_ms: float = Field(default=100.0, gt=0.0, le=60_000.0)
    """How often a worker tells what it has generated; a lost worker costs at most so much of its work. Workers with
    more chunks than their driver can hear of so often (10,000 in all at 100 ms) tell less often by themselves."""
    silence_s: float = Field(default=300.0, gt=0.0)
    """A worker that finished no step for so long, with chunks to run or engines to draft for, counts as lost."""
    start_timeout_s: float = Field(default=900.0, gt=0.0)
    """An engine that takes longer to start, or to load weights, counts as lost. A draft ladder may take as long."""
    max_failed_starts: int = Field(default=3, ge=1)
    """A worker that is lost so many times in a row without generating anything is given up."""
    max_crashes: int = Field(default=3, ge=0)
    """How many workers in a row may be lost that have generated before, when one response alone had just begun there
    and had no token. One more, and the response has failed: it is what ends them. Others with its prompt have failed
    with the first worker that they end, if it never got a token."""
    on_failure: OnFailure = "deliver"
    """What becomes of a response that fails: its options leave no token to draw, the model gives NaN, no engine takes
    it, or it ends its workers; but where another worker is up, only once that one has failed it too (not with the
    variant `group`): if it goes on there, the first worker is replaced. deliver: as far as it came, with
    `finish_reason` "error" and the reason, while the others go on; its reward is `rewards.failure_reward`. raise: the
    rollout ends with an error that names it."""
    rewards: RewardSettings | None = None
    """The pool of reward workers. Unset, `Fleet` uses one with the defaults where it is given a reward function, and
    `train` computes rewards in the trainer's process after the rollout."""

    @property
    def num_drafters(self) -> int:
        """Workers that draft and do not verify."""
        parts = _ROLES.fullmatch(self.roles)
        return int(parts["drafters"]) if parts else 0

    @model_validator(mode="after")
    def _check_roles(self) -> FleetSettings:
        if self.roles == "auto":
            return self
        parts = _ROLES.fullmatch(self.roles)
        if parts is None:
            raise ValueError(f"roles {self.roles!r}: write 'auto', or for example '3 verifiers + 1 drafter'")
        verifiers, drafters = int(parts["verifiers"]), int(parts["drafters"])
        if verifiers + drafters != self.workers or drafters > verifiers:
            raise ValueError(
                f"roles {self.roles!r} of {self.workers} workers: the numbers must add up to workers, with no more "
                "drafters than verifiers, as a verifier has one drafter"
            )
        return self

    @model_validator(mode="after")
    def _check_metrics(self) -> FleetSettings:
        if self.metrics_host is not None and self.metrics_port is None:
            raise ValueError(
                f"metrics_host {self.metrics_host!r} without metrics_port serves nothing: give the port too, or leave "
                "both away"
            )
        return self
