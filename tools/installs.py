"""Walks of a stranger: environments with nothing but what a page names, in which the page's own lines run.

python tools/installs.py [--short] [NAME ...]

The source is cloned into a folder with a space in its name. The README's lines without make install Shoal into an
empty environment. Each walk then gets a layer over that environment, an empty home and an empty folder. It runs the
`sh` blocks of its page as they are printed. Further arguments cut training and sets of tasks to a few; a settings file
of a page gets numbers that fit one host. Nothing else is changed. A line that serves is ended by Ctrl-C after it has
printed its address, and the curl line that it printed was answered.
The last line of standard output is a JSON object.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 900.0
"""Seconds that one line may take."""
SHORT = "--train.steps=3 --eval.questions=6 --eval.every_steps=0"
"""Arguments that cut a training run."""
LONGER = "--train.steps=5"
"""Takes the place of the number of steps in a line that resumes a run."""
TRAINS = re.compile(r"^shoal (train|demo)\b(?!.*--dry-run)")
SERVES = re.compile(r"^shoal (view|serve|swarm serve)\b(?!.*&$)")
PRELUDE = """set -em
ended() { for job in $(jobs -p); do kill -INT -- -$job || true; done; wait; }
trap ended EXIT
serving() {
    "$@" > served 2>&1 & served=$!
    for second in $(seq 120); do
        grep -q http:// served && break
        kill -0 $served || break
        sleep 1
    done
    request="s/^curl/curl -sS --fail-with-body/;s/-d '{/-d '{$ALSO/"
    ! grep -q ^curl served || bash -ec "$(grep -m 1 ^curl served | sed "$request")"
    kill -INT -- -$served || true
    code=0; wait $served || code=$?
    cat served
    grep -q http:// served && { [ $code = 0 ] || [ $code = 130 ]; }
}
set -x
"""
"""Beginning of each script: `serving` ends a command by Ctrl-C once it has printed an address."""


class Stumble(Exception):
    """A line that did not do what its page says."""


@dataclass(frozen=True)
class Walk:
    """A page whose lines are run in a layer of the installed environment."""

    name: str
    page: str
    """Path in the repository."""
    starter: str = ""
    """Kind of the folder that `shoal init` writes first; the page is that folder's README."""
    blocks: bool = True
    """Whether the page's `sh` blocks are run, too."""
    in_clone: bool = False
    """Whether the lines name files of the source checkout."""
    after: tuple[str, ...] = ()
    """Lines that the page prints outside of its `sh` blocks."""
    values: tuple[str, str] = ("", "")
    """A placeholder of those lines, and the walk's value for it."""
    also: str = ""
    """Further fields of the request that the served address is asked."""
    sizes: tuple[tuple[str, str], ...] = ()
    """Sizes in the page's settings, which become `run.toml`, and the walk's."""
    short: bool = False
    """Whether the short form has it."""

    def settings(self) -> str:
        """Text of the page's settings with the walk's sizes."""
        text = re.findall(r"^```toml\n(.*?)^```$", (ROOT / self.page).read_text(), re.MULTILINE | re.DOTALL)[0]
        for old, new in self.sizes:
            if old not in text:
                raise Stumble(f"{self.page} no longer has `{old}`: mend tools/installs.py")
            text = text.replace(old, new)
        return str(text)

    def lines(self) -> list[str]:
        """Printed lines, without comments and continued lines joined."""
        text = (ROOT / self.page).read_text()
        for line in self.after:
            if line not in " ".join(text.split()):
                raise Stumble(f"{self.page} no longer prints `{line}`: mend tools/installs.py")
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if self.blocks else []
        joined = "".join(blocks).replace("\\\n", " ").splitlines()
        found = [line.partition("  #")[0].strip() for line in joined]
        after = [line.replace(*self.values) if self.values[0] else line for line in self.after]
        return [line for line in [*found, *after] if line and not line.startswith("#")]


