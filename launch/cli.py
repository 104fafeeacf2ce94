"""funclaunch: the command line. Each command parses, opens what it needs, prints, and closes it.

Text goes to stdout, everything else to stderr. Bad input ends with one line `error: ...` and exit code 2, a failed
engine with exit code 1, an interrupt with 130; --debug adds the traceback. torch is imported inside the commands only,
so that help is instant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

import funcllm
from funcllm.launch import early
from funcllm.launch import options as opt

if TYPE_CHECKING:
    from funcllm.launch.engine import Engine, Output
    from funcllm.launch.request import SamplingParams

INTERRUPTED = 130

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


# --- errors and exit codes -------------------------------------------------------------------------------------------


class BadInput(click.ClickException):
    """What the user can put right in the command."""

    exit_code = 2


class Failed(click.ClickException):
    """An engine or a machine that failed."""

    exit_code = 1


class Command(click.Command):
    """A command whose exceptions end as one line; with --debug their traceback comes first."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _readable_warnings():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            raise kind_of(error)(one_line(error)) from error


class Group(click.Group):
    """The commands; prints what they raise and exits."""

    command_class = Command

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        _replace_closed_streams()
        code: Any = 0
        try:
            code = super().main(*args, standalone_mode=False, **extra)  # type: ignore[call-overload]
        except click.ClickException as error:
            click.echo(f"error: {error.format_message()}", err=True)
            code = error.exit_code
        except click.Abort:
            code = INTERRUPTED
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command {args[0]!r}; {opt.nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _replace_closed_streams() -> None:
    """Python leaves None where a standard stream is closed; nothing to read, and nobody who reads, do as well."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def kind_of(error: Exception) -> type[click.ClickException]:
    return BadInput if isinstance(error, ValueError) else Failed


def one_line(error: Exception) -> str:
    """The message of an error in one line; that of a rank ends with the last line of its traceback."""
    from funcllm.launch.errors import CallError, EngineError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if len(lines) > 1 and isinstance(error, (EngineError, CallError)):
        return f"{text} {lines[-1]} (--debug shows the traceback)"
    if len(lines) > 1:
        text = " ".join(lines)
    if isinstance(error, (ValueError, EngineError, CallError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows the traceback)"


@contextlib.contextmanager
def _readable_warnings() -> Iterator[None]:
    """Warnings and log lines as one line each on stderr."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            click.echo(f"warning: {message}", err=True)

    logger, handler = logging.getLogger("funcllm"), _EchoHandler()
    logger.addHandler(handler)
    propagated, logger.propagate = logger.propagate, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


class _EchoHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)


# --- options ---------------------------------------------------------------------------------------------------------


def _stack(*decorators: _Decorator) -> _Decorator:
    def apply(fn: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            fn = decorator(fn)
        return fn

    return apply


def _read_config(ctx: click.Context, param: click.Parameter, file: str | None) -> str | None:
    """Puts the values of a run.yaml under the flags: a flag that is given beats the file."""
    if file is not None:
        flags = {p.opts[0].lstrip("-").replace("-", "_"): p for p in ctx.command.params if isinstance(p, click.Option)}
        keys = [
            opt.Key(name=name, multiple=p.multiple, flag=p.is_flag, text=p.type is click.STRING)
            for name, p in flags.items()
            if name not in ("config", "debug")
        ]
        try:
            values = opt.read_run_file(file, keys)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        ctx.default_map = {str(flags[name].name): value for name, value in values.items()}
    return file


_positive = click.IntRange(min=1)

_common_options = _stack(
    click.option(
        "--config", metavar="FILE", is_eager=True, callback=_read_config, expose_value=False,
        help="A YAML file of flags (`max-tokens: 64`, `layer: [mlp=my:fn]`); a flag given here beats it.",
    ),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)  # fmt: skip

_model_options = _stack(
    click.option(
        "--model", metavar="MODEL",
        help="A Hugging Face folder or Hub id (Qwen/Qwen3-0.6B).  [default: the bundled demo]",
    ),
    click.option("--tp", type=_positive, default=1, show_default=True, help="Ranks that share the model."),
    click.option("--device", help="cpu, cuda, or cuda:N for rank 0.  [default: cuda where there is a GPU]"),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
        help="auto: float32 on CPU, the checkpoint's own on GPU and in inspect.",
    ),
    click.option(
        "--layer", multiple=True, metavar="NAME[@LAYERS]=MODULE:FUNCTION",
        help="Put a function of yours in the place of one of the model's: mlp=my:fn in every layer, mlp@3-7,9=my:fn in"
        f" some. Repeatable. Names: {', '.join(opt.LAYER_FUNCTIONS)}.",
    ),
)  # fmt: skip

