"""The ``kvarn`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(help="A KV cache for Transformers that is several times smaller.", no_args_is_help=True)
bench = typer.Typer(help="Measure the kernels on this machine's GPU.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.callback()
def main() -> None:
    """A KV cache for Transformers that is several times smaller."""


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a Hugging Face hub name or a .gguf file; SmolLM2-135M-Instruct if not given."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; a speech of 1809 if not given.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file to take the prompt from.")] = None,
    preset: Annotated[str, typer.Option(help="kvarn_k<key bits>v<value bits>_g<tile size>.")] = "kvarn_k4v2_g128",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate with each cache.")] = 64,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
) -> None:
    """Continue one prompt from the dense cache and from KVarN, and compare text, memory, accuracy and speed."""
    from transformers.utils import logging

    from kvarn_hf import KVarNConfig
    from kvarn_hf.demo import PROMPT_SOURCE, default_prompt, run_demo, show
    from kvarn_hf.models import DEFAULT_MODEL, load_model

    console = Console()
    logging.disable_progress_bar()
    try:
        config = KVarNConfig.from_preset(preset)
        text = _prompt(prompt, prompt_file)
        with console.status(f"Loading {model or DEFAULT_MODEL}"):
            loaded, tokenizer = load_model(model, dtype, device)
        console.print(f"Model: {model or DEFAULT_MODEL}", highlight=False, markup=False)
        if text is None:
            console.print(f"Prompt: {PROMPT_SOURCE}", highlight=False, markup=False)
        with _Bars(console) as bars:
            result = run_demo(loaded, tokenizer, text or default_prompt(), config, max_new_tokens, bars.update)
    except (ValueError, OSError) as error:
        _fail(error)
    show(result, loaded, tokenizer, console)


@bench.command("quantize")
def bench_quantize() -> None:
    """Time quantizing and dequantizing a long context, against the copy bandwidth."""
    import torch

    if not torch.cuda.is_available():
        _fail("`kvarn bench quantize` times the GPU kernels, and this machine has no CUDA GPU that torch can use.")
    from kvarn_hf.bench import quantize

    quantize()


def _prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    if prompt is not None and prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    text = prompt_file.read_text(encoding="utf-8") if prompt_file is not None else prompt
    if text is not None and not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _fail(reason: object) -> NoReturn:
    Console(stderr=True).print(f"Error: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)


class _Bars:
    """One progress bar for every stage, added when the stage begins."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.tasks: dict[str, object] = {}

    def __enter__(self) -> _Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        if stage not in self.tasks:
            self.tasks[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(self.tasks[stage], completed=done)  # type: ignore[arg-type]
