from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from funcllm.launch.text import TextStream
from funcllm.launch.tokenizer import has_tokenizer, load_tokenizer, wrap_tokenizer

SAMPLES = [
    "Hello world, don't panic",
    "  leading spaces\n\n\ttabs ",
    "ď 客单价 🌶️ 👩‍🚀",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|end|>b",
    "",
]
TEMPLATE = """{%- if tools %}{{ tools | tojson }}\n{% endif %}
{%- for message in messages %}
    {%- if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {{- '<|im_end|>\\n' }}
    {%- if loop.index > 5 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}{{ bos_token }}{{ eos_token }}"""
CHATS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "é < & >"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ],
    [{"role": "user", "content": str(i)} for i in range(9)],
]


def byte_level_bpe() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world the panic of the spaces"] * 3, trainer)
    return tokenizer


def save_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path, byte_level_bpe(), chat_template=TEMPLATE)


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_texts(SAMPLES, True) == [ours.encode(text) for text in SAMPLES]
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)
    assert ours.eos_ids == ((theirs.eos_token_id,) if theirs.eos_token_id is not None else ())
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= ours.special_ids


def test_a_byte_level_tokenizer_equals_transformers(folder: Path) -> None:
    assert_equal_to_transformers(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello 🌶️ world")) == "hello 🌶️ world"


@pytest.mark.parametrize("add_bos_token", [True, False, None])
@pytest.mark.parametrize("post_processor", ["template", "byte level", "none"])
def test_the_bos_token_is_added_where_transformers_adds_it(
    tmp_path: Path, post_processor: str, add_bos_token: bool | None
) -> None:
    tokenizer = byte_level_bpe()
    if post_processor == "template":
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    elif post_processor == "byte level":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    save_folder(tmp_path, tokenizer, bos_token="<s>", **config)
    assert_equal_to_transformers(tmp_path)
    starts_with_bos = load_tokenizer(tmp_path).encode("hello")[0] == tokenizer.token_to_id("<s>")
    assert starts_with_bos == (post_processor == "template")


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    size = byte_level_bpe().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(size): {"content": "<tool>", "special": False, **flags},
        str(size + 1): {"content": "<|stop|>", "special": True, **flags},
    }
    save_folder(
        tmp_path,
        byte_level_bpe(),
        added_tokens_decoder=added,
        eos_token={"__type": "AddedToken", "content": "<|stop|>", **flags},
    )
    assert_equal_to_transformers(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<tool><|stop|>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<tool>"
    assert tokenizer.eos_ids == (size + 1,)


def test_vocabulary_and_merges_without_a_tokenizer_json_go_through_transformers(tmp_path: Path) -> None:
    byte_level_bpe().model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    assert has_tokenizer(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    assert_equal_to_transformers(tmp_path)
    assert load_tokenizer(tmp_path).apply_chat_template(CHATS[0]).startswith("<|im_start|>user\nhi<|im_end|>")


@pytest.mark.parametrize("chat", CHATS, ids=["one", "three", "break"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}], ids=str)
@pytest.mark.parametrize("tools", [None, [{"name": "f", "about": "é<>&'"}]], ids=["plain", "tools"])
def test_chats_render_as_in_transformers(folder: Path, chat: list[dict[str, str]], kwargs: Any, tools: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folder))
    kwargs = {"add_generation_prompt": True, "tools": tools, **kwargs}
    expected = theirs.apply_chat_template(chat, tokenize=False, **kwargs)
    assert load_tokenizer(folder).apply_chat_template(chat, **kwargs) == expected
    assert f"<|im_start|>{chat[0]['role']}\n{chat[0]['content']}<|im_end|>" in expected