_engine_options = _stack(
    click.option(
        "--max-model-len", type=click.IntRange(min=2), help="Longest prompt + output.  [default: the model's]"
    ),
    click.option("--max-num-seqs", type=_positive, default=256, show_default=True, help="Most sequences at once."),
    click.option(
        "--max-num-batched-tokens", type=_positive, help="Most tokens of a step.  [default: 8192 on GPU, 1024 on CPU]"
    ),
    click.option("--kv-blocks", type=_positive, help="Size of the KV pool in blocks.  [default: by memory]"),
    click.option(
        "--block-size", type=_positive, help="Tokens of a KV block; a power of two from 16 on GPU.  [default: fits]"
    ),
    click.option(
        "--gpu-memory-fraction", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True,
        help="Share of the GPU's memory that may be used.",
    ),
    click.option(
        "--depth", type=click.IntRange(min=0), default=1, show_default=True,
        help="Steps launched ahead of the one that is read; the tokens are the same at every depth.",
    ),
    click.option(
        "--prefix-caching/--no-prefix-caching", default=True, show_default=True, help="Reuse KV of shared prefixes."
    ),
    click.option("--eager", is_flag=True, help="Neither compile nor fuse nor capture."),
    click.option(
        "--compile/--no-compile",
        default=None,
        help="torch.compile what no kernel does, such as --layer.  [default: on GPU]",
    ),
    click.option(
        "--graphs/--no-graphs", default=True, show_default=True, help="CUDA graphs (GPU only)."
    ),
    click.option(
        "--fusion", type=click.Choice(["auto", "off"]), default="auto", show_default=True,
        help="Fused kernels where they stand for the functions in use.",
    ),
)  # fmt: skip


def _sampling_options(max_tokens: int) -> _Decorator:
    return _stack(
        click.option(
            "--max-tokens", type=_positive, default=max_tokens, show_default=True, help="Most tokens of an output."
        ),
        click.option("--min-tokens", type=click.IntRange(min=0), default=0, show_default=True, help="No stop before."),
        click.option(
            "--temperature", type=float, help="0 is greedy.  [default, as for the next three: generation_config.json]"
        ),
        click.option("--top-k", type=int, help="Only the k likeliest; 0 is off."),
        click.option("--top-p", type=float, help="Only the likeliest that reach p together; 1 is off."),
        click.option("--min-p", type=float, help="Only those with p times the best's probability; 0 is off."),
        click.option("--seed", type=int, help="Prompt i samples with seed + i.  [default: another at every run]"),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable."),
        click.option("--stop-token-id", multiple=True, type=click.IntRange(min=0), help="End at this id. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on behind the model's end-of-text ids."),
    )


_template_options = _stack(
    click.option("--system", metavar="TEXT", help="System message of the chat."),
    click.option(
        "--template-arg", multiple=True, metavar="NAME=VALUE",
        help="A value for the chat template, such as enable_thinking=false. Repeatable.",
    ),
)  # fmt: skip

_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos")
_ENGINE_NAMES = (
    "tp", "device", "dtype", "eager", "compile", "graphs", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "kv_blocks", "block_size", "gpu_memory_fraction", "depth", "prefix_caching",
)  # fmt: skip


