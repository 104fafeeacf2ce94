from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from funcllm.config import GenerationDefaults, ModelConfig, legal_tp_sizes, parse_dtype, qwen3_config, validate_tp
from funcllm.rope import RopeConfig, inverse_frequencies, yarn_attention_factor
from tests.tiny import HF_CONFIGS, tiny_config, tiny_hf_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
    "rope_theta": 1e6,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {**QWEN3, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def test_every_fact_is_read():
    generation = {"eos_token_id": [5, 7], "bos_token_id": 3, "do_sample": True, "temperature": 0.6, "top_k": 20}
    config = ModelConfig.from_dict(QWEN3, generation)
    assert config == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        qk_norm=True,
        rope=RopeConfig(theta=1e6),
        dtype=torch.bfloat16,
        eos_token_ids=(5, 7),
        bos_token_id=3,
        generation=GenerationDefaults(do_sample=True, temperature=0.6, top_k=20),
    )
    assert hash(config) == hash(ModelConfig.from_dict(QWEN3, generation))


@pytest.mark.parametrize(
    ("raw", "qk_norm", "qkv_bias", "o_bias", "mlp_bias"),
    [
        pytest.param(QWEN3, True, False, False, False, id="qwen3"),
        pytest.param(QWEN3 | {"attention_bias": True}, True, True, True, False, id="qwen3-bias"),
        pytest.param(QWEN2, False, True, False, False, id="qwen2"),
        pytest.param(QWEN2 | {"attention_bias": False}, False, True, False, False, id="qwen2-flag-ignored"),
        pytest.param(LLAMA, False, False, False, False, id="llama"),
        pytest.param(LLAMA | {"attention_bias": True}, False, True, True, False, id="llama-bias"),
        pytest.param(LLAMA | {"mlp_bias": True}, False, False, False, True, id="llama-mlp-bias"),
        pytest.param(MISTRAL, False, False, False, False, id="mistral"),
    ],
)
def test_norms_and_biases_follow_from_the_architecture(raw, qk_norm, qkv_bias, o_bias, mlp_bias):
    config = ModelConfig.from_dict(raw)
    assert (config.qk_norm, config.qkv_bias, config.o_bias, config.mlp_bias) == (qk_norm, qkv_bias, o_bias, mlp_bias)


def test_norms_and_biases_are_those_of_transformers_models():
    for architecture in HF_CONFIGS:
        for bias in (False, True):
            options = {} if architecture in ("Qwen2ForCausalLM", "MistralForCausalLM") else {"attention_bias": bias}
            hf = tiny_hf_config(architecture, **options)
            names = getattr(transformers, architecture)(hf).state_dict()
            config = ModelConfig.from_dict(hf.to_dict() | {"architectures": [architecture]})
            assert config.qkv_bias == ("model.layers.0.self_attn.q_proj.bias" in names)
            assert config.o_bias == ("model.layers.0.self_attn.o_proj.bias" in names)
            assert config.qk_norm == ("model.layers.0.self_attn.q_norm.weight" in names)


@pytest.mark.parametrize(
    ("raw", "head_dim"),
    [
        pytest.param(without(QWEN3, "head_dim"), 128, id="qwen3"),
        pytest.param(QWEN3 | {"head_dim": None}, 128, id="qwen3-null"),
        pytest.param(without(LLAMA, "head_dim"), 16, id="llama"),
        pytest.param(LLAMA | {"head_dim": 32}, 32, id="llama-given"),
        pytest.param(without(QWEN2, "head_dim"), 16, id="qwen2"),
        pytest.param(MISTRAL | {"head_dim": None}, 16, id="mistral-null"),
    ],
)
def test_head_dim_is_given_or_derived(raw, head_dim):
    assert ModelConfig.from_dict(raw).head_dim == head_dim


def test_num_kv_heads_may_be_absent_where_that_has_one_meaning():
    assert ModelConfig.from_dict(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4
    assert ModelConfig.from_dict(QWEN3 | {"num_key_value_heads": None}).num_kv_heads == 4
    with pytest.raises(ValueError, match="num_key_value_heads is missing"):
        ModelConfig.from_dict(without(QWEN3, "num_key_value_heads"))


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"torch_dtype": None}, None),
        ({"dtype": "auto"}, None),
        ({}, None),
    ],
)
def test_dtype_in_both_spellings(raw, dtype):
    assert ModelConfig.from_dict(without(QWEN3, "torch_dtype") | raw).dtype is dtype


def test_dtype_names():
    assert parse_dtype("bf16") is parse_dtype(torch.bfloat16) is torch.bfloat16
    assert parse_dtype(None) is None
    for wrong in ("int8", torch.float64, "float8_e4m3fn"):
        with pytest.raises(ValueError, match="use bfloat16, float16, float32 or auto"):
            parse_dtype(wrong)


