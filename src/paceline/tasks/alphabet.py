"""The Countdown tokenizer: one token per character, one for the answer mark, `<bos>` put in front of
every text.

Invariant: `decode(encode(text), skip_special_tokens=True) == text` for every text over the alphabet,
blanks included, and the pieces of a streaming decoder join to the same text. Characters outside the
alphabet become `<unk>`. Called by pretraining, which stores the tokenizer beside the weights; everybody
else loads it from there.
"""

from __future__ import annotations

from typing import Any

from paceline.tasks.traces import ANSWER_MARK

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
ALPHABET = (PAD, BOS, EOS, UNKNOWN, *"0123456789", *"+-*/=", *",:;|", *"x<> ", ANSWER_MARK)
TOKEN_ID = {token: i for i, token in enumerate(ALPHABET)}


def encode_prompt(text: str) -> list[int]:
    """Token ids of a prompt, `<bos>` first; what the tokenizer gives, without loading it (KeyError: not a
    prompt)."""
    return [BOS_ID, *(TOKEN_ID[character] for character in text)]


def encode_trace(text: str) -> list[int]:
    """Token ids of a trace with one answer mark, `<eos>` last."""
    search, mark, answer = text.partition(ANSWER_MARK)
    marks = [TOKEN_ID[ANSWER_MARK]] if mark else []
    return [*(TOKEN_ID[c] for c in search), *marks, *(TOKEN_ID[c] for c in answer), EOS_ID]


def build_tokenizer(max_length: int) -> Any:
    """The tokenizer as a Hugging Face `PreTrainedTokenizerFast`, ready for `save_pretrained`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(TOKEN_ID, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{ANSWER_MARK}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
