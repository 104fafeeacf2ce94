"""ModelConfig: every static fact of a model, read from a Hugging Face folder by our own parser.

Owns the reading and writing of config.json and generation_config.json, in the spellings of transformers 4 and 5, the
shapes of the Qwen3 family, and the tensor-parallel sizes that a model allows. What we do not support is refused here
with a ValueError that names the value and the way out; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from funcllm.rope import RopeConfig, inverse_frequencies, parse_rope, rope_to_dict

__all__ = [
    "ARCHITECTURES",
    "GenerationDefaults",
    "ModelConfig",
    "RopeConfig",
    "inverse_frequencies",
    "legal_tp_sizes",
    "parse_dtype",
    "qwen3_config",
    "read_json",
    "validate_tp",
]

ARCHITECTURES = {  # class name -> model_type
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling that the model's makers recommend (generation_config.json). None: they say nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The static facts of a decoder. Hashable: part of every compilation and graph key."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_window: int = 0  # 0: none
    sliding_layers: tuple[int, ...] = ()  # the layers that it holds for
    dtype: torch.dtype | None = None  # of the stored weights; None: the config does not say
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def __post_init__(self) -> None:
        _check_numbers(self)

    @staticmethod
    def from_pretrained(folder: str | Path) -> ModelConfig:
        """The config of a Hugging Face folder: config.json, and generation_config.json where there is one."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give a folder that holds config.json and *.safetensors")
        if not (folder / "config.json").exists():
            raise ValueError(_why_no_config(folder))
        raw = read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else None
        try:
            return ModelConfig.from_dict(raw, generation)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None

    @staticmethod
    def from_dict(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """The config of a parsed config.json; generation: a parsed generation_config.json, whose EOS ids come first."""
        return _parse(raw, generation or {})

    def to_dict(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 both read; from_dict gives this config back (without generation)."""
        return _to_dict(self)

    def generation_to_dict(self) -> dict[str, Any]:
        """A generation_config.json: token ids and the recommended sampling."""
        ids = {"bos_token_id": self.bos_token_id, "eos_token_id": _ids_to_json(self.eos_token_ids)}
        values = ids | {name: getattr(self.generation, name) for name in _GENERATION_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    def window(self, layer: int) -> int:
        """The sliding window of a layer; 0: it attends to everything before."""
        return self.sliding_window if layer in self.sliding_layers else 0


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
_GENERATION_FIELDS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def parse_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """A floating dtype by name ("bfloat16", "torch.bfloat16", "bf16", ...); "auto" and None are None."""
    if value is None or value == "auto":
        return None
    if isinstance(value, torch.dtype):
        dtype: torch.dtype | None = value if value in DTYPES.values() else None
    else:
        dtype = DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype {value} is not supported; use bfloat16, float16, float32 or auto")
    return dtype


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; a missing, unreadable or Git LFS pointer file is a ValueError that names it."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give a Hugging Face model folder, downloaded to the end") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if text.startswith("version https://git-lfs"):
        raise ValueError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}); it may be an incomplete download") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(value).__name__}")
    return value


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def legal_tp_sizes(config: ModelConfig) -> tuple[int, ...]:
    """The tensor-parallel sizes that this model can be cut into, ascending."""
    return tuple(tp for tp in range(1, config.num_heads + 1) if not _tp_obstacles(config, tp))


def validate_tp(config: ModelConfig, tp: int) -> None:
    """Raises ValueError, with the numbers and the legal sizes, where this model cannot be cut into tp shards."""
    obstacles = _tp_obstacles(config, tp)
    if obstacles:
        sizes = [str(size) for size in legal_tp_sizes(config)]
        listed = ", ".join(sizes[:-1]) + " or " + sizes[-1] if len(sizes) > 1 else sizes[0]
        raise ValueError(f"{'; '.join(obstacles)}; use tp {listed}")


def _tp_obstacles(config: ModelConfig, tp: int) -> list[str]:
    if tp < 1:
        return [f"tp={tp} is below 1"]
    obstacles = []
    if config.num_heads % tp:
        obstacles.append(f"num_heads={config.num_heads} does not divide by tp={tp}")
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        obstacles.append(f"num_kv_heads={config.num_kv_heads} neither divides by tp={tp} nor divides it")
    if config.intermediate_size % tp:
        obstacles.append(f"intermediate_size={config.intermediate_size} does not divide by tp={tp}")
    return obstacles


# --- the Qwen3 family ------------------------------------------------------------------------------------------------

_QWEN3_SHAPES = {  # hidden, ffn, layers, heads, KV heads, head_dim, tied
    "tiny": (64, 96, 2, 4, 2, 16, True),
    "0.6b": (1024, 3072, 28, 16, 8, 128, True),
    "1.7b": (2048, 6144, 28, 16, 8, 128, True),
    "4b": (2560, 9728, 36, 32, 8, 128, True),
    "8b": (4096, 12288, 36, 32, 8, 128, False),
    "14b": (5120, 17408, 40, 40, 8, 128, False),
    "32b": (5120, 25600, 64, 64, 8, 128, False),
}


def qwen3_config(size: str, *, num_layers: int | None = None) -> ModelConfig:
    """The config of a Qwen3 model by its size: 0.6b, 1.7b, 4b, 8b, 14b, 32b, or tiny (2 layers, vocabulary 320)."""
    if size.lower() not in _QWEN3_SHAPES:
        raise ValueError(f"unknown size {size!r}; use one of {', '.join(_QWEN3_SHAPES)}")
    hidden, ffn, layers, heads, kv_heads, head_dim, tied = _QWEN3_SHAPES[size.lower()]
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        qk_norm=True,
        rope=RopeConfig(theta=1_000_000.0),
        dtype=torch.bfloat16,
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
        generation=GenerationDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95),
    )
    if size.lower() == "tiny":
        config = replace(config, vocab_size=320, eos_token_ids=(258, 256), bos_token_id=256)
    return config if num_layers is None else replace(config, num_layers=num_layers)


# --- reading and writing config.json ---------------------------------------------------------------------------------


def _why_no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return f"{folder} holds an adapter, not a model; merge it into its base first (peft: merge_and_unload)"
    if any(folder.glob("*.gguf")):
        return f"{folder} holds GGUF files only; use the model's safetensors checkpoint, GGUF is not read"
    return f"{folder} holds no config.json; give a Hugging Face model folder, downloaded to the end"


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    kind = ARCHITECTURES[architecture]
    num_heads = _int(raw, "num_attention_heads")
    num_layers = _int(raw, "num_hidden_layers")
    hidden_size = _int(raw, "hidden_size")
    max_positions = _int(raw, "max_position_embeddings", default=2048 if kind == "llama" else 32768)
    attention_bias = _bool(raw, "attention_bias") and kind in ("qwen3", "llama")
    sliding_window, sliding_layers = _sliding(raw, kind, num_layers, max_positions)
    eos = generation.get("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(raw, kind, num_heads),
        head_dim=_head_dim(raw, kind, hidden_size, num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=_float(raw, "rms_norm_eps", default=1e-6),
        tie_word_embeddings=_bool(raw, "tie_word_embeddings"),
        qk_norm=kind == "qwen3",
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_bool(raw, "mlp_bias") and kind == "llama",
        rope=parse_rope(raw, max_position_embeddings=max_positions),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        dtype=_stored_dtype(raw),
        eos_token_ids=_ids(raw.get("eos_token_id") if eos is None else eos, "eos_token_id"),
        bos_token_id=_bos(raw, generation),
        generation=_generation_defaults(generation),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise ValueError(f"architectures must be a list in config.json, and is {named!r}")
    if named:
        name = str(named[0])
    else:
        by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
        name = by_type.get(str(raw.get("model_type")), f"model_type {raw.get('model_type')!r}")
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return name


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = raw.get(key)
        if quantization:
            details = quantization if isinstance(quantization, Mapping) else {}
            method = details.get("quant_method") or details.get("quantization_status") or key
            raise ValueError(f"the checkpoint is quantised ({method}); use the unquantised bf16 or fp16 checkpoint")
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(key)]
    if experts:
        raise ValueError(f"{experts[0]}={raw[experts[0]]}: mixture-of-experts is not supported; use a dense model")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; only silu is (swap the mlp for another)")


def _num_kv_heads(raw: Mapping[str, Any], kind: str, num_heads: int) -> int:
    if raw.get("num_key_value_heads", num_heads if kind == "llama" else 0) is None:
        return num_heads
    return _int(raw, "num_key_value_heads", default=num_heads if kind == "llama" else None)


def _head_dim(raw: Mapping[str, Any], kind: str, hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        return _int(raw, "head_dim")
    if kind == "qwen3":
        return 128
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} does not divide by num_attention_heads={num_heads}; add head_dim")
    return hidden_size // num_heads


def _sliding(raw: Mapping[str, Any], kind: str, num_layers: int, max_positions: int) -> tuple[int, tuple[int, ...]]:
    """(window, the layers it holds for); a window that no position can leave is none."""
    if kind == "llama":
        return 0, ()
    if kind == "mistral":
        window = raw.get("sliding_window", 4096)
        if window is not None and window < max_positions:
            raise ValueError(
                f"sliding_window={window} is not supported for Mistral; set it to null in config.json and keep"
                f" sequences within {window} tokens"
            )
        return 0, ()
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    if window is None:
        return 0, ()
    window = _int(raw, "sliding_window")
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        layers = tuple(range(num_layers))[first:]
    else:
        layers = _sliding_layers(layer_types, num_layers)
    return (window, layers) if layers else (0, ())


def _sliding_layers(layer_types: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ValueError(f"layer_types must list one type for each of {num_layers} layers, and is {layer_types!r}")
    unknown = set(layer_types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"layer type {sorted(unknown)[0]!r} is not supported; use full_attention or sliding_attention")
    return tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")


def _stored_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    return parse_dtype(raw.get("dtype") or raw.get("torch_dtype"))


def _bos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> int | None:
    ids = _ids(generation.get("bos_token_id", raw.get("bos_token_id")), "bos_token_id")
    return ids[0] if ids else None


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    values = {name: generation[name] for name in _GENERATION_FIELDS if generation.get(name) is not None}
    wrong = {name: value for name, value in values.items() if not isinstance(value, int | float)}
    if wrong:
        name, value = next(iter(wrong.items()))
        raise ValueError(f"{name}={value!r} in generation_config.json must be a number")
    return GenerationDefaults(**values)


def _ids(value: Any, name: str) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise ValueError(f"{name}={value!r} must be a token id or a list of token ids")
    return tuple(dict.fromkeys(values))


def _ids_to_json(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def _int(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name} is missing in config.json; add it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} in config.json must be a positive whole number")
    return value


def _bool(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} in config.json must be true or false")
    return bool(value)


def _float(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name}={value!r} in config.json must be a positive number")
    return float(value)


def _check_numbers(config: ModelConfig) -> None:
    for name in _POSITIVE:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {config.architecture} is not supported; use one of {', '.join(ARCHITECTURES)}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} does not divide by num_kv_heads={config.num_kv_heads};"
            " each KV head must serve a whole number of query heads"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} is odd; the rotary embedding needs an even one")


def _to_dict(config: ModelConfig) -> dict[str, Any]:
    kind = ARCHITECTURES[config.architecture]
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _ids_to_json(config.eos_token_ids),
        **rope_to_dict(config.rope),
    }
    if config.dtype is not None:
        values["torch_dtype"] = str(config.dtype).removeprefix("torch.")
    if kind == "llama":
        values |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if kind == "mistral":
        values |= {"sliding_window": None}
    if kind in ("qwen2", "qwen3"):
        values |= _sliding_to_dict(config)
    if kind == "qwen3":
        values |= {"attention_bias": config.qkv_bias}
    return values


def _sliding_to_dict(config: ModelConfig) -> dict[str, Any]:
    if not config.sliding_layers:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
    kinds = ["sliding_attention" if config.window(i) else "full_attention" for i in range(config.num_layers)]
    first = config.sliding_layers[0]
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": kinds,
    }
