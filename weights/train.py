"""Trains a small Qwen3 model on a text file, through the functions that serve it.

    python -m funcllm.weights.train TEXT_FILE OUT_FOLDER

Owns the whole way from a text to a Hugging Face folder: tokenizer, token arrays, loss, optimiser, schedule, folder.
The model is `funcllm.logits`, mapped over a batch by `torch.func.vmap` and differentiated by
`torch.func.grad_and_value`. One step of the training is a pure function (state, ids, rate) -> (state, loss), so that
keeping the best parameters is keeping a reference to them. Dropout is an edit of two sites, not a part of the model.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from funcllm.config import GenerationDefaults, ModelConfig, validate_tp
from funcllm.qwen3 import logits, param_specs
from funcllm.record import Layers
from funcllm.rope import RopeConfig
from funcllm.specs import init_params
from funcllm.types import Context, PyTree
from funcllm.weights.random_model import CHAT_TEMPLATE, SPECIAL_TOKENS
from funcllm.weights.save import prepare_folder, save_params, write_json

END_OF_TEXT, START_OF_TURN, END_OF_TURN = SPECIAL_TOKENS

WORDS = r" ?\p{L}+|['\u2019](?:s|t|d|m|ll|re|ve)\b|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a training runs. minutes: 0 is no limit; with one, the schedule ends when steps or minutes do."""

    steps: int = 3000
    batch: int = 32
    context: int = 1024
    rate: float = 3e-3
    warmup: int = 100
    final_rate: float = 0.05  # of the highest
    weight_decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.1
    average: float = 0.995  # decay of the running average of the parameters, which is what is kept; 0: none
    every: int = 100  # steps between looks at the held-out text
    minutes: float = 0.0
    seed: int = 0


class Corpus(NamedTuple):
    """Token ids of the two parts of a text, and how many characters a held-out token stands for."""

    training_ids: Tensor  # int32 [tokens]
    held_out_ids: Tensor  # int32 [tokens]
    characters_per_token: float


class TrainState(NamedTuple):
    """All that one step hands to the next, in fp32."""

    params: PyTree
    mean: PyTree  # of the gradients, running
    square: PyTree  # of their squares, running
    average: PyTree  # of the parameters, running
    step: Tensor  # fp32 []


class Trained(NamedTuple):
    """The best parameters, judged by the held-out text, and how the training went."""

    params: PyTree
    bits_per_character: float
    best_step: int
    steps: int
    tokens: int
    seconds: float


# --- from text to token ids ------------------------------------------------------------------------------------------


def documents(text: str) -> list[str]:
    """The documents of a text: two or more blank lines stand between them."""
    found = [part.strip() for part in re.split(r"\n(?:[ \t]*\n){2,}", text.replace("\r\n", "\n"))]
    return [part for part in found if part]


def hold_out(document: str, share: float) -> tuple[str, str]:
    """A document cut at the paragraph where the last `share` of its characters begins: (training, held out)."""
    limit = int(len(document) * (1 - share))
    cut = document.rfind("\n\n", 0, limit + 2)
    cut = cut if cut > 0 else limit
    return document[:cut], document[cut:].strip()


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most vocab_size ids; the special tokens are ids 0, 1, 2."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size={vocab_size} has no room for 256 bytes and the special tokens; use at least 259")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chats(document: str, every: int, characters: int = 1500) -> Iterator[str]:
    """Every n-th passage of a document as a chat: the user opens with its first sentence, the assistant goes on.

    Without them the ids of the chat template would never be trained.
    """
    passages, passage = [], ""
    for paragraph in re.split(r"\n\s*\n", document):
        passage = f"{passage}\n\n{paragraph}" if passage else paragraph
        if len(passage) >= characters:
            passages.append(passage)
            passage = ""
    for passage in passages[::every] if every else ():
        opening = re.match(r".{20,300}?[.!?;:,]['\u2019\u201d\"]*(?=\s)", passage, re.DOTALL)
        if opening:
            answer = passage[opening.end() :].strip()
            yield (
                f"{START_OF_TURN}user\n{opening.group()}{END_OF_TURN}\n"
                f"{START_OF_TURN}assistant\n{answer}{END_OF_TURN}\n{END_OF_TEXT}"
            )