def test_named_templates_and_template_files_are_found(folder: Path) -> None:
    named = [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": "T"}]
    save_folder(folder, byte_level_bpe(), chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(CHATS[0]) == "D<|im_end|>"
    assert tokenizer.apply_chat_template(CHATS[0], tools=[{}]) == "T"
    assert tokenizer.apply_chat_template(CHATS[0], template="tool_use") == "T"
    assert tokenizer.apply_chat_template(CHATS[0], template="x{{ messages[0].role }}") == "xuser"
    (folder / "chat_template.jinja").write_text("F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(CHATS[0]) == "F"
    assert tokenizer.apply_chat_template(CHATS[0], template="rag") == "R"
    with pytest.raises(ValueError, match=r"'nope' is not among \['default', 'rag'\]"):
        tokenizer.apply_chat_template(CHATS[0], template="nope")


def test_a_keyword_that_the_template_does_not_read_is_warned_of(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    with pytest.warns(UserWarning, match="does not read thinking_budget"):
        rendered = tokenizer.apply_chat_template(CHATS[0], thinking_budget=4, enable_thinking=True)
    assert rendered == tokenizer.apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], "mapping with 'role'"),
        ([{"content": "hi"}], "mapping with 'role'"),
        ([{"role": "forbidden", "content": ""}], "refuses this chat: no such role"),
    ],
)
def test_bad_chats_are_refused(folder: Path, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder).apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ x.y.z }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{% for i in range(99999999) %}{% endfor %}",
    ],
)
def test_templates_cannot_leave_their_sandbox(folder: Path, template: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        load_tokenizer(folder).apply_chat_template(CHATS[0], template=template)


def test_special_tokens_are_skipped_in_text_and_kept_in_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("hi<|im_end|>")
    assert ids[-1:] == list(tokenizer.eos_ids)
    assert TextStream(tokenizer.decoder()).push(ids) == "hi"
    assert TextStream(tokenizer.decoder(skip_special_tokens=False)).push(ids) == "hi<|im_end|>"


def test_a_folder_without_a_tokenizer_names_what_is_missing(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: neither tokenizer\.json nor vocab\.json"):
        load_tokenizer(tmp_path)
    save_folder(tmp_path, byte_level_bpe())
    with pytest.raises(ValueError, match="no default chat template"):
        load_tokenizer(tmp_path).apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [("version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"), ("{", "EOF")],
    ids=["pointer", "truncated"],
)
def test_broken_tokenizer_files_are_named(folder: Path, content: str, message: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json cannot be read: {message}"):
        load_tokenizer(folder)


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": [5]},
        {"chat_template": {"default": 5}},
        {"eos_token": 5},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"a": {"content": "x"}}},
        {"added_tokens_decoder": {"1": {}}},
    ],
    ids=str,
)
def test_a_config_with_odd_entries_is_named(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"beside .*tokenizer\.json have an entry of an unknown form"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_config_that_is_no_object_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("[]")
    with pytest.raises(ValueError, match=rf"{name} must hold a JSON object, and holds a list"):
        load_tokenizer(folder)


@pytest.mark.parametrize("text", ["ab\ud800c", "ab\udcff"], ids=ascii)
def test_what_is_no_character_is_refused_with_its_place(folder: Path, text: str) -> None:
    both = load_tokenizer(folder), wrap_tokenizer(AutoTokenizer.from_pretrained(str(folder)))
    for tokenizer in both:
        with pytest.raises(ValueError, match=r"holds '\\ud.*' at position 2, which is no character"):
            tokenizer.encode(text)


def test_tokenizers_in_memory_are_wrapped(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    backend = byte_level_bpe()
    backend.add_special_tokens([AddedToken("<new>", special=True)])
    assert wrap_tokenizer(loaded) is loaded
    assert wrap_tokenizer(backend).encode("hello<new>") == backend.encode("hello<new>").ids
    theirs = wrap_tokenizer(AutoTokenizer.from_pretrained(str(folder)))
    assert theirs.encode("hello") == loaded.encode("hello")
    assert theirs.apply_chat_template(CHATS[0]) == loaded.apply_chat_template(CHATS[0])
    assert theirs.eos_ids == loaded.eos_ids
    with pytest.raises(ValueError, match="is no tokenizer"):
        wrap_tokenizer("hello")


def test_the_usual_way_does_without_transformers(folder: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from funcllm.launch.tokenizer import load_tokenizer\n"
        f"print(load_tokenizer({str(folder)!r}).decode([5, 6]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == load_tokenizer(folder).decode([5, 6]) + "\n"
