from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import funcllm

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kernels", "launch", "weights")

API = """
    ModelConfig qwen3 Layers Group SINGLE load_params init_params save_params logits Component site all_reduce
    check_layer SamplingParams Engine generate EngineError process_group run_threads sync_grads qwen3_config
    REFERENCE FAST Extra Spec Part Context Stream attend write_kv settle vocab_ids head_ids
"""


def run_python(code: str, cwd: Path, path: Path | None = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_a_link_in_the_package(part):
    link = ROOT / "funcllm" / part
    assert link.is_symlink()
    assert os.readlink(link) == f"../{part}"
    assert link.resolve() == (ROOT / part).resolve()


@pytest.mark.parametrize("part", PARTS)
def test_no_part_is_a_package_at_the_top(part):
    # With an __init__.py, code that runs beside the repository would take ours for Hugging Face's `kernels`.
    assert not (ROOT / part / "__init__.py").exists()


def imports_of(file: Path) -> set[str]:
    """The parts of funcllm that a file imports when it is imported: "funcllm", "kernels", "weights" or "launch"."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "funcllm":
                found.add(pieces[1] if len(pieces) > 1 and pieces[1] in PARTS else "funcllm")
    return found


ALLOWED = {
    "kernels": {"kernels"},
    "funcllm": {"kernels", "funcllm"},
    "weights": {"kernels", "funcllm", "weights"},
    "launch": {"kernels", "funcllm", "weights", "launch"},
}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part):
    files = sorted((ROOT / part).glob("*.py"))
    assert files
    wrong = {f.name: imports_of(f) - ALLOWED[part] for f in files if f.name != "__init__.py"}
    assert {name: extra for name, extra in wrong.items() if extra} == {}


# --- the package -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", API.split())
def test_every_public_name_is_there(name):
    value = getattr(funcllm, name)
    assert name in funcllm.__all__
    assert name in dir(funcllm)
    expected = getattr(value, "__name__", name)
    assert expected == name or name in ("SINGLE", "REFERENCE", "FAST")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = funcllm.no_such_name


def test_the_type_checker_sees_what_the_package_exports():
    source = (ROOT / "funcllm" / "__init__.py").read_text(encoding="utf-8")
    pairs = re.findall(r"^    from (\S+) import (\w+) as \w+$", source, re.MULTILINE)
    imported = {name: module for module, name in pairs}
    assert imported == funcllm._HOME


def test_the_function_qwen3_is_not_hidden_by_its_module(tmp_path):
    code = """
import funcllm.qwen3
from funcllm import qwen3
from funcllm.qwen3 import param_specs
print(type(qwen3).__name__)
"""
    assert run_python(code, tmp_path) == "function"


def test_importing_the_package_is_light(tmp_path):
    code = """
import sys
before = set(sys.modules)
import funcllm
print(len(set(sys.modules) - before), 'torch' in sys.modules)
"""
    count, has_torch = run_python(code, tmp_path).split()
    assert int(count) < 60
    assert has_torch == "False"


def test_the_engine_needs_neither_transformers_nor_the_hub(tmp_path):
    code = """
import sys
import funcllm.launch.engine
print([name for name in ('transformers', 'huggingface_hub') if name in sys.modules])
"""
    assert run_python(code, tmp_path) == "[]"


def test_transformers_takes_no_top_folder_for_a_package():
    # From the repository's root the folders kernels/ and launch/ are in reach of `import kernels`.
    code = """
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_kernels_available
print(Qwen3Config.model_type, Qwen3ForCausalLM.__name__, is_kernels_available())
"""
    installed = any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions())
    assert run_python(code, ROOT) == f"qwen3 Qwen3ForCausalLM {installed}"


# --- installing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in ("funcllm", *PARTS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    result = subprocess.run([*command, "."], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_source_file_under_funcllm(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {f"funcllm/{file.name}" for file in (ROOT / "funcllm").glob("*.py")}
    for part in PARTS:
        wanted |= {f"funcllm/{part}/{file.name}" for file in (ROOT / part).glob("*.py")}
    wanted |= {f"funcllm/weights/demo/{file.name}" for file in (ROOT / "weights" / "demo").glob("*")}
    assert wanted - names == set()
    assert "funcllm/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"funcllm", f"funcllm-{funcllm.__version__}.dist-info"}


def test_the_wheel_works_and_shadows_nothing(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import funcllm.kernels.bundle, funcllm.launch.plan, funcllm.weights.save, importlib.util\n"
        "print(funcllm.__file__)\n"
        "print([n for n in ('launch', 'weights') if importlib.util.find_spec(n)])"
    )
    home, found = run_python(code, tmp_path, site).splitlines()
    assert Path(home) == site / "funcllm" / "__init__.py"
    assert found == "[]"


def test_the_wheel_has_the_console_script_and_the_version(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"funcllm-{funcllm.__version__}.dist-info"
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "funclaunch = funcllm.launch.cli:main" in scripts
    assert f"Version: {funcllm.__version__}" in metadata
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: <3.14,>=3.10" in metadata
