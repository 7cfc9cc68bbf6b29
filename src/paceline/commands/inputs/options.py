"""Arguments and options that several commands share, with their help texts."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline import processor
from paceline.errors import ConfigError, RecordError
from paceline.record.whole_file import is_stream, name_draft

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of the model, in Hugging Face format.")
]
PromptsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PROMPTS.jsonl",
        help='One JSON object a line: {"prompt": "text"}, {"messages": [...]} or {"prompt_ids": [...]}; '
        'an "id" and other fields are carried through.',
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Longest response, tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel="Sampling")]
TopP = Annotated[
    float,
    typer.Option(help="Smallest set of tokens of this probability; 1: off.", rich_help_panel="Sampling"),
]
TopK = Annotated[int, typer.Option(help="The k most probable tokens; 0: off.", rich_help_panel="Sampling")]
MinP = Annotated[
    float,
    typer.Option(
        help="Tokens at least this probable relative to the best; 0: off.", rich_help_panel="Sampling"
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends a response; may be given several times.", rich_help_panel="Sampling"),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of the dice: the same seed gives the same responses.", rich_help_panel="Sampling"
    ),
]
ModelDrafter = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of a small model with the same tokenizer, or of an EAGLE head, that drafts too; on GPUs also "
        "'mtp': the target's own prediction layers.",
        rich_help_panel="Engine",
    ),
]
DraftWorker = Annotated[
    bool,
    typer.Option(
        "--draft-worker",
        help="Run the model drafter in a process of its own, which drafts ahead while the target verifies; for a "
        "drafter that takes a tenth of the target's time or more, where a core is free.",
        rich_help_panel="Engine",
    ),
]
DraftWorkerAuto = Annotated[
    bool,
    typer.Option(
        "--draft-worker-auto",
        help="A draft worker that rests while the model drafts faster inside the engine, by turns with the target and "
        "with all cores for either.",
        rich_help_panel="Engine",
    ),
]
FurtherDrafter = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Folder of a further small model. With --draft-worker it drafts for the same responses, in one more "
        "process; with --ladder the best one drafts. May be given up to three times.",
        rich_help_panel="Engine",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        help="Number format of the weights; auto: the checkpoint's own, but 16 bits for a float32 one.",
        rich_help_panel="Engine",
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled/--eager",
        help="Run the target through torch.compile: faster steps; the first start compiles for a minute, later ones "
        "load from vLLM's cache. The two modes differ in the last bits of logits: a file is resumed in its own.",
        rich_help_panel="Engine",
    ),
]
LinearKernel = Annotated[
    processor.LinearKernel | None,
    typer.Option(
        help="Whose linear layers a bfloat16 model has on a CPU; unset: by the processor. They differ in the last "
        "bits of logits: a file is resumed with its own.",
        rich_help_panel="Engine",
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most responses that run at once.", rich_help_panel="Engine")]
KvCacheGib = Annotated[
    float, typer.Option(help="Memory for keys and values, GiB (CPU only).", rich_help_panel="Engine")
]


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that does not fit in a key."""
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"--seed {seed}: must be at least 0 and less than 2^63")


def check_writable(option: str, path: Path) -> None:
    """Raise before the long work: RecordError for what cannot be written, ConfigError for a folder."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: give a file in it")
    draft = name_draft(path)
    try:
        if is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}; choose another {option}") from error
