"""Small tokenizers of the kinds that models have, trained in a moment on the texts that ship."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from loadtest.tokenized_text import LANGUAGES, read_units

KINDS = ("gpt2", "qwen", "llama2")
_NUM_UNITS = 6000
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def made_tokenizer(kind: str) -> Tokenizer:
    """gpt2: bytes, split into words. qwen: bytes, a mark may stay with the word after it. llama2:
    characters with bytes for rare ones, a space is part of a word, BOS before a text.
    """
    byte_fallback = kind == "llama2"
    tokenizer = Tokenizer(models.BPE(byte_fallback=byte_fallback, unk_token=None))
    specials = ["<s>", *(f"<0x{value:02X}>" for value in range(256) if byte_fallback)]
    alphabet: list[str] = [] if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "qwen":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer.decoder = decoders.Metaspace() if byte_fallback else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=specials,
        initial_alphabet=alphabet,
        limit_alphabet=600,  # the thousands of other characters of the texts are rare ones
        show_progress=False,
    )
    texts = [read_units(language)[:_NUM_UNITS] for language in LANGUAGES]
    # Once as text and once word by word: models know words without a space before them too.
    lines = [line for units in texts for line in (" ".join(units), *units)]
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer
