from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from funcllm.launch import options as opt
from funcllm.launch.cli import main, one_line
from funcllm.launch.errors import CallError, EngineError
from funcllm.launch.request import SamplingParams
from tests.patience import MOST, patient

SWAPS = """
import torch

def relu2(x_td, params, context, /):
    gate, up = torch.nn.functional.linear(x_td, params.gate_up_proj.weight).chunk(2, -1)
    return torch.nn.functional.linear(torch.relu(gate) ** 2 * up, params.down_proj.weight)

class holder:
    relu2 = staticmethod(relu2)

def one_argument(x_td):
    return x_td
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def swaps(tmp_path, monkeypatch):
    """The current folder holds a module with functions to swap in; its name is new in every test."""
    name = f"swaps_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SWAPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*args, stdin=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def rows_of(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


# --- the command itself ----------------------------------------------------------------------------------------------


def test_help_imports_no_torch_and_is_quick(tmp_path):
    code = (
        "import sys, time\nstarted = time.process_time()\nfrom funcllm.launch.cli import main\n"
        "main(['generate', '--help'], standalone_mode=False)\n"
        "print('seconds', time.process_time() - started, 'torch' in sys.modules, 'rich' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    _, seconds, has_torch, has_rich = result.stdout.splitlines()[-1].split()
    assert (has_torch, has_rich) == ("False", "False")
    assert float(seconds) < 2  # 0.1 on an idle machine


def test_version():
    import funcllm

    assert run("--version").output == f"funclaunch, version {funcllm.__version__}\n"


def test_no_command_shows_help():
    result = run()
    assert result.exit_code == 0
    assert {"generate", "chat", "inspect", "doctor", "random-model", "bench"} <= set(result.output.split())


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "doctor", "random-model", "bench"])
def test_every_option_is_explained(command):
    unexplained = [p.name for p in main.commands[command].params if isinstance(p, click.Option) and not p.help]
    assert unexplained == []
    assert run(command, "--help").exit_code == 0


# --- bad input: one line, exit code 2 --------------------------------------------------------------------------------

BAD = {
    "unknown command": (["generte"], "there is no command 'generte'; did you mean generate?"),
    "unknown flag": (["generate", "--promt", "a"], "--prompt"),
    "no prompt": (["generate"], "there is no prompt; add --prompt TEXT or --prompts-file FILE"),
    "two kinds of prompts": (["generate", "--prompt", "a", "--prompts-file", "b.txt"], "are both given; use one"),
    "no such file": (["generate", "--prompts-file", "nowhere.txt"], "nowhere.txt does not exist"),
    "no such model": (["generate", "--model", "/no/where", "--prompt", "a"], "/no/where is neither a folder nor"),
    "temperature": (["generate", "--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be"),
    "top_p": (["generate", "--prompt", "a", "--top-p", "1.5"], "top_p=1.5 must be above 0 and at most 1"),
    "max_tokens": (["generate", "--prompt", "a", "--max-tokens", "0"], "0 is not in the range x>=1"),
    "min over max": (["generate", "--prompt", "a", "--max-tokens", "2", "--min-tokens", "3"], "min_tokens=3 is above"),
    "empty stop": (["generate", "--prompt", "a", "--stop", ""], "stop=[''] must be"),
    "system without chat": (["generate", "--prompt", "a", "--system", "b"], "add --chat"),
    "template argument": (["generate", "--prompt", "a", "--chat", "--template-arg", "x"], "must read name=value"),
    "output folder": (["generate", "--prompt", "a", "--output", "no/where.jsonl"], "there is no folder no"),
    "output is a folder": (["generate", "--prompt", "a", "--output", "."], "is a folder; name a file"),
    "layer form": (["inspect", "--size", "tiny", "--layer", "mlp"], "must read NAME[@LAYERS]=module:function"),
    "layer name": (["inspect", "--size", "tiny", "--layer", "mlpp=a:b"], "did you mean mlp?"),
    "layer module": (["inspect", "--size", "tiny", "--layer", "mlp=no_such:f"], "there is no module 'no_such'"),
    "layer attribute": (["inspect", "--size", "tiny", "--layer", "mlp=json:dumpss"], "did you mean dumps?"),
    "layer numbers": (["inspect", "--size", "tiny", "--layer", "mlp@a=json:dumps"], "must be numbers and ranges"),
    "layer range": (["inspect", "--size", "tiny", "--layer", "mlp@5-3=json:dumps"], "runs backwards; write 3-5"),
    "tp": (["inspect", "--size", "tiny", "--tp", "3"], "use tp 1, 2 or 4"),
    "rank": (["inspect", "--size", "tiny", "--tp", "2", "--rank", "2"], "not among the ranks 0 to 1"),
    "device": (["inspect", "--size", "tiny", "--device", "gpu"], "device='gpu' must be cpu or cuda"),
    "no such GPU": (["bench", "--size", "tiny", "--device", "cuda:99"], "use cpu or another number"),
    "size": (["inspect", "--size", "9b"], "unknown size '9b'; use one of tiny, 0.6b"),
    "size and model": (["inspect", "--size", "8b", "--model", "x"], "two ways to name a model"),
    "random size": (["random-model", "--size", "7b", "x"], "'7b' is not one of 'tiny'"),
    "job": (["bench", "--jobs", "b2", "--size", "tiny"], "there is no job 'b2'; use nano, b1, decN"),
    "job too long": (["bench", "--jobs", "pre50000", "--size", "tiny"], "sequences of 50001 tokens"),
    "config file": (["generate", "--config", "nowhere.yaml", "--prompt", "a"], "nowhere.yaml does not exist"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback():
    result = run("generate", "--debug", "--model", "/no/where", "--prompt", "a")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: /no/where is neither")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("tp=3 is\n  wrong"), "tp=3 is wrong"),
        (EngineError("rank 1 was killed by SIGKILL"), "rank 1 was killed by SIGKILL"),
        (
            CallError("rank 1 raised in a call:\nTraceback:\n  File x\nKeyError: 'a'\n"),
            "rank 1 raised in a call: KeyError: 'a' (--debug shows the traceback)",
        ),
        (KeyError("x"), "KeyError: 'x' (--debug shows the traceback)"),
        (RuntimeError(), "RuntimeError: RuntimeError (--debug shows the traceback)"),
    ],
)
def test_an_error_is_one_line(error, text):
    assert one_line(error) == text


# --- run.yaml --------------------------------------------------------------------------------------------------------

KEYS = [
    opt.Key(name="tp"),
    opt.Key(name="fusion"),
    opt.Key(name="temperature"),
    opt.Key(name="eager", flag=True),
    opt.Key(name="layer", multiple=True),
    opt.Key(name="max_tokens"),
]


def run_file(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return opt.read_run_file(file, KEYS)


def test_a_run_file_gives_values_as_the_flags_read_them(tmp_path):
    text = "tp: 2\nfusion: off\ntemperature: 0.5\neager: true\nlayer: [mlp=a:b]\nmax-tokens: 9\n"
    assert run_file(tmp_path, text) == {
        "tp": "2",
        "fusion": "off",
        "temperature": "0.5",
        "eager": True,
        "layer": ["mlp=a:b"],
        "max_tokens": "9",
    }


def test_a_run_file_takes_one_value_or_a_mapping_for_a_repeatable_flag(tmp_path):
    assert run_file(tmp_path, "layer: mlp=a:b") == {"layer": ["mlp=a:b"]}
    assert run_file(tmp_path, "layer: {mlp@1: 'a:b', norm: 'c:d'}") == {"layer": ["mlp@1=a:b", "norm=c:d"]}


def test_an_empty_run_file_and_empty_values_change_nothing(tmp_path):
    assert run_file(tmp_path, "") == {}
    assert run_file(tmp_path, "tp:\n") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature: 1", "there is no key 'temprature'; did you mean temperature?"),
        ("tp: [1, 2]", "tp takes one value, and got a list of 2"),
        ("eager: 3", "eager must be true or false, and is 3"),
        ("tp: {a: 1}", "tp takes one value"),
        ("layer: [[a]]", "layer must be a number or a word, and is a list"),
        ("max-tokens: 1\nmax_tokens: 2", "max_tokens is given twice"),
        ("- tp", "must hold `flag: value` lines, and holds a list"),
        ("tp: [", "is not YAML"),
    ],
)
def test_a_run_file_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"run\.yaml") as caught:
        run_file(tmp_path, text)
    assert message in str(caught.value)


def test_a_flag_beats_the_run_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("size: tiny\ntp: 4\nrank: 3\njson: true\n")
    result = run("inspect", "--config", file, "--tp", 2)
    assert (result.exit_code, result.stderr) == (2, result.stderr)
    assert "rank 3 is not among the ranks 0 to 1" in result.stderr
    facts = json.loads(run("inspect", "--config", file, "--rank", 1).stdout)
    assert (facts["tp"], facts["rank"]) == (4, 1)


def test_a_bad_value_in_a_run_file_names_its_flag(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("tp: 2.5\n")
    result = run("inspect", "--size", "tiny", "--config", file)
    assert result.exit_code == 2
    assert "'--tp'" in result.stderr
    assert "2.5" in result.stderr


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("mlp=a.b:f.g", ()),
        ("mlp@3=a.b:f.g", (3,)),
        ("mlp@3-5=a.b:f.g", (3, 4, 5)),
        ("mlp@7,0-2,1=a.b:f.g", (0, 1, 2, 7)),
    ],
)
def test_a_layer_option_is_read(text, layers):
    assert opt.parse_layer(text) == opt.LayerOption(name="mlp", layers=layers, module="a.b", attribute="f.g")


def test_layer_options_build_the_record(swaps):
    layers = opt.build_layers([f"mlp@1={swaps}:relu2", f"norm={swaps}:holder.relu2"])
    module = sys.modules[swaps]
    assert layers.of(1).mlp is module.relu2
    assert layers.of(0).mlp is not module.relu2
    assert layers.norm is module.relu2


def test_a_function_given_twice_is_refused(swaps):
    with pytest.raises(ValueError, match="given twice for every layer"):
        opt.build_layers([f"mlp={swaps}:relu2", f"mlp={swaps}:relu2"])


def test_a_function_of_the_wrong_arity_is_refused_with_both_signatures(swaps):
    with pytest.raises(ValueError, match=r"mlp is called as \(x_td, params, context, /\).*one_argument\(x_td\)"):
        opt.build_layers([f"mlp={swaps}:one_argument"])


def test_a_module_that_raises_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_swap.py").write_text("1 / 0")
    (tmp_path / "needy_swap.py").write_text("import no_such_dependency")
    with pytest.raises(ValueError, match="importing broken_swap raised ZeroDivisionError"):
        opt.build_layers(["mlp=broken_swap:f"])
    with pytest.raises(ValueError, match="needy_swap:f cannot be imported: No module named 'no_such_dependency'"):
        opt.build_layers(["mlp=needy_swap:f"])


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_text_file_holds_a_prompt_a_line(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffone\r\n\r\nthree\u2028same\n".encode())
    assert [line.prompt for line in opt.read_prompts(file)] == ["one", "", "three\u2028same"]


def test_a_jsonl_file_holds_prompts_ids_and_chats(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a", "sampling": {"temperature": 0}, "note": 1}\n\n[1, 2]\n{"prompt_token_ids": [3]}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}'
    )
    first, ids, more_ids, chat = opt.read_prompts(file)
    assert first == opt.PromptLine(prompt="a", sampling={"temperature": 0})
    assert (ids.token_ids, more_ids.token_ids) == ((1, 2), (3,))
    assert chat.messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "a", "ends in .txt"),
        ("p.txt", "", "holds no prompts"),
        ("p.jsonl", "\n", "holds no prompts"),
        ("p.jsonl", "[1]\n{", "p.jsonl:2 is not JSON"),
        ("p.jsonl", "3", "must be an object"),
        ("p.jsonl", "[1, true]", "flat array of integers"),
        ("p.jsonl", '{"prompt_token_ids": [[1]]}', "flat array of integers"),
        ("p.jsonl", '{"promt": "a"}', "holds no prompt"),
        ("p.jsonl", '{"prompt": "a", "prompt_token_ids": [1]}', 'holds both "prompt" and "prompt_token_ids"'),
        ("p.jsonl", '{"prompt": 3}', "prompt must be a string, and is 3"),
        ("p.jsonl", '{"prompt": "a", "sampling": [1]}', "sampling must be an object, and is [1]"),
        ("p.jsonl", '{"messages": []}', "messages must be an array"),
    ],
)
def test_a_prompts_file_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"p\.") as caught:
        opt.read_prompts(tmp_path / name)
    assert message in str(caught.value)


def test_template_arguments_are_read_as_yaml():
    assert opt.parse_template_args(["enable_thinking=false", "n=3", "who=a=b", "empty="]) == {
        "enable_thinking": False,
        "n": 3,
        "who": "a=b",
        "empty": "",
    }


def test_a_line_overrides_the_sampling():
    base = SamplingParams(temperature=1.0, max_tokens=5)
    assert opt.override_sampling(base, {"temperature": 0}, "prompt 3") == replace(base, temperature=0)
    assert opt.override_sampling(base, None, "prompt 3") is base
    with pytest.raises(ValueError, match="prompt 3: sampling has no field 'temprature'; did you mean temperature"):
        opt.override_sampling(base, {"temprature": 0}, "prompt 3")
    with pytest.raises(ValueError, match="prompt 3: top_p=2 must be"):
        opt.override_sampling(base, {"top_p": 2}, "prompt 3")


@pytest.mark.parametrize(
    ("params", "defaults", "text"),
    [
        ({}, {}, "sampling: temperature 1, at most 16 tokens"),
        ({"temperature": 0}, {"top_k": 20}, "sampling: greedy, at most 16 tokens"),
        (
            {"top_p": 0.5, "max_tokens": None},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
            "sampling: temperature 0.6 (generation_config.json), top_k 20 (generation_config.json), top_p 0.5, "
            "as many tokens as fit",
        ),
        ({}, {"temperature": 0.0}, "sampling: greedy (generation_config.json), at most 16 tokens"),
    ],
)
def test_the_log_says_how_tokens_are_chosen(params, defaults, text):
    assert opt.describe_sampling(SamplingParams(**params), defaults) == text


# --- inspect, doctor, random-model -----------------------------------------------------------------------------------


def test_inspect_counts_what_a_rank_holds():
    facts = json.loads(run("inspect", "--size", "8b", "--tp", 2, "--dtype", "bfloat16", "--json").stdout)
    assert facts["num_parameters"] == 8_190_735_360
    assert facts["legal_tp_sizes"] == [1, 2, 4, 8, 16, 32]
    assert facts["kv_bytes_per_token"] == 2 * 36 * 4 * 128 * 2
    rows = {row["name"]: row for row in facts["parameters"]}
    down = rows["model.layers.35.mlp.down_proj.weight"]
    assert (down["shape"], down["axis"], down["local_shape"]) == ([4096, 12288], 1, [4096, 6144])
    assert down["bytes"] == 4096 * 6144 * 2
    norm = rows["model.norm.weight"]
    assert (norm["axis"], norm["bytes"]) == (None, 8192)
    assert facts["bytes_per_rank"][0] == sum(row["bytes"] for row in facts["parameters"])


def test_inspect_shows_what_a_swap_does_to_fusion(swaps):
    facts = json.loads(run("inspect", "--size", "tiny", "--layer", f"mlp@1={swaps}:relu2", "--json").stdout)
    assert facts["swapped"] == [{"name": "mlp", "function": f"{swaps}:relu2", "layers": [1]}]
    default, swapped = facts["fusion"]
    assert set(default["decode"]) - set(swapped["decode"]) == {"silu_mul"}
    assert set(swapped["decode"]) <= set(default["decode"])


def test_inspect_prints_tables():
    text = run("inspect", "--size", "tiny", "--tp", 2).stdout
    assert "model.layers.0-1.mlp.down_proj.weight" in text
    assert "legal tp sizes: 1, 2, 4" in text
    assert "KV cache: 128 B a token on each rank" in text
    assert "rank 1: 82.7 KB of parameters" in text


def test_doctor_reports():
    sections = json.loads(run("doctor", "--json").stdout)
    titles = [section["title"] for section in sections]
    assert {"versions", "GPUs", "kernels"} <= set(titles)
    text = run("doctor")
    assert text.exit_code == 0
    assert all(title in text.stdout for title in titles)


def test_a_random_model_is_written_once(tmp_path):
    folder = tmp_path / "model"
    assert run("random-model", "--size", "tiny", "--layers", 3, "--dtype", "float32", folder).exit_code == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    first = (folder / "model.safetensors").read_bytes()
    refused = run("random-model", "--size", "tiny", folder)
    assert refused.exit_code == 2
    assert "is not empty; name another folder, or add --force" in refused.stderr
    assert (folder / "model.safetensors").read_bytes() == first
    again = run("random-model", "--size", "tiny", "--layers", 3, "--dtype", "float32", "--force", "--seed", 1, folder)
    assert again.exit_code == 0
    assert (folder / "model.safetensors").read_bytes() != first


# --- generate, end to end --------------------------------------------------------------------------------------------

SMALL = ("--device", "cpu", "--kv-blocks", 64, "--max-num-seqs", 8)


def generate(folder, *args):
    return run("generate", "--model", folder, *SMALL, *args)


def test_one_prompt_streams_its_text_to_stdout(byte_folder, tmp_path):
    out = tmp_path / "out.jsonl"
    result = generate(byte_folder, "--prompt", "hello", "--temperature", 0, "--max-tokens", 12, "--output", out)
    assert result.exit_code == 0, result.stderr
    (row,) = rows_of(out)
    assert result.stdout == row["text"] + "\n"
    assert "sampling: greedy, at most 12 tokens" in result.stderr
    assert row == {
        "index": 0,
        "prompt": "hello",
        "prompt_token_ids": list(b"hello"),
        "text": row["text"],
        "token_ids": row["token_ids"],
        "finish_reason": "length",
        "cached_tokens": 0,
    }
    assert len(row["token_ids"]) == 12


def test_flags_that_change_how_it_runs_do_not_change_the_tokens(byte_folder, tmp_path):
    base = generate(byte_folder, "--prompt", "hello", "--seed", 5, "--max-tokens", 12)
    for flags in (
        ["--eager"],
        ["--fusion", "off"],
        ["--no-prefix-caching", "--depth", 0],
        ["--block-size", 3, "--max-num-batched-tokens", 8],
    ):
        assert generate(byte_folder, "--prompt", "hello", "--seed", 5, "--max-tokens", 12, *flags).stdout == base.stdout


def test_many_prompts_come_in_order_and_a_bad_one_fails_alone(byte_folder, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        '{"prompt": "hello", "sampling": {"max_tokens": 3}}\n[104, 101, 108, 108, 111]\n[]\n[99999]\n{"prompt": "b"}\n'
    )
    result = generate(byte_folder, "--prompts-file", prompts, "--temperature", 0, "--max-tokens", 6, "--output", out)
    assert result.exit_code == 2
    assert result.stdout == ""
    rows = rows_of(out)
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [len(row["token_ids"]) for row in rows] == [3, 6, 0, 0, 6]
    assert rows[0]["token_ids"] == rows[1]["token_ids"][:3]
    assert (rows[0]["prompt"], rows[1]["prompt"]) == ("hello", None)
    assert [row["finish_reason"] for row in rows] == ["length", "length", "error", "error", "length"]
    assert "empty" in rows[2]["error"]
    assert "99999" in rows[3]["error"]
    assert "error" not in rows[4]
    assert "error: prompt 2: " in result.stderr
    assert "error: prompt 3: " in result.stderr


def test_rows_go_to_stdout_on_request(byte_folder):
    result = generate(byte_folder, "--prompt", "a", "--prompt", "b", "--seed", 1, "--max-tokens", 4, "--output", "-")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["index"], row["prompt"], len(row["token_ids"])) for row in rows] == [(0, "a", 4), (1, "b", 4)]


def test_texts_of_many_prompts_go_to_stdout(byte_folder, tmp_path):
    out = tmp_path / "o.jsonl"
    flags = ["--prompt", "a", "--prompt", "b", "--seed", 1, "--max-tokens", 4]
    generate(byte_folder, *flags, "--output", out)
    assert generate(byte_folder, *flags).stdout == "".join(row["text"] + "\n" for row in rows_of(out))


def test_prompt_i_samples_with_seed_plus_i(byte_folder):
    def tokens(*args):
        result = generate(byte_folder, *args, "--max-tokens", 8, "--output", "-")
        return [json.loads(line)["token_ids"] for line in result.stdout.splitlines()]

    same, other = tokens("--prompt", "x", "--prompt", "x", "--seed", 7)
    assert same != other
    assert tokens("--prompt", "x", "--seed", 8) == [other]


def test_a_single_bad_prompt_is_one_line(byte_folder):
    result = generate(byte_folder, "--prompt", "")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "error: the prompt is empty; it needs at least one token"


def test_a_prompt_that_is_too_long_is_one_line(byte_folder):
    result = generate(byte_folder, "--prompt", "x" * 64, "--max-model-len", 32)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "64" in result.stderr.splitlines()[-1]


def test_a_chat_goes_through_the_template(byte_folder, tmp_path):
    out = tmp_path / "o.jsonl"
    result = generate(
        byte_folder, "--chat", "--system", "s", "--prompt", "u", "--max-tokens", 2, "--output", out, "--seed", 0,
        "--template-arg", "no_such=1",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "warning: the chat template does not read no_such: no effect" in result.stderr
    (row,) = rows_of(out)
    start, end = 257, 258
    turns = [start, *b"system\ns", end, 10, start, *b"user\nu", end, 10, start, *b"assistant\n"]
    assert row["prompt_token_ids"] == turns
    assert row["prompt"] == "u"


def test_a_swapped_function_changes_the_text_and_is_the_same_in_fewer_words(byte_folder, swaps):
    flags = ["--prompt", "hello", "--temperature", 0, "--max-tokens", 8]
    plain = generate(byte_folder, *flags).stdout
    swapped = generate(byte_folder, *flags, "--layer", f"mlp={swaps}:relu2").stdout
    by_layers = generate(byte_folder, *flags, "--layer", f"mlp@0-1={swaps}:relu2").stdout
    assert swapped != plain
    assert by_layers == swapped


def test_a_layer_that_the_model_lacks_is_one_line(byte_folder, swaps):
    result = generate(byte_folder, "--prompt", "a", "--layer", f"mlp@2={swaps}:relu2")
    assert result.exit_code == 2
    assert "layer 2 is replaced, but the model has layers 0 to 1" in result.stderr


def test_a_run_file_runs(byte_folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {byte_folder}\nprompt: [hello]\ntemperature: 0\nmax-tokens: 5\ndevice: cpu\nkv-blocks: 64\n"
    )
    assert (
        run("generate", "--config", file).stdout
        == generate(byte_folder, "--prompt", "hello", "--temperature", 0, "--max-tokens", 5).stdout
    )


@pytest.mark.slow
def test_ranks_do_not_change_the_text(byte_folder):
    flags = ["--model", byte_folder, "--prompt", "hello", "--temperature", 0, "--max-tokens", 16, *SMALL]

    def text(*more):
        command = [sys.executable, "-m", "funcllm.launch.cli", "generate", *map(str, [*flags, *more])]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout

    assert text("--tp", 2) == text()


# --- chat ------------------------------------------------------------------------------------------------------------


def chat(folder, *lines):
    flags = ["--device", "cpu", "--kv-blocks", 64, "--temperature", 0, "--max-tokens", 6]
    return run("chat", "--model", folder, *flags, stdin="".join(f"{line}\n" for line in lines))


def test_a_chat_remembers_and_forgets(byte_folder):
    once = chat(byte_folder, "hi").stdout
    result = chat(byte_folder, "hi", "hi", "/reset", "", "hi", "/exit", "not read")
    assert result.exit_code == 0
    assert result.stdout.startswith(once)
    assert result.stdout.endswith(once)
    middle = result.stdout[len(once) : -len(once)]
    assert middle
    assert middle != once


def test_a_chat_that_grows_too_long_goes_on(byte_folder):
    result = chat(byte_folder, "x" * 600, "hi")
    assert result.exit_code == 0
    assert "/reset forgets the conversation" in result.stderr
    assert result.stdout == chat(byte_folder, "hi").stdout


def test_a_chat_without_a_tokenizer_is_refused(byte_folder, tmp_path):
    for file in byte_folder.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    result = chat(tmp_path, "hi")
    assert result.exit_code == 2
    assert "a chat needs a tokenizer" in result.stderr


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def start():
    """Starts a command that is ended with the test."""
    processes = []

    def start_command(*args):
        command = [sys.executable, "-m", "funcllm.launch.cli", *map(str, args)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=pipe, text=True))
        return processes[-1]

    yield start_command
    for process in processes:
        process.kill()
        process.wait()


def wait_for(process, beginning):
    """Reads stderr up to a line with this beginning."""
    line = next((line for line in process.stderr if line.startswith(beginning)), None)
    assert line is not None, f"the command ended without a line that begins with {beginning!r}"
    return line


def wait_for_cpu(process, seconds):
    """Waits until the process has computed for so long from now: as much work on a busy machine as on an idle one."""
    end = cpu_seconds(process) + seconds
    while process.poll() is None and cpu_seconds(process) < end:
        time.sleep(0.02)


def cpu_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[-1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
def test_ctrl_c_ends_at_once_and_keeps_what_is_finished(start, byte_folder, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    long = {"prompt": "b", "sampling": {"max_tokens": 500, "ignore_eos": True, "seed": 0}}
    short = {"prompt": "a", "sampling": {"max_tokens": 1}}
    prompts.write_text("\n".join(map(json.dumps, [short, *[long] * 40])))
    flags = ["--prompts-file", prompts, "--output", out, "--device", "cpu", "--max-num-seqs", 2, "--kv-blocks", 80]
    process = start("generate", "--model", byte_folder, *flags)
    wait_for(process, "sampling:")
    wait_for_cpu(process, 2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=patient(20))
    assert process.returncode == 130
    assert "Traceback" not in stderr
    rows = rows_of(out)
    assert (rows[0]["index"], len(rows[0]["token_ids"])) == (0, 1)
    assert len(rows) < 41


@pytest.mark.slow
def test_ctrl_c_ends_a_chat(start, byte_folder):
    process = start("chat", "--model", byte_folder, "--device", "cpu", "--kv-blocks", 64)
    wait_for(process, "sampling:")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=patient(20))
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_command_with_one_line(start, byte_folder):
    flags = ["--prompt", "b", "--ignore-eos", "--max-tokens", 500, "--device", "cpu", "--kv-blocks", 64, "--tp", 2]
    process = start("generate", "--model", byte_folder, *flags)
    wait_for(process, "sampling:")
    process.stdout.read(1)
    (worker,) = children_of(process)
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    _, stderr = process.communicate(timeout=MOST)
    assert time.monotonic() - killed < patient(15)  # 5 on an idle machine
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback(start, byte_folder):
    flags = ["--prompt", "b", "--ignore-eos", "--max-tokens", 400, "--device", "cpu", "--kv-blocks", 64]
    process = start("generate", "--model", byte_folder, *flags)
    process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(MOST) == 1
    assert "Traceback" not in stderr
    assert "error" not in stderr
