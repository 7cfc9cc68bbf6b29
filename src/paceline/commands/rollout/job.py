"""One rollout job: which responses are missing, and the loop that makes and writes them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from paceline.commands.inputs.launch import Launch, describe_failure, hush
from paceline.commands.inputs.model_folder import Checkpoint, load_tokenizer
from paceline.commands.inputs.prompts import Prompt
from paceline.commands.inputs.sampling import Sampling
from paceline.commands.rollout.responses import (
    Identity,
    KnownResponse,
    ResponseFile,
    ResponseLine,
    encode_line,
    refuse_difference,
)
from paceline.config import OnFailure
from paceline.errors import EngineError, PacelineError
from paceline.terminal.interruption import INTERRUPTED, Interruption
from paceline.terminal.meter import RolloutMeter
from paceline.terminal.progress import Progress
from paceline.types import Response, RolloutRequest

if TYPE_CHECKING:
    from paceline.engine.rollout_engine import RolloutEngine, TokenEvent

LINE_BYTES_PER_TOKEN = 32
"""About what a token takes in the output: its id, its log-probability, its text."""
SOME_FAILED = 1
"""Exit code of a rollout in which responses failed; all of them have their lines."""


@dataclass(frozen=True, slots=True)
class Job:
    """A rollout, checked and ready to run."""

    checkpoint: Checkpoint
    launch: Launch
    sampling: Sampling
    fingerprint: str
    options: Mapping[str, Any]
    """What decides the tokens beside prompt, sample and weights."""
    todo: Sequence[tuple[Prompt, int, int | None]]
    """(prompt, sample, key) of every response that is missing."""
    num_done: int
    """Responses that the output already holds."""

    def requests(self) -> list[RolloutRequest]:
        """The missing responses as the engine takes them, in the order of `todo`."""
        from paceline.engine.keys import prompt_group

        return [
            RolloutRequest(
                prompt=prompt.tokens,
                max_tokens=self.sampling.max_tokens,
                key=key,
                group=prompt_group(prompt.tokens),
                sample=sample,
            )
            for prompt, sample, key in self.todo
        ]


def plan_job(
    checkpoint: Checkpoint,
    launch: Launch,
    sampling: Sampling,
    seed: int,
    prompts: Sequence[Prompt],
    samples: int,
    out: Path,
    done: Mapping[Identity, KnownResponse],
) -> Job:
    """Find out what is missing. Raises RecordError when `done` holds a response that this job would not make."""
    fingerprint = checkpoint.fingerprint()
    options = {
        **sampling.described(),
        "seed": seed,
        "dtype": launch.dtype,
        "compiled": launch.compiled,
        "linear_kernel": launch.linear_kernel,
        "plain": launch.settings is None,
    }
    todo = []
    num_done = 0
    for prompt in prompts:
        for sample in range(samples):
            key = None if launch.settings is None else derive(seed, prompt, sample)
            known = done.get((prompt.id, sample))
            if known is None:
                todo.append((prompt, sample, key))
            else:
                refuse_difference(out, known, key, fingerprint, options)
                num_done += 1
    return Job(checkpoint, launch, sampling, fingerprint, options, todo, num_done)


def derive(seed: int, prompt: Prompt, sample: int) -> int:
    """Dice key of a prompt's `sample`-th response."""
    from paceline.dice import derive_key

    return derive_key(seed, prompt.tokens, prompt.sample_of(sample))


def run_job(job: Job, file: ResponseFile, console: Console, on_failure: OnFailure) -> None:
    """Make the missing responses and write each as it finishes.

    on_failure: what becomes of a response that fails, as of `RolloutEngine.generate`.

    Raises EngineError when the engine fails, RecordError when the disk does, typer.Exit(130) after Ctrl-C and (1) at
    the end if responses failed; whatever was written stays.
    """
    tell_plan(job, file.path, console)
    if not job.todo:
        return
    tokenizer = load_tokenizer(job.checkpoint) if job.checkpoint.has_tokenizer else None
    console.print("starting the engine")
    with hush():
        engine = job.launch.start()
    if engine.invariance_gap is not None:
        console.print(f"note: {engine.invariance_gap}", highlight=False)
    reasons: Counter[str] = Counter()
    with engine, Interruption() as interruption, Progress(console) as progress:
        meter = RolloutMeter(len(job.todo))
        for event in _events(engine, job, interruption, file, on_failure):
            response = event.response
            if response is not None:
                file.append(encode_response(job, event.index, response, tokenizer))
                reasons[response.finish_reason] += 1
            meter.count(len(event.tokens), response is not None)
            progress.show_rollout(meter, engine.take_observations)
        meter.observe(engine.take_observations())
    tell_end(job, file, meter, reasons, console)
    if meter.num_finished < len(job.todo):
        raise typer.Exit(INTERRUPTED)
    if reasons["error"]:
        raise typer.Exit(SOME_FAILED)


