from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from funcllm.config import ModelConfig, qwen3_config
from funcllm.qwen3 import param_specs
from funcllm.specs import init_params, named, nbytes
from funcllm.weights import hub
from funcllm.weights.load import load_params
from funcllm.weights.random_model import byte_tokenizer, write_random_model

TEXT = "Hi,\n ď 客单价 🌶️ 👩‍🚀 \x00"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_model(tmp_path, qwen3_config("tiny"), seed=3)
    return tmp_path


def test_the_weights_are_those_of_init_params(folder):
    config = ModelConfig.from_pretrained(folder)
    specs = param_specs(config)
    loaded = named(load_params(folder, specs), specs)
    expected = named(init_params(specs, seed=3, dtype=torch.bfloat16), specs)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_config_is_that_asked_for_with_the_tokenizers_ids(folder):
    config = ModelConfig.from_pretrained(folder)
    assert config == replace(qwen3_config("tiny"), eos_token_ids=(258, 256), bos_token_id=256)
    assert config.generation.temperature == 0.6


def test_shards_are_bounded_and_told_of(tmp_path):
    config, told = qwen3_config("tiny"), []
    write_random_model(tmp_path, config, dtype=torch.float32, max_shard_bytes=50_000, progress=told.append)
    files = list(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 90_000 for file in files)  # the embedding alone has 81,920 bytes
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(told) == nbytes(param_specs(config), dtype=torch.float32)
    assert load_params(tmp_path, param_specs(config)).norm.weight.dtype == torch.float32


def test_only_a_shard_is_in_memory(tmp_path, monkeypatch):
    from funcllm.weights import save

    largest = 0

    def watched(tensors, file, metadata):
        nonlocal largest
        largest = max(largest, sum(tensor.nbytes for tensor in tensors.values()))
        Path(file).touch()

    monkeypatch.setattr(save, "save_file", watched)
    write_random_model(tmp_path, qwen3_config("tiny", num_layers=6), max_shard_bytes=45_000)
    assert largest <= 45_000


def test_transformers_loads_model_and_tokenizer(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, transformers.Qwen3ForCausalLM)
    assert model.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 258
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_each_byte_is_its_own_token():
    tokenizer = byte_tokenizer(300)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.encode(TEXT).ids == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert tokenizer.encode("a<|im_start|>b<|im_end|><|endoftext|>").ids == [97, 257, 98, 258, 256]
    assert tokenizer.decode([97, 258], skip_special_tokens=True) == "a"
    assert tokenizer.decode([97, 258], skip_special_tokens=False) == "a<|im_end|>"
    assert tokenizer.decode([97, 299, 98]) == "a t299b"
    every_byte = bytes(range(256)).decode("latin-1")
    assert tokenizer.decode(tokenizer.encode(every_byte).ids) == every_byte


def test_a_vocabulary_without_room_for_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size=258 has no room .*use at least 259"):
        write_random_model(tmp_path, replace(qwen3_config("tiny"), vocab_size=258))
    assert list(tmp_path.iterdir()) == []
    assert byte_tokenizer(259).get_vocab_size() == 259


def test_an_older_model_is_not_overwritten_unless_asked(folder):
    with pytest.raises(ValueError, match="already holds weights"):
        write_random_model(folder, qwen3_config("tiny"))
    write_random_model(folder, qwen3_config("tiny", num_layers=1), overwrite=True)
    assert ModelConfig.from_pretrained(folder).num_layers == 1


# --- finding models --------------------------------------------------------------------------------------------------


def test_a_folder_is_itself(folder, monkeypatch):
    assert hub.resolve(folder) == folder
    assert hub.resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    (folder.parent / "org" / "name").mkdir(parents=True)
    assert hub.resolve("org/name") == Path("org/name")


def test_the_demo_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "DEMO", tmp_path)
    with pytest.raises(ValueError, match="bundled demo model is missing"):
        hub.resolve()
    (tmp_path / "config.json").touch()
    assert hub.resolve() == hub.resolve("demo") == tmp_path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "/no/such/folder is neither a folder nor a Hub id; give a model folder, org/name, or demo"),
        ("qwen3", "qwen3 is neither a folder nor a Hub id"),
        ("", "the model's name is empty"),
        (__file__, "is a file; name the folder that holds config.json"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        hub.resolve(model)


def test_the_local_cache_comes_before_the_network(folder, monkeypatch):
    calls = []

    def snapshot(name, allow_patterns, ignore_patterns, local_files_only=False):
        calls.append((name, local_files_only))
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.resolve("Qwen/Qwen3-0.6B") == folder
    assert calls == [("Qwen/Qwen3-0.6B", True)]
    (folder / "model.safetensors").unlink()  # a cache that an interrupted download left
    assert hub.resolve("Qwen/Qwen3-0.6B") == folder
    assert calls[1:] == [("Qwen/Qwen3-0.6B", True), ("Qwen/Qwen3-0.6B", False)]


def test_being_offline_is_one_clear_line(monkeypatch):
    def snapshot(name, allow_patterns, ignore_patterns, local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        raise OSError("Name or service not known\n  while connecting")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ValueError, match="not in the local cache and cannot be downloaded") as caught:
        hub.resolve("Qwen/Qwen3-0.6B")
    assert str(caught.value) == (
        "Qwen/Qwen3-0.6B is not in the local cache and cannot be downloaded (Name or service not known while"
        " connecting); go online, or give a folder"
    )


def test_a_real_snapshot_cache_is_found(folder, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("hub")
    snapshot = cache / "models--org--name" / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    found = hub.resolve("org/name")
    assert found == snapshot
    assert ModelConfig.from_pretrained(found).vocab_size == 320