def read_corpus(text: str, vocab_size: int, *, held_out: float = 0.02, chat_every: int = 8) -> tuple[Tokenizer, Corpus]:
    """The tokenizer trained on a text, and the text as ids: each document ends with the end-of-text token.

    held_out: the share of each document, at its end, that neither tokenizer nor model is trained on. chat_every: one in
    so many passages also appears as a chat (0: none).
    """
    parts = [hold_out(document, held_out) for document in documents(text)]
    if not parts:
        raise ValueError("the text is empty; give a file with some megabytes of plain text")
    training, held = [part for part, _ in parts], [part for _, part in parts if part]
    tokenizer = train_tokenizer(training, vocab_size)
    talks = [chat for document in training for chat in chats(document, chat_every)]
    held_out_ids = _ids(tokenizer, [part + END_OF_TEXT for part in held])
    corpus = Corpus(
        training_ids=_ids(tokenizer, [part + END_OF_TEXT for part in training] + talks),
        held_out_ids=held_out_ids,
        characters_per_token=sum(map(len, held)) / max(1, len(held_out_ids)),
    )
    return tokenizer, corpus


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return torch.tensor([i for encoding in encoded for i in encoding.ids], dtype=torch.int32)


# --- loss and one step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropout:
    """An edit of a site that zeroes a share of what passes and scales the rest up; equal by value, as records want."""

    share: float

    def __call__(self, x: Tensor, context: Context, /) -> Tensor:
        return F.dropout(x, self.share)


def with_dropout(layers: Layers, share: float) -> Layers:
    """The record that drops a share of what attention and MLP add to the stream."""
    if not share:
        return layers
    return layers.edit("layers.*.attention.out", Dropout(share)).edit("layers.*.mlp.out", Dropout(share))


def next_token_loss(params: PyTree, ids_bt: Tensor, *, config: ModelConfig, layers: Layers = Layers()) -> Tensor:
    """The mean cross entropy, in nats, of each token behind its predecessors; ids_bt holds one more than is read."""

    def of_sequence(ids_t: Tensor) -> Tensor:
        return logits(params, ids_t, config=config, layers=layers)

    logits_btv = torch.func.vmap(of_sequence, randomness="different")(ids_bt[:, :-1])
    return F.cross_entropy(logits_btv.flatten(0, 1), ids_bt[:, 1:].flatten().long())


def start(params: PyTree) -> TrainState:
    """The state before the first step."""
    zeros = pytree.tree_map(torch.zeros_like, params)
    step = torch.zeros((), device=pytree.tree_leaves(params)[0].device)
    return TrainState(params, zeros, zeros, params, step)


def train_step(
    state: TrainState, ids_bt: Tensor, rate: Tensor, *, config: ModelConfig, layers: Layers, recipe: Recipe
) -> tuple[TrainState, Tensor]:
    """(the next state, the loss): gradients, clipped to a norm of recipe.clip, and one step of AdamW."""

    def loss_of(params: PyTree) -> Tensor:
        return next_token_loss(params, ids_bt, config=config, layers=layers)

    grads, loss = torch.func.grad_and_value(loss_of)(state.params)
    return adamw(state, clipped(grads, recipe.clip), rate, recipe), loss


def clipped(grads: PyTree, limit: float) -> PyTree:
    """The gradients, scaled down where their common norm exceeds the limit."""
    norms = torch.stack([grad.norm() for grad in pytree.tree_leaves(grads)])
    scale = (limit / (norms.norm() + 1e-6)).clamp(max=1.0)
    return pytree.tree_map(lambda grad: grad * scale, grads)


