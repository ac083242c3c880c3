"""How ``kvarn inspect`` shows what it found: tables, figures and a suggestion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from kvarn_hf.inspect.layers import LARGE_CHANNEL, VARYING_CHANNEL, LayerInspection
from kvarn_hf.inspect.model import Inspection, Trial
from kvarn_hf.terminal import table

_OUTPUT_ERROR = "error of the attention output / %"
_LISTED_TOKENS = 5


def show(found: Inspection, token_text: Callable[[int], str], context: int, console: Console) -> None:
    """Print tables and the suggestion, with its cost for ``context`` tokens; ``token_text`` takes a position in the
    text and returns its token as text."""
    console.print(_layers(found))
    console.print(
        f"Attention KL: of the weights, in nats, mean over heads. Error: |o - ô| / |o| of the attention's output with "
        f"both sides quantized, and with one. Outlier channels: head:channel, and how many times the head's median "
        f"channel ({LARGE_CHANNEL:g} and more), ± how its deviation compares ({VARYING_CHANNEL:g} and more).",
        style="dim",
        highlight=False,
    )
    console.print(_tokens(found, token_text))
    console.print(_trials(found))
    for line in _conclusions(found, context):
        console.print(line, highlight=False, soft_wrap=True)


def save_figures(found: Inspection, folder: Path) -> list[Path]:
    """Write the figures as PNG files and return their paths.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from kvarn_hf.plotting import layers as figures

    preset, indices = found.config.name, [layer.layer for layer in found.layers]
    errors = {
        trial.config.name: [100 * _total(layer.errors[trial.config.name].output) for layer in found.layers]
        for trial in found.widths
    }
    # Layers may differ in their number of heads.
    by_head = pad_sequence([100 * layer.errors[preset].output for layer in found.layers], batch_first=True)
    sides = ("keys", "values")
    size = {side: [layer.channel_size[side] for layer in found.layers] for side in sides}
    spread = {side: [layer.channel_spread[side] for layer in found.layers] for side in sides}
    trials = found.widths + found.skips
    points = [figures.Point(_label(t), t.bytes_per_token, t.kl, bool(t.skip_layers)) for t in trials]
    made = {
        "heads": figures.heads(by_head, indices, f"{preset}: {_OUTPUT_ERROR}"),
        "channels": figures.channels(size, spread, indices, (LARGE_CHANNEL, VARYING_CHANNEL)),
        "widths": figures.widths(errors, indices, _OUTPUT_ERROR),
        "trade_off": figures.trade_off(points, found.max_kl, _label(found.suggestion), preset),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def _layers(found: Inspection) -> Table:
    preset = found.config.name
    worst = {layer.layer for layer in found.worst_layers[:3]}
    errors = ("attention KL", 9), ("error", 6), ("keys only", 6), ("values only", 6), ("worst KV head", 9)
    channels = ("outlier channels of keys", 8), ("of values", 6)
    title = f"Layers of the model with {preset} (* the three whose output moves most)"
    made = table(("layer", 5), *errors, *channels, title=title, names=dict(channels))
    for layer in found.layers:
        error = layer.errors[preset]
        head = int(error.output.argmax())
        made.add_row(
            f"{'*' if layer.layer in worst else ''}{layer.layer}",
            f"{error.kl.mean().item():.4f}",
            *(_percent(_total(part)) for part in (error.output, error.keys_only, error.values_only)),
            f"{head} ({_percent(error.output[head].item())})",
            _channels(layer, "keys"),
            _channels(layer, "values"),
            style="bold" if layer.layer in worst else "",
        )
    return made


def _channels(layer: LayerInspection, side: str) -> str:
    outliers = [outlier for outlier in layer.outlier_channels if outlier.side == side]
    listed = ", ".join(f"{o.head}:{o.channel} ({o.size:.0f} ± {o.spread:.0f})" for o in outliers[:2])
    return f"{listed}, {len(outliers) - 2} more" if len(outliers) > 2 else listed


def _tokens(found: Inspection, token_text: Callable[[int], str]) -> Table:
    columns = "", "layer", "KV head", "position", "times the head's median", ("token", 6)
    made = table(*columns, title="Longest vectors among the quantized tokens", names=("", "token"))
    for side in ("keys", "values"):
        tokens = [(layer.layer, layer.worst_token(side)) for layer in found.layers]
        for index, token in sorted(tokens, key=lambda pair: -pair[1].size)[:_LISTED_TOKENS]:
            text = escape(repr(token_text(token.position)))
            made.add_row(side, str(index), str(token.head), str(token.position), f"{token.size:.1f}", text)
        made.add_section()
    return made


def _trials(found: Inspection) -> Table:
    title = f"Next-token distributions over {found.tokens:,} tokens, errors accumulating"
    figures = "KL / nats", "same top token", "bytes per token", "times smaller"
    made = table(("setting", 20), *figures, title=title, names=("setting",))
    for group in (found.widths, found.skips):
        for trial in group:
            size, times = trial.bytes_per_token, found.dense_bytes_per_token / trial.bytes_per_token
            cells = trial.name, f"{trial.kl:.4f}", f"{trial.top1:.1%}", f"{size:,.0f}", f"{times:.2f}"
            made.add_row(*cells, style="bold" if trial == found.suggestion else "")
        made.add_section()
    return made


def _conclusions(found: Inspection, context: int) -> list[str]:
    best = found.suggestion
    needs = f"layers to skip: {_list(best.skip_layers)}" if best.skip_layers else "no layer needs to be skipped"
    size, dense = best.bytes_per_token, found.dense_bytes_per_token
    return [
        _outliers(found),
        f"[bold]Suggestion: {best.config.name}, {needs}[/bold] (KL {best.kl:.4f} nats, "
        f"{'within' if best.kl <= found.max_kl else 'no setting is within'} {found.max_kl:g}).",
        f"Cost: {size:,.0f} bytes per token of the full-attention layers instead of {dense:,.0f} at 16 bits; "
        f"{size * context / 2**20:,.1f} MiB instead of {dense * context / 2**20:,.1f} for {context:,} tokens.",
        f"    {_code(best)}",
    ]


def _outliers(found: Inspection) -> str:
    layers = found.outlier_layers
    if not layers:
        return "No layer has outlier key channels."
    varying = [layer.layer for layer in layers if layer.channel_spread["keys"].max() >= VARYING_CHANNEL]
    text = f"Layers with outlier key channels, as a key bias makes them: {_list(layer.layer for layer in layers)}. "
    if not varying:
        return f"{text}They hardly vary from token to token: a zero point takes them in."
    text += f"They vary from token to token in {_list(varying)}"
    text += "; elsewhere a zero point takes them in." if len(varying) < len(layers) else "."
    return text + (" The pre-scale damps them before the rotation." if found.config.method == "kvarn" else "")


def _code(trial: Trial) -> str:
    config = trial.config
    preset = config.replace(method="kvarn").name
    settings = f'"{preset}"'
    if config.method != "kvarn":
        settings = f'KVarNConfig.from_preset({settings}, method="{config.method}")'
    skips = f", skip_layers={list(trial.skip_layers)}" if trial.skip_layers else ""
    return escape(f"KVarNCache(model.config, {settings}{skips})")


def _label(trial: Trial) -> str:
    return f"skip {_list(trial.skip_layers)}" if trial.skip_layers else trial.config.name.split("_", 1)[1]


def _list(items: Any) -> str:
    return ", ".join(map(str, items))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _total(by_head: torch.Tensor) -> float:
    """Root mean square over heads."""
    return by_head.square().mean().sqrt().item()
