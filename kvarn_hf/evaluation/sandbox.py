"""Runs generated programs in a process of their own, with little time and memory.

The limits keep a program that loops, allocates or prints without end from taking the machine with it. They are no jail:
run code that may be hostile in a container or on a machine without anything to lose.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

# Hard limits, set by the child before the program begins, so that the program cannot raise them.
_LIMITED = """
import resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
for limit, value in (("CPU", seconds), ("AS", memory), ("FSIZE", 1 << 20), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
program = sys.stdin.read()
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""


def passes(program: str, seconds: int = 5, memory: int = 1 << 30) -> bool:
    """Whether a Python program ends without an error, in so many ``seconds`` of processor time, twice as much real
    time, and ``memory`` bytes of address space."""
    command = [sys.executable, "-I", "-c", _LIMITED, str(seconds), str(memory)]
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(program.encode("utf-8", "replace"), timeout=2 * seconds)
        finally:
            # What it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return child.returncode == 0