def sampling_from(values: dict[str, Any]) -> SamplingParams:
    """The sampling that the flags ask for. Raises ValueError for values out of range."""
    from funcllm.launch.request import SamplingParams

    return SamplingParams(
        **{name: values[name] for name in _SAMPLING_NAMES},
        stop=list(values["stop"]) or None,
        stop_token_ids=list(values["stop_token_id"]) or None,
    )


def engine_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The keywords of Engine that the flags ask for."""
    return {
        **{name: values[name] for name in _ENGINE_NAMES},
        "fusion": values["fusion"] != "off",
        "layers": opt.build_layers(values["layer"]),
    }


def _open_engine(values: dict[str, Any]) -> Engine:
    with early.importing(values["device"]):
        arguments = engine_arguments(values)
        from funcllm.launch.engine import Engine

    return Engine(values["model"], progress=sys.stderr.isatty(), exit_on_death=True, **arguments)


# --- commands --------------------------------------------------------------------------------------------------------


@click.group(
    cls=Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog='\b\nExamples:\n  funclaunch generate --prompt "Once upon a time"\n  funclaunch COMMAND --help',
)
@click.version_option(funcllm.__version__, prog_name="funclaunch")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Generate text with a language model made of pure functions, and look at what runs."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@main.command(
    epilog="""\b
Examples:
  funclaunch generate --prompt "Once upon a time" --temperature 0 --max-tokens 64
  funclaunch generate --model Qwen/Qwen3-0.6B --chat --prompt "Who are you?" --template-arg enable_thinking=false
  funclaunch generate --model FOLDER --tp 2 --prompts-file prompts.jsonl --output out.jsonl
  funclaunch generate --prompt "A fox" --layer mlp@1-2=my_layers:relu2
  funclaunch generate --config run.yaml --seed 7

\b
A line of a .jsonl file is {"prompt": "..."}, {"prompt_token_ids": [...]}, {"messages": [...]} or [1, 2, 3]; an object
may hold "sampling": {"temperature": 0, "max_tokens": 8}, which beats the flags for that prompt.""",
)
@click.option("--prompt", multiple=True, metavar="TEXT", help="A prompt. Repeatable.")
@click.option("--prompts-file", metavar="FILE", help=".txt: a prompt a line. .jsonl: see below.")
@click.option("--output", metavar="FILE.jsonl", help="Write one JSON object an output; - is stdout.")
@click.option("--chat", is_flag=True, help="Put each prompt through the model's chat template.")
@_template_options
@_sampling_options(256)
@_model_options
@_engine_options
@_common_options
@click.pass_context
def generate(ctx: click.Context, **values: Any) -> None:
    """Complete prompts. One prompt streams to stdout; many show a progress bar and come in their order."""
    lines = _prompt_lines(values["prompt"], values["prompts_file"])
    is_chat = values["chat"] or any(line.messages for line in lines)
    if not is_chat and (values["system"] is not None or values["template_arg"]):
        raise ValueError("--system and --template-arg are for chats; add --chat")
    template_args = opt.parse_template_args(values["template_arg"])
    base = sampling_from(values)
    _check_output(values["output"])
    sampling = [_sampling_of(line, base, index) for index, line in enumerate(lines)]
    engine = _open_engine(values)
    with engine:
        _log_start(engine, base)
        rows: dict[int, dict[str, Any]] = {}
        try:
            prompts = [_encode(engine, line, values, template_args) for line in lines]
            run = _run_one if len(lines) == 1 else _run_many
            run(engine, lines, prompts, sampling, rows, quiet=values["output"] == "-")
        finally:
            _write_rows(values["output"], rows, are_many=len(lines) > 1)
    if any("error" in row for row in rows.values()):
        ctx.exit(2)


@main.command(
    epilog="""\b
Examples:
  funclaunch chat
  funclaunch chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence." --template-arg enable_thinking=false

