from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from funcllm.config import ModelConfig
from funcllm.group import SINGLE, Group
from funcllm.qwen3 import param_specs
from funcllm.record import Layers
from funcllm.specs import init_params, named, spec_leaves, specs_of, whole
from funcllm.types import Component, Part, Spec
from funcllm.weights.load import canonical, layer_sources, load_params, open_checkpoint, refill
from tests.tiny import HF_CONFIGS, tiny_folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An untied tiny Qwen3 in one file."""
    tiny_folder(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files with an index."""
    tiny_folder(tmp_path, max_shard_size=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def load(folder: Path, group: Group = SINGLE, **options: Any) -> dict[str, Tensor]:
    """This rank's slices by their names."""
    specs = param_specs(ModelConfig.from_pretrained(folder), Layers(), group)
    return named(load_params(folder, specs, group, **options), specs, group)


def edit_tensors(folder: Path, *, drop: tuple[str, ...] = (), **changes: Tensor) -> None:
    """Rewrites a single-file checkpoint; keywords write `__` for a dot."""
    tensors = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if name not in drop}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- what is loaded --------------------------------------------------------------------------------------------------

MODELS = [
    pytest.param(architecture, options, id=f"{architecture.removesuffix('ForCausalLM')}-{name}")
    for architecture in HF_CONFIGS
    for name, options in (
        ("untied", {}),
        ("tied-199", {"tie_word_embeddings": True, "vocab_size": 199}),
        ("257", {"vocab_size": 257}),
    )
] + [
    pytest.param("Qwen3ForCausalLM", {"attention_bias": True}, id="Qwen3-bias"),
    pytest.param("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, id="Llama-biases"),
]


@pytest.mark.parametrize(("architecture", "options"), MODELS)
def test_every_rank_holds_its_slices_of_what_transformers_holds(architecture, options, tmp_path):
    model = tiny_folder(tmp_path, architecture, **options)
    expected = dict(model.named_parameters())
    config = ModelConfig.from_pretrained(tmp_path)
    for tp in (1, 2, 4):
        gathered: dict[str, dict[int, Tensor]] = {}
        for rank in range(tp):
            specs = param_specs(config, Layers(), Group(rank, tp))
            parts = {part.name: part for spec in spec_leaves(specs) for part in spec.parts}
            for name, view in load(tmp_path, Group(rank, tp)).items():
                shard = rank * parts[name].shards // tp if parts[name].axis is not None else 0
                known = gathered.setdefault(name, {}).setdefault(shard, view)
                assert torch.equal(known, view), f"ranks that share a slice of {name} hold different values"
        assert gathered.keys() == expected.keys()
        for name, slices in gathered.items():
            axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat([slices[i] for i in sorted(slices)], axis), expected[name]), name


def test_qkv_and_gate_up_are_fused_in_order(folder):
    stored = load_file(folder / WEIGHTS)
    specs = param_specs(ModelConfig.from_pretrained(folder), Layers(), Group(3, 4))
    layer = load_params(folder, specs, Group(3, 4)).layers[1]
    q, k, v = (stored[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat([q[48:64], k[16:32], v[16:32]]))
    gate, up = (stored[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([gate[72:], up[72:]]))


def test_shards_with_an_index_load_like_a_single_file(sharded, tmp_path_factory):
    single = tmp_path_factory.mktemp("single")
    tiny_folder(single)
    ours, theirs = load(sharded), load(single)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_shards_without_an_index_load_too(sharded):
    expected = load(sharded)
    (sharded / INDEX).unlink()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(sharded).items())


def test_a_single_file_of_another_name_loads(folder):
    (folder / WEIGHTS).rename(folder / "weights.safetensors")
    assert load(folder)["model.norm.weight"].shape == (64,)


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "_orig_mod.", "module._orig_mod."])
def test_trainers_prefixes_are_known(prefix, folder):
    expected = load(folder)
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    ours = load(folder, strict=True)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_base_models_own_names_are_known(folder):
    expected = load(folder)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(folder, strict=True).items())


def test_canonical_names():
    assert canonical("module._orig_mod.model.layers.3._checkpoint_wrapped_module.mlp.up_proj.weight") == (
        "layers.3.mlp.up_proj.weight"
    )
    assert canonical("base_model.model.lm_head.weight") == "lm_head.weight"


