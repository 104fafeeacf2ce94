"""From what stands on a command line, or in a run.yaml, to the values that the engine takes.

Pure parsing: no torch at import, no model. Whatever a user can get wrong is a ValueError that names the value and the
way out; the commands in cli.py turn it into one line and exit code 2.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcllm.launch.request import SamplingParams
    from funcllm.launch.tokenizer import Tokenizer
    from funcllm.record import Layers

LAYER_FUNCTIONS = ("norm", "qk_norm", "rope", "attention", "mlp", "linear", "block", "embed", "head", "sample")

_LAYER = re.compile(r"(?P<name>[^@=]*)(?:@(?P<layers>[^=]*))?=(?P<module>[^:]*):(?P<attribute>.*)")
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_MAX_LAYER = 9999  # far above any model's; a range is spelled out


def nearest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error message; else all that there is."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


# --- swapped functions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerOption:
    """One `--layer NAME[@LAYERS]=module:function`; layers () means every layer."""

    name: str
    layers: tuple[int, ...] = ()
    module: str
    attribute: str


def parse_layer(text: str) -> LayerOption:
    """The parts of `NAME[@LAYERS]=module:function`, LAYERS being numbers and inclusive ranges: 3-7 or 0,2,5-8."""
    match = _LAYER.fullmatch(text.strip())
    if not match or not match["module"] or not match["attribute"]:
        raise ValueError(f"--layer {text!r} must read NAME[@LAYERS]=module:function, such as mlp@3-7=my_mlp:relu2")
    if match["name"] not in LAYER_FUNCTIONS:
        raise ValueError(f"--layer {text!r}: no function is called {match['name']!r}; {_layer_names(match['name'])}")
    layers = () if match["layers"] is None else parse_ranges(match["layers"], text)
    return LayerOption(name=match["name"], layers=layers, module=match["module"], attribute=match["attribute"])


def parse_ranges(text: str, where: str) -> tuple[int, ...]:
    """The numbers of `0,2,5-8`, ascending and once each."""
    if not _RANGES.fullmatch(text):
        raise ValueError(f"--layer {where!r}: the layers {text!r} must be numbers and ranges, such as 3-7 or 0,2,5-8")
    numbers: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"--layer {where!r}: the range {piece} runs backwards; write {last}-{first}")
        if int(last or first) > _MAX_LAYER:
            raise ValueError(f"--layer {where!r}: no model has a layer {last or first}; layers count from 0")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def import_function(option: LayerOption) -> Any:
    """The object that `module:attribute` names; modules of the current folder are found first."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    where = f"{option.module}:{option.attribute}"
    try:
        value: Any = importlib.import_module(option.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{option.module}.".startswith(f"{error.name}."):
            raise ValueError(f"--layer: {where} cannot be imported: {error}") from error
        raise ValueError(
            f"--layer: there is no module {option.module!r}; run where {option.module.partition('.')[0]}.py lies,"
            " or add its folder to PYTHONPATH"
        ) from None
    except Exception as error:
        raise ValueError(f"--layer: importing {option.module} raised {type(error).__name__}: {error}") from error
    for name in option.attribute.split("."):
        if not hasattr(value, name):
            public = [n for n in dir(value) if not n.startswith("_")]
            raise ValueError(f"--layer: {option.module} has no {name!r}; {nearest(name, public)}")
        value = getattr(value, name)
    return value


def build_layers(texts: Sequence[str]) -> Layers:
    """The record of functions that these `--layer` options ask for; the default record when there are none."""
    from funcllm.record import Layers

    options = [parse_layer(text) for text in texts]
    everywhere = [option.name for option in options if not option.layers]
    twice = sorted({name for name in everywhere if everywhere.count(name) > 1})
    if twice:
        raise ValueError(
            f"--layer {twice[0]}=... is given twice for every layer; give one, or name layers: {twice[0]}@0-3"
        )
    layers = Layers(**{option.name: import_function(option) for option in options if not option.layers})
    for option in options:
        if option.layers:
            layers = layers.at(option.layers, **{option.name: import_function(option)})
    return layers


def _layer_names(name: str) -> str:
    return nearest(name.replace("-", "_"), LAYER_FUNCTIONS)


# --- run.yaml --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key that a run file may hold: a flag's name with underscores, and which values it takes.

    multiple: a list of them. flag: true or false. text: any words, so one that YAML reads as a boolean is refused.
    """

    name: str
    multiple: bool = False
    flag: bool = False
    text: bool = False


def read_run_file(file: str | Path, keys: Sequence[Key]) -> dict[str, Any]:
    """The values of a run.yaml by flag, as text for the flags' own parsers. Dashes and underscores are one.

    Numbers and words go through as written, lists belong to repeatable flags only, a mapping there is name=value pairs;
    an empty value leaves the flag at its default. Raises ValueError for an unknown key, with the nearest name.
    """
    import yaml

    try:
        text = Path(file).read_text(encoding="utf-8")
        content, twice = yaml.safe_load(text), _twice(yaml.compose(text, yaml.SafeLoader))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; --config takes a YAML file of flags, such as `tp: 2`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold `flag: value` lines, and holds a {type(content).__name__}")
    if twice is not None:
        raise ValueError(f"{file}: {twice} is given twice; keep one")
    known = {key.name: key for key in keys}
    values: dict[str, Any] = {}
    for written, value in content.items():
        name = str(written).replace("-", "_")
        if name not in known:
            raise ValueError(f"{file}: there is no key {written!r}; {nearest(name, known)}")
        if name in values:
            raise ValueError(f"{file}: {name} is given twice; keep one")
        if value is not None:
            values[name] = _run_value(value, known[name], f"{file}: {written}")
    return values


def _twice(node: Any) -> str | None:
    """The first key that a mapping of a YAML text holds twice; the parser would keep the last."""
    names = [key.value for key, _ in node.value if isinstance(key.value, str)] if _is_mapping(node) else []
    return next((name for name in names if names.count(name) > 1), None)


def _is_mapping(node: Any) -> bool:
    import yaml

    return isinstance(node, yaml.MappingNode)


def _run_value(value: Any, key: Key, where: str) -> Any:
    if isinstance(value, Mapping):
        if not key.multiple:
            raise ValueError(f"{where} takes one value, and got a mapping")
        return [f"{name}={_pair_value(entry, where)}" for name, entry in value.items()]
    if isinstance(value, list) and not key.multiple:
        raise ValueError(f"{where} takes one value, and got a list of {len(value)}")
    if key.multiple:
        return [_plain(entry, key, where) for entry in (value if isinstance(value, list) else [value])]
    return _plain(value, key, where)


def _pair_value(value: Any, where: str) -> str:
    """The value of a name=value pair, which is read as YAML again."""
    return _yaml(value) if isinstance(value, bool) else _text(value, where)


def _plain(value: Any, key: Key, where: str) -> Any:
    """A scalar as its flag's parser wants it."""
    if key.flag:
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, and is {value!r}")
        return value
    if isinstance(value, bool):
        if key.text:
            raise ValueError(f"{where} is {_yaml(value)} to YAML, as yes, no, on and off are; put the word in quotes")
        return "on" if value else "off"
    return _text(value, where)


def _text(value: Any, where: str) -> str:
    if isinstance(value, (int, float, str)):
        return str(value)
    kind = "empty" if value is None else f"a {type(value).__name__}"
    raise ValueError(f"{where} must be a number or a word, and is {kind}")


def _yaml(value: bool) -> str:
    return "true" if value else "false"


# --- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One prompt as it was given: text, token ids or a chat, and what its line asks of sampling."""

    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    sampling: Mapping[str, Any] | None = None


def read_prompts(file: str | Path) -> list[PromptLine]:
    """The prompts of a file. `.txt`: one a line, an empty line being an empty prompt. `.jsonl`: one value a line, blank
    lines skipped: an object with "prompt", "prompt_token_ids" or "messages", perhaps "sampling", or an array of ids.
    Other keys of an object, such as a number of its own, are passed over, but for those that belong into "sampling".
    """
    file = Path(file)
    if file.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{file}: a prompts file ends in .txt (one prompt a line) or .jsonl (one JSON value a line)")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; --prompts-file takes a .txt or .jsonl file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from None
    if lines[-1] == "":
        lines.pop()
    if file.suffix == ".txt":
        prompts = [PromptLine(prompt=line) for line in lines]
    else:
        prompts = [parse_prompt(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def parse_prompt(line: str, where: str) -> PromptLine:
    """One line of a .jsonl file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if isinstance(value, list):
        return PromptLine(token_ids=_ids(value, where))
    if not isinstance(value, dict):
        raise ValueError(f'{where} must be an object with "prompt" or "prompt_token_ids", or an array of token ids')
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if value.get(name) is not None]
    if len(given) != 1:
        what = f'holds both "{given[0]}" and "{given[1]}"' if given else "holds no prompt"
        raise ValueError(f'{where} {what}; give one of "prompt", "prompt_token_ids" and "messages"')
    _refuse_misplaced(value, where)
    return PromptLine(
        prompt=_typed(value.get("prompt"), str, f"{where}: prompt"),
        token_ids=_ids(value["prompt_token_ids"], where) if given == ["prompt_token_ids"] else None,
        messages=_messages(value["messages"], where) if given == ["messages"] else None,
        sampling=_typed(value.get("sampling"), dict, f"{where}: sampling"),
    )


def _refuse_misplaced(line: Mapping[str, Any], where: str) -> None:
    """Keys that a reader would take for sampling, and that nothing reads where they stand."""
    from funcllm.launch.request import SamplingParams

    misplaced = sorted(line.keys() & {field.name for field in fields(SamplingParams)})
    if misplaced:
        name = misplaced[0]
        raise ValueError(f'{where}: "{name}" stands beside the prompt; write "sampling": {{"{name}": ...}}')
    mistyped = [key for key in line if key != "sampling" and difflib.get_close_matches(key, ["sampling"], cutoff=0.8)]
    if mistyped:
        raise ValueError(f'{where}: there is no key "{mistyped[0]}"; did you mean "sampling"?')


def encode_prompt(
    line: PromptLine, tokenizer: Tokenizer | None, *, chat: bool, system: str | None, template_args: Mapping[str, Any]
) -> str | list[int]:
    """What the engine takes for a prompt: ids as they are, a chat rendered and encoded, text as text."""
    if line.token_ids is not None:
        return list(line.token_ids)
    if line.messages is None and not chat:
        return line.prompt or ""
    if tokenizer is None:
        raise ValueError("a chat needs a tokenizer, and this model has none; give token ids instead")
    messages = chat_messages(line.prompt or "", system) if line.messages is None else list(line.messages)
    return tokenizer.encode(tokenizer.apply_chat_template(messages, **template_args), add_special_tokens=False)


def chat_messages(prompt: str, system: str | None) -> list[Mapping[str, Any]]:
    """A chat of one turn. Raises ValueError for an empty one."""
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    start: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def parse_template_args(texts: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs for a chat template; values are read as YAML: true, false, numbers, words."""
    import yaml

    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--template-arg {text!r} must read name=value, such as enable_thinking=false")
        if name in ("self", "messages"):
            raise ValueError(f"--template-arg {text!r}: {name} is not yours to give; messages come from the prompts")
        try:
            values[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            values[name] = value
    return values


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise ValueError(f"{where}: a prompt of token ids must be a flat array of integers")
    return tuple(value)


def _messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value or any(not isinstance(x, dict) or "role" not in x for x in value):
        raise ValueError(f'{where}: messages must be an array of objects with "role" and "content"')
    return tuple(value)


def _typed(value: Any, kind: type, where: str) -> Any:
    if value is not None and not isinstance(value, kind):
        name = "a string" if kind is str else "an object"
        raise ValueError(f"{where} must be {name}, and is {json.dumps(value)}")
    return value


# --- sampling --------------------------------------------------------------------------------------------------------


def override_sampling(sampling: SamplingParams, overrides: Mapping[str, Any] | None, where: str) -> SamplingParams:
    """`sampling` with the fields that a line of a prompts file gives anew."""
    if not overrides:
        return sampling
    known = [field.name for field in fields(sampling)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"{where}: sampling has no field {name!r}; {nearest(name, known)}")
    try:
        return replace(sampling, **overrides)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def describe_sampling(sampling: SamplingParams, defaults: Mapping[str, Any]) -> str:
    """How tokens are chosen, and which of it is the model's own advice, in one line for the log."""
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    parts = []
    for name, off in neutral.items():
        given, advised = getattr(sampling, name), defaults.get(name)
        value = given if given is not None else advised if advised is not None else off
        source = " (generation_config.json)" if given is None and advised is not None else ""
        if name == "temperature" and value == 0:
            return f"sampling: greedy{source}, at most {sampling.max_tokens} tokens"
        is_off = value <= 0 if name == "top_k" else value == off
        if not is_off or name == "temperature":
            parts.append(f"{name} {value:g}{source}")
    limit = "as many tokens as fit" if sampling.max_tokens is None else f"at most {sampling.max_tokens} tokens"
    return f"sampling: {', '.join(parts)}, {limit}"