\b
/reset forgets the conversation, /exit ends; so do Ctrl-D and Ctrl-C. What a model writes between <think> and </think>
is shown, and kept apart from its answer in the conversation.""",
)
@_template_options
@_sampling_options(1024)
@_model_options
@_engine_options
@_common_options
def chat(**values: Any) -> None:
    """Talk with a model, turn by turn."""
    template_args = opt.parse_template_args(values["template_arg"])
    sampling = sampling_from(values)
    start = [] if values["system"] is None else [{"role": "system", "content": values["system"]}]
    with _open_engine(values | {"max_num_seqs": 1}) as engine:
        if engine.tokenizer is None:
            raise ValueError("a chat needs a tokenizer, and this model has none; use a folder with tokenizer.json")
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], **template_args)
        _log_start(engine, sampling)
        messages: list[dict[str, str]] = list(start)
        while (line := _read_turn()) is not None and line != "/exit":
            if line == "/reset":
                messages = list(start)
            elif line:
                messages = _turn(engine, messages, line, sampling, template_args)


@main.command(
    epilog="""\b
Examples:
  funclaunch inspect --model FOLDER --tp 2
  funclaunch inspect --size 8b --tp 4 --rank 3
  funclaunch inspect --layer mlp@1=my_layers:relu2""",
)
@click.option("--size", metavar="SIZE", help="A Qwen3 shape instead of a model: 0.6b, 1.7b, 4b, 8b, 14b, 32b or tiny.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose share is shown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_model_options
@_common_options
def inspect(**values: Any) -> None:
    """Show a model's parameters, how they are cut, what they weigh, and which fused kernels stand in."""
    config = _config_of(values["model"], values["size"])
    from funcllm.launch.inspect_model import inspect_model, print_facts

    layers = opt.build_layers(values["layer"])
    dtype, device = values["dtype"], values["device"]
    facts = inspect_model(config, tp=values["tp"], rank=values["rank"], layers=layers, dtype=dtype, device=device)
    if values["as_json"]:
        click.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def doctor(as_json: bool, debug: bool) -> None:
    """Show versions, GPUs and links, and which kernels would be chosen, with the reasons."""
    from funcllm.launch import doctor as checks

    found = checks.report()
    click.echo(json.dumps(found, indent=2, default=str) if as_json else checks.render(found))


@main.command(
    "random-model",
    epilog="""\b
Examples:
  funclaunch random-model --size tiny /tmp/tiny
  funclaunch random-model --size 8b --layers 4 --dtype bfloat16 /tmp/8b-of-4-layers""",
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--size", required=True, help="Whose shapes to take.",
    type=click.Choice(["tiny", "0.6b", "1.7b", "4b", "8b", "14b", "32b"], case_sensitive=False),
)  # fmt: skip
@click.option("--layers", type=_positive, help="Another number of layers.  [default: the size's]")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same weights.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True,
    help="How the weights are stored.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Write into a folder that is not empty, over the weights there.")
@_common_options
def random_model(folder: Path, size: str, layers: int | None, seed: int, dtype: str, force: bool, debug: bool) -> None:
    """Write a random checkpoint of a Qwen3 shape: weights, index, config, tokenizer. Takes little memory."""
    if folder.exists() and any(folder.iterdir()) and not force:
        raise ValueError(f"{folder} is not empty; name another folder, or add --force")
    from funcllm.config import parse_dtype, qwen3_config
    from funcllm.qwen3 import param_specs
    from funcllm.specs import nbytes
    from funcllm.weights.random_model import write_random_model

    config = qwen3_config(size, num_layers=layers)
    stored = parse_dtype(dtype)
    assert stored is not None
    total = nbytes(param_specs(config), dtype=stored)
    _check_space(folder, total)
    label = f"{folder}: {total / 1e9:.2f} GB"
    with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
        write_random_model(folder, config, seed=seed, dtype=stored, overwrite=force, progress=bar.update)


