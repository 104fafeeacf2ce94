"""The training: text to tokens, one step against torch's own optimiser, and a folder that transformers can read."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer
from torch.utils import _pytree as pytree

from funcllm.config import ModelConfig, legal_tp_sizes
from funcllm.qwen3 import logits, param_specs
from funcllm.record import Layers
from funcllm.specs import init_params, named
from funcllm.weights.load import load_params
from funcllm.weights.train import (
    END_OF_TEXT,
    END_OF_TURN,
    Corpus,
    Recipe,
    adamw,
    bits_per_character,
    chats,
    clipped,
    documents,
    draw,
    hold_out,
    initial_params,
    main,
    model_config,
    next_token_loss,
    rate_at,
    read_corpus,
    start,
    traced,
    train,
    train_step,
    train_tokenizer,
    with_dropout,
)

NAMES = ["the king", "a fox", "the old woman", "Jack"]
DEEDS = ["went", "ran", "walked"]
PLACES = ["wood", "sea", "hill"]
SHAPE = {"layers": 1, "hidden": 32, "ffn": 48, "heads": 2, "kv_heads": 1, "head_dim": 16}


def tales(num_documents: int = 4, paragraphs: int = 60, seed: int = 0) -> str:
    """Sentences that a few rules make: three choices of 4, 3 and 3 in each, so at best log2(36) bits a sentence."""
    rng = random.Random(seed)

    def sentence() -> str:
        return f"Then {rng.choice(NAMES)} {rng.choice(DEEDS)} over to the {rng.choice(PLACES)}."

    def paragraph() -> str:
        return " ".join(sentence() for _ in range(6))

    return "\n\n\n".join("\n\n".join(paragraph() for _ in range(paragraphs)) for _ in range(num_documents))


def micro(context: int = 32, **recipe: Any) -> tuple[ModelConfig, Any, Corpus, Recipe]:
    tokenizer, corpus = read_corpus(tales(), 300)
    config = model_config(tokenizer, context=context, **SHAPE)
    values = {"steps": 8, "batch": 2, "context": context, "dropout": 0.0, "warmup": 2, "every": 4, **recipe}
    return config, initial_params(config, 0, "cpu"), corpus, Recipe(**values)


# --- text ------------------------------------------------------------------------------------------------------------


def test_two_blank_lines_part_documents() -> None:
    assert documents("a\n\nb\n\n\nc\n \n\t\nd\r\n\r\n\r\ne\n\n\n") == ["a\n\nb", "c", "d", "e"]


def test_the_end_of_a_document_is_held_out_at_a_paragraph() -> None:
    document = "\n\n".join(["x" * 98] * 10)
    training, held = hold_out(document, 0.2)
    assert training == "\n\n".join(["x" * 98] * 8)
    assert held == "\n\n".join(["x" * 98] * 2)


def test_a_document_of_one_paragraph_is_cut_by_length() -> None:
    assert hold_out("x" * 100, 0.1) == ("x" * 90, "x" * 10)


def test_tokenizer_gives_text_back_and_keeps_special_tokens_whole() -> None:
    tokenizer = train_tokenizer([tales()], 300)
    text = "Then \u2018Jack\u2019 didn\u2019t  go\n\n\tover 1865 seas \u2013 né 🦊"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ids = tokenizer.encode(f"Then{END_OF_TURN}\n{END_OF_TEXT}").ids
    assert ids[1:] == [2, tokenizer.token_to_id("Ċ"), 0]
    assert tokenizer.get_vocab_size() == 300


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=258 has no room .* use at least 259"):
        train_tokenizer(["text"], 258)


def test_chats_open_with_the_first_sentence() -> None:
    first, second = "Once upon a time there was a fox. He ran.", "Once upon a time there was a hen! She sat."
    assert list(chats(f"{first}\n\n{second}", every=2, characters=20)) == [
        "<|im_start|>user\nOnce upon a time there was a fox.<|im_end|>\n"
        "<|im_start|>assistant\nHe ran.<|im_end|>\n<|endoftext|>"
    ]
    assert list(chats(first, every=0, characters=20)) == []


def test_each_part_of_a_corpus_ends_its_documents() -> None:
    tokenizer, corpus = read_corpus(tales(3), 300, held_out=0.1, chat_every=0)
    assert (corpus.training_ids == 0).sum() == (corpus.held_out_ids == 0).sum() == 3
    held = sum(len(hold_out(document, 0.1)[1]) for document in documents(tales(3)))
    assert corpus.characters_per_token == pytest.approx(held / len(corpus.held_out_ids))
    assert tokenizer.decode(corpus.training_ids.tolist()).startswith(tales(3)[:200])


# --- loss and step ---------------------------------------------------------------------------------------------------


def test_loss_and_gradients_are_those_of_transformers() -> None:
    config, _, corpus, _ = micro()
    specs = param_specs(config)
    params = init_params(specs, seed=1, std=0.2)
    fields = {key: value for key, value in config.to_dict().items() if key not in ("architectures", "model_type")}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).float()
    model.load_state_dict(named(params, specs), strict=False)
    ids_bt = corpus.training_ids[:99].reshape(3, 33)
    theirs_btv = model(ids_bt[:, :-1].long()).logits
    expected = torch.nn.functional.cross_entropy(theirs_btv.flatten(0, 1), ids_bt[:, 1:].flatten().long())
    expected.backward()
    grads, loss = torch.func.grad_and_value(functools.partial(next_token_loss, config=config))(params, ids_bt)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    ours = named(grads, specs)
    for name, param in model.named_parameters():
        if name in ours:
            error = (ours[name] - param.grad).norm() / param.grad.norm()
            assert error < 1e-4, f"{name}: {error}"


def test_adamw_is_torchs_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    tree = {"matrix": torch.randn(5, 3, generator=generator), "norm": torch.randn(4, generator=generator)}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in tree.items()}
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.3}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    state, recipe = start(tree), Recipe(weight_decay=0.3, average=0.0)
    for _ in range(5):
        grads = {name: torch.randn(value.shape, generator=generator) for name, value in tree.items()}
        state = adamw(state, grads, torch.tensor(0.02), recipe)
        for name, param in theirs.items():
            param.grad = grads[name]
        optimizer.step()
    for name, param in theirs.items():
        torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(state.average["matrix"], state.params["matrix"])


def test_clipping_scales_all_gradients_by_their_common_norm() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    torch.testing.assert_close(clipped(grads, 1.0)["a"], torch.tensor([0.6]))
    assert torch.equal(clipped(grads, 6.0)["b"], grads["b"])


def test_a_traced_step_gives_the_values_of_the_step() -> None:
    config, params, corpus, recipe = micro()

    def one_step(state: Any, ids_bt: torch.Tensor, rate: torch.Tensor) -> Any:
        return train_step(state, ids_bt, rate, config=config, layers=Layers(), recipe=recipe)

    generator = torch.Generator().manual_seed(3)
    batches = [draw(corpus.training_ids, recipe, generator) for _ in range(4)]
    reports: list[str] = []
    run = traced(one_step, (start(params), batches[0], torch.tensor(0.0)), reports.append)
    ours = theirs = start(params)
    for i, ids_bt in enumerate(batches):
        ours, loss = run(ours, ids_bt, torch.tensor(0.01 * i))
        theirs, expected = one_step(theirs, ids_bt, torch.tensor(0.01 * i))
        torch.testing.assert_close(loss, expected)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        torch.testing.assert_close(a, b)
    assert reports == []


def test_a_step_that_cannot_be_traced_runs_as_it_is() -> None:
    reports: list[str] = []
    fn = traced(lambda x: x + 1 if x.sum().item() > 0 else x, (torch.ones(2),), reports.append)
    assert torch.equal(fn(-torch.ones(2)), -torch.ones(2))
    assert len(reports) == 1
    assert "untraced" in reports[0]


def test_dropout_draws_anew_in_every_step_and_keeps_the_mean() -> None:
    config, params, corpus, recipe = micro()
    layers = with_dropout(Layers(), 0.5)
    assert with_dropout(Layers(), 0.0) == Layers()
    torch.manual_seed(0)

    def loss(params: Any, ids_bt: torch.Tensor) -> torch.Tensor:
        return next_token_loss(params, ids_bt, config=config, layers=layers)

    ids_bt = draw(corpus.training_ids, recipe, torch.Generator().manual_seed(0))
    run = traced(loss, (params, ids_bt), lambda line: None)
    losses = [float(run(params, ids_bt)) for _ in range(20)]
    assert len(set(losses)) == 20
    assert sum(losses) / 20 == pytest.approx(float(next_token_loss(params, ids_bt, config=config)), abs=0.05)


def test_rate_rises_then_falls_to_its_last_share() -> None:
    recipe = Recipe(rate=1.0, warmup=10, final_rate=0.1)
    assert rate_at(0.0, 4, recipe) == pytest.approx(0.5)
    assert rate_at(0.5, 50, recipe) == pytest.approx(0.55)
    assert rate_at(1.0, 100, recipe) == pytest.approx(0.1)


# --- training --------------------------------------------------------------------------------------------------------


def test_a_micro_model_learns_the_rules_and_its_folder_is_read_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "tales.txt").write_text(tales(), encoding="utf-8")
    out = tmp_path / "out"
    shape = "--layers 1 --hidden 32 --ffn 48 --heads 2 --kv-heads 1 --head-dim 16 --vocab-size 320"
    recipe = "--steps 150 --batch 8 --context 48 --rate 0.01 --warmup 10 --dropout 0.02 --average 0.9 --every 50"
    options = [*shape.split(), *recipe.split(), "--device", "cpu", "--about", "Rules."]
    result = CliRunner().invoke(main, [str(tmp_path / "tales.txt"), str(out), *options])
    assert result.exit_code == 0, result.output
    note = (out / "README.md").read_text(encoding="utf-8")
    assert "Rules." in note
    # 36 equally likely sentences of 34 characters cost log2(36) / 34 = 0.15 bits a character.
    bits = float(note.split("costs **")[1].split(" bits")[0])
    assert 0.14 < bits < 0.30

    config = ModelConfig.from_pretrained(out)
    assert config.eos_token_ids == (2, 0)
    assert config.max_position_embeddings == 48
    assert (config.generation.temperature, config.generation.top_p) == (0.8, 0.95)
    params = load_params(out, param_specs(config), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer.encode("Then the king ran over to the")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs_tv = theirs(torch.tensor([ids])).logits[0]
    ours_tv = logits(params, torch.tensor(ids), config=config)
    assert (ours_tv - theirs_tv).abs().max() < 1e-5 * theirs_tv.abs().max()
    likely = str(tokenizer.decode([int(ours_tv[-1].argmax())])).strip()
    assert likely
    assert any(place.startswith(likely) for place in PLACES)
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == 2
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 48
    assert (out / "model.safetensors").stat().st_size < 3 * sum(p.numel() for p in pytree.tree_leaves(params))


def test_a_seed_gives_the_same_parameters() -> None:
    config, params, corpus, recipe = micro(dropout=0.1)
    first, second = train(params, corpus, config, recipe), train(params, corpus, config, recipe)
    for a, b in zip(pytree.tree_leaves(first.params), pytree.tree_leaves(second.params)):
        assert torch.equal(a, b)
    assert first.steps == 8
    assert first.tokens == 8 * 2 * 32


def test_the_best_step_is_kept_when_training_goes_astray() -> None:
    config, params, corpus, recipe = micro(
        steps=12, every=1, rate=0.03, final_rate=30.0, warmup=0, average=0.0, clip=1e9
    )
    lines: list[str] = []
    trained = train(params, corpus, config, recipe, report=lines.append)
    seen = [float(line.split("held out ")[1].split(" bits")[0]) for line in lines]
    assert len(seen) == 12
    assert trained.bits_per_character == pytest.approx(min(seen), abs=1e-3)
    assert trained.best_step == seen.index(min(seen)) + 1 < 12
    found = bits_per_character(trained.params, corpus.held_out_ids, corpus, config, recipe)
    assert found == pytest.approx(trained.bits_per_character, rel=1e-5)


def test_a_training_that_diverges_at_once_is_an_error() -> None:
    config, params, corpus, recipe = micro(steps=2, every=1, rate=float("inf"), warmup=0)
    with pytest.raises(ValueError, match="never finite with rate=inf; use a smaller --rate"):
        train(params, corpus, config, recipe)


@pytest.mark.gpu
def test_a_gpu_trains_to_the_same_losses() -> None:
    config, params, corpus, recipe = micro()
    on_gpu = pytree.tree_map(lambda param: param.cuda(), params)
    run_gpu = functools.partial(train_step, config=config, layers=Layers(), recipe=recipe)
    generator, reports = torch.Generator().manual_seed(0), []  # type: ignore[var-annotated]
    ids_bt = draw(corpus.training_ids, recipe, generator)
    traced_gpu = traced(run_gpu, (start(on_gpu), ids_bt.cuda(), torch.zeros((), device="cuda")), reports.append)
    ours, theirs = start(on_gpu), start(params)
    for _ in range(4):
        ids_bt = draw(corpus.training_ids, recipe, generator)
        ours, loss = traced_gpu(ours, ids_bt.cuda(), torch.full((), 0.01, device="cuda"))
        theirs, expected = run_gpu(theirs, ids_bt, torch.tensor(0.01))
        assert float(loss) == pytest.approx(float(expected), rel=1e-3)
    assert reports == []


def test_minutes_end_the_training() -> None:
    config, params, corpus, recipe = micro(steps=10**9, minutes=0.02, every=10**6)
    trained = train(params, corpus, config, recipe)
    assert 0 < trained.steps < 10**6
    assert trained.best_step == trained.steps


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "the text is empty"),
        ("A tale.\n\n" * 3, [], "fewer than context=1024"),
        ("A tale of one paragraph. " * 99, ["--context", "32", "--held-out", "0.001"], "larger --held-out"),
        (tales(1), ["--context", "32", "--heads", "3"], "num_heads=3"),
    ],
    ids=["empty", "short", "nothing held out", "heads"],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, text: str, options: list[str], message: str) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    command = [
        str(tmp_path / "text.txt"),
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--vocab-size",
        "300",
        "--steps",
        "1",
    ]
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 2
    assert message in result.output


# --- the bundled checkpoint ------------------------------------------------------------------------------------------


def test_the_demo_is_small_shards_to_four_ranks_and_names_its_source() -> None:
    demo = Path(__file__).parent.parent / "weights" / "demo"
    assert sum(file.stat().st_size for file in demo.iterdir()) <= 12_000_000
    config = ModelConfig.from_pretrained(demo)
    assert legal_tp_sizes(config) == (1, 2, 4)
    assert (config.max_position_embeddings, config.head_dim, config.dtype) == (1024, 64, torch.bfloat16)
    assert "public domain" in (demo / "README.md").read_text(encoding="utf-8")


def test_the_demo_knows_english_words() -> None:
    demo = Path(__file__).parent.parent / "weights" / "demo"
    config = ModelConfig.from_pretrained(demo)
    params = load_params(demo, param_specs(config), dtype=torch.float32)
    encode = Tokenizer.from_file(str(demo / "tokenizer.json")).encode
    text = "Once upon a time there was a king who had a daughter, and she was the most beautiful of all."
    ids_bt = torch.tensor([encode(text).ids])
    shuffled_bt = ids_bt[:, torch.randperm(ids_bt.shape[1], generator=torch.Generator().manual_seed(0))]
    loss, worse = (float(next_token_loss(params, ids, config=config)) for ids in (ids_bt, shuffled_bt))
    assert loss < 0.9 * worse
    assert loss < 5.5
