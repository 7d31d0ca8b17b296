"""`--view` serves the page of a run that is about to begin, and ends with it where nobody sits at a terminal."""

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


def test_the_page_is_there_before_the_run_and_goes_with_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(model=tiny_model_dir))
    # A browser that opens nothing.
    environment = {**os.environ, "BROWSER": "true"}
    with subprocess.Popen(
        [SHOAL, "train", str(config), "--view"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        found = re.fullmatch(r"page: (http://127\.0\.0\.1:\d+)\n", process.stderr.readline())
        assert found is not None
        url = found[1]
        with urlopen(url, timeout=120) as answer:  # it waits until the run has begun
            assert "<h1>run</h1>" in answer.read().decode()
        process.stderr.read()
    assert process.returncode == 0
    with pytest.raises(URLError):
        urlopen(url, timeout=10)


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