def adamw(
    state: TrainState, grads: PyTree, rate: Tensor, recipe: Recipe, beta1: float = 0.9, beta2: float = 0.95
) -> TrainState:
    """AdamW (Loshchilov and Hutter, 2019), with the running average of the parameters; matrices decay, norms do not."""
    step = state.step + 1
    mean = pytree.tree_map(lambda m, g: m + (1 - beta1) * (g - m), state.mean, grads)
    square = pytree.tree_map(lambda s, g: s + (1 - beta2) * (g * g - s), state.square, grads)
    mean_scale, square_scale = 1 / (1 - beta1**step), 1 / (1 - beta2**step)

    def moved(param: Tensor, m: Tensor, s: Tensor) -> Tensor:
        decay = recipe.weight_decay if param.dim() > 1 else 0.0
        return param - rate * (m * mean_scale / ((s * square_scale).sqrt() + 1e-8) + decay * param)

    params = pytree.tree_map(moved, state.params, mean, square)
    kept = torch.clamp(step / (step + 10), max=recipe.average) if recipe.average else torch.zeros_like(step)
    average = pytree.tree_map(lambda a, p: p + kept * (a - p), state.average, params)
    return TrainState(params, mean, square, average, step)


def rate_at(progress: float, step: int, recipe: Recipe) -> float:
    """The learning rate: linear warm-up, then a cosine over the share `progress` of the training that is done."""
    lowest = recipe.final_rate * recipe.rate
    cosine = lowest + 0.5 * (recipe.rate - lowest) * (1 + math.cos(math.pi * min(1.0, progress)))
    return cosine * min(1.0, (step + 1) / max(1, recipe.warmup))


# --- the training ----------------------------------------------------------------------------------------------------


