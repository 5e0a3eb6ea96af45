"""Prompts to ids: templates, special tokens, refusals, threads."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.chat_template import ChatTemplate
from engine.errors import ModelError, PromptError
from engine.generation_config import eos_ids
from engine.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from engine.tokenizer import Tokenizer
from runtime.setup.model import default_folder
from tests.fakes_tokenizers import BOS, EOS, TEXTS, build, write_checkpoint

USER = {"role": "user", "content": "the cat"}


def chat(*messages: dict[str, Any], **kwargs: Any) -> ChatPrompt:
    return ChatPrompt(messages, kwargs)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_checkpoint(tmp_path))


def decoded(tokenizer: Tokenizer, prompt: Prompt) -> str:
    ids = tokenizer.encode_prompt(prompt).tolist()
    return tokenizer.decode(ids, skip_special_tokens=False)


def refused(tokenizer: Tokenizer, prompt: Prompt) -> PromptError:
    with pytest.raises(PromptError) as caught:
        tokenizer.encode_prompt(prompt)
    return caught.value


# Chats


def test_a_chat_has_one_bos(tokenizer: Tokenizer) -> None:
    """The template writes it, and the tokenizer would add another."""
    text = decoded(tokenizer, chat(USER))
    assert text == f"{BOS}[user] the cat{EOS}\n[assistant] "


def test_text_has_the_tokenizers_bos(tokenizer: Tokenizer) -> None:
    assert decoded(tokenizer, TextPrompt("the cat")) == f"{BOS}the cat"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant", "content": None}, "[assistant] "),
        ({"role": "assistant"}, "[assistant] "),
        ({"role": "developer", "content": "be"}, "[system] be"),
        ({"role": "user", "content": []}, "[user] "),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a ", "b")]},
            "[user] a b",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no", "text": "x"}]},
            "[assistant] no",
        ),
    ],
)
def test_forms_of_messages(tokenizer: Tokenizer, message: dict[str, Any], shown: str) -> None:
    before = json.dumps(message)
    assert decoded(tokenizer, chat(message)) == f"{BOS}{shown}{EOS}\n[assistant] "
    assert json.dumps(message) == before


@pytest.mark.parametrize("content", [
    7, {"text": "a"}, ["a"], [{"text": "a"}], [{"type": "text"}], [{"type": ["text"]}],
    [{"type": "image_url", "text": "a", "image_url": "a"}],
])  # fmt: skip
def test_content_of_other_kinds_is_refused(tokenizer: Tokenizer, content: Any) -> None:
    error = refused(tokenizer, chat(USER, {"role": "user", "content": content}))
    assert error.param.startswith("messages[1].content")


def test_parts_are_read_without_the_get_that_is_slow_between_threads(tokenizer: Tokenizer) -> None:
    class Part(dict[str, str]):
        def get(self, *_: object) -> None:  # type: ignore[override]
            raise AssertionError

    parts = [Part(type="text", text="hel"), Part(type="text", text="lo")]
    told = tokenizer.encode_prompt(chat({"role": "user", "content": parts}))
    plain = tokenizer.encode_prompt(chat({"role": "user", "content": "hello"}))
    assert told.tolist() == plain.tolist()


def test_arguments_of_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if not enable_thinking %}, no thinking{% endif %}"
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, chat_template=template))
    assert decoded(tokenizer, chat(USER, enable_thinking=True)) == "the cat"
    assert decoded(tokenizer, chat(USER)) == "the cat, no thinking"
    assert decoded(tokenizer, chat(USER, messages=[], add_generation_prompt=False)).startswith(
        "the cat"
    )


def test_what_templates_use() -> None:
    source = """
    {%- for message in messages %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- endfor %}
    {{- eos_token }}{{ strftime_now('%Y') | length }}{{ tools is none }}"""
    template = ChatTemplate(source, {"eos_token": "</s>"}, 1000)
    message = {"role": "user", "content": "<é> & 'x'"}
    text = template.render(chat(message, message, message))
    assert text == json.dumps(message, ensure_ascii=False) * 2 + "</s>4True"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.attribute }}", ""),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ""),
        ("{{ messages.append(1) }}", ""),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}", "4000000 characters"),
    ],
)
def test_a_template_that_raises_refuses_its_request(tmp_path: Path, source: str, told: str) -> None:
    """CVE-2024-56326, CVE-2025-27516, CVE-2026-5760: whatever it tries, it runs in a sandbox."""
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, chat_template=source))
    error = refused(tokenizer, chat(USER))
    assert error.param == "messages"
    assert told in error.message
    assert " at 0x" not in error.message


def test_a_model_without_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    assert refused(tokenizer, chat(USER)).param == "messages"
    assert len(tokenizer.encode_prompt(TextPrompt("the cat")))


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    folder = write_checkpoint(tmp_path, chat_template=named)
    assert decoded(Tokenizer.load(folder), chat(USER)) == "a"
    (folder / "chat_template.jinja").write_text("c{{ bos_token }}")
    assert decoded(Tokenizer.load(folder), chat(USER)) == f"c{BOS}"


def test_special_tokens_in_both_spellings(tmp_path: Path) -> None:
    bos = {"content": BOS, "lstrip": False, "special": True}
    folder = write_checkpoint(tmp_path, bos_token=bos, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": EOS}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert decoded(Tokenizer.load(folder), chat(USER)).startswith(f"{BOS}[user] the cat{EOS}")


def test_a_text_without_special_tokens_around_it(tokenizer: Tokenizer) -> None:
    assert decoded(tokenizer, TextPrompt("the cat", add_special_tokens=False)) == "the cat"


def test_token_texts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt(TextPrompt("the cat")).tolist()
    texts = tokenizer.token_texts([*ids, 10**6])
    assert (texts[0], texts[-1]) == (BOS, "")
    assert "".join(texts[1:-1]).replace("\u0120", " ").strip() == "the cat"


def test_text_that_spells_a_special_token_is_that_token(tokenizer: Tokenizer) -> None:
    """As in transformers; nothing counts special tokens, so it harms no one but its author.

    CVE-2026-44222.
    """
    spelled = tokenizer.encode_prompt(chat({"role": "user", "content": EOS})).tolist()
    assert spelled.count(tokenizer.backend.token_to_id(EOS)) == 2


# Refusals


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TokenPrompt(()), "prompt"),
        (TokenPrompt((0, -1)), "prompt"),
        (TokenPrompt((10**30,)), "prompt"),
        (TextPrompt("a\ud800b"), "prompt"),
        (ChatPrompt(({"role": "user", "content": "\udfff"},)), "messages"),
        (TextPrompt("a" * 4_000_001), "prompt"),
    ],
)
def test_bad_prompts_name_their_field(tokenizer: Tokenizer, prompt: Prompt, param: str) -> None:
    error = refused(tokenizer, prompt)
    assert error.param == param
    assert len(error.message) < 200
    error.message.encode()


def test_an_empty_text_without_bos(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    assert "empty" in refused(Tokenizer.load(folder), TextPrompt("")).message


def test_ids_are_checked_against_the_models_vocabulary(tmp_path: Path) -> None:
    """Wider than the tokenizer's (padding), or narrower: text may not reach past the embedding."""
    folder = write_checkpoint(tmp_path)
    size = build("byte_level").get_vocab_size()
    for vocab_size in (size + 5, size - 3):
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode_prompt(TokenPrompt((0, vocab_size - 1)))
        assert ids.dtype == np.int32 and ids.tolist() == [0, vocab_size - 1]
        assert not ids.flags.writeable
        assert str(vocab_size) in refused(tokenizer, TokenPrompt((0, vocab_size))).message
    assert refused(tokenizer, TextPrompt(f"the cat{EOS}")).param == "prompt"


