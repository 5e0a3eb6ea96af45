"""Prompts to token ids, and ids to text, with a checkpoint's own tokenizer.

Rules
- tokenizer.json decides everything, special tokens added to plain text included. It is loaded by
  `tokenizers` alone: importing transformers' AutoTokenizer takes seconds, and is kept for
  checkpoints without that file.
- A rendered chat is encoded without further special tokens: the template has written them already,
  and Llama 3's would begin with two.
- Text that spells a special token is encoded as that token, in chats as in plain prompts, as it is
  in transformers and in the engines that models are tried with. The template's own markers arrive
  as text among the client's, so the two cannot be told apart without encoding the pieces
  separately, which changes ids at their borders. Nothing here or later counts or indexes by special
  tokens.
- Decoding never "cleans up" spaces before punctuation: that changes code and quotations.

Knows nothing of requests' limits: whoever calls compares lengths with the context.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import tokenizers

from engine.chat_template import ChatTemplate, read_template
from engine.errors import ModelError, PromptError
from engine.generation_config import read_json, token_text
from engine.request import ChatPrompt, Int32Array, Prompt, TextPrompt

# A million tokens of ordinary text; encoding this much takes seconds.
MAX_PROMPT_CHARS: Final = 4_000_000


class Tokenizer:
    """A tokenizer and its chat template. Safe from any thread: nothing is written after loading.

    `tokenizers` takes shared borrows only, for encoding and decoding; its "Already borrowed" comes
    from changing a tokenizer (truncation, padding, added tokens), which is not done here.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: ChatTemplate | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """vocab_size  ids below it are valid; None: as many as the tokenizer has"""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size: int = vocab_size or backend.get_vocab_size()
        self._template = template

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The tokenizer of the checkpoint in `folder`, with config.json's vocabulary size.

        Raises ModelError where a file is missing or broken.
        """
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        return cls(
            _backend(folder), template=_template(folder, config), vocab_size=_vocab_size(folder)
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def token_id(self, text: str) -> int | None:
        """The id of a token that is written so, None where there is none."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id is not None and token_id < self.vocab_size else None

    @property
    def chat_template_source(self) -> str | None:
        """The template's own text: its markers tell how the model writes calls and reasoning."""
        return None if self._template is None else self._template.source

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        """[n] int32, n >= 1, each in the vocabulary, no longer written. Raises PromptError."""
        if isinstance(prompt, ChatPrompt):
            if self._template is None:
                raise PromptError("this model has no chat template", "messages")
            text = self._template.render(prompt)
            ids = self._encode(text, "messages", add_special_tokens=False)
            return self._checked(ids, "messages")
        if isinstance(prompt, TextPrompt):
            ids = self._encode(prompt.text, "prompt", add_special_tokens=prompt.add_special_tokens)
            return self._checked(ids, "prompt")
        return self._checked(prompt.token_ids, "prompt")

    def encode_word(self, text: str) -> tuple[int, ...]:
        """The ids of a text with nothing around it; empty where one is not the model's.

        Raises PromptError where the text is not valid Unicode.
        """
        ids = self._encode(text, "bad_words", add_special_tokens=False)
        return tuple(ids) if all(each < self.vocab_size for each in ids) else ()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole output; ids that the tokenizer does not know have none."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each id; "" for one that it lacks."""
        return [self.backend.id_to_token(each) or "" for each in token_ids]

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > MAX_PROMPT_CHARS:
            raise PromptError(
                f"the prompt has {len(text)} characters; the limit is {MAX_PROMPT_CHARS}", param
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text is not valid Unicode: a lone surrogate at {error.start}", param
            ) from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _checked(self, ids: Sequence[int], param: str) -> Int32Array:
        if not ids:
            raise PromptError("the prompt is empty", param)
        for index, each in ((ids.index(each), each) for each in (min(ids), max(ids))):
            if not 0 <= each < self.vocab_size:
                raise PromptError(
                    f"token {index} of the prompt is {each}; "
                    f"ids are between 0 and {self.vocab_size - 1}",
                    param,
                )
        checked = np.array(ids, np.int32)
        checked.flags.writeable = False
        return checked


def _template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    special = _special_tokens(folder, config)
    try:
        source = read_template(folder, config)
        return ChatTemplate(source, special, MAX_PROMPT_CHARS) if source else None
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except Exception as error:  # a file may hold anything, and compiling fails in many ways
        raise ModelError(f"{folder}: the chat template cannot be read: {error!r}") from error


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    is_there = file.is_file()
    try:
        return tokenizers.Tokenizer.from_file(str(file)) if is_there else _converted(folder)
    except Exception as error:  # `tokenizers` and transformers' converters raise bare Exceptions
        what = file if is_there else folder
        raise ModelError(f"{what}: the tokenizer cannot be loaded: {error}") from error


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """From an older format: tokenizer.model (SentencePiece), or vocab.json with merges.txt."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise ModelError("it has no tokenizer.json, tokenizer.model or vocab.json")
    from transformers import AutoTokenizer  # 4 s beyond torch: only for a checkpoint that needs it

    loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError("transformers has no conversion for it to the tokenizer.json format")
    return backend


def _vocab_size(folder: Path) -> int | None:
    """The width of the model's logits and embedding; a tokenizer may have fewer ids, or more."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if type(size) is int and size > 0 else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template variables: bos_token, eos_token and their like, each the token's text."""
    both = {**read_json(folder / "special_tokens_map.json"), **config}
    texts = {name: token_text(value) for name, value in both.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}