def test_one_tensor_under_two_names_is_refused(folder):
    edit_tensors(folder, norm__weight=torch.ones(64))
    with pytest.raises(ValueError, match=r"both (model\.)?norm\.weight and (model\.)?norm\.weight are .*keep one"):
        load(folder)


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_config", "asked", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", torch.float16, torch.float16),
        (None, None, torch.float32),  # that of the stored weights
    ],
)
def test_dtype_is_asked_for_or_the_configs_or_the_stored_one(in_config, asked, expected, folder):
    edit_json(folder / "config.json", dtype=in_config)
    stored = load_file(folder / WEIGHTS)
    loaded = load(folder, dtype=asked)
    assert {tensor.dtype for tensor in loaded.values()} == {expected}
    assert all(torch.equal(tensor, stored[name].to(expected)) for name, tensor in loaded.items())


def test_stored_dtype_counts_when_the_config_is_silent(folder):
    edit_json(folder / "config.json", dtype=None)
    save_file({n: t.half() for n, t in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    assert {tensor.dtype for tensor in load(folder).values()} == {torch.float16}


def test_files_of_mixed_dtypes_are_cast(folder):
    stored = load_file(folder / WEIGHTS)
    mixed = {n: t.bfloat16() if "mlp" in n else t.double() if "norm" in n else t for n, t in stored.items()}
    save_file(mixed, folder / WEIGHTS)
    loaded = load(folder, dtype="float32")
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert all(torch.equal(tensor, mixed[name].float()) for name, tensor in loaded.items())


# --- tied heads ------------------------------------------------------------------------------------------------------


def test_a_tied_head_may_be_stored_too(tmp_path):
    tiny_folder(tmp_path, tie_word_embeddings=True)
    embed = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    edit_tensors(tmp_path, lm_head__weight=embed.clone())
    loaded = load(tmp_path, strict=True)
    assert "lm_head.weight" not in loaded
    assert torch.equal(loaded["model.embed_tokens.weight"], embed)


def test_a_stored_head_that_is_not_the_tied_one_is_refused(tmp_path):
    tiny_folder(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lm_head__weight=torch.randn(256, 64))
    with pytest.raises(ValueError, match=r"differs from the embedding.*set it to false"):
        load(tmp_path)


def test_an_untied_model_without_a_head_is_refused(folder):
    edit_tensors(folder, drop=("lm_head.weight",))
    with pytest.raises(ValueError, match=r": no lm_head\.weight; .*set tie_word_embeddings to true"):
        load(folder)


def test_head_and_embedding_are_not_mixed_up(folder):
    stored, loaded = load_file(folder / WEIGHTS), load(folder)
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(loaded["lm_head.weight"], stored["lm_head.weight"])


# --- extras ----------------------------------------------------------------------------------------------------------


def test_harmless_extras_are_skipped_in_silence(folder):
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.masked_bias": torch.ones(1)}
    edit_tensors(folder, **extras)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder, strict=True)


def test_other_extras_are_listed_in_one_warning(folder):
    edit_tensors(folder, **{"v_head.weight": torch.ones(1), "model.layers.2.mlp.up_proj.weight": torch.ones(1)})
    with pytest.warns(UserWarning, match="does not use") as caught:
        load(folder)
    assert len(caught) == 1
    assert "does not use: model.layers.2.mlp.up_proj.weight, v_head.weight" in str(caught[0].message)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match=r"v_head\.weight; remove them"):
        load(folder, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder, Group(1, 2))  # rank 0 speaks for all


