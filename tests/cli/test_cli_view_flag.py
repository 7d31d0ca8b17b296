"""`--view` of a run that never begins; tests/run/test_run.py has the page of one that does."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

SHOAL = str(Path(sys.executable).with_name("shoal"))
CONFIG = """
run_dir = "run"
[[tasks]]
name = "chain_sum"
[model]
path = "{model}"
[rollout]
group_size = 2
max_tokens = 4
[train]
steps = 3
groups_per_step = 1
[eval]
every_steps = 0
questions = 2
"""


def test_a_run_that_is_refused_leaves_no_page(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(model=tmp_path / "nowhere"))
    environment = {**os.environ, "BROWSER": "true"}
    done = subprocess.run(
        [SHOAL, "train", str(config), "--view"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    (url,) = re.findall(r"page: (\S+)", done.stderr)
    assert "does not exist" in done.stderr
    with pytest.raises(URLError):
        urlopen(url, timeout=10)
