"""The suites ``pseudo-decode`` and ``accumulation``: KL divergence from the dense run, by text, cache and position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvarn_hf.checks import whole
from kvarn_hf.evaluation.caches import cache_spec, full_attention_layers
from kvarn_hf.evaluation.pseudo_decode import HISTORIES, SKIP, DenseReference, dense_reference
from kvarn_hf.evaluation.runner import Run, first_tokens

KEY = ("text", "cache", "tokens", "stretches", "dtype", "history")
POSITION_WIDTH = 256
STATISTICS = ("mean", "median", "p999", "max", "top1", "perplexity_ratio")


def measure(
    run: Run,
    suite: str,
    texts: Sequence[Path],
    caches: Sequence[str],
    lengths: Sequence[int],
    histories: Sequence[str] = HISTORIES[:1],
    batch: int = 1,
    stretches: int = 1,
) -> None:
    """Measure every combination that is not in the results yet.

    Parameters
    ----------
    run : Run
    suite : str
        Name of the result file: ``"pseudo_decode"`` or ``"accumulation"``.
    texts : sequence of Path
        UTF-8 files.
    caches : sequence of str
        Names, see :mod:`kvarn_hf.evaluation.caches`.
    lengths : sequence of int
        Tokens of a stretch.
    histories : sequence of str
        See :meth:`~kvarn_hf.evaluation.pseudo_decode.DenseReference.compare`.
    batch : int
        Texts in one forward pass, with all their stretches.
    stretches : int
        Stretches of each text, from its beginning on; its figures are those of all their positions.

    Raises
    ------
    ValueError
        If a length is too short for anything to be measured.
    """
    for count in lengths:
        whole("tokens", count, least=SKIP + 1)
    results = run.results(suite, KEY)
    specs = [cache_spec(name) for name in caches]
    groups = [(count, list(texts[start : start + batch])) for count in lengths for start in range(0, len(texts), batch)]
    with run.progress(len(groups) * len(specs) * len(histories)) as steps:
        for count, group in groups:
            reference: DenseReference | None = None
            for spec in specs:
                for history in histories:
                    fields = {"cache": spec.name, "tokens": count, "stretches": stretches}
                    fields |= {"dtype": run.dtype, "history": history}
                    missing = [i for i, text in enumerate(group) if not results.has(text=text.stem, **fields)]
                    # A cache that reads single tokens alone has no static history: it is patched into the model.
                    if not missing or (history == "static" and not spec.reads_in_blocks):
                        steps.end()
                        continue
                    steps.begin(f"{run.name} {count} {spec.name} {history}")
                    model, tokenizer = run.loaded
                    if reference is None:
                        reference = dense_reference(model, first_tokens(tokenizer, group, count, stretches))
                    line = None
                    with run.tolerating(spec), spec.opened(model) as cache:
                        pace = {} if spec.reads_in_blocks else {"block": 1, "first": SKIP}
                        found = reference.compare(model, cache, history, **pace)
                        bits = spec.bits_per_element(head_dim(model, reference))
                        for i in missing:
                            row = found.rows(i * stretches, stretches)
                            record = {"text": group[i].stem, **fields, "bits": bits}
                            record |= {name: getattr(row, name) for name in STATISTICS}
                            record |= {"position_width": POSITION_WIDTH, "first_position": SKIP}
                            record["by_position"] = row.by_position(POSITION_WIDTH)
                            results.add(record, run.environment)
                        line = (
                            f"{run.name} {count:,} {spec.name} {history}: mean KL {found.mean:.5f}, median "
                            f"{found.median:.2g}, 99.9th {found.p999:.3f}, top-1 {found.top1:.3f}"
                        )
                    steps.end(line)


def head_dim(model: object, reference: DenseReference) -> int:
    """head_dim of the layers that are quantized."""
    layer = full_attention_layers(model.config)[0]  # type: ignore[attr-defined]
    return reference.states[0][layer][0].shape[3]