@main.command(
    epilog="""\b
Jobs (a number for N):
  nano    256 random requests, prompts and outputs of 100 to 1024 tokens, temperature 0.6: seconds
  b1      one sequence behind 128 tokens: milliseconds a token, over 512
  decN    N sequences behind 512 tokens each: milliseconds a step, over 256
  preN    milliseconds to the first token of an N-token prompt
  longN   one sequence behind N tokens: milliseconds a token, over 128
  steadyN N sequences at any time, 512-token prompts and 256 outputs, each that ends making room for the next:
          milliseconds a token of a sequence, tokens a second, and the longest wait between two tokens
  start   seconds from starting a process to its first token
  host    milliseconds of host work a step, at 1 and 256 rows, without a model

\b
Each job runs twice in one process with other seeds; the second figure counts, the first is printed too. Each stands
beside the floor that the machine sets: bytes over bandwidth or FLOPs over peak, whichever is longer.

\b
Examples:
  funclaunch bench --size 0.6b --jobs nano,b1,dec64
  funclaunch bench --model FOLDER --tp 2 --jobs b1,pre4096 --json figures.jsonl
  funclaunch bench --size 8b --jobs dec128 --profile trace""",
)
@click.option("--jobs", default="b1", show_default=True, metavar="JOB,JOB", help="Which to run; see below.")
@click.option("--size", metavar="SIZE", help="Random weights of a Qwen3 shape, in memory: 0.6b, 1.7b, 4b, 8b, ...")
@click.option("--json", "json_file", metavar="FILE", help="Append one JSON line a job.")
@click.option("--profile", metavar="DIR", help="Write a trace and a table of kernels of one decode step there.")
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="TB/s of a GPU.  [default: a measured copy]")
@click.option(
    "--flops", type=click.FloatRange(0, min_open=True), help="Peak TFLOP/s of a GPU.  [default: a measured matmul]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights in memory and of the workloads.")
@_model_options
@_engine_options
@_common_options
@click.pass_context
def bench(ctx: click.Context, **values: Any) -> None:
    """Measure speed, each figure beside its physical limit."""
    if values["model"] is not None and values["size"] is not None:
        raise ValueError("--model and --size are two ways to name a model; give one")
    explicit = ctx.get_parameter_source("max_num_seqs") is not click.core.ParameterSource.DEFAULT
    from funcllm.launch.bench import BenchOptions, run_bench

    arguments = engine_arguments(values)
    if not explicit:
        arguments["max_num_seqs"] = None
    run_bench(
        BenchOptions(
            jobs=tuple(values["jobs"].split(",")),
            model=values["model"],
            size=values["size"],
            seed=values["seed"],
            engine=arguments,
            layer_texts=tuple(values["layer"]),
            bandwidth=values["bandwidth"],
            flops=values["flops"],
            json_file=values["json_file"],
            profile=values["profile"],
        )
    )


# --- generate --------------------------------------------------------------------------------------------------------


def _prompt_lines(prompts: Sequence[str], file: str | None) -> list[opt.PromptLine]:
    if prompts and file is not None:
        raise ValueError("--prompt and --prompts-file are both given; use one")
    if file is not None:
        return opt.read_prompts(file)
    if not prompts:
        raise ValueError("there is no prompt; add --prompt TEXT or --prompts-file FILE")
    return [opt.PromptLine(prompt=prompt) for prompt in prompts]


def _sampling_of(line: opt.PromptLine, base: SamplingParams, index: int) -> SamplingParams:
    seeded = {} if base.seed is None else {"seed": (base.seed + index + 2**63) % 2**64 - 2**63}
    return opt.override_sampling(base, seeded | dict(line.sampling or {}), f"prompt {index}")


def _encode(
    engine: Engine, line: opt.PromptLine, values: dict[str, Any], template_args: dict[str, Any]
) -> list[int] | ValueError:
    """The ids of a prompt, or why there are none: a bad prompt fails alone."""
    try:
        prompt = opt.encode_prompt(
            line, engine.tokenizer, chat=values["chat"], system=values["system"], template_args=template_args
        )
        if isinstance(prompt, str):
            if engine.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, and this model has none; give token ids instead")
            return engine.tokenizer.encode(prompt)
    except ValueError as error:
        return error
    return prompt