# Loading


def test_a_saved_truncation_or_padding_is_not_applied(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    backend = build("byte_level")
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    plain = build("byte_level").encode(TEXTS[0]).ids
    assert tokenizer.encode_prompt(TextPrompt(TEXTS[0])).tolist() == plain


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", "{", "tokenizer.json: the tokenizer cannot be loaded"),
        ("tokenizer.json", "", "tokenizer.json: the tokenizer cannot be loaded"),
        ("tokenizer.json", "{}", "tokenizer.json: the tokenizer cannot be loaded"),
        ("tokenizer.json", '{"model": {"type": "Nobody"}}', "tokenizer.json: the tokenizer cannot"),
        ("tokenizer.json", None, "it has no tokenizer.json, tokenizer.model or vocab.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json does not hold a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("special_tokens_map.json", "7", "special_tokens_map.json does not hold"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is a int, not text"),
        ("tokenizer_config.json", '{"chat_template": [7]}', "the chat template cannot be read"),
        ("chat_template.jinja", "{% for %}", "does not compile"),
        ("chat_template.jinja", "{{ messages[0] ", "does not compile"),
        ("chat_template.jinja", "{% if " + "(" * 20_000, "the chat template"),
        ("chat_template.jinja", b"\xff\xfe", "the chat template cannot be read: UnicodeDecode"),
    ],
)
def test_broken_checkpoints_say_what_is_wrong(
    tmp_path: Path, name: str, content: str | bytes | None, told: str
) -> None:
    folder = write_checkpoint(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=told) as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_an_older_format_is_converted(tmp_path: Path) -> None:
    """vocab.json and merges.txt, without tokenizer.json."""
    folder = write_checkpoint(tmp_path, tokenizer_class="Qwen2Tokenizer")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    tokenizer = Tokenizer.load(folder)
    assert decoded(tokenizer, TextPrompt(TEXTS[0])) == TEXTS[0]
    assert len(tokenizer.encode_prompt(TextPrompt(TEXTS[0]))) < len(TEXTS[0])