@pytest.mark.parametrize(
    ("architecture", "first"), [("Qwen2ForCausalLM", r"k_proj\.bias"), ("Qwen3ForCausalLM", r"k_norm\.weight")]
)
def test_what_the_config_denies_is_refused_not_dropped(architecture, first, tmp_path):
    tiny_folder(tmp_path, architecture)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"], model_type="llama")
    message = rf"holds model\.layers\.\{{0-1\}}\.self_attn\.{first}, .*which a LlamaForCausalLM .* does not use"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_unmerged_adapters_are_refused(folder):
    edit_tensors(folder, **{"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(4, 64)})
    with pytest.raises(ValueError, match=r"adapter that is not merged.*merge_and_unload"):
        load(folder)


# --- what is missing or broken ---------------------------------------------------------------------------------------


def test_all_missing_and_misshapen_tensors_are_listed(folder):
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    edit_tensors(folder, drop=(*names, "model.norm.weight"), **{"model.embed_tokens.weight": torch.ones(255, 64)})
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load(folder)
    message = str(caught.value)
    assert ": no model.layers.{0-1}.mlp.down_proj.weight, model.norm.weight; the download may be incomplete" in message
    assert "model.embed_tokens.weight [255, 64] instead of [256, 64]" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_taller_tensor_is_not_cropped(rank, folder):
    edit_tensors(folder, **{"model.layers.0.self_attn.q_proj.weight": torch.ones(128, 64)})
    with pytest.raises(ValueError, match=r"q_proj\.weight \[128, 64\] instead of \[64, 64\]"):
        load(folder, Group(rank, 2))


def test_a_missing_shard_is_named_with_its_tensors(sharded):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    gone = weight_map["model.norm.weight"]
    (sharded / gone).unlink()
    with pytest.raises(ValueError, match=rf"{gone} missing, with them .*model\.norm\.weight.*incomplete"):
        load(sharded)
    (sharded / INDEX).unlink()
    with pytest.raises(ValueError, match=rf"{gone} missing; the download is incomplete"):
        load(sharded)


def test_an_index_of_another_checkpoint_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"holds model\.norm\.weight, and it does not; the index and the files"):
        load(sharded)


def test_the_indexs_total_size_is_no_concern(sharded):
    edit_json(sharded / INDEX, metadata={"total_size": 1})
    assert load(sharded)["model.norm.weight"].shape == (64,)


def test_an_empty_index_is_refused(sharded):
    edit_json(sharded / INDEX, weight_map={})
    with pytest.raises(ValueError, match="has no weight_map"):
        load(sharded)


@pytest.mark.parametrize("keep", [4, 100, 30_000, -1])
def test_a_truncated_file_is_named(keep, folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short.*fetch it again"):
        load(folder)


def test_a_file_that_is_no_safetensors_is_named(folder):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 8) + b"notjson!" + b"0" * 100)
    with pytest.raises(ValueError, match="no readable safetensors header"):
        load(folder)


def edit_header(file, edit):
    """Rewrites the header of a safetensors file; edit takes the record of a norm's weight."""
    content = file.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    edit(header["model.norm.weight"])
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


@pytest.mark.parametrize("offsets", [[0, 2], [5], ["a", "b"], []], ids=["of another tensor", "one", "words", "none"])
def test_a_header_that_does_not_fit_its_file_is_named(folder, offsets):
    edit_header(folder / WEIGHTS, lambda record: record.update(data_offsets=offsets))
    with pytest.raises(
        ValueError, match=r"model\.safetensors (is damaged|has no readable safetensors header).*fetch it"
    ):
        load(folder)


def test_bytes_behind_the_last_tensor_are_named(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged \(.*\); fetch it again"):
        load(folder)


def test_a_folder_in_the_place_of_the_weights_is_named(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is a folder, and should be a safetensors file"):
        load(folder)


@pytest.mark.parametrize("weight_map", [{"a": 5}, {"a": 5, "b": "c"}, {"a": None}])
def test_an_index_that_names_no_files_is_refused(sharded, weight_map):
    edit_json(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(ValueError, match="has a weight_map of other values than file names"):
        load(sharded)


def test_a_git_lfs_pointer_is_named(folder):
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 100\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer, not the weights; run `git lfs pull`"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", r"holds an adapter, not a model; merge it into its base"),
        ("pytorch_model.bin", r"pickled weights .* convert them to safetensors"),
        ("model-q4.gguf", r"GGUF files only; use the model's safetensors"),
        ("readme.md", r"holds no \*\.safetensors; the download is incomplete"),
    ],
)
def test_folders_without_readable_weights_say_what_to_do(file, message, folder):
    (folder / WEIGHTS).unlink()
    (folder / file).touch()
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_several_files_without_an_index_are_ambiguous(folder):
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    save_file({"x": torch.ones(1)}, folder / "b.safetensors")
    with pytest.raises(
        ValueError, match=r"holds a\.safetensors, b\.safetensors and no model\.safetensors\.index\.json"
    ):
        load(folder)


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match="/nowhere is not a folder"):
        load_params("/nowhere", ())