STARTERS = ("first", "data", "reward", "agent", "trl", "verifiers", "swarm")
WALKS = (
    Walk("tutorial-first", "docs/tutorial/first-run.md", short=True),
    Walk("tutorial-data", "docs/tutorial/my-data.md"),
    Walk("tutorial-reward", "docs/tutorial/my-reward.md"),
    Walk("tutorial-agent", "docs/tutorial/my-agent.md", short=True),
    Walk("tutorial-real", "docs/tutorial/real-model.md", in_clone=True),
    Walk("tutorial-swarm", "docs/tutorial/join-a-swarm.md"),
    Walk("tutorial-wrong", "docs/tutorial/went-wrong.md"),
    Walk("smollm2", "examples/smollm2/README.md", in_clone=True, after=("shoal demo --real",), short=True),
    Walk(
        "serve",
        "docs/reference/gateway.md",
        after=("pip install 'shoal[serve]'", "shoal serve --model DIR"),
        values=("DIR", "demo"),
        also='"response_format": {"type": "json_object"}, ',
        blocks=False,
    ),
    Walk(
        "cluster",
        "docs/guides/hosts.md",
        after=("pip install 'shoal[cluster]'", "ray start --head", "shoal train run.toml"),
        sizes=(
            ("10.0.0.1:8200", "127.0.0.1:8217"),
            ("{count = 8, gpus = 1}", "{count = 1}"),
            ("{hosts = 2, gpus = 8}", "{hosts = 1}"),
            ("rewards = 2", "rewards = 1"),
        ),
        blocks=False,
    ),
    Walk("software", "docs/guides/software.md"),
    Walk(
        "notebooks",
        "docs/guides/library.md",
        after=("pip install nbclient ipykernel", "jupyter execute examples/notebooks/*.ipynb"),
        blocks=False,
        in_clone=True,
    ),
    Walk(
        "tinker",
        "docs/guides/tinker.md",
        after=("pip install 'shoal[tinker]'", "shoal serve tinker --model NAME=DIRECTORY"),
        values=("NAME=DIRECTORY", "demo"),
    ),
    *(Walk(f"init-{kind}", f"examples/start/{kind}/README.md", starter=kind) for kind in STARTERS),
)


