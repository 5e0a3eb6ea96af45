"""Small tokenizers of every family, built here; nothing is downloaded.

Each knows all 256 bytes, some words, characters of several scripts, special tokens and an added
token that is not special.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

FAMILIES = ("byte_level", "tiktoken", "byte_fallback", "gemma", "metaspace", "word_level")
BOS, EOS, ADDED = "<|begin|>", "<|end|>", "<tool call>"
TEXTS = (
    "the cat sat on the mat, and the dog sat on the log.",
    "hello world, hello there: def f(x): return x + 1",
    "今天天气如何？ 写一首诗",
    "Привет, мир! naïve café 🎉👩‍👩‍👧 ประเทศไทย",
)
# As Llama 3's: it writes BOS itself.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
_SPLIT = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build(family: str) -> Tokenizer:
    """A new tokenizer of that family, special tokens at the end of its vocabulary."""
    tokenizer = _BUILDERS[family]()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


@cache
def shared(family: str) -> Tokenizer:
    """The same object each time: not to be changed."""
    return build(family)


def write_checkpoint(folder: Path, family: str = "byte_level", **tokenizer_config: Any) -> Path:
    """tokenizer.json, tokenizer_config.json and config.json in `folder`."""
    tokenizer = build(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE, **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab_size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained_on_bytes(tokenizer)


def _tiktoken() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _trained_on_bytes(tokenizer)


def _trained_on_bytes(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2's: the first space of a text is the tokenizer's own, and is not decoded."""
    tokenizer = _gemma()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _gemma() -> Tokenizer:
    """Byte-fallback without the space at the start. Most characters here are bytes."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [*"▁thecasonmdglwr,.", "今", "天"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("a", "t"), ("▁", "c")]
    words += ["".join(pair) for pair in merges]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _metaspace() -> Tokenizer:
    words = ["<unk>", "▁", *"thecasonmdglwr,.", "▁the", "▁cat", "at", "▁▁"]
    model = models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _word_level() -> Tokenizer:
    """No decoder at all: words joined with spaces."""
    words = ["<unk>", *"the cat sat on mat and dog".split()]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


_BUILDERS = {
    "byte_level": _byte_level,
    "tiktoken": _tiktoken,
    "byte_fallback": _byte_fallback,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "word_level": _word_level,
}
