"""``kvarn eval``: one suite over models and caches, and its tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers import set_seed

from kvarn_hf.checks import whole
from kvarn_hf.evaluation import divergence, retrieval, tasks, tensors
from kvarn_hf.evaluation.caches import DEFAULT_CACHES, cache_spec
from kvarn_hf.evaluation.prompts import MOST_LINES
from kvarn_hf.evaluation.pseudo_decode import HISTORIES
from kvarn_hf.evaluation.report import write_reports
from kvarn_hf.evaluation.runner import Run

SUITES = ("pseudo-decode", "accumulation", "tensor", "retrieval", "tasks")


def evaluate(
    suite: str,
    models: Sequence[str | None] = (),
    *,
    caches: Sequence[str] = DEFAULT_CACHES,
    texts: Sequence[Path] = (),
    lengths: Sequence[int] = (1024,),
    stretches: int = 1,
    histories: Sequence[str] | None = None,
    batch: int = 1,
    lines: Sequence[int] = (20, 50, 100, 200),
    samples: int = 50,
    task_names: Sequence[str] = (),
    limit: int | None = None,
    chat: bool = False,
    data: Path | None = None,
    dtype: str = "float32",
    device: str | None = None,
    out: Path = Path("eval/results"),
    seed: int = 0,
    console: Console | None = None,
) -> list[Path]:
    """Run a suite, add what it finds to ``out``, and write tables and figures of all that is there.

    Parameters
    ----------
    suite : str
        One of :data:`SUITES`.
    models : sequence of str
        Folders, hub names or ``.gguf`` files; none: only tables and figures are written again.
    caches : sequence of str
        Names, see :mod:`kvarn_hf.evaluation.caches`.
    texts, lengths : sequence of Path, sequence of int
        UTF-8 files and tokens of each: the texts of pseudo-decode, accumulation and tensor, retrieval's haystacks.
    stretches : int
        pseudo-decode and accumulation: stretches of that many tokens in each text.
    histories : sequence of str, optional
        ``"accumulated"`` and ``"static"``; None: the suite's own.
    batch : int
        Rows in one forward pass.
    lines, samples
        See :func:`kvarn_hf.evaluation.retrieval.measure`.
    task_names, limit, chat, data
        See :func:`kvarn_hf.evaluation.tasks.measure`.
    dtype, device, out, seed, console
        See :class:`~kvarn_hf.evaluation.runner.Run`.

    Raises
    ------
    ValueError
        If an argument is out of range; the message names it, its value and what is allowed.
    """
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    for history in histories or ():
        if history not in HISTORIES:
            raise ValueError(f"history must be one of {', '.join(HISTORIES)}, got {history!r}")
    counts = [
        ("batch", batch),
        ("samples", samples),
        ("stretches", stretches),
        ("limit", 1 if limit is None else limit),
    ]
    for name, count in (*counts, *(("tokens", count) for count in lengths)):
        whole(name, count, least=1)
    for count in lines:
        whole("lines", count, least=1, most=MOST_LINES)
    if data is not None and not data.is_dir():
        raise ValueError(f"data must be a folder, got {str(data)!r}")
    for name in caches:
        cache_spec(name)
    if suite in ("pseudo-decode", "accumulation", "tensor") and models and not texts:
        raise ValueError(f"text must be given for the suite {suite}, got none")
    if suite == "tasks" and models and not task_names:
        raise ValueError("task must be given for the suite tasks, got none")
    histories = histories or (HISTORIES[:1] if suite == "pseudo-decode" else HISTORIES)
    console = console or Console()
    for model in models:
        set_seed(seed)
        run = Run(model, dtype, device, out, seed, console)
        if suite in ("pseudo-decode", "accumulation"):
            divergence.measure(run, suite.replace("-", "_"), texts, caches, lengths, histories, batch, stretches)
        elif suite == "tensor":
            tensors.measure(run, texts, caches, lengths, histories, batch)
        elif suite == "retrieval":
            retrieval.measure(run, caches, lines, samples, texts, lengths, histories, batch)
        else:
            tasks.measure(run, task_names, caches, limit, batch, chat, data)
    written = write_reports(out)
    try:
        from kvarn_hf.evaluation.figures import write_figures

        written += write_figures(out)
    except ImportError as error:
        console.print(str(error), markup=False)
    return written
