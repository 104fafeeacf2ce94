"""What may stand in a command, in its files and behind its streams without being fit for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from funcllm.launch import options as opt
from funcllm.launch.cli import _turn, main
from funcllm.launch.engine import Delta
from funcllm.launch.request import SamplingParams
from funcllm.launch.tokenizer import wrap_tokenizer
from funcllm.weights.random_model import byte_tokenizer

GREEDY = ("--temperature", "0", "--max-tokens", "4")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*args: Any, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def process(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with its streams as `options` have them."""
    command = [sys.executable, "-m", "funcllm.launch.cli", *map(str, args)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 250}
    return subprocess.run(command, **(piped | options))


def without(number: int) -> Any:
    """Closes a standard stream in the new process."""
    return lambda: os.close(number)


def error_of(result: Result) -> str:
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_no_text_fails_alone(byte_folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "a\\ud800"}\n{"prompt": "ď"}\n')
    result = run("generate", "--model", byte_folder, "--prompts-file", file, "--output", out, *GREEDY)
    assert "prompt 0: the text holds '\\ud800' at position 1, which is no character" in error_of(result)
    bad, good = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert (bad["prompt"], bad["finish_reason"]) == ("a\ud800", "error")
    assert (good["prompt"], good["prompt_token_ids"], good["finish_reason"]) == ("ď", [0xC4, 0x8F], "length")
    assert '"ď"' in out.read_text(encoding="utf-8")


def test_bytes_that_are_no_utf_8_on_the_command_line_are_refused(byte_folder: Path) -> None:
    result = process("generate", "--model", byte_folder, "--prompt", os.fsdecode(b"ab\xff"), *GREEDY)
    assert result.returncode == 2
    assert "error: the text holds '\\udcff' at position 2" in result.stderr


def test_a_chat_goes_on_behind_a_line_that_is_no_text(byte_folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:surrogateescape"}
    result = process(
        "chat", "--model", byte_folder, *GREEDY, input="ab\udcff\nhi\n", env=environment, errors="surrogateescape"
    )
    assert result.returncode == 0
    assert "error: the text holds '\\udcff'" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_a_single_refused_prompt_has_its_row(byte_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("generate", "--model", byte_folder, "--prompt", "", "--output", out)
    assert error_of(result) == "error: the prompt is empty; it needs at least one token"
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["index"], row["finish_reason"], row["error"]) == (
        0,
        "error",
        "the prompt is empty; it needs at least one token",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        (f"[{'1' * 5000}]", "is not JSON"),
        (
            '{"prompt": "a", "temperature": 0}',
            '"temperature" stands beside the prompt; write "sampling": {"temperature"',
        ),
        ('{"prompt": "a", "samplng": {"seed": 1}}', 'there is no key "samplng"; did you mean "sampling"?'),
    ],
    ids=["deep", "large number", "misplaced", "mistyped"],
)
def test_a_line_that_would_be_misread_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"p\.jsonl:1") as caught:
        opt.read_prompts(tmp_path / "p.jsonl")
    assert message in str(caught.value)


def test_other_keys_of_a_line_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "id": 7, "answer": "b", "same": 1}')
    assert opt.read_prompts(tmp_path / "p.jsonl") == [opt.PromptLine(prompt="a")]


def test_a_prompts_file_from_elsewhere_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert [line.prompt for line in opt.read_prompts(tmp_path / "p.txt")] == ["one", "two"]
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n[1]\r\n')
    assert [line.prompt for line in opt.read_prompts(tmp_path / "p.jsonl")] == ["one", None]


# --- flags -----------------------------------------------------------------------------------------------------------

