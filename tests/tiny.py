"""Tiny random models for tests: our configs, and Hugging Face folders made by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from funcllm.config import ModelConfig
from funcllm.rope import RopeConfig

HF_CONFIGS = {
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
}


def tiny_config(architecture: str = "Qwen3ForCausalLM", **overrides: Any) -> ModelConfig:
    """2 layers, hidden 64, 4 heads and 2 KV heads of 16, vocabulary 256, fp32; overrides are ModelConfig fields."""
    config = ModelConfig(
        architecture=architecture,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=architecture == "Qwen2ForCausalLM",
        rope=RopeConfig(theta=10_000.0),
        dtype=torch.float32,
        eos_token_ids=(1,),
    )
    return replace(config, **overrides)


def tiny_hf_config(architecture: str = "Qwen3ForCausalLM", **overrides: Any) -> Any:
    """The same shapes as a transformers config; overrides are its fields (num_hidden_layers, attention_bias, ...)."""
    values = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    if architecture == "MistralForCausalLM":
        values["sliding_window"] = None
    return HF_CONFIGS[architecture](**(values | overrides))


def tiny_folder(
    path: str | Path, architecture: str = "Qwen3ForCausalLM", seed: int = 0, std: float = 0.25, **overrides: Any
) -> Any:
    """Saves a random model as a Hugging Face folder and returns it: transformers' model in fp32, eval.

    Matrices and biases are normal with deviation std (so that greedy tests are not degenerate), norm weights are around
    1, and the embedding differs from the head unless they are tied. overrides: see `tiny_hf_config`; max_shard_size
    goes to save_pretrained.
    """
    save_options = {"max_shard_size": overrides.pop("max_shard_size")} if "max_shard_size" in overrides else {}
    config = tiny_hf_config(architecture, **overrides)
    model = getattr(transformers, architecture)(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(0.0, std, generator=generator)
            if "norm" in name:
                param.add_(1.0)
    model.save_pretrained(path, **save_options)
    return model
