"""Make the prose policy and its small drafter from recorded reasoning over grade-school maths, and measure them.

    python scripts/pretrain_prose.py tokenizer --groups FILES --questions FILE --out DIR
        byte-pair tokenizer of 8,192 ids
    python scripts/pretrain_prose.py policy --groups FILE --questions FILE --tokenizer DIR --out DIR
        policy, from recorded responses and solved problems
    python scripts/pretrain_prose.py sharpen --policy DIR --temperature 0.65 --out DIR
        the policy as it is at that temperature, at temperature 1
    python scripts/pretrain_prose.py prompts --questions FILE --out PROMPTS [--held-out]
    python scripts/pretrain_prose.py responses --policy DIR --prompts PROMPTS --out RESPONSES
        what the policy writes; 'paceline rollout' does the same, faster
    python scripts/pretrain_prose.py drafter --teacher DIR --responses RESPONSES --out DIR
        small drafter, distilled on what the policy writes
    python scripts/pretrain_prose.py measure --policy DIR [--drafter DIR] --prompts FILE

docs/prose.md says where the files come from. Problems are told apart by a hash of their question: one in five is held
out of everything, so no seed can mix them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterable
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

from paceline.tasks.alphabet import BOS, BOS_ID, EOS, EOS_ID, PAD

VOCABULARY = 8192
POLICY = Shape(hidden=256, layers=4, intermediate=704, kv_heads=2)
DRAFTER = Shape(hidden=128, layers=2, intermediate=352, kv_heads=1)
QUICK = Shape(hidden=64, layers=1, intermediate=96, kv_heads=1)
INSTRUCTION = " Let's think step by step and output the final answer after `####`.\n"
"""What follows the question in the recorded prompts, and so in ours."""
HELD_OUT_SHARE = 0.2
MIN_RESPONSE_TOKENS = 16


# --- data -------------------------------------------------------------------------------------------------


def is_held_out(question: str) -> bool:
    """Whether a question is kept out of all training, by a hash of its words."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def read_questions(file: Path) -> list[dict[str, str]]:
    """Problems with `question` and `answer`, as GSM8K has them."""
    with file.open() as lines:
        return [json.loads(line) for line in lines]


def read_group(file: Path) -> list[dict[str, Any]]:
    """Recorded responses: rows with `prompt` and `response`."""
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def take_question(prompt: str) -> str:
    """The user's words of a recorded prompt, without the system's."""
    return (
        prompt.rpartition("\nuser\n")[2]
        .rpartition("\nassistant")[0]
        .removesuffix(INSTRUCTION.strip())
        .strip()
    )


def build_documents(tokenizer: Any, groups: Path, samples: int) -> list[Document]:
    """The first `samples` recorded responses to each prompt; of their prompts the question alone."""
    documents: list[Document] = []
    for row in read_group(groups):
        prompt = tokenizer(take_question(row["prompt"]) + INSTRUCTION)["input_ids"]
        response = tokenizer(row["response"].strip(), add_special_tokens=False)["input_ids"]
        if row["sample"] < samples and len(response) >= MIN_RESPONSE_TOKENS:
            documents.append(([*prompt, *response, EOS_ID], len(prompt)))
    return documents


def train_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level byte-pair tokenizer of VOCABULARY ids that puts `<bos>` in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


# --- commands ---------------------------------------------------------------------------------------------


def make_tokenizer(arguments: argparse.Namespace) -> None:
    """Learn the merges from all recorded responses and the problems that are not held out."""
    problems = [row for row in read_questions(arguments.questions) if not is_held_out(row["question"])]
    texts = [row["response"] for file in arguments.groups for row in read_group(file)]
    texts += [f"{row['question']}\n{row['answer']}" for row in problems]
    train_tokenizer(texts).save_pretrained(arguments.out)


def write_prompts(arguments: argparse.Namespace) -> None:
    """The prompts of the problems that are held out, or of the others, as `paceline rollout` takes them."""
    with arguments.out.open("w") as file:
        for row in read_questions(arguments.questions):
            if is_held_out(row["question"]) == arguments.held_out:
                file.write(json.dumps({"prompt": row["question"] + INSTRUCTION}) + "\n")


def make_policy(arguments: argparse.Namespace) -> None:
    """Train the policy from scratch, or go on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    documents = build_documents(tokenizer, arguments.groups, arguments.samples)
    print(f"documents {len(documents)} tokens {sum(len(ids) for ids, _ in documents)}", flush=True)
    shape = QUICK if arguments.quick else DRAFTER if arguments.small else POLICY
    model = start_model(shape, len(tokenizer), arguments)
    stream = repeat_documents(documents, arguments.seed)
    train(model, None, stream, arguments, lambda: save_checkpoint(model, tokenizer, arguments.out))


def sharpen_policy(arguments: argparse.Namespace) -> None:
    """Divide the logits by a temperature for good, through the weights of the last norm."""
    from transformers import AutoTokenizer

    policy = load_model(arguments.policy)
    with torch.no_grad():
        policy.model.norm.weight /= arguments.temperature
    save_checkpoint(policy, AutoTokenizer.from_pretrained(arguments.policy), arguments.out)


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The first `--problems` prompts of a file of them."""
    lines = arguments.prompts.read_text().splitlines()[: arguments.problems]
    return [json.loads(line)["prompt"] for line in lines]