def readme_lines() -> list[str]:
    """Lines of the README that install and start Shoal without make."""
    found = re.search(r"^Without make: `([^`]+)`, then `([^`]+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    if found is None:
        raise Stumble("README.md no longer has a line 'Without make: `...`, then `...`': mend tools/installs.py")
    return [*found[1].split(" && "), found[2]]


def environment(home: Path, commands: Path | None) -> dict[str, str]:
    """Variables of a stranger. pip keeps its cache and its constraints, which change versions and not what is there."""
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "PIP_INDEX_URL", "SSL_CERT_FILE")}
    home.mkdir(parents=True, exist_ok=True)
    cache = os.environ.get("PIP_CACHE_DIR") or str(Path("~/.cache/pip").expanduser())
    path = f"{Path(sys.executable).resolve().parent}:{os.defpath}"
    return {
        **kept,
        "PATH": f"{commands}:{path}" if commands else path,
        "HOME": str(home),
        "TERM": "dumb",
        "BROWSER": "true",
        "OMP_NUM_THREADS": "1",
        "PIP_CACHE_DIR": cache,
        "PIP_CONSTRAINT": (ROOT / "constraints.txt").as_uri(),  # pip parts a path at its spaces
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def script(lines: list[str]) -> str:
    """One shell's script of the lines, so that `cd`, `&` and `.` mean what they mean to a person."""
    return PRELUDE + "\n".join(f"serving {line}" if SERVES.search(line) else cut(line) for line in lines) + "\n"


def cut(line: str) -> str:
    """A line with less training or fewer tasks.

    A Ray cluster ends with the shell. verifiers' own environment gets the clone, and its packages no constraints.
    """
    if line.startswith("ray start"):
        return f"{line} --num-cpus=4 --block &\nuntil ray status; do sleep 1; kill -0 $!; done"
    if line.startswith("verifiers-venv/bin/pip"):
        return "PIP_CONSTRAINT= " + line.replace("--no-deps shoal", '--no-deps "$CLONE"')
    line = re.sub(r"--most \d+", "--most 6", line)
    if not TRAINS.search(line):
        return line
    shorter = re.sub(r"--train\.steps=\d+", LONGER, line) if "--train.steps" in line else f"{line.rstrip('& ')} {SHORT}"
    return f"{shorter} &" if line.endswith("&") else shorter


def walk_lines(lines: list[str], folder: Path, variables: dict[str, str], log: Path) -> float:
    """Runs lines in a folder and returns their seconds. Raises `Stumble` with the end of what they said."""
    began = time.monotonic()
    with log.open("w") as said:
        shell = subprocess.Popen(
            ["bash", "-c", script(lines)],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code: int | str = shell.wait(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            code = "no end"
            os.killpg(shell.pid, signal.SIGKILL)
    if code:
        raise Stumble(f"{code}; the end of {log}:\n{log.read_text()[-3000:]}")
    return time.monotonic() - began


def layer(base: Path, folder: Path) -> Path:
    """Commands of an environment that sees the packages of another one and keeps its own beside them."""
    venv.create(folder, with_pip=True, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (below,) = (base / "lib").glob("python*/site-packages")
    (packages / "below.pth").write_text(f"{below}\n")
    for script in (base / "bin").iterdir():
        made = folder / "bin" / script.name
        if not made.exists() and script.is_file():
            made.write_bytes(script.read_bytes().replace(str(base).encode(), str(folder).encode()))
            made.chmod(0o755)
    return folder / "bin"


def main() -> int:
    """Runs the walks that are named, or all, and prints what each took or where it stumbled."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", help="walks; all by default")
    arguments.add_argument("--short", action="store_true", help="the walks of the short form")
    arguments.add_argument("--keep", type=Path, help="folder that is kept, with its environment, for another call")
    given = arguments.parse_args()
    if unknown := set(given.names) - {walk.name for walk in WALKS}:
        arguments.error(f"no walk {sorted(unknown)}; there are {[walk.name for walk in WALKS]}")
    chosen = [walk for walk in WALKS if (walk.name in given.names if given.names else walk.short or not given.short)]
    folder = given.keep or Path(tempfile.mkdtemp(prefix="shoal installs "))
    took: dict[str, float] = {}
    stumbles: dict[str, str] = {}
    clone = folder / "a clone"
    try:
        if not (clone / ".venv/done").exists():
            subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
            variables = environment(folder / "home", None)
            took["README"] = walk_lines(readme_lines(), clone, variables, folder / "README.log")
            (clone / ".venv/done").touch()
        for walk in chosen:
            print(f"{walk.name}: {walk.page}", file=sys.stderr, flush=True)
            here = folder / walk.name
            here.mkdir()
            variables = environment(here / "home", layer(clone / ".venv", here / "environment"))
            variables["XDG_CACHE_HOME"] = str(folder / "home" / ".cache")  # the embedded model is made once
            where = here
            if walk.in_clone:
                where = here / "a clone"
                subprocess.run(["git", "clone", "-q", clone, where], check=True)
            variables |= {"ALSO": walk.also, "CLONE": str(clone)}
            if walk.sizes:
                (where / "run.toml").write_text(walk.settings())
            lines = [f"shoal init {walk.starter}", f"cd my-{walk.starter}"] if walk.starter else []
            try:
                took[walk.name] = walk_lines([*lines, *walk.lines()], where, variables, folder / f"{walk.name}.log")
            except Stumble as stumble:
                stumbles[walk.name] = str(stumble)
                print(stumble, file=sys.stderr, flush=True)
    except Stumble as stumble:
        stumbles["README"] = str(stumble)
        print(stumble, file=sys.stderr)
    finally:
        if not given.keep and not stumbles:
            shutil.rmtree(folder)
    print(json.dumps({"seconds": {name: round(value) for name, value in took.items()}, "stumbles": sorted(stumbles)}))
    return 1 if stumbles else 0


if __name__ == "__main__":
    sys.exit(main())
