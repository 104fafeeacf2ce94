from __future__ import annotations

import re
from pathlib import Path

import pytest

from funcllm.launch.cli import main
from funcllm.weights import hub

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", README, re.DOTALL))


@pytest.fixture
def model(byte_folder, monkeypatch):
    """A tiny model in the place of the bundled one."""
    monkeypatch.setattr(hub, "DEMO", byte_folder)


def run(name):
    scope: dict[str, object] = {"__name__": "readme"}
    exec(compile(EXAMPLES[name], f"README.md, {name}", "exec"), scope)
    return scope


def test_the_two_lines_that_set_everything_up_are_there():
    assert 'pip install -e . && funclaunch generate --prompt "' in README
    assert 'pip install -e ".[test]" && python -m pytest' in README


def test_the_examples_are_these():
    assert set(EXAMPLES) == {"Generate", "Replace a part", "Watch and edit", "Differentiate"}


def test_generate(model, capsys):
    outputs = run("Generate")["outputs"]
    assert [output.prompt for output in outputs] == ["Once upon a time", "The fox said"]
    assert outputs[0].text in capsys.readouterr().out


def test_replace_a_part(model):
    scope = run("Replace a part")
    assert scope["layers"].of(1).mlp is scope["relu2"]


def test_watch_and_edit(model):
    plain, steered = run("Watch and edit")["outputs"]
    assert plain.token_ids != steered.token_ids
    captured = steered.captured["layers.1.residual_post"]
    assert captured.shape == (len(steered.token_ids), 64)


def test_differentiate(model):
    grads = run("Differentiate")["grads"]
    norms = [float(layer.self_attn.o_proj.weight.norm()) for layer in grads.layers]
    assert len(norms) == 2
    assert min(norms) > 0


def test_every_command_is_in_the_table():
    assert set(re.findall(r"^\| `funclaunch ([a-z-]+)` \|", README, re.MULTILINE)) == set(main.commands)


def test_the_map_names_every_file():
    named = set(re.findall(r"[\w*]+\.py", README))
    for folder in ("funcllm", "kernels", "launch", "weights"):
        for file in (ROOT / folder).glob("*.py"):
            patterns = [name.replace("*", r"\w*").replace(".py", r"\.py") for name in named]
            skipped = folder == "kernels" or file.name in ("__init__.py", "errors.py", "progress.py")
            assert skipped or any(re.fullmatch(pattern, file.name) for pattern in patterns), file.name