BAD_FLAGS = {
    "a layer beyond all": (["--layer", "mlp@0-99999999999=math:sqrt"], "no model has a layer 99999999999"),
    "a stop id beyond all": (["--stop-token-id", "99999999999"], "stop_token_ids=[99999999999] must be a list"),
    "messages": (["--chat", "--template-arg", "messages=1"], "messages is not yours to give"),
    "a template that fails": (["--chat", "--template-arg", "template={{ 1 / 0 }}"], "refuses this chat: division by"),
    "a device of no number": (["--device", "cpu:x"], "device='cpu:x' must be cpu or cuda"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_one_line(byte_folder: Path, name: str) -> None:
    flags, message = BAD_FLAGS[name]
    assert message in error_of(run("generate", "--model", byte_folder, "--prompt", "a", *flags))


KEYS = (
    opt.Key(name="stop", multiple=True, text=True),
    opt.Key(name="model", text=True),
    opt.Key(name="fusion"),
    opt.Key(name="template_arg", multiple=True, text=True),
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stop: [yes]", "stop is true to YAML, as yes, no, on and off are; put the word in quotes"),
        ("model: off", "model is false to YAML"),
        ("stop: [null]", "stop must be a number or a word, and is empty"),
        ("fusion: off\nfusion: auto", "fusion is given twice; keep one"),
        ("model: {a: 1}", "model takes one value, and got a mapping"),
    ],
)
def test_a_run_file_that_would_be_misread_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml") as caught:
        opt.read_run_file(tmp_path / "run.yaml", KEYS)
    assert message in str(caught.value)


def test_a_run_file_keeps_words_and_booleans_of_the_template(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("stop: ['yes', 3]\nfusion: off\ntemplate-arg: {enable_thinking: off, n: 2}\n")
    values = opt.read_run_file(tmp_path / "run.yaml", KEYS)
    assert values == {"stop": ["yes", "3"], "fusion": "off", "template_arg": ["enable_thinking=false", "n=2"]}
    assert opt.parse_template_args(values["template_arg"]) == {"enable_thinking": False, "n": 2}


def test_words_of_a_run_file_reach_their_flags_or_are_refused(byte_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("prompt: [no]\n")
    result = run("generate", "--model", byte_folder, "--config", tmp_path / "run.yaml")
    assert "prompt is false to YAML" in error_of(result)


def test_the_log_leaves_out_what_is_off() -> None:
    text = opt.describe_sampling(SamplingParams(temperature=0.5, top_k=-1), {"top_k": 20, "min_p": 0.0})
    assert text == "sampling: temperature 0.5, at most 16 tokens"


# --- streams ---------------------------------------------------------------------------------------------------------


def test_json_on_a_stdout_of_few_characters_has_escapes(byte_folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = process("generate", "--model", byte_folder, "--prompt", "“ď”", "--output", "-", *GREEDY, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["prompt"] == "“ď”"
    assert "\\u010f" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("output", ["/dev/full", None], ids=["file", "stdout"])
def test_a_full_disk_is_named(byte_folder: Path, output: str | None) -> None:
    flags = [] if output is None else ["--output", output]
    with open("/dev/full", "w") as full:
        stdout = full if output is None else subprocess.PIPE
        result = process("generate", "--model", byte_folder, "--prompt", "a", *flags, *GREEDY, stdout=stdout)
    assert result.returncode == 1
    where = "stdout" if output is None else "--output /dev/full"
    assert f"error: {where} cannot be written: No space left on device" in result.stderr


@pytest.mark.parametrize("number", [0, 1, 2], ids=["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_is_an_empty_one(byte_folder: Path, tmp_path: Path, number: int) -> None:
    out = tmp_path / "out.jsonl"
    given = [None, None, None]
    given[number] = subprocess.DEVNULL  # type: ignore[call-overload]
    streams = {"stdin": given[0], "stdout": given[1] or subprocess.PIPE, "stderr": given[2] or subprocess.PIPE}
    flags = ["generate", "--model", byte_folder, "--prompt", "a", "--output", out, *GREEDY]
    result = process(*flags, preexec_fn=without(number), **streams)
    assert result.returncode == 0, result.stderr
    assert json.loads(out.read_text())["finish_reason"] == "length"


def test_a_chat_without_stdin_ends(byte_folder: Path) -> None:
    result = process("chat", "--model", byte_folder, stdin=subprocess.DEVNULL, preexec_fn=without(0))
    assert (result.returncode, result.stdout) == (0, "")


# --- thinking --------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %} thought {{ m.reasoning_content }}{% endif %}]"
    "{{ m.content }}{% endfor %}[assistant]{% if thinks %}<think>\n{% endif %}"
)


class Scripted:
    """Stands for an engine: replies as told, in pieces, and keeps the prompts that it was asked."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.prompts = list(replies), []  # type: ignore[var-annotated]
        self.tokenizer = replace(wrap_tokenizer(byte_tokenizer()), chat_templates={"default": TEMPLATE})

    def stream(self, prompt: list[int], sampling: Any) -> Iterator[Delta]:
        self.prompts.append(self.tokenizer.decode(prompt))
        for piece in re.findall(".{1,3}", self.replies.pop(0), re.DOTALL):
            yield Delta(piece, [], None)


@pytest.mark.parametrize(
    ("reply", "opened", "shown", "kept"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "<think>\nhm\n</think>\n\nyes\n", "[assistant thought hm]yes"),
        ("hm\n</think>\n\nyes", True, "<think>\nhm\n</think>\n\nyes\n", "[assistant thought hm]yes"),
        ("hm, and", True, "<think>\nhm, and\n", "[assistant thought hm, and]"),
        ("yes <b>", False, "yes <b>\n", "[assistant]yes <b>"),
    ],
    ids=["both tags", "opened by the template", "cut while thinking", "no thinking"],
)
def test_a_chat_keeps_thinking_apart(
    capsys: pytest.CaptureFixture[str], reply: str, opened: bool, shown: str, kept: str
) -> None:
    engine, messages = Scripted(reply, "bye"), []  # type: ignore[var-annotated]
    for line in ("hi", "so"):
        messages = _turn(engine, messages, line, SamplingParams(), {"thinks": opened})  # type: ignore[arg-type]
        if line == "hi":
            assert capsys.readouterr().out == shown
    assert engine.prompts[1].removesuffix("<think>\n") == f"[user]hi{kept}[user]so[assistant]"