def train(
    params: PyTree,
    corpus: Corpus,
    config: ModelConfig,
    recipe: Recipe,
    *,
    report: Report = lambda line: None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """The parameters with the lowest loss on the held-out text.

    Runs on the device of `params`; batches are drawn there, and the host waits for it at every 50th step only.
    Raises ValueError for a text that is too short, and when the loss was never finite.
    report: told a line at every look at the held-out text; progress: told (step, loss).
    """
    _check(corpus, recipe)
    device = pytree.tree_leaves(params)[0].device
    torch.manual_seed(recipe.seed)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    training_ids, held_out_ids = corpus.training_ids.to(device), corpus.held_out_ids.to(device)
    layers = with_dropout(Layers(), recipe.dropout)
    state, rate = start(params), torch.zeros((), device=device)
    begun, done = time.monotonic(), 0.0
    best, best_step, step, loss = (math.inf, params), 0, 0, math.nan

    def one_step(state: TrainState, ids_bt: Tensor, rate: Tensor) -> tuple[TrainState, Tensor]:
        return train_step(state, ids_bt, rate, config=config, layers=layers, recipe=recipe)

    run = traced(one_step, (state, draw(training_ids, recipe, generator), rate), report)
    with torch.no_grad():
        while done < 1.0:
            rate = torch.full((), rate_at(done, step, recipe), device=device)
            state, loss_now = run(state, draw(training_ids, recipe, generator), rate)
            step += 1
            if step % min(50, recipe.every) == 0:
                loss = loss_now.item()
            progress(step, loss)
            done = _done(step, time.monotonic() - begun, recipe)
            if step % recipe.every == 0 or done >= 1.0:
                bits = bits_per_character(state.average, held_out_ids, corpus, config, recipe)
                speed = step * recipe.batch * recipe.context / (time.monotonic() - begun)
                report(
                    f"step {step}: loss {loss_now.item():.3f}, held out {bits:.3f} bits per character, "
                    f"{speed:,.0f} tokens/s"
                )
                if bits < best[0]:
                    best, best_step = (bits, state.average), step
    if best_step == 0:
        raise ValueError(f"the held-out loss was never finite with rate={recipe.rate:g}; use a smaller --rate")
    return Trained(
        params=best[1],
        bits_per_character=best[0],
        best_step=best_step,
        steps=step,
        tokens=step * recipe.batch * recipe.context,
        seconds=time.monotonic() - begun,
    )


def traced(fn: Callable[..., PyTree], args: tuple[PyTree, ...], report: Report) -> Callable[..., PyTree]:
    """fn as the flat list of operations that it does on such arguments: the same values, without the transforms' cost.

    A pure function of tensors may be recorded once and replayed. Where it cannot be, fn itself, and the reason is said.
    The recording knows its arguments by identity, hence the copies: a tensor that stands in two places is two.
    """
    try:
        return make_fx(fn)(*pytree.tree_map(torch.clone, args))
    except Exception as error:
        report(f"the step runs untraced, which is slower: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return fn


def draw(ids: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """A batch of context + 1 ids each, from random places."""
    places_b = torch.randint(
        len(ids) - recipe.context, (recipe.batch, 1), generator=generator, device=ids.device, dtype=torch.int64
    )
    return ids[places_b + torch.arange(recipe.context + 1, device=ids.device)]


def bits_per_character(
    params: PyTree, held_out_ids: Tensor, corpus: Corpus, config: ModelConfig, recipe: Recipe
) -> float:
    """What the held-out text costs in windows of the training's context, each read without what stands before it."""
    length = min(recipe.context, len(held_out_ids) - 1)
    windows = held_out_ids.unfold(0, length + 1, length)
    with torch.no_grad():
        losses = [len(ids) * next_token_loss(params, ids, config=config) for ids in windows.split(recipe.batch)]
    nats_per_token = float(torch.stack(losses).sum()) / len(windows)
    return nats_per_token / math.log(2) / corpus.characters_per_token


def _done(step: int, seconds: float, recipe: Recipe) -> float:
    timed = seconds / (60 * recipe.minutes) if recipe.minutes else 0.0
    return max(step / recipe.steps, timed)


def _check(corpus: Corpus, recipe: Recipe) -> None:
    if len(corpus.training_ids) <= recipe.context + 1:
        raise ValueError(
            f"the text has {len(corpus.training_ids)} tokens to train on, fewer than context={recipe.context} + 2; "
            "give more text, or a smaller --context"
        )
    if len(corpus.held_out_ids) < 16:
        raise ValueError(
            f"the held-out text has {len(corpus.held_out_ids)} tokens, too few to judge by; "
            "give more text, or a larger --held-out"
        )


# --- the folder ------------------------------------------------------------------------------------------------------


def write_folder(
    folder: Path, trained: Trained, tokenizer: Tokenizer, config: ModelConfig, recipe: Recipe, about: str, device: str
) -> None:
    """A Hugging Face folder: bf16 weights, configs, tokenizer with its chat template, and a README with the figures."""
    params = pytree.tree_map(lambda param: param.to(torch.bfloat16), trained.params)
    save_params(params, param_specs(config), config, folder, overwrite=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [START_OF_TURN],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "README.md").write_text(readme(trained, config, recipe, about, device), encoding="utf-8")


def readme(trained: Trained, config: ModelConfig, recipe: Recipe, about: str, device: str) -> str:
    """The folder's note: what the model is, what it was trained on, how, and how well it reads."""
    heads = f"{config.num_heads} query heads and {config.num_kv_heads} key-value heads of {config.head_dim}"
    million = f"{trained.tokens / 1e6:.1f} million tokens"
    return f"""# A small Qwen3 model

{_size(trained.params) / 1e6:.1f} million parameters: {config.num_layers} layers of width {config.hidden_size},
{heads}, feed-forward width {config.intermediate_size},
a tied embedding of {config.vocab_size} byte-level BPE tokens, {config.max_position_embeddings} positions (the length \
it was trained at).
It continues text; in a chat it goes on from the user's first sentence.

## Text

{about}

## Training

`python -m funcllm.weights.train` on {device}, through `funcllm.logits`, the function that serves it:
{trained.steps} steps of {recipe.batch} x {recipe.context} ({million}) in {trained.seconds / 60:.1f} minutes, \
seed {recipe.seed};
AdamW, highest rate {recipe.rate:g}, weight decay {recipe.weight_decay:g}, dropout {recipe.dropout:g}, \
running average of the parameters {recipe.average:g}.

Held-out text costs **{trained.bits_per_character:.3f} bits per character** (step {trained.best_step}, the best one, \
is what is stored).
"""


# --- the command line ------------------------------------------------------------------------------------------------


def model_config(
    tokenizer: Tokenizer, *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, context: int
) -> ModelConfig:
    """The config of a small tied Qwen3 for this tokenizer; its positions end where the training's context does."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        qk_norm=True,
        rope=RopeConfig(theta=10_000.0),
        dtype=torch.bfloat16,
        eos_token_ids=(SPECIAL_TOKENS.index(END_OF_TURN), SPECIAL_TOKENS.index(END_OF_TEXT)),
        bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        generation=GenerationDefaults(do_sample=True, temperature=0.8, top_p=0.95),
    )


def initial_params(config: ModelConfig, seed: int, device: torch.device | str) -> PyTree:
    """Random parameters; what adds to the residual stream starts smaller, by the square root of its additions."""
    params = init_params(param_specs(config), seed=seed, device=device)
    scale = (2 * config.num_layers) ** -0.5

    def damped(layer: PyTree) -> PyTree:
        o_proj, down_proj = layer.self_attn.o_proj, layer.mlp.down_proj
        return layer._replace(
            self_attn=layer.self_attn._replace(o_proj=o_proj._replace(weight=o_proj.weight * scale)),
            mlp=layer.mlp._replace(down_proj=down_proj._replace(weight=down_proj.weight * scale)),
        )

    return params._replace(layers=tuple(damped(layer) for layer in params.layers))


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("text_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out_folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", default=Recipe.steps, type=click.IntRange(1), help="Steps of the optimiser.")
@click.option("--minutes", default=0.0, type=click.FloatRange(0), help="Ends the schedule by this time; 0: no limit.")
@click.option("--batch", default=Recipe.batch, type=click.IntRange(1), help="Sequences a step.")
@click.option(
    "--context", default=Recipe.context, type=click.IntRange(8), help="Tokens a sequence; also the limit of the model."
)
@click.option(
    "--vocab-size", default=4096, type=click.IntRange(259), help="Ids of the tokenizer, special ones included."
)
@click.option("--layers", default=6, type=click.IntRange(1), help="Decoder layers.")
@click.option("--hidden", default=256, type=click.IntRange(1), help="Width of the residual stream.")
@click.option("--ffn", default=704, type=click.IntRange(1), help="Width of the feed-forward network.")
@click.option("--heads", default=4, type=click.IntRange(1), help="Query heads.")
@click.option("--kv-heads", default=2, type=click.IntRange(1), help="Key-value heads; must divide the query heads.")
@click.option(
    "--head-dim", default=64, type=click.IntRange(2), help="Width of a head; the GPU kernels take 64, 128, ..."
)
@click.option("--rate", default=Recipe.rate, type=click.FloatRange(0, min_open=True), help="Highest learning rate.")
@click.option("--warmup", default=Recipe.warmup, type=click.IntRange(0), help="Steps until that rate.")
@click.option("--weight-decay", default=Recipe.weight_decay, type=click.FloatRange(0), help="Decay of the matrices.")
@click.option(
    "--dropout",
    default=Recipe.dropout,
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of each layer's update.",
)
@click.option(
    "--average",
    default=Recipe.average,
    type=click.FloatRange(0, 1, max_open=True),
    help="Decay of the parameter average.",
)
@click.option("--every", default=Recipe.every, type=click.IntRange(1), help="Steps between looks at the held-out text.")
@click.option(
    "--held-out", default=0.02, type=click.FloatRange(0, 0.5, min_open=True), help="Share of each document to judge by."
)
@click.option(
    "--chat-every", default=8, type=click.IntRange(0), help="One passage in so many is seen as a chat too; 0: none."
)
@click.option("--seed", default=0, type=int, help="Of the initial values, the batches and the dropout.")
@click.option("--device", default=None, help="cpu, cuda, cuda:1, ...; the GPU where there is one.")
@click.option("--about", default=None, help="What the text is and its licence, for the folder's README.")
def main(text_file: Path, out_folder: Path, about: str | None, device: str | None, **options: float) -> None:
    """Train a small Qwen3 model on TEXT_FILE and write it to OUT_FOLDER as a Hugging Face folder.

    TEXT_FILE is UTF-8 text: paragraphs stand apart by a blank line, documents by two. A byte-level BPE tokenizer is
    trained first, then the model; what is kept is the step that reads the held-out end of each document best.

    The defaults make a model of 5.5 million parameters (11 MB), which a data-centre GPU trains in a few minutes and
    10 MB of text is enough for. On a CPU, start smaller:

    \b
        python -m funcllm.weights.train tales.txt out --minutes 10 --batch 8 --context 256 --dropout 0
        funclaunch generate --model out --prompt "Once upon a time"
    """
    console = Console()
    try:
        _run(text_file, out_folder, about, device, options, console)
    except (ValueError, UnicodeDecodeError) as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


def _run(
    text_file: Path,
    out_folder: Path,
    about: str | None,
    device: str | None,
    options: dict[str, float],
    console: Console,
) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = {name: int(options.pop(name)) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")}
    corpus_options = {"held_out": options.pop("held_out"), "chat_every": int(options.pop("chat_every"))}
    vocab_size = int(options.pop("vocab_size"))
    recipe = replace(Recipe(), **options)  # type: ignore[arg-type]
    prepare_folder(out_folder, overwrite=True)
    tokenizer, corpus = read_corpus(text_file.read_text(encoding="utf-8"), vocab_size, **corpus_options)  # type: ignore[arg-type]
    config = model_config(tokenizer, context=recipe.context, **shape)
    validate_tp(config, 1)
    params = initial_params(config, recipe.seed, device)
    console.print(
        f"{len(corpus.training_ids):,} tokens to train on, {len(corpus.held_out_ids):,} held out "
        f"({corpus.characters_per_token:.2f} characters each); {_size(params):,} parameters on {_name(device)}",
        highlight=False,
        soft_wrap=True,
    )
    with _bar(console) as bar, _tf32(device):
        task = bar.add_task("training", total=recipe.steps, loss=math.nan)
        trained = train(
            params,
            corpus,
            config,
            recipe,
            report=lambda line: console.print(line, highlight=False, soft_wrap=True),
            progress=lambda step, loss: bar.update(task, completed=step, loss=loss),
        )
    about = about or f"`{text_file.name}`."
    write_folder(out_folder, trained, tokenizer, config, recipe, about, _name(device))
    console.print(
        f"{out_folder}: {trained.bits_per_character:.3f} bits per character, "
        f"step {trained.best_step} of {trained.steps}",
        highlight=False,
        soft_wrap=True,
    )


class _tf32:
    """Matrix products of fp32 tensors in TF32 on a GPU, and as before when it is over."""

    def __init__(self, device: str) -> None:
        self.precision = "high" if torch.device(device).type == "cuda" else torch.get_float32_matmul_precision()

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)

    def __exit__(self, *details: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _size(params: PyTree) -> int:
    return sum(param.numel() for param in pytree.tree_leaves(params))


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "the CPU"


if __name__ == "__main__":
    main()
