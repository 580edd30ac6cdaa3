"""The README's Python example does what its comments say, on a real node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.cli.test_serve import serving
from tests.repo.tree import ROOT


def test_readme_example_prints_what_it_says(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    promised = re.findall(r"print\(.*\) +# (.+)$", code, re.M)
    assert len(promised) == 2
    with serving(tmp_path) as node:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OCTAVO_ADDRESS": node.address},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised
