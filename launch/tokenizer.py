"""Text to token ids and back, and chats to prompts, from the tokenizer files of a Hugging Face folder.

A folder with a tokenizer.json is read by the `tokenizers` library alone, in milliseconds; other kinds go through
transformers. Ids, text and rendered chats equal those of transformers' AutoTokenizer.
"""

from __future__ import annotations

import datetime
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcllm.config import read_json
from funcllm.launch.text import Decode

if TYPE_CHECKING:
    import jinja2
    import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_KINDS = ("vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer as functions and facts.

    encode_texts(texts, add_special_tokens) -> ids of each; decode_ids(ids, skip_special_tokens) -> text.
    named_tokens: the texts of bos_token, eos_token and their like, where there are such. special_ids: the ids that are
    skipped with skip_special_tokens. chat_templates: by name, the usual one being "default".
    """

    encode_texts: Callable[[list[str], bool], list[list[int]]]
    decode_ids: Callable[[list[int], bool], str]
    token_to_id: Callable[[str], int | None]
    vocab_size: int
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; with add_special_tokens also those that the tokenizer itself puts around every text.

        Raises ValueError for a text with lone surrogates, which are no characters.
        """
        _refuse_surrogates(text)
        return self.encode_texts([text], add_special_tokens)[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.decode_ids(list(ids), skip_special_tokens)

    def decoder(self, skip_special_tokens: bool = True) -> Decode:
        """decode with its flag bound, for a TextStream."""
        return functools.partial(_decode_with, self.decode_ids, skip_special_tokens)

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text when generation_config.json and config.json name none."""
        eos_id = self._named_id("eos_token")
        return () if eos_id is None else (eos_id,)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a chat. Encode it with add_special_tokens=False: templates write those tokens themselves.

        template: the name of one of the chat templates, or a template. kwargs, such as enable_thinking, go to the
        template; one that it does not read is warned of. Raises ValueError for chats that the template refuses.
        """
        return render_chat(
            self._template(template, bool(tools)),
            messages,
            {**self.named_tokens, "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None},
            kwargs,
        )

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _template(self, wanted: str | None, with_tools: bool) -> str:
        templates = self.chat_templates
        if wanted is not None:
            if wanted not in templates and "{" not in wanted:
                raise ValueError(
                    f"chat template {wanted!r} is not among {sorted(templates)}; name one, or give its text"
                )
            return templates.get(wanted, wanted)
        if with_tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" not in templates:
            known = f"it has {sorted(templates)}, name one" if templates else "give one, or a plain prompt"
            raise ValueError(f"the tokenizer has no default chat template; {known}")
        return templates["default"]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ValueError where there is none or its files cannot be read."""
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return _load_fast(folder)
    if has_tokenizer(folder):
        return _load_other(folder)
    raise ValueError(
        f"{folder} has no tokenizer: neither tokenizer.json nor {', '.join(_OTHER_KINDS)}; "
        "complete the download, or give prompts as token ids"
    )


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in ("tokenizer.json", *_OTHER_KINDS))


def wrap_tokenizer(tokenizer: Any) -> Tokenizer:
    """A Tokenizer from what a caller has in memory: ours, one of `tokenizers`, or one of transformers."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    templates = _named_templates(getattr(tokenizer, "chat_template", None))
    named = {name: str(token) for name in _NAMED_TOKENS if (token := getattr(tokenizer, name, None)) is not None}
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "get_added_tokens_decoder"):
        return _of_backend(backend, named, templates)
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise ValueError(
            f"tokenizer={tokenizer!r} is no tokenizer of transformers or tokenizers; give one, or a folder"
        )

    def encode_texts(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode_ids(ids: list[int], skip_special_tokens: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    return Tokenizer(
        encode_texts=encode_texts,
        decode_ids=decode_ids,
        token_to_id=tokenizer.get_vocab().get,
        vocab_size=len(tokenizer),
        named_tokens=named,
        special_ids=frozenset(tokenizer.all_special_ids),
        chat_templates=templates,
    )


def render_chat(
    template: str, messages: Sequence[Message], variables: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> str:
    """A chat rendered by a Jinja template in a sandbox. Templates are untrusted: they see plain data only."""
    import jinja2

    if not messages:
        raise ValueError("a chat needs at least one message; got none")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"a chat message is a mapping with 'role' and 'content'; got {message!r}")
    try:
        compiled, known = _compile(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error
    unknown = sorted(set(kwargs) - known)
    if unknown:
        warnings.warn(f"the chat template does not read {', '.join(unknown)}: no effect", UserWarning, stacklevel=3)
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return compiled.render({**variables, **kwargs, "messages": plain})
    except Exception as error:  # a template is a program, and may fail in any way
        raise ValueError(f"the chat template refuses this chat: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The compiled template and the names of the variables that it reads."""
    from jinja2 import TemplateError, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here it stands for what it encloses."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    known = meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(known)


def _decode_with(decode_ids: Callable[[list[int], bool], str], skip_special_tokens: bool, ids: list[int]) -> str:
    return decode_ids(ids, skip_special_tokens)


def _load_fast(folder: Path) -> Tokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        reason = "it is a Git LFS pointer, fetch the real file" if _is_lfs_pointer(path) else str(error)
        raise ValueError(f"{path} cannot be read: {reason}") from error
    config, special = (_read_json(folder / f"{name}.json") for name in ("tokenizer_config", "special_tokens_map"))
    try:
        named = _named_tokens({**special, **config})
        _add_missing_tokens(backend, config, named)
        templates = _templates_of(folder, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the tokenizer files beside {path} have an entry of an unknown form ({type(error).__name__}: {error}); "
            "fetch the folder again"
        ) from error
    return _of_backend(backend, named, templates)


def _load_other(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{folder} has no tokenizer.json, and transformers cannot read its files: {error}") from error
    return wrap_tokenizer(tokenizer)


def _of_backend(backend: tokenizers.Tokenizer, named: Mapping[str, str], templates: Mapping[str, str]) -> Tokenizer:
    backend.no_truncation()
    backend.no_padding()

    def encode_texts(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if len(texts) == 1:
            return [backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
        return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=add_special_tokens)]

    def decode_ids(ids: list[int], skip_special_tokens: bool) -> str:
        return backend.decode(ids, skip_special_tokens=skip_special_tokens)

    return Tokenizer(
        encode_texts=encode_texts,
        decode_ids=decode_ids,
        token_to_id=backend.token_to_id,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        named_tokens=named,
        special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
        chat_templates=templates,
    )


def _named_tokens(entries: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the named special tokens."""
    texts = {name: _token_text(entries.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(token: Any) -> str | None:
    """A token is written as its text or as a record with the text in `content`."""
    return token.get("content") if isinstance(token, Mapping) else token


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds the tokens that only tokenizer_config.json knows, in the order of their ids."""
    from tokenizers import AddedToken

    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for _, record in listed:
        content, special = record["content"], record.get("special", False) or record["content"] in named.values()
        if backend.token_to_id(content) is None:
            flags = {name: record.get(name, False) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(content, special=special, **flags)])
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in named.values() if t not in added]
    )


def _templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: files of their own go before the entry in tokenizer_config.json."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return _named_templates(config.get("chat_template"))


def _named_templates(entry: Any) -> dict[str, str]:
    """A template entry is one text, a list of records with name and template, or a mapping."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    templates = dict(entry) if isinstance(entry, Mapping) else {one["name"]: one["template"] for one in entry}
    if not all(isinstance(text, str) for text in templates.values()):
        raise TypeError("a chat template is no text")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at position {error.start}, which is no character: half of a "
            "surrogate pair, or a byte that is not UTF-8; repair the text, or give token ids"
        ) from None


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).startswith(b"version https://git-lfs")
