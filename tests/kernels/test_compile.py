"""Every kernel compiles, for sm_80, sm_86 and sm_90 and without a GPU: Triton's interpreter takes what its compiler
refuses, such as a variable that changes its type in a loop."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys

import pytest

import kvarn_kernels
from tests.kernels import compile_kernels

# Those of one process, and the kernels that they launch.
PROCESSES = {
    ("attention",): {"split_kernel", "combine_kernel"},
    ("pack", "write", "advance"): {"pack_kernel", "write_kernel", "advance_kernel"},
    ("quantize", "imbalance"): {"quantize_kernel", "imbalance_kernel"},
    ("dequantize",): {"dequantize_kernel"},
}


@pytest.mark.slow
@pytest.mark.parametrize("names", PROCESSES, ids="-".join)
def test_compiles(names, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment.update(
        PYTHONPATH=os.pathsep.join(sys.path),
        TRITON_CACHE_DIR=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    command = [sys.executable, "-m", compile_kernels.__name__, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    # A crash of the compiler leaves a setting without its outcome.
    crash = {"kernels": [], "error": f"exit status {done.returncode}"}
    outcomes = list(itertools.zip_longest(lines[::2], lines[1::2], fillvalue=crash))
    failures = [
        f"{setting}\n{outcome['error'] or 'nothing was compiled'}"
        for setting, outcome in outcomes
        if outcome["error"] or not outcome["kernels"]
    ]
    summary = f"{len(failures)} of {len(outcomes)} settings do not compile"
    assert not failures, "\n\n".join([summary, *failures, done.stderr[-2000:]])
    assert done.returncode == 0, done.stderr[-2000:]
    assert {kernel for _, outcome in outcomes for kernel in outcome["kernels"]} == PROCESSES[names]


def test_no_kernel_is_left_out():
    modules = [importlib.import_module(f"kvarn_kernels.{m.name}") for m in pkgutil.iter_modules(kvarn_kernels.__path__)]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert set.union(*PROCESSES.values()) == kernels
    assert {name for names in PROCESSES for name in names} == set(compile_kernels.CASES)


@pytest.mark.parametrize("name", compile_kernels.CASES)
def test_every_two_values_meet(name):
    _, factors, _ = compile_kernels.CASES[name]
    variants = compile_kernels.pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        met = [(variant[a], variant[b]) for variant in variants]
        assert all(pair in met for pair in itertools.product(factors[a], factors[b])), (a, b)