def _run_one(
    engine: Engine,
    lines: list[opt.PromptLine],
    prompts: list[list[int] | ValueError],
    sampling: list[SamplingParams],
    rows: dict[int, dict[str, Any]],
    *,
    quiet: bool,
) -> None:
    """Streams a single prompt to stdout. Raises ValueError where it cannot be served."""
    prompt, started = prompts[0], time.perf_counter()
    try:
        if isinstance(prompt, ValueError):
            raise prompt
        deltas = engine.stream(prompt, sampling[0])
    except ValueError as error:
        rows[0] = _refused_row(0, lines[0], prompt, str(error))
        raise
    pieces: list[str] = []
    token_ids: list[int] = []
    reason: str | None = None
    for delta in deltas:
        pieces.append(delta.text)
        token_ids += delta.token_ids
        reason = delta.finish_reason
        if not quiet:
            _write_text(delta.text)
    if not quiet:
        _write_text("\n")
    seconds = time.perf_counter() - started
    click.echo(f"{len(token_ids)} tokens in {seconds:.2f} s, ended by {reason}", err=True)
    rows[0] = _row(0, lines[0], prompt, "".join(pieces), token_ids, str(reason))


def _run_many(
    engine: Engine,
    lines: list[opt.PromptLine],
    prompts: list[list[int] | ValueError],
    sampling: list[SamplingParams],
    rows: dict[int, dict[str, Any]],
    *,
    quiet: bool,
) -> None:
    """Runs all prompts together and fills `rows` as they end, so that an interrupt keeps what is finished."""
    from funcllm.launch.progress import GenerateProgress

    pending: dict[int, int] = {}
    for index, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            pending[engine.submit(prompt, sampling[index])] = index
        except ValueError as error:
            rows[index] = _refused_row(index, lines[index], prompt, str(error))
    stats, enabled = engine._scheduler.stats, sys.stderr.isatty()
    before, started = stats(), time.perf_counter()
    with GenerateProgress(len(pending), stats, enabled=enabled) as bar:
        while pending:
            for request_id in engine.step():
                if request_id in pending:
                    index = pending.pop(request_id)
                    rows[index] = _output_row(engine.output(request_id, index), lines[index])
            bar.update(len(pending))
    seconds, after = max(time.perf_counter() - started, 1e-9), stats()
    prefill = (after.prefill_tokens - before.prefill_tokens) / seconds
    decode = (after.generated_tokens - before.generated_tokens) / seconds
    click.echo(
        f"{len(prompts)} prompts in {seconds:.2f} s: prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", err=True
    )


def _output_row(output: Output, line: opt.PromptLine) -> dict[str, Any]:
    ids = output.prompt_token_ids
    row = _row(output.index, line, ids, output.text, output.token_ids, output.finish_reason, output.cached_tokens)
    return row if output.error is None else {**row, "error": output.error}


def _refused_row(index: int, line: opt.PromptLine, prompt: list[int] | ValueError, error: str) -> dict[str, Any]:
    ids = [] if isinstance(prompt, ValueError) else prompt
    return {**_row(index, line, ids, "", [], "error"), "error": error}


def _row(
    index: int,
    line: opt.PromptLine,
    prompt_token_ids: list[int],
    text: str,
    token_ids: list[int],
    finish_reason: str,
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """What --output writes of a prompt."""
    return {
        "index": index,
        "prompt": line.prompt,
        "prompt_token_ids": prompt_token_ids,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "cached_tokens": cached_tokens,
    }


def _check_output(file: str | None) -> None:
    if file is None or file == "-":
        return
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"--output {file} is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {file}: there is no folder {path.parent}; make it first")
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"--output {file} cannot be written: {error.strerror}") from None


def _write_rows(file: str | None, rows: dict[int, dict[str, Any]], *, are_many: bool) -> None:
    """What is finished, in the order of the prompts: to the file, or else the texts of many prompts to stdout."""
    ordered = [rows[index] for index in sorted(rows)]
    for row in ordered:
        if are_many and "error" in row:
            click.echo(f"error: prompt {row['index']}: {row['error']}", err=True)
    if file == "-":
        with _written("stdout"):
            _dump(ordered, sys.stdout)
    elif file is not None:
        with _written(f"--output {file}"), open(file, "w", encoding="utf-8") as out:
            _dump(ordered, out)
    elif are_many:
        for row in ordered:
            if "error" not in row:
                click.echo(f"--- prompt {row['index']}", err=True)
                _write_text(f"{row['text']}\n")


