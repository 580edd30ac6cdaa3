"""What was saved last is not lost with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from octavo.vllm import draining

class Saver:
    def drain(self, timeout_s):
        print("drained", timeout_s > 0)
        return True

saver = Saver()
draining.register(saver)
{then}
"""


@pytest.mark.parametrize(
    ("then", "printed"),
    [("", "drained True\n"), ("draining.forget(saver)", ""), ("del saver", "")],
    ids=["still-open", "closed", "gone"],
)
def test_end_of_the_process_waits_for_savers_that_nobody_closed(then: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == printed