def write_responses(arguments: argparse.Namespace) -> None:
    """One response of the policy to each prompt."""
    from transformers import AutoTokenizer

    policy, tokenizer = load_model(arguments.policy), AutoTokenizer.from_pretrained(arguments.policy)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in read_prompts(arguments)]
    responses = sample_in_batches(policy, prompts, arguments.max_new_tokens, arguments.seed, arguments.batch)
    with arguments.out.open("w") as file:
        for prompt, response in zip(prompts, responses, strict=True):
            file.write(json.dumps({"prompt_ids": prompt, "tokens": response}) + "\n")
    print(json.dumps(describe_lengths(responses)), flush=True)


def make_drafter(arguments: argparse.Namespace) -> None:
    """Distil the drafter from the teacher on the teacher's own responses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.teacher)
    model = start_model(QUICK if arguments.quick else DRAFTER, len(tokenizer), arguments)
    stream = repeat_documents(read_responses(arguments.responses), arguments.seed)
    teacher = load_model(arguments.teacher)
    train(model, teacher, stream, arguments, lambda: save_checkpoint(model, tokenizer, arguments.out))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lengths and finish rate of the policy on `--prompts`; entropy and agreement with a drafter if one is given."""
    from transformers import AutoTokenizer

    policy, tokenizer = load_model(arguments.policy), AutoTokenizer.from_pretrained(arguments.policy)
    texts = read_prompts(arguments)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    responses = sample_in_batches(policy, prompts, arguments.max_new_tokens, arguments.seed, arguments.batch)
    for text, response in list(zip(texts, responses, strict=True))[: arguments.show]:
        print(f"{text}{tokenizer.decode(response)}\n")
    drafter = load_model(arguments.drafter) if arguments.drafter else policy
    agreement = measure_agreement(policy, drafter, prompts, responses)
    return {"problems": len(texts), **describe_lengths(responses), "agreement": agreement}


# --- command line -----------------------------------------------------------------------------------------


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tokenizer = commands.add_parser("tokenizer", help="learn the byte pairs")
    tokenizer.add_argument("--groups", type=Path, nargs="+", required=True)
    tokenizer.set_defaults(run=make_tokenizer)
    policy = commands.add_parser("policy", help="train the policy on recorded responses")
    policy.add_argument("--groups", type=Path, required=True)
    policy.add_argument("--tokenizer", type=Path, required=True)
    policy.add_argument("--samples", type=int, default=8, help="recorded responses per prompt to learn from")
    policy.add_argument("--small", action="store_true", help="of the drafter's size, for it to start from")
    policy.set_defaults(run=make_policy)
    prompts = commands.add_parser("prompts", help="write prompts for 'paceline rollout'")
    prompts.add_argument("--held-out", action="store_true")
    prompts.set_defaults(run=write_prompts)
    drafter = commands.add_parser("drafter", help="distil a small drafter from the policy")
    drafter.add_argument("--teacher", type=Path, required=True)
    drafter.add_argument(
        "--responses", type=Path, required=True, help="the teacher's, from 'paceline rollout'"
    )
    drafter.set_defaults(run=make_drafter)
    for command in (tokenizer, prompts):
        command.add_argument("--questions", type=Path, required=True, help="problems with their solutions")
    for command in (tokenizer, policy, prompts, drafter):
        command.add_argument("--out", type=Path, required=True)
    for command, steps in ((policy, 1600), (drafter, 800)):
        command.add_argument("--seed", type=int, default=0)
        add_training_options(command, steps, 4e-3)
    sharpening = commands.add_parser("sharpen", help="divide the logits by a temperature for good")
    sharpening.add_argument("--policy", type=Path, required=True)
    sharpening.add_argument("--temperature", type=float, required=True)
    sharpening.add_argument("--out", type=Path, required=True)
    sharpening.set_defaults(run=sharpen_policy)
    responses = commands.add_parser("responses", help="write what the policy answers")
    responses.add_argument("--out", type=Path, required=True)
    responses.set_defaults(run=write_responses)
    measuring = commands.add_parser("measure", help="lengths, entropy, agreement")
    measuring.add_argument("--drafter", type=Path)
    measuring.add_argument("--show", type=int, default=0, help="print so many responses")
    measuring.set_defaults(run=measure)
    for command in (responses, measuring):
        command.add_argument("--prompts", type=Path, required=True)
        command.add_argument("--problems", type=int, default=64)
        add_sampling_options(command, max_new_tokens=1024)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    if "threads" in arguments:
        torch.set_num_threads(arguments.threads)
    if getattr(arguments, "quick", False):
        arguments.steps, arguments.tokens_per_step = min(arguments.steps, 20), 2048
    result = arguments.run(arguments)
    if result is not None:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
