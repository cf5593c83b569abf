"""The pool of threads of the compiled kernels where the system does not play along."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from tests.native import ROOT
from tests.ops.native import ops
from tests.ops.test_torch import normal, same_bits


def product(table):
    """A product that is large enough for all threads."""
    return table.linear(normal(200, 512), table.prepare(normal(512, 512, seed=1)))


def test_a_forked_child_has_threads_of_its_own():
    """Those of its parent are not there: it must not wait for them."""
    table = ops("portable", 3)
    want = product(table)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits
        os._exit(0 if same_bits(product(table), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bits(product(table), want)


def test_a_system_without_further_threads():
    """As many threads as there are do the work: here the caller alone."""
    ops("portable", 1)  # built before
    code = """
from tests.ops.native import ops
from tests.ops.test_cpu_threads import product
from tests.ops.test_torch import same_bits
import threading
try:
    threading.Thread(target=print).start()
except RuntimeError:
    assert same_bits(product(ops("portable", 4)), product(ops("portable", 1)))
    print("the same")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 46, -1)),
    )  # fmt: skip
    assert done.stdout == "the same\n", done.stderr
