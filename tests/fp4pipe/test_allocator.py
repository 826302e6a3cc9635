"""Freed blocks stay in the process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from fp4pipe.allocator import keep_freed_memory
import numpy as np
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2_000_000)
before = faults()
for _ in range(50):
    np.ones(2_000_000)  # 16 MB, about 4,000 pages
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_blocks_are_reused_without_new_page_faults():
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 5_000
    assert faults("default") > 10 * faults("keep")