# --- quantised -------------------------------------------------------------------------------------------------------


def test_a_quantised_config_is_refused_by_its_method(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"quantised \(gptq\)"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_tensors_are_refused_even_when_the_config_is_silent(dtype, folder):
    edit_tensors(folder, **{"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64).to(dtype)})
    with pytest.raises(ValueError, match=r"up_proj\.weight is stored as (I8|F8_E4M3): the checkpoint is quantised"):
        load(folder)


def test_scales_beside_the_weights_are_refused(folder):
    edit_tensors(folder, **{"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ValueError, match=r"holds quantised weights .*weight_scale_inv"):
        load(folder)


# --- own components --------------------------------------------------------------------------------------------------


def gate(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.full(shape, 3.0)


def own_mlp(config: ModelConfig, group: Group, place: str) -> dict[str, Spec]:
    return {"gate": Spec(parts=(Part(name=f"{place}.gate.weight", shape=(2, 64)),), init=gate)}


def own_specs(folder: Path) -> Any:
    layers = Layers().at(1, mlp=Component(lambda x, params, context, /: x, specs=own_mlp))
    return param_specs(ModelConfig.from_pretrained(folder), layers, SINGLE)


def test_own_parameters_come_from_their_source_or_their_init(folder, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the layer's own mlp weights are passed over in silence
        params = load_params(folder, own_specs(folder))
    assert torch.equal(params.layers[1].mlp["gate"], torch.full((2, 64), 3.0))
    given = torch.randn(2, 64)
    file = tmp_path_factory.mktemp("source") / "mine.safetensors"
    save_file({"gate.weight": given}, file)
    module = nn.ModuleDict({"gate": nn.Linear(64, 2, bias=False)})
    with torch.no_grad():
        module["gate"].weight.copy_(given)
    for source in ({"gate.weight": given}, {"layers.1.mlp.gate.weight": given}, str(file), module):
        params = load_params(folder, own_specs(folder), sources={"layers.1.mlp": source})
        assert torch.equal(params.layers[1].mlp["gate"], given)
    params = load_params(folder, own_specs(folder), sources={"layers.0.mlp": {"gate.weight": given}})
    assert torch.equal(params.layers[1].mlp["gate"], torch.full((2, 64), 3.0))


def test_a_source_goes_before_the_checkpoint(folder):
    specs = param_specs(ModelConfig.from_pretrained(folder))
    params = load_params(folder, specs, sources={"": {"model.norm.weight": torch.full((64,), 2.0)}})
    assert torch.equal(params.norm.weight, torch.full((64,), 2.0))


def test_a_records_sources_are_found_by_their_places():
    def place(name: str) -> Component:
        return Component(lambda *args: args[0], source={"name": name})

    layers = Layers(mlp=place("all"), norm=place("norms"), embed=place("embed"))
    layers = layers.at(1, mlp=place("one"), attention=place("attention"))
    sources = {where: source["name"] for where, source in layer_sources(layers, 2).items()}
    norms = {
        f"layers.{i}.{name}": "norms" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")
    }
    assert sources == norms | {
        "embed": "embed",
        "norm": "norms",
        "layers.0.mlp": "all",
        "layers.1.mlp": "one",
        "layers.1.attention": "attention",
    }


def test_a_whole_mapping_loads_like_its_folder(folder):
    stored = {f"module.{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    config = ModelConfig.from_pretrained(folder)
    specs = own_specs(folder)
    ours, theirs = named(load_params(stored, specs, config=config), specs), named(load_params(folder, specs), specs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match="needs the model's config"):
        load_params(stored, specs)
    del stored["module.model.norm.weight"]
    with pytest.raises(ValueError, match=r"the tensors given: no model\.norm\.weight"):
        load_params(stored, specs, config=config)


def test_a_source_of_another_shape_or_kind_is_refused(folder):
    with pytest.raises(ValueError, match=r"gate\.weight \[3, 64\] instead of \[2, 64\]"):
        load_params(folder, own_specs(folder), sources={"layers.1.mlp": {"gate.weight": torch.ones(3, 64)}})
    with pytest.raises(ValueError, match="a int is no source of tensors"):
        load_params(folder, own_specs(folder), sources={"layers.1.mlp": 3})
    with pytest.raises(ValueError, match=r"nothing\.safetensors does not exist"):
        load_params(folder, own_specs(folder), sources={"layers.1.mlp": "/tmp/nothing.safetensors"})


def test_a_missing_norm_is_not_initialised(folder):
    edit_tensors(folder, drop=("model.norm.weight",))
    specs = param_specs(ModelConfig.from_pretrained(folder))
    specs = specs._replace(norm=specs.norm._replace(weight=replace(specs.norm.weight, init=gate)))
    with pytest.raises(ValueError, match=r": no model\.norm\.weight"):
        load_params(folder, specs)


def test_own_parameters_that_a_checkpoint_holds_are_loaded(folder):
    module = nn.Linear(64, 2)
    specs = own_specs(folder)
    specs = specs._replace(layers=(specs.layers[0], specs.layers[1]._replace(mlp=specs_of(module, "layers.1.mlp.own"))))
    edit_tensors(folder, **{"layers.1.mlp.own.bias": torch.full((2,), 5.0)})
    params = load_params(folder, specs)
    assert params.layers[1].mlp["bias"].tolist() == [5.0, 5.0]
    assert torch.equal(params.layers[1].mlp["weight"], module.weight)


# --- other readers ---------------------------------------------------------------------------------------------------


def test_headers_tell_names_dtypes_and_shapes(folder):
    entry = open_checkpoint(folder)["model.embed_tokens.weight"]
    assert (entry.dtype, entry.shape, entry.file) == ("F32", (256, 64), folder / WEIGHTS)


@pytest.mark.parametrize("tp", [1, 2])
def test_refill_overwrites_in_place_from_every_kind_of_source(tp, folder):
    stored = load_file(folder / WEIGHTS)
    group = Group(tp - 1, tp)
    specs = param_specs(ModelConfig.from_pretrained(folder), Layers(), group)
    expected = load(folder, group)

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from ((f"module.{name}", tensor) for name, tensor in reversed(stored.items()))
        yield "optimizer.step", torch.ones(1)

    for source in (folder, folder / WEIGHTS, stored, stream()):
        params = init_params(specs, group, seed=9)
        address = params.norm.weight.data_ptr()
        assert refill(params, specs, source, group) == set(expected)
        assert params.norm.weight.data_ptr() == address
        ours = named(params, specs, group)
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_refill_checks_before_it_writes(folder):
    stored = load_file(folder / WEIGHTS)
    specs = param_specs(ModelConfig.from_pretrained(folder))
    params = init_params(specs, seed=9)
    before = {name: view.clone() for name, view in named(params, specs).items()}
    short = {name: tensor for name, tensor in stored.items() if name != "model.norm.weight"}
    misshapen = stored | {"model.norm.weight": torch.ones(65)}
    for source, message in (
        (short, r"new weights: no model\.norm\.weight"),
        (misshapen, r"norm\.weight \[65\] instead of \[64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            refill(params, specs, source)
        assert all(torch.equal(view, before[name]) for name, view in named(params, specs).items())
    with pytest.raises(ValueError, match=r": no .*model\.norm\.weight"):
        refill(params, specs, iter([("lm_head.weight", stored["lm_head.weight"])]))
    assert refill(params, specs, {"model.norm.weight": torch.full((64,), 7.0)}, partial=True) == {"model.norm.weight"}
    assert torch.equal(params.norm.weight, torch.full((64,), 7.0))


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "asked", "shown"), [(0, True, True), (1, True, False), (0, None, False)])
def test_the_bar_is_rank_0s_and_goes_to_stderr(rank, asked, shown, folder, capsys):
    load(folder, Group(rank, 2), progress=asked)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("loading weights" in err) == shown


def test_whole_specs_read_everything(folder):
    specs = whole(param_specs(ModelConfig.from_pretrained(folder), Layers(), Group(1, 4)))
    assert load_params(folder, specs).layers[0].mlp.gate_up_proj.weight.shape == (192, 64)
