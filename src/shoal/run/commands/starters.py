"""Starters are folders that run as they are; `shoal init` copies one, to be changed into one's own.

A checkout has them under `examples/start`, from where the wheel takes them to `shoal/starters`.
"""

import json
import re
import shlex
import shutil
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote

from shoal.errors import RunDirError

HERE = Path(__file__).parents[2]
PLACES = (HERE / "starters", HERE.parents[1] / "examples" / "start")
BY_NAME = "--no-deps shoal"
"""Words of a page that stand for a second installation of Shoal, from where this one came."""
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def starter_folder(kind: str) -> Path:
    """Folder of a starter. Raises `RunDirError` where an installation lacks it."""
    for place in PLACES:
        if (place / kind).is_dir():
            return place / kind
    raise RunDirError(f"init: expected the starter {kind!r} in {PLACES[0]}; install Shoal again")


def _source() -> str:
    """Where pip got this installation of Shoal: a folder, an address, or else its name."""
    origin = json.loads(distribution("shoal").read_text("direct_url.json") or "{}")
    url = str(origin.get("url", "shoal"))
    tool = origin.get("vcs_info", {}).get("vcs")
    return f"{tool}+{url}" if tool else shlex.quote(unquote(url.removeprefix("file://")))


def write_starter(kind: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Copies a starter to a new folder. Returns its files, and the commands of its README. Raises `RunDirError`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirError(f"{folder} exists already; name another folder: shoal init {kind} FOLDER")
    try:
        source = starter_folder(kind)
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    except OSError as error:
        raise RunDirError(f"{folder} cannot be written: {error}") from error
    page = folder / "README.md"
    page.write_text(page.read_text(encoding="utf-8").replace(BY_NAME, f"--no-deps {_source()}"), encoding="utf-8")
    blocks = _COMMANDS.findall(page.read_text(encoding="utf-8"))
    return sorted(path for path in folder.rglob("*") if path.is_file()), blocks[0].splitlines()