@pytest.mark.parametrize(
    ("config_eos", "generation", "ids"),
    [
        pytest.param(7, None, (7,), id="config-int"),
        pytest.param([7, 5, 7], None, (7, 5), id="config-list"),
        pytest.param(7, {"eos_token_id": [5, 6]}, (5, 6), id="generation-first"),
        pytest.param(7, {"eos_token_id": None}, (7,), id="generation-null"),
        pytest.param(7, {"temperature": 0.5}, (7,), id="generation-silent"),
        pytest.param(None, {"eos_token_id": 0}, (0,), id="zero-is-an-id"),
        pytest.param(None, None, (), id="none"),
    ],
)
def test_eos_ids(config_eos, generation, ids):
    assert ModelConfig.from_dict(QWEN3 | {"eos_token_id": config_eos}, generation).eos_token_ids == ids


def test_bad_ids_are_refused():
    with pytest.raises(ValueError, match="eos_token_id='</s>' must be a token id"):
        ModelConfig.from_dict(QWEN3 | {"eos_token_id": "</s>"})


# --- rope ------------------------------------------------------------------------------------------------------------

PLAIN = [
    pytest.param({}, id="theta-only"),
    pytest.param({"rope_scaling": None}, id="scaling-null"),
    pytest.param({"rope_scaling": {"rope_type": "default"}}, id="scaling-default"),
    pytest.param({"rope_scaling": {"type": "default", "rope_theta": 1e6}}, id="old-type-key"),
    pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None}, id="parameters"),
    pytest.param(
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta": None},
        id="parameters-by-layer-type",
    ),
]


@pytest.mark.parametrize("spelling", PLAIN)
def test_plain_rope_in_every_spelling(spelling):
    config = ModelConfig.from_dict(QWEN3 | spelling)
    assert config.rope == RopeConfig(theta=1e6)
    inv_freq, factor = inverse_frequencies(config)
    expected = torch.tensor([1e6 ** -(2 * i / 16) for i in range(8)], dtype=torch.float64)
    assert inv_freq.dtype == torch.float32
    assert factor == 1.0
    torch.testing.assert_close(inv_freq.double(), expected, rtol=1e-6, atol=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
SCALINGS = [
    pytest.param({"rope_type": "linear", "factor": 2.5}, id="linear"),
    pytest.param(YARN, id="yarn"),
    pytest.param(YARN | {"attention_factor": 0.7}, id="yarn-attention-factor"),
    pytest.param(YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, id="yarn-mscales"),
    pytest.param(YARN | {"mscale": 0.7}, id="yarn-one-mscale"),
    pytest.param(YARN | {"beta_fast": 20.0, "beta_slow": 2.0}, id="yarn-betas"),
    pytest.param(YARN | {"truncate": False}, id="yarn-untruncated"),
    pytest.param(YARN | {"factor": 1.0}, id="yarn-factor-1"),
    pytest.param({"rope_type": "yarn", "factor": 4.0}, id="yarn-original-length-absent"),
    pytest.param(YARN | {"original_max_position_embeddings": 4}, id="yarn-tiny-original-length"),
    pytest.param(LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, id="llama3"),
    pytest.param(LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 32.0}, id="llama3-wide"),
]


