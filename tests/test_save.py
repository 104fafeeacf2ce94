from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from funcllm.config import ModelConfig
from funcllm.group import Group, run_threads
from funcllm.launch.tokenizer import _OTHER_KINDS
from funcllm.qwen3 import param_specs
from funcllm.record import Layers
from funcllm.specs import init_params, named
from funcllm.types import PyTree
from funcllm.weights.load import load_params
from funcllm.weights.save import copy_tokenizer, save_params, split_shards
from tests.tiny import HF_CONFIGS, tiny_config, tiny_folder


def copy_folder(source: Path, target: Path, tp: int = 1, max_shard_bytes: int = 1 << 30) -> ModelConfig:
    """Loads a folder at tp and saves it again."""
    config = ModelConfig.from_pretrained(source)

    def run(group: Group) -> None:
        specs = param_specs(config, Layers(), group)
        params = load_params(source, specs, group)
        save_params(params, specs, config, target, group=group, max_shard_bytes=max_shard_bytes)

    run_threads(run, tp)
    return config


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *(pytest.param(architecture, {}, id=architecture) for architecture in HF_CONFIGS),
        pytest.param("Qwen3ForCausalLM", {"tie_word_embeddings": True, "vocab_size": 199}, id="tied-199"),
        pytest.param(
            "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "vocab_size": 257}, id="biases-257"
        ),
    ],
)
def test_transformers_loads_what_was_saved(architecture, options, tp, tmp_path):
    model = tiny_folder(tmp_path / "in", architecture, **options)
    config = copy_folder(tmp_path / "in", tmp_path / "out", tp, max_shard_bytes=60_000)
    assert ModelConfig.from_pretrained(tmp_path / "out") == config
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert type(again) is type(model)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = model.state_dict()
    ours = again.state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_single_shard_has_no_index_and_several_have(tmp_path):
    tiny_folder(tmp_path / "in", tie_word_embeddings=True)
    copy_folder(tmp_path / "in", tmp_path / "one")
    names = {file.name for file in (tmp_path / "one").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}
    copy_folder(tmp_path / "in", tmp_path / "many", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    stored = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(file).values())


def test_the_dtype_of_the_parameters_is_kept_and_named(tmp_path):
    config = tiny_config()
    specs = param_specs(config)
    save_params(init_params(specs, dtype=torch.bfloat16), specs, config, tmp_path)
    assert ModelConfig.from_pretrained(tmp_path).dtype is torch.bfloat16
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_parameters_that_require_grad_are_saved(tmp_path):
    config = tiny_config()
    specs = param_specs(config)
    params = init_params(specs, seed=3)
    for leaf in torch.utils._pytree.tree_leaves(params):
        leaf.requires_grad_()
    save_params(params, specs, config, tmp_path)
    loaded = named(load_params(tmp_path, specs), specs)
    assert all(torch.equal(loaded[name], view) for name, view in named(params, specs).items())


def test_weights_are_not_overwritten_unless_asked(tmp_path):
    tiny_folder(tmp_path / "in")
    copy_folder(tmp_path / "in", tmp_path / "out", max_shard_bytes=60_000)
    config = tiny_config()
    specs = param_specs(config)
    params = init_params(specs, seed=4)
    with pytest.raises(ValueError, match=r"already holds weights \(model.*\); name another folder"):
        save_params(params, specs, config, tmp_path / "out")
    save_params(params, specs, config, tmp_path / "out", overwrite=True)
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    assert torch.equal(load_params(tmp_path / "out", specs).lm_head.weight, params.lm_head.weight)


def test_a_folder_that_cannot_be_written_stops_every_rank(tmp_path):
    (tmp_path / "file").touch()
    config = tiny_config()
    errors: list[str] = []

    def run(group: Group) -> None:
        specs: PyTree = param_specs(config, Layers(), group)
        try:
            save_params(init_params(specs, group), specs, config, tmp_path / "file", group=group)
        except ValueError as error:
            errors.append(f"{group.rank}: {error}")

    run_threads(run, 2)
    assert sorted(errors) == [
        f"0: {tmp_path / 'file'} is a file; name a folder",
        f"1: rank 0 cannot write to {tmp_path / 'file'}; its error says why",
    ]


def test_the_tokenizer_is_copied(tmp_path):
    config = tiny_config()
    specs = param_specs(config)
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(ValueError, match="source holds no tokenizer"):
        save_params(init_params(specs), specs, config, tmp_path / "out", tokenizer_from=source)
    assert not (tmp_path / "out").exists()
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "notes.txt").write_text("not copied")
    save_params(init_params(specs), specs, config, tmp_path / "out", tokenizer_from=source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "out" / "notes.txt").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", *_OTHER_KINDS])
def test_every_kind_of_tokenizer_that_is_read_is_copied(tmp_path, name):
    (tmp_path / "source").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "source" / name).write_text("x")
    copy_tokenizer(tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "x"


def test_shards_are_cut_in_order_and_stay_within_their_size():
    tensors = [
        ("a", (10,), torch.float32),
        ("b", (5,), torch.float64),
        ("c", (50,), torch.int8),
        ("d", (1,), torch.int8),
    ]
    assert split_shards(tensors, 80) == [["a", "b"], ["c", "d"]]
    assert split_shards(tensors, 79) == [["a"], ["b"], ["c", "d"]]
    assert split_shards(tensors, 30) == [["a"], ["b"], ["c"], ["d"]]
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        split_shards(tensors, 0)
