"""Random checkpoints of any shape, written shard by shard, with a byte-level tokenizer that needs no download.

The values are those of `init_params` with the same seed: a function of (seed, tensor name) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from funcllm.config import ModelConfig
from funcllm.qwen3 import param_specs
from funcllm.specs import ahead, init_part, spec_leaves
from funcllm.weights.save import prepare_folder, split_shards, write_config, write_json, write_shards

MAX_SHARD_BYTES = 2 << 30

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
END_OF_TEXT, START_OF_TURN, END_OF_TURN = range(256, 259)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_random_model(
    folder: str | Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    std: float = 0.02,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a random model as a Hugging Face folder: weights, configs, byte-level tokenizer with a chat template.

    One shard and the few tensors drawn ahead are in memory at a time. The EOS ids become the tokenizer's own. progress:
    told the bytes of each tensor. Raises ValueError when the vocabulary has no room for the bytes and the special
    tokens (259 ids), and when the folder already holds weights, unless overwrite.
    """
    tokenizer = byte_tokenizer(config.vocab_size)
    folder = Path(folder)
    prepare_folder(folder, overwrite=overwrite)
    parts = {part.name: (part, spec.init) for spec in spec_leaves(param_specs(config)) for part in spec.parts}

    def draw(name: str) -> torch.Tensor:
        part, init = parts[name]
        return init_part(name, part.shape, seed=seed, std=std, init=init).to(dtype)

    shards = split_shards([(name, part.shape, dtype) for name, (part, _) in parts.items()], max_shard_bytes)
    tensors = ahead(draw, parts)
    write_shards(folder, shards, lambda name: next(tensors), progress)
    config = replace(config, eos_token_ids=(END_OF_TURN, END_OF_TEXT), bos_token_id=END_OF_TEXT)
    write_config(folder, config, dtype)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", _tokenizer_config(config.max_position_embeddings))


def byte_tokenizer(vocab_size: int = 259) -> Tokenizer:
    """A tokenizer whose token of a byte is the byte's value: text is its UTF-8 bytes, then special tokens at 256-258.

    Ids above are never produced by encoding; they decode to their own number (" t300"), so that the text of a random
    model shows which ids it chose.
    """
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size={vocab_size} has no room for 256 bytes and the special tokens; use at least 259")
    characters = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    vocabulary |= {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    space = characters[ord(" ")]
    vocabulary |= {f"{space}t{i}": i for i in range(259, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _tokenizer_config(max_length: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "additional_special_tokens": [SPECIAL_TOKENS[1]],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