def _events(
    engine: RolloutEngine, job: Job, interruption: Interruption, file: ResponseFile, on_failure: OnFailure
) -> Iterator[TokenEvent]:
    """The engine's events until all is done, or until the step in which an interrupt was asked for has been told."""
    step: set[int] = set()
    events = engine.stream(job.requests(), job.sampling.build(), on_failure=on_failure)
    with closing(events) as stream:
        while True:
            try:
                event = next(stream, None)
            except PacelineError:
                raise
            except Exception as error:
                raise EngineError(
                    f"the engine failed: {describe_failure(error)}; the {file.num_written} responses of this run are "
                    f"in {file.path}, go on with --resume"
                ) from error
            if event is None:
                return
            if interruption.wanted:
                if event.index in step:
                    return
                step.add(event.index)
            yield event


def encode_response(job: Job, index: int, response: Response, tokenizer: Any) -> bytes:
    """The output line of the `index`-th missing response."""
    prompt, sample, key = job.todo[index]
    line = ResponseLine(
        id=prompt.id,
        sample=sample,
        group=response.group,
        key=key,
        prompt_ids=prompt.tokens,
        tokens=response.tokens,
        text=None if tokenizer is None else tokenizer.decode(response.tokens, skip_special_tokens=True),
        logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        policy=str(job.checkpoint.folder),
        policy_fingerprint=job.fingerprint,
        options=dict(job.options),
        num_draft_tokens=response.num_draft_tokens,
        num_accepted_tokens=response.num_accepted_tokens,
        num_steps=response.num_steps,
        failure=response.failure,
    )
    return encode_line(line, prompt.fields)


def tell_plan(job: Job, out: Path, console: Console) -> None:
    """Say what there is to do."""
    if not job.todo:
        console.print(f"nothing to do: {out} holds all {job.num_done} responses", highlight=False)
        return
    kept = f", {job.num_done} are there already" if job.num_done else ""
    console.print(f"{len(job.todo)} responses to make{kept}", highlight=False)
    if job.sampling.temperature == 0 and any(sample for _, sample, _ in job.todo):
        console.print("note: at temperature 0 all samples of a prompt are the same response", highlight=False)
    longest, wanted = max(len(prompt.tokens) for prompt, *_ in job.todo), job.sampling.max_tokens
    if longest + wanted > job.launch.max_model_len:
        room = job.launch.max_model_len - longest
        console.print(
            f"note: the model takes {job.launch.max_model_len} tokens and the longest prompt has {longest}: responses "
            f"to it end after {room}, not --max-tokens {wanted}",
            highlight=False,
        )
    upper = len(job.todo) * job.launch.max_model_len * LINE_BYTES_PER_TOKEN
    free = shutil.disk_usage(out.parent).free
    if upper > free:
        console.print(
            f"note: the output may take up to {decimal(upper)}, {decimal(free)} of the disk are free",
            highlight=False,
        )


def tell_end(
    job: Job, file: ResponseFile, meter: RolloutMeter, reasons: Counter[str], console: Console
) -> None:
    """Say what was done, and how to go on if something is missing."""
    elapsed_s = max(meter.elapsed_s, 1e-9)
    parts = [f"{file.num_written} responses, {meter.num_tokens} tokens in {elapsed_s:.1f} s"]
    parts.append(f"{meter.num_tokens / elapsed_s:.0f} tokens/s")
    if meter.num_decoded:
        parts.append(f"acceptance length {meter.acceptance_length:.2f}")
    if reasons["error"]:
        parts.append(f"{reasons['error']} failed (their lines say why)")
    if reasons["length"]:
        parts.append(f"{reasons['length']} cut at --max-tokens")
    console.print(", ".join(parts), highlight=False, soft_wrap=True)
    missing = len(job.todo) - meter.num_finished
    if not missing:
        console.print(f"written to {file.path}", highlight=False, soft_wrap=True)
        return
    remedy = "go on with the same command and --resume"
    if job.launch.settings is None:
        remedy = "a run with --plain cannot go on: start anew with --overwrite"
    console.print(
        f"stopped with {missing} responses missing; what finished is in {file.path}: {remedy}",
        highlight=False,
        soft_wrap=True,
    )
