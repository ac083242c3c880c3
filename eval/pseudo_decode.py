"""KL divergence of quantized caches in pseudo-decode, for models x texts x methods x presets.

    python eval/pseudo_decode.py --model path/to/model --text code.txt --text vim.txt

Results are kept in one JSON file per model and set into tables in pseudo_decode.md, both in the folder ``--out``. A run
adds what is missing there and measures nothing twice, so an interrupted one can be continued.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from statistics import mean

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvarn_hf
from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.config import METHODS
from kvarn_hf.pseudo_decode import dense_reference

PRESETS = ("k4v2", "k3v2", "k2v2", "k4v4")


def measure(model_path: str, options: argparse.Namespace) -> None:
    """Measure every combination that ``options.out`` does not hold yet, and write it there."""
    store = options.out / f"pseudo_decode_{Path(model_path).name}.json"
    records = json.loads(store.read_text())["results"] if store.exists() else []
    done = {(r["text"], r["method"], r["preset"], r["tokens"], r["dtype"]) for r in records}
    todo = [
        (text, method, preset)
        for text in options.text
        for method in options.method or METHODS
        for preset in options.preset or PRESETS
        if (text.stem, method, preset, options.tokens, options.dtype) not in done
    ]
    if not todo:
        return
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, device_map=options.device).eval()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(store.stem, total=len(todo))
        current, reference = None, None
        for text, method, preset in todo:
            progress.update(task, description=f"{Path(model_path).name} {text.stem} {method} {preset}")
            if text != current:
                ids = tokens(tokenizer, text, options.tokens)
                current, reference = text, dense_reference(model, ids)
            config = KVarNConfig.from_preset(f"kvarn_{preset}_g128", method=method)
            result = reference.compare(model, KVarNCache(model.config, config))
            record = {"text": text.stem, "method": method, "preset": preset}
            record |= {"tokens": options.tokens, "dtype": options.dtype}
            record |= {name: getattr(result, name) for name in ("mean", "median", "p999", "max", "top1")}
            records.append(record)
            content = {"model": Path(model_path).name, "versions": versions(), "results": records}
            store.write_text(json.dumps(content, indent=1) + "\n")
            progress.advance(task)


def tokens(tokenizer: transformers.PreTrainedTokenizerBase, text: Path, count: int) -> torch.Tensor:
    """The first ``count`` tokens of a text, as the tokenizer begins a text by itself (Gemma's with a BOS)."""
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :count]
    if ids.shape[1] < count:
        raise SystemExit(f"--tokens {count}: {text} has only {ids.shape[1]} tokens")
    return ids


def versions() -> dict[str, str]:
    """What the figures depend on."""
    return {
        "kvarn_hf": kvarn_hf.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def report(folder: Path) -> str:
    """All results in ``folder`` as Markdown."""
    lines = [
        "# Pseudo-decode KL divergence",
        "",
        "KL(dense || quantized) of the next-token distributions in nats, over all positions from 384 on; sinks,",
        "residual and tiles of 128 tokens for every method. How it is measured, and what the texts are:",
        "[README](../README.md). Lower is better, and differences under 10 % are ties.",
    ]
    for path in sorted(folder.glob("pseudo_decode_*.json")):
        content = json.loads(path.read_text())
        results = content["results"]
        used = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        for count, dtype in sorted({(r["tokens"], r["dtype"]) for r in results}):
            chosen = [r for r in results if (r["tokens"], r["dtype"]) == (count, dtype)]
            lines += ["", f"## {content['model']}, {count:,} tokens, {dtype}", "", f"{used}.", "", *tables(chosen)]
    return "\n".join(lines) + "\n"


def tables(results: list[dict]) -> list[str]:
    """A row per preset and method, a column per text."""
    texts = list(dict.fromkeys(r["text"] for r in results))
    by_key = {(r["text"], r["method"], r["preset"]): r for r in results}
    presets = [p for p in (*PRESETS, "k8v4") if any(r["preset"] == p for r in results)]
    pairs = [(p, m) for p in presets for m in METHODS]

    def cell(text: str, preset: str, method: str) -> str:
        r = by_key.get((text, method, preset))
        return f"{r['mean']:.5f} / {r['p999']:.2f} / {r['top1']:.3f}" if r else ""

    lines = ["Mean KL / 99.9th percentile / top-1 agreement:", "", f"| | {' | '.join(texts)} | mean KL of all |"]
    lines += ["|---" * (len(texts) + 2) + "|"]
    for preset, method in pairs:
        cells = [cell(text, preset, method) for text in texts]
        if any(cells):
            values = [by_key[text, method, preset]["mean"] for text in texts if (text, method, preset) in by_key]
            overall = f"{mean(values):.5f}" if len(values) == len(texts) else ""
            lines.append(f"| {preset} {method} | {' | '.join(cells)} | {overall} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="folder or name of a model; repeatable")
    parser.add_argument("--text", action="append", default=[], type=Path, help="UTF-8 text file; repeatable")
    parser.add_argument("--preset", action="append", choices=(*PRESETS, "k8v4"), help=f"repeatable; default {PRESETS}")
    parser.add_argument("--method", action="append", choices=METHODS, help=f"repeatable; default {METHODS}")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("eval/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for model in options.model:
        measure(model, options)
    (options.out / "pseudo_decode.md").write_text(report(options.out))


if __name__ == "__main__":
    main()