def test_loading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    program = (
        "import sys; from engine.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(folder)!r}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


# Threads


def test_threads_encode_and_decode_alike(tokenizer: Tokenizer) -> None:
    """With one tokenizer for all, and the GIL off where the build allows it."""
    prompts: list[Prompt] = [
        *(TextPrompt(text * n) for text in TEXTS for n in (1, 7)),
        *(chat({"role": "user", "content": text}) for text in TEXTS),
    ]
    expected = [tokenizer.encode_prompt(prompt).tolist() for prompt in prompts]
    texts = [tokenizer.decode(ids) for ids in expected]
    barrier = threading.Barrier(4)
    failures: list[str] = []

    def work(offset: int) -> None:
        barrier.wait()
        for i in range(200):
            at = (i * 5 + offset) % len(prompts)
            ids = tokenizer.encode_prompt(prompts[at]).tolist()
            if ids != expected[at] or tokenizer.decode(ids) != texts[at]:
                failures.append(f"prompt {at}: {ids}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


# EOS


def test_every_file_may_name_an_eos(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    eos = build("byte_level").token_to_id(EOS)
    assert eos_ids(folder) == (eos,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert eos_ids(folder) == tuple(sorted((5, 7, 9, eos)))
    config = {"eos_token": {"content": "x"}, "added_tokens_decoder": {"11": {"content": "x"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert eos_ids(folder) == (5, 7, 9, 11)
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3}}))
    assert eos_ids(folder) == (3, 5, 7, 11)


def test_a_checkpoint_without_eos(tmp_path: Path) -> None:
    assert eos_ids(tmp_path) == ()


@pytest.mark.parametrize("value", ["7", -1, [1, None], 1.5, True])
def test_eos_ids_of_a_wrong_kind(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_ids(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": [7]}, "added_tokens_decoder must be"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "</s>"}}, "added_tokens_decoder"),
        ("tokenizer.json", {"added_tokens": [7]}, "tokenizer.json: added_tokens must be a list"),
        ("tokenizer.json", {"added_tokens": [{"id": 7}]}, "tokenizer.json: added_tokens must be"),
        ("tokenizer.json", {"added_tokens": 7}, "tokenizer.json: added_tokens must be a list"),
    ],
)
def test_added_tokens_of_a_wrong_kind(tmp_path: Path, name: str, content: Any, told: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    whole = {"eos_token": "</s>", **content} if name == "tokenizer_config.json" else content
    (tmp_path / name).write_text(json.dumps(whole))
    with pytest.raises(ModelError, match=told):
        eos_ids(tmp_path)


# The reference


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_equal_to_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoTokenizer  # seconds, as below

    folder = write_checkpoint(tmp_path, family, tokenizer_class="PreTrainedTokenizerFast")
    _compare(Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.model
def test_smollm2_equals_transformers() -> None:
    from transformers import AutoTokenizer

    folder = default_folder()
    if not folder.is_dir():
        pytest.skip("the default model is not prepared: ./plait test prepares it")
    ours = Tokenizer.load(folder)
    _compare(ours, AutoTokenizer.from_pretrained(folder))
    assert eos_ids(folder) == (2,)
    answer = [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert ours.decode(answer) == "The capital of France is Paris."


def _compare(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        assert ours.encode_prompt(TextPrompt(text)).tolist() == theirs(text)["input_ids"]
        messages = [{"role": "system", "content": "sat"}, {"role": "user", "content": text}]
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_prompt(chat(*messages)).tolist() == expected
