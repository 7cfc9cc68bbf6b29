"""Make the Countdown policy and its small drafter from generated search traces, and measure them.

    python scripts/pretrain_countdown.py policy --out DIR
        base policy from traces
    python scripts/pretrain_countdown.py drafter --teacher DIR --out DIR
        small drafter, distilled from a policy on traces
    python scripts/pretrain_countdown.py prompts --out FILE; paceline rollout DIR FILE --out RESPONSES
    python scripts/pretrain_countdown.py drafter --teacher DIR --start DIR --responses RESPONSES --out DIR
        the drafter distilled further, on what the policy itself writes
    python scripts/pretrain_countdown.py measure --policy DIR [--drafter DIR]

`--quick` makes a tiny model in seconds (for tests).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pretraining import (
    MAX_POSITIONS,
    Document,
    Shape,
    add_sampling_options,
    add_training_options,
    describe_lengths,
    load_model,
    measure_agreement,
    read_responses,
    repeat_documents,
    sample_in_batches,
    save_checkpoint,
    start_model,
    train,
)

from paceline.tasks.alphabet import ALPHABET, build_tokenizer, encode_prompt, encode_trace
from paceline.tasks.traces import Problem, ProblemRange, stream_examples

POLICY = Shape(hidden=256, layers=4, intermediate=704, kv_heads=2)
DRAFTER = Shape(hidden=128, layers=2, intermediate=352, kv_heads=1)
QUICK = Shape(hidden=64, layers=1, intermediate=96, kv_heads=1)


# --- data -------------------------------------------------------------------------------------------------


def stream_problems(seed: int, hard_share: float, max_tokens: int) -> Iterator[tuple[Problem, str]]:
    """(problem, trace) without end; a `hard_share` of the problems has four numbers."""
    easy = stream_examples(seed, ProblemRange(), max_tokens)
    hard = stream_examples(seed + 1, ProblemRange(min_numbers=4, max_numbers=4), max_tokens)
    owed = 0.0
    while True:
        owed += hard_share
        yield next(hard) if owed >= 1 else next(easy)
        owed -= float(owed >= 1)


def stream_documents(seed: int, hard_share: float, max_tokens: int) -> Iterator[Document]:
    """(token ids, number of prompt tokens) of traces, without end."""
    for problem, trace in stream_problems(seed, hard_share, max_tokens):
        prompt = encode_prompt(problem.prompt)
        yield prompt + encode_trace(trace), len(prompt)


def choose_documents(arguments: argparse.Namespace) -> Iterator[Document]:
    """Responses if a file of them is given, otherwise traces.

    Responses hold what no trace does: slips of arithmetic, and searches longer than any that was generated.
    """
    if arguments.command == "drafter" and arguments.responses:
        return repeat_documents(read_responses(arguments.responses), arguments.seed)
    return stream_documents(arguments.seed, arguments.hard_share, arguments.max_tokens)


# --- measuring --------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Held-out solve rate, length percentiles and finish rate of a policy; agreement with a drafter if
    one is given."""
    from transformers import AutoTokenizer

    from paceline.tasks import load_task

    policy, tokenizer = load_model(arguments.policy), AutoTokenizer.from_pretrained(arguments.policy)
    task = load_task("countdown", max_numbers=arguments.max_numbers)
    rows = task.held_out_rows(arguments.problems, arguments.seed)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    responses = sample_in_batches(policy, prompts, arguments.max_new_tokens, arguments.seed, arguments.batch)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [task.reward(text, row) for text, row in zip(texts, rows, strict=True)]
    result: dict[str, Any] = {
        "problems": len(rows),
        "solve_rate": sum(reward == 1.0 for reward in rewards) / len(rows),
        "mean_reward": sum(rewards) / len(rows),
        **describe_lengths(responses),
    }
    if arguments.drafter:
        drafter = load_model(arguments.drafter)
        result["agreement"] = measure_agreement(policy, drafter, prompts, responses)
    if arguments.show:
        for prompt, text, reward in list(zip(prompts, texts, rewards, strict=True))[: arguments.show]:
            print(f"{reward:.1f} {tokenizer.decode(prompt, skip_special_tokens=True)}{text}")
    return result


# --- command line -----------------------------------------------------------------------------------------


def write_prompts(arguments: argparse.Namespace) -> None:
    """The prompts of `--problems` problems, as `paceline rollout` takes them."""
    problems = stream_problems(arguments.seed, arguments.hard_share, arguments.max_tokens)
    with arguments.out.open("w") as file:
        for problem, _ in itertools.islice(problems, arguments.problems):
            file.write(json.dumps({"prompt": problem.prompt}) + "\n")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    policy = commands.add_parser("policy", help="train the base policy on traces")
    drafter = commands.add_parser("drafter", help="distil a small drafter from a policy")
    drafter.add_argument("--teacher", type=Path, required=True)
    drafter.add_argument(
        "--responses",
        type=Path,
        metavar="FILE",
        help="the teacher's, from 'paceline rollout', in place of traces",
    )
    prompts = commands.add_parser("prompts", help="write prompts for 'paceline rollout'")
    prompts.add_argument("--problems", type=int, default=4096)
    for command in (policy, drafter, prompts):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--max-tokens", type=int, default=640, help="longest trace")
        command.add_argument("--hard-share", type=float, default=0.05, help="share of four-number problems")
        command.add_argument("--seed", type=int, default=0)
    for command, steps in ((policy, 2400), (drafter, 1200)):
        add_training_options(command, steps, 4e-3)
    measuring = commands.add_parser("measure", help="held-out solve rate, lengths, agreement")
    measuring.add_argument("--problems", type=int, default=512)
    measuring.add_argument("--max-numbers", type=int, default=3)
    measuring.add_argument("--drafter", type=Path)
    measuring.add_argument("--show", type=int, default=0, help="print so many responses")
    add_sampling_options(measuring, max_new_tokens=512)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    if arguments.command == "prompts":
        write_prompts(arguments)
        return
    torch.set_num_threads(arguments.threads)
    if arguments.command == "measure":
        print(json.dumps(measure(arguments), indent=1))
        return
    if arguments.quick:
        arguments.steps, arguments.tokens_per_step = min(arguments.steps, 20), 2048
    shape = QUICK if arguments.quick else POLICY if arguments.command == "policy" else DRAFTER
    model = start_model(shape, len(ALPHABET), arguments)
    teacher = load_model(arguments.teacher) if arguments.command == "drafter" else None
    tokenizer = build_tokenizer(MAX_POSITIONS)
    train(
        model,
        teacher,
        choose_documents(arguments),
        arguments,
        lambda: save_checkpoint(model, tokenizer, arguments.out),
    )


if __name__ == "__main__":
    main()
