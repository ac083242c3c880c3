"""What arguments must be, said in one sentence."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """``value`` as an int.

    Raises
    ------
    ValueError
        If it is none, or out of bounds; the message calls it ``name``.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: of tensors with more than one element
        number = None
    allowed = number is not None and (least is None or number >= least) and (most is None or number <= most)
    if number is None or isinstance(value, bool) or not allowed:
        bounds = "" if least is None else f" >= {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{name} must be an integer{bounds}, got {value!r}")
    return number


def text_of(name: str, path: Path) -> str:
    """What a text file holds.

    Raises
    ------
    ValueError
        If it is no UTF-8 text, or empty; the message calls it ``name``.
    OSError
        If it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be a UTF-8 text file, got {str(path)!r} with other bytes") from error
    if not text.strip():
        raise ValueError(f"{name} must be a file with some text, got {str(path)!r}, which is empty")
    return text


def torch_device(device: torch.device | str) -> torch.device:
    """The device, if this machine has it.

    Raises
    ------
    ValueError
        If it is no device, or a GPU that is not here.
    """
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch device such as cpu or cuda:0, got {str(device)!r}") from error
    gpus = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= gpus:
        raise ValueError(f"device must be one of this machine's {gpus} GPUs or cpu, got {str(device)!r}")
    return chosen


def check_like(
    name: str, new: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse new tokens that are not like those held: ``shape`` is ``(batch, heads, head_dim)``."""
    if (new.shape[0], new.shape[1], new.shape[3]) != shape:
        expected = [shape[0], shape[1], "any", shape[2]]
        raise ValueError(f"{name} must have shape {expected} like the tokens held, got {list(new.shape)}")
    if new.dtype != dtype:
        raise ValueError(f"{name} must have dtype {dtype} like the tokens held, got {new.dtype}")
    if new.device != device:
        raise ValueError(f"{name} must be on {device} like the tokens held, got {new.device}")