@pytest.mark.parametrize("theta", [10_000.0, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_tables_are_those_of_transformers(scaling, theta):
    hf = tiny_hf_config("LlamaForCausalLM", head_dim=64, rope_parameters=scaling | {"rope_theta": theta})
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf, device="cpu")
    ours = LLAMA | {"head_dim": 64, "rope_theta": theta, "rope_scaling": scaling}
    for raw in (
        ours,
        without(ours, "rope_theta", "rope_scaling") | {"rope_parameters": scaling | {"rope_theta": theta}},
    ):
        config = ModelConfig.from_dict(raw)
        inv_freq, factor = inverse_frequencies(config)
        assert factor == pytest.approx(expected_factor, rel=1e-12)
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
        again = ModelConfig.from_dict(config.to_dict())
        assert again.rope == config.rope


def test_yarn_differs_from_plain_rope():
    plain = ModelConfig.from_dict(LLAMA)
    yarn = replace(plain, rope=replace(plain.rope, type="yarn", factor=4.0, original_max_position_embeddings=128))
    assert not torch.equal(inverse_frequencies(yarn)[0], inverse_frequencies(plain)[0])
    assert yarn_attention_factor(yarn.rope) == pytest.approx(1.1386294361)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported; .*yarn or llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "rope factor=-1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor and high_freq_factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "differ between full_attention or sliding_attention",
        ),
    ],
)
def test_rope_that_is_not_understood_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN3 | raw)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        pytest.param({"sliding_window": 32, "use_sliding_window": False}, [0, 0], id="off"),
        pytest.param({"sliding_window": 32}, [0, 0], id="off-by-default"),
        pytest.param({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, [0, 32], id="upper"),
        pytest.param({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 28}, [0, 0], id="none"),
        pytest.param(
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [32, 0],
            id="layer-types",
        ),
    ],
)
def test_sliding_windows(raw, windows):
    config = ModelConfig.from_dict(QWEN2 | raw)
    assert [config.window(i) for i in range(2)] == windows
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_windows_that_are_not_understood_are_refused():
    with pytest.raises(ValueError, match=r"sliding_window=128 is not supported for Mistral; set it to null"):
        ModelConfig.from_dict(MISTRAL | {"sliding_window": 128})
    assert ModelConfig.from_dict(MISTRAL | {"sliding_window": 512}).sliding_window == 0
    raw = QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["chunked_attention"] * 2}
    with pytest.raises(ValueError, match="layer type 'chunked_attention'"):
        ModelConfig.from_dict(raw)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "architecture Qwen3MoeForCausalLM is not supported; supported are Q",
        ),
        ({"architectures": [], "model_type": "gemma3"}, "architecture model_type 'gemma3' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\); use the unquantised"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised \(awq\)"),
        ({"num_experts": 8}, "num_experts=8: mixture-of-experts"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "256"}, "vocab_size='256' in config.json must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"num_attention_heads": 5}, "num_heads=5 does not divide by num_kv_heads=2"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"torch_dtype": "int8"}, "dtype int8 is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_value(raw, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN3 | raw)


def test_model_type_stands_in_for_architectures():
    assert ModelConfig.from_dict(without(QWEN2, "architectures")).architecture == "Qwen2ForCausalLM"


def test_broken_folders(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a folder"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="GGUF files only"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ValueError, match="adapter, not a model; merge it"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCa')
    with pytest.raises(ValueError, match=r"not JSON.*incomplete download"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, and holds a list"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_experts": 4}))
    with pytest.raises(ValueError, match=r"config\.json: num_experts=4"):
        ModelConfig.from_pretrained(tmp_path)


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_config(), id="qwen3"),
        pytest.param(tiny_config(qkv_bias=True, o_bias=True, tie_word_embeddings=True), id="qwen3-bias-tied"),
        pytest.param(tiny_config("Qwen2ForCausalLM", eos_token_ids=(1, 2)), id="qwen2"),
        pytest.param(tiny_config("LlamaForCausalLM", mlp_bias=True, head_dim=32, dtype=None), id="llama"),
        pytest.param(tiny_config("MistralForCausalLM", eos_token_ids=()), id="mistral"),
    ],
)
def test_a_written_config_reads_back_the_same_here_and_in_transformers(config, tmp_path: Path):
    assert ModelConfig.from_dict(config.to_dict()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(hf) is HF_CONFIGS[config.architecture]
    ours = ModelConfig.from_dict(hf.to_dict() | {"architectures": [config.architecture]})
    assert ours == config


def test_generation_config_round_trip():
    config = replace(tiny_config(), generation=GenerationDefaults(temperature=0.0, top_p=0.9), eos_token_ids=(5, 7))
    assert config.generation_to_dict() == {"eos_token_id": [5, 7], "temperature": 0.0, "top_p": 0.9}
    assert ModelConfig.from_dict(config.to_dict(), config.generation_to_dict()) == config


@pytest.mark.parametrize(
    ("size", "billions"),
    [("0.6b", 0.596), ("1.7b", 1.72), ("4b", 4.02), ("8b", 8.19), ("14b", 14.77), ("32b", 32.76)],
)
def test_qwen3_sizes_have_their_published_parameter_counts(size, billions):
    c = qwen3_config(size)
    attention = 2 * c.hidden_size * c.head_dim * (c.num_heads + c.num_kv_heads) + 2 * c.head_dim
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    total = c.num_layers * layer + embeddings + c.hidden_size
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
    assert (c.head_dim, c.rope.theta, c.max_position_embeddings, c.qk_norm) == (128, 1e6, 40960, True)


def test_qwen3_sizes_take_a_number_of_layers():
    assert qwen3_config("8B", num_layers=3) == replace(qwen3_config("8b"), num_layers=3)
    with pytest.raises(ValueError, match=r"unknown size .7b.; use one of tiny, 0\.6b"):
        qwen3_config("7b")


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def test_legal_tp_sizes():
    assert legal_tp_sizes(tiny_config()) == (1, 2, 4)
    assert legal_tp_sizes(tiny_config(num_heads=6, num_kv_heads=3)) == (1, 3, 6)
    assert legal_tp_sizes(tiny_config(num_heads=6, num_kv_heads=2)) == (1, 2, 6)
    assert legal_tp_sizes(tiny_config(intermediate_size=90)) == (1, 2)
    assert legal_tp_sizes(qwen3_config("32b")) == (1, 2, 4, 8, 16, 32, 64)


def test_an_illegal_tp_size_names_the_numbers_and_the_legal_sizes():
    validate_tp(tiny_config(), 4)
    with pytest.raises(ValueError, match=r"num_heads=6 does not divide by tp=4; .*use tp 1, 2 or 6"):
        validate_tp(tiny_config(num_heads=6, num_kv_heads=2, intermediate_size=90), 4)
    with pytest.raises(ValueError, match="num_kv_heads=4 neither divides by tp=6 nor divides it; use tp 1, 2, 4 or 12"):
        validate_tp(tiny_config(num_heads=12, num_kv_heads=4), 6)
    with pytest.raises(ValueError, match="tp=0 is below 1"):
        validate_tp(tiny_config(), 0)


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_a_switch_is_true_or_false(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='yes' in config.json must be true or false"):
        ModelConfig.from_dict({**QWEN3, name: "yes"})
