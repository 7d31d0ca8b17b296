"""Models that are made on this machine: whole or not at all, and told of while they are made."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.errors import ModelError
from shoal.model.made_models import REFUSAL, make
from shoal.model.quantised import Making

MAKER = """
import sys, time
from pathlib import Path
folder, how = Path(sys.argv[1]), sys.argv[2]
if how == "refuse":
    (folder / "refusal.txt").write_text("the file is cut")
    sys.exit(1)
if how == "wait":
    print("begun", flush=True)
    time.sleep(3600)
(folder / "config.json").write_text("{}")
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of models; the module `maker` makes them."""
    (tmp_path / "maker.py").write_text(MAKER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "cache" / "shoal"


def making(how: str) -> "subprocess.Popen[str]":
    """Another process that makes a model."""
    script = f"from shoal.model.quantised import make; make('other', 'maker', [{how!r}])"
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True, env=dict(os.environ)
    )


def test_what_a_killed_making_left_is_removed_and_a_making_under_way_is_not(cache: Path) -> None:
    with making("wait") as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        os.killpg(killed.pid, signal.SIGKILL)
    (left,) = cache.iterdir()
    with making("wait") as under_way:
        assert under_way.stdout is not None
        under_way.stdout.readline()
        (kept,) = cache.iterdir()
        assert kept != left, "the second making removed what the first one left"
        make("model", "maker", ["make"])
        assert {path.name for path in cache.iterdir()} == {kept.name, "model"}
        os.killpg(under_way.pid, signal.SIGKILL)


def test_a_making_that_refuses_says_why_in_one_sentence_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"^the file is cut$"):
        make("model", "maker", ["refuse"])
    assert list(cache.iterdir()) == []
    assert REFUSAL == "refusal.txt"


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_model_is_made_where_folders_cannot_be_locked_and_other_makings_stay(
    cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    other = cache / "unfinished-other"
    other.mkdir(parents=True)
    calls = iter(range(10))

    def unable(descriptor: int, operation: int) -> None:
        next(calls)  # ends a making that asks again and again
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unable)
    make("model", "maker", ["make"])
    assert {path.name for path in cache.iterdir()} == {other.name, "model"}


class Told(io.StringIO):
    """A stream that notes when its second line about a tokenizer has come."""

    def __init__(self) -> None:
        super().__init__()
        self.again = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("tokenizer") >= 2:
            self.again.set()
        return written


def test_a_long_phase_is_told_again_and_again() -> None:
    stream = Told()
    with Making("reading m.gguf", stream=stream, every_s=0.001) as making:
        making.now("tokenizer (2 of 4)")
        assert stream.again.wait(60)
    first, *others = stream.getvalue().splitlines()
    assert first == "reading m.gguf (once): starting, 0 s"
    assert any(re.fullmatch(r"reading m.gguf \(once\): tokenizer \(2 of 4\), \d s", one) for one in others), others
