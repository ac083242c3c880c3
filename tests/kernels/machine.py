"""A machine without a GPU on which Triton compiles for one: its driver launches nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._subclasses import FakeTensor
from triton.backends.compiler import GPUTarget

# Architectures, each a GPU, and the shared memory (KiB) of a multiprocessor.
GPUS = {80: 164, 86: 100, 90: 228}


class Machine:
    """The GPUs, which of them is current, and the stage at which compilation ends."""

    def __init__(self) -> None:
        self.current = 0
        self.last_stage = "cubin"
        self.compiled: list[str] = []
        self.folder: Path | None = None  # of what is dumped
        self.setting = ""

    @property
    def arch(self) -> int:
        return list(GPUS)[self.current]

    def properties(self, device: int) -> SimpleNamespace:
        arch, kib = list(GPUS.items())[device]
        return SimpleNamespace(major=arch // 10, shared_memory_per_multiprocessor=kib << 10, multi_processor_count=108)

    def install(self) -> None:
        """Put this machine where torch and Triton look for one."""
        torch.cuda.current_device = lambda: self.current
        torch.cuda.get_device_properties = self.properties
        FakeTensor.data_ptr = lambda tensor: 0
        triton.runtime.driver.set_active(Driver(self))
        triton.knobs.compilation.always_compile = True
        triton.knobs.compilation.listener = lambda src, **_: self.compiled.append(src.fn.__name__)
        nvidia = triton.backends.backends["nvidia"]
        triton.backends.backends["nvidia"] = triton.backends.Backend(ending_early(nvidia.compiler, self), nvidia.driver)


class Driver:
    """What Triton asks of a driver between compiling and launching; no kernel runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.machine.arch, 32)

    def get_current_device(self) -> int:
        return self.machine.current

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": (list(GPUS.values())[device] - 1) << 10}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), 0, 128, 0, 1024  # module, function, registers, spills, most threads

    def unload_module(self, module: Any) -> None: ...

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


def ending_early(backend: Any, machine: Machine) -> Any:
    """Triton's compiler for CUDA, ending after ``machine.last_stage``."""

    class EndingEarly(backend):
        def add_stages(self, stages, options, language):
            super().add_stages(stages, options, language)
            names = list(stages)
            for name in names[names.index(machine.last_stage) + 1 :]:
                stages[name] = self.nothing
            if machine.folder is not None:
                for name in {"ttir", "ptx"} & set(names[: names.index(machine.last_stage) + 1]):
                    stages[name] = self.dumping(name, stages[name])

        def dumping(self, name, stage):
            def run(source, metadata):
                result = stage(source, metadata)
                kernel, text = without_names(str(result))
                (machine.folder / f"{machine.setting}.{kernel}.{name}").write_text(text)
                return result

            return run

        def nothing(self, source, metadata):
            # As far as a stage that did run has not set them.
            metadata.setdefault("name", "nothing")
            metadata.setdefault("shared", 0)
            return b""

    return EndingEarly


def without_names(text: str) -> tuple[str, str]:
    """The kernel's name, and its IR or PTX without names, labels and what debuggers read."""
    kernel = re.search(r"(?:tt\.func public @|\.entry\s+)(\w+)", text)
    assert kernel is not None
    name = kernel[1]
    text = text.split("\n\t.section\t.debug")[0]
    text = re.sub(r"^(#loc|\s*\.loc\b|\s*\.file\b|\s*//|\$L__\w+:).*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r" loc\(([^()\n]|\([^()\n]*\))*\)| *//.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[ \t]+", "", text, flags=re.MULTILINE)
    text = re.sub(rf"\b{name}(\b|(?=_param_))", "kernel", text)
    numbers: dict[str, str] = {}
    return name, re.sub(r"%\w+|\$L__\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text)


def innermost(error: BaseException) -> str:
    """What is wrong, rather than which calls led there."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