def _dump(rows: list[dict[str, Any]], out: TextIO) -> None:
    for row in rows:
        out.write(_json_line(row, _encoding(out)))
    out.flush()


def _json_line(row: dict[str, Any], encoding: str) -> str:
    """A row as JSON, with escapes only where it holds what the encoding lacks."""
    line = json.dumps(row, ensure_ascii=False) + "\n"
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(row) + "\n"
    return line


def _write_text(text: str) -> None:
    """Text to stdout at once; characters that its encoding lacks become question marks."""
    encoding = _encoding(sys.stdout)
    with _written("stdout"):
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def _encoding(out: TextIO) -> str:
    return getattr(out, "encoding", None) or "utf-8"


@contextlib.contextmanager
def _written(name: str) -> Iterator[None]:
    """Names what could not be written, such as a full disk; a reader that has left is another matter."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if name == "stdout":
            _discard_stdout()
        raise Failed(f"{name} cannot be written: {error.strerror or error}") from error


def _discard_stdout() -> None:
    """Sends what stdout still holds nowhere: else Python tries to write it once more at its end, and exits with 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _log_start(engine: Engine, sampling: SamplingParams) -> None:
    described = engine.describe()
    click.echo(
        f"{engine.config.architecture} on {described['device']} x {described['tp']}, {described['dtype']}, "
        f"ready in {engine.timings['start']:.1f} s",
        err=True,
    )
    generation = engine.config.generation
    defaults = {name: getattr(generation, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if generation.do_sample is False:
        defaults["temperature"] = 0.0
    click.echo(opt.describe_sampling(sampling, defaults), err=True)


# --- chat ------------------------------------------------------------------------------------------------------------


def _read_turn() -> str | None:
    """What the user says; None at the end of the input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _turn(
    engine: Engine,
    messages: list[dict[str, str]],
    line: str,
    sampling: SamplingParams,
    template_args: dict[str, Any],
) -> list[dict[str, str]]:
    """One turn; the conversation behind it. A turn that cannot be served leaves the conversation as it was."""
    from funcllm.launch.text import THINK_OPEN, opens_thinking

    asked = [*messages, {"role": "user", "content": line}]
    assert engine.tokenizer is not None
    try:
        rendered = engine.tokenizer.apply_chat_template(asked, **template_args)
        deltas = engine.stream(engine.tokenizer.encode(rendered, add_special_tokens=False), sampling)
    except ValueError as error:
        click.echo(f"error: {error}; /reset forgets the conversation", err=True)
        return messages
    pieces = []
    is_thinking = opens_thinking(rendered)
    if is_thinking:
        _write_text(f"{THINK_OPEN}\n")
    for delta in deltas:
        pieces.append(delta.text)
        _write_text(delta.text)
    _write_text("\n")
    return [*asked, _reply("".join(pieces), is_thinking)]


def _reply(text: str, opened_by_template: bool) -> dict[str, str]:
    """The assistant's message: its answer, and what it thought under the name that chat templates know."""
    from funcllm.launch.text import split_thinking

    thinking, answer, _ = split_thinking(text, opened_by_template)
    message = {"role": "assistant", "content": answer}
    return message | {"reasoning_content": thinking} if thinking else message


# --- models ----------------------------------------------------------------------------------------------------------


def _config_of(model: str | None, size: str | None) -> Any:
    if model is not None and size is not None:
        raise ValueError("--model and --size are two ways to name a model; give one")
    from funcllm.config import ModelConfig, qwen3_config
    from funcllm.weights.hub import resolve

    return qwen3_config(size) if size is not None else ModelConfig.from_pretrained(resolve(model))


def _check_space(folder: Path, wanted: int) -> None:
    import shutil

    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < wanted:
        raise ValueError(
            f"{folder} needs {wanted / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free there; use fewer --layers or "
            "another disk"
        )


if __name__ == "__main__":
    main()
