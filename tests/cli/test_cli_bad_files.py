"""Files, folders, modules and commands that are not what they should be: a sentence that names them, exit code 2."""

import contextlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli import main

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]
LONG = "x" * 300


class Case(NamedTuple):
    """`damage` makes the wrong thing in a folder and returns the arguments; the sentence has `names` in it."""

    name: str
    damage: Callable[[Path], Sequence[str]]
    names: str


def dry_run(folder: Path, *settings: str) -> list[str]:
    """Arguments of a dry run of the folder's configuration."""
    return ["train", str(folder / "config.toml"), "--dry-run", *settings]


def of_config(name: str, content: bytes) -> Case:
    """A configuration file with such bytes."""

    def damage(folder: Path) -> Sequence[str]:
        (folder / "config.toml").write_bytes(content)
        return dry_run(folder)

    return Case(f"config: {name}", damage, "config.toml" if "tasks" not in name else "tasks")


def of_model(name: str, file: str, content: bytes | None, names: str = "") -> Case:
    """A model directory where one file has such bytes, or is missing."""

    def damage(folder: Path) -> Sequence[str]:
        (folder / "model" / file).unlink()
        if content is not None:
            (folder / "model" / file).write_bytes(content)
        return dry_run(folder)

    return Case(f"model: {name}", damage, names or file)


def of_model_setting(key: str, value: object) -> Case:
    """A config.json in which one number is something else."""

    def damage(folder: Path) -> Sequence[str]:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        return dry_run(folder)

    return Case(f"model: {key} = {value!r}", damage, key)


def of_rows(name: str, content: bytes, names: str = "rows.jsonl") -> Case:
    """A file of questions with such bytes."""

    def damage(folder: Path) -> Sequence[str]:
        (folder / "rows.jsonl").write_bytes(content)
        return dry_run(folder)

    return Case(f"rows: {name}", damage, names)


def of_module(name: str, source: str, use: str, setting: str) -> Case:
    """A module of the user's own that cannot be used, named in a setting."""

    def damage(folder: Path) -> Sequence[str]:
        module = f"own_{abs(hash((name, use)))}"
        (folder / f"{module}.py").write_text(source)
        return dry_run(folder, *(one.replace("MODULE", module) for one in setting.split(" ")))

    return Case(f"{use}: {name}", damage, "own_")


def of_arguments(*arguments: str, names: str = "") -> Case:
    """A command line; FOLDER in it is the case's folder."""

    def damage(folder: Path) -> Sequence[str]:
        return [one.replace("FOLDER", str(folder)) for one in arguments]

    return Case(" ".join(arguments)[:60], damage, names)


def file_at(*parts: str) -> Callable[[Path], Path]:
    """Makes a file where a folder should be."""

    def make(folder: Path) -> Path:
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file")
        return path

    return make


def of_file_in_run(name: str) -> Case:
    """A run to be resumed, in which a file lies where a folder should be."""

    def damage(folder: Path) -> Sequence[str]:
        run = file_at("begun", name)(folder).parent
        (run / "log.sqlite").touch()
        return [*dry_run(folder, f"--run_dir={run}"), "--resume"]

    return Case(f"run with a file as {name}", damage, f"{name}: expected a folder, got a file")


def of_run_dir(name: str, make: Callable[[Path], Path | str], names: str = "run") -> Case:
    """A place where no run can be written."""

    def damage(folder: Path) -> Sequence[str]:
        return dry_run(folder, f"--run_dir={make(folder)}")

    return Case(f"run_dir: {name}", damage, names)


MODULES = {
    "syntax error": "def f(:\n",
    "raises": "raise RuntimeError('no')\n",
    "divides": "1 / 0\n",
    "exits": "import sys; sys.exit(3)\n",
    "imports what is not there": "import nothing_of_this_name\n",
    "has no such name": "g = 1\n",
    "is no function": "f = 5\n",
    "recurses": "def g(): g()\ng()\n",
}
USES = {
    "task": "--tasks.0.service=python --tasks.0.path=MODULE:f",
    "share": "--swarm.share=MODULE:f",
    "take": "--swarm.take=MODULE:f",
    "hook": "--tasks.0.reward=MODULE:f",
    "agent": "--tasks.0.agent=MODULE:f",
}
HEADER = struct.pack("<Q", 1 << 40)
WEIGHTS = "model.safetensors"
RUN_COMMANDS = ("report", "export --jsonl FOLDER/out.jsonl", "audit", "status", "swarm status")
BAD_RUNS = ("FOLDER/none", "FOLDER/rows.jsonl", "FOLDER/empty", "FOLDER/garbage", f"FOLDER/{LONG}")

CASES = [
    of_config("not UTF-8", b"run_dir = '\xff'"),
    of_config("UTF-16", "run_dir = 'x'".encode("utf-16")),
    of_config("cut", b"[model]\npath = "),
    of_config("twice", b"seed = 1\nseed = 2\n"),
    of_config("NUL", b"seed = 1\0"),
    of_config("JSON", b'{"seed": 1}'),
    of_config("deep list", b"x = " + b"[" * 3000 + b"]" * 3000),
    of_arguments("train", "FOLDER/deep.toml", names="nested too deeply"),
    of_config("no tasks", b""),
    of_config("tasks a number", b"tasks = 3"),
    of_config("tasks a table", b"[tasks]\nname = 'gcd'"),
    of_config("tasks of numbers", b"tasks = [1, 2]"),
    of_arguments("train", "FOLDER", "--dry-run", names="cannot be read"),
    of_arguments("train", "FOLDER/none.toml", names="none.toml"),
    of_arguments("train", f"FOLDER/{LONG}.toml", names=LONG),
    of_arguments("eval", "FOLDER/none.toml", names="none.toml"),
    *(
        of_model(f"no {file}", file, None, names=file.removeprefix("model."))
        for file in ("config.json", "tokenizer.json", WEIGHTS)
    ),
    *(
        of_model(f"{file} {name}", file, content, names="model")
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
        for name, content in {
            "empty": b"",
            "a list": b"[]",
            "a number": b"3",
            "null": b"null",
            "cut": b'{"a": ',
            "binary": b"\xff\xfe\x00",
            "deep": b"[" * 5000,
        }.items()
    ),
    *(
        of_model(f"weights {name}", WEIGHTS, content)
        for name, content in {
            "empty": b"",
            "cut": b"\x10\0\0\0\0\0\0\0{",
            "text": b"once upon a time, and long enough",
            "huge header": HEADER + b"{}",
            "no JSON": struct.pack("<Q", 8) + b"nonsense",
            "no tensor": struct.pack("<Q", 8) + b"{}      ",
            "a list": struct.pack("<Q", 8) + b"[]      ",
        }.items()
    ),
    *(
        of_model_setting(key, value)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        for value in ("many", -1, 0, 1.5, [4], True)
    ),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--model.path=FOLDER/rows.jsonl", names="rows.jsonl"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--model.path=FOLDER/empty", names="empty"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--model.path=", names="model"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", f"--model.path=/{LONG}", names=LONG),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--model.device=cuda", names="model.device"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--engine.gpus=[0]", names="engine.gpus"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", '--metrics.trackers=["wandb:x"]', names="wandb"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--engine.max_model_len=100000", names="max_model_len"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--rollout.max_tokens=300", names="rollout.max_tokens"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--rollout.group_size=1", names="rollout.group_size"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--swarm.external_groups=4", names="swarm.servers"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--swarm.share=budget:x", names="budget"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--swarm.take=nobody", names="swarm.take"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--tasks.0.scorer=nobody", names="scorer"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--tasks.0.reward=length:x", names="reward"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", '--tasks.0.rewrite=[["(", ""]]', names="rewrite"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--tasks.0.service=turns", names="sums"),
    of_arguments(
        "train", "FOLDER/config.toml", "--dry-run", "--tasks.0.service=remote", "--tasks.0.path=x:99999", names="99999"
    ),
    of_rows("none", b""),
    of_rows("blank", b"\n\n"),
    of_rows("not UTF-8", b'{"prompt": "\xff"}'),
    of_rows("not JSON", b"once"),
    of_rows("a list", b"[]\n"),
    of_rows("deep", b"[" * 5000),
    of_rows("no prompt", b'{"answer": "1"}\n'),
    of_rows("prompt a number", b'{"prompt": 3, "answer": "1"}\n'),
    of_rows("no answer", b'{"prompt": "x"}\n'),
    of_rows("answer a list", b'{"prompt": "x", "answer": []}\n'),
    of_rows("answer true", b'{"prompt": "x", "answer": true}\n'),
    of_rows("one row", b'{"prompt": "x", "answer": "1"}\n'),
    of_rows("roles", b'{"prompt": [{"role": "king", "content": "x"}], "answer": "1"}\n'),
    of_rows("info a list", b'{"prompt": "x", "answer": "1", "info": []}\n'),
    of_rows("scorer unknown", b'{"prompt": "x", "answer": "1", "info": {"scorer": "nobody"}}\n'),
    of_rows(
        "prompt too long",
        b"".join(b'{"prompt": "%s", "answer": "1"}\n' % (letter * 3000) for letter in (b"x", b"y")),
        names="sums",
    ),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--tasks.0.path=FOLDER/none.jsonl", names="none.jsonl"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--tasks.0.path=FOLDER/empty", names="empty"),
    of_arguments(
        "train", "FOLDER/config.toml", "--dry-run", "--tasks.0.path=FOLDER/none.parquet", names="none.parquet"
    ),
    *(of_module(name, source, use, setting) for name, source in MODULES.items() for use, setting in USES.items()),
    of_run_dir("long", lambda folder: folder / LONG, LONG),
    of_run_dir("very long", lambda folder: "/".join([str(folder), *[LONG[:200]] * 40]), "run_dir"),
    of_run_dir("a file", file_at("here"), "here"),
    of_run_dir("in a file", lambda folder: file_at("here")(folder) / "run", "here"),
    of_run_dir("not empty", lambda folder: folder, "exists already"),
    of_run_dir("/proc", lambda folder: "/proc/run", "/proc"),
    of_arguments("train", "FOLDER/config.toml", "--dry-run", "--resume", names="no run to resume"),
    *map(of_file_in_run, ("weights", "logs", "checkpoints", "swarm", "model", "adapter", "archive")),
    *(
        of_arguments(*f"{command.replace(' --', f' {run} --', 1) if ' --' in command else f'{command} {run}'}".split())
        for command in RUN_COMMANDS
        for run in BAD_RUNS
    ),
    of_arguments("export", "FOLDER/empty", names="--jsonl"),
    of_arguments("swarm", "serve", "--folder", "FOLDER/rows.jsonl", names="rows.jsonl"),
    of_arguments("swarm", "serve", "--host", "no.such.host.invalid", "--folder", "FOLDER/nats"),
    of_arguments("swarm", "ban", "FOLDER/empty", "xyz", names="peer id"),
    of_arguments("swarm", "join", "FOLDER/config.toml", names="--model-url"),
    of_arguments("swarm", "join", "FOLDER/config.toml", "--rule=truth", names="swarm.servers"),
    of_arguments("swarm", "join", "FOLDER/config.toml", "--rule=nobody", names="rule"),
    of_arguments(
        "swarm",
        "join",
        "FOLDER/config.toml",
        "--model-url=nonsense",
        '--swarm.servers=["nats://h:1"]',
        names="--model-url",
    ),
    of_arguments("swarm", "demo", "--nodes=1"),
    of_arguments("judge", "serve", "FOLDER/none.toml", names="none.toml"),
    of_arguments("judge", "serve", "--folder=FOLDER/rows.jsonl", names="rows.jsonl"),
    of_arguments(
        "judge", "take", "nonsense", "--engine=http://h:1/v1", "--model=m", "--identity=FOLDER/id.pem", names="nonsense"
    ),
    of_arguments(
        "judge",
        "take",
        "http://127.0.0.1:1",
        "--engine=nonsense",
        "--model=m",
        "--identity=FOLDER/id.pem",
        names="nonsense",
    ),
    of_arguments("rewards", "serve", names="--run"),
    of_arguments("serve", "--model=FOLDER/empty", names="empty"),
    of_arguments("serve", "--model=FOLDER/model", "--device=cuda", names="device"),
    of_arguments("serve", "--model=FOLDER/model", "--device=tpu", names="device"),
    of_arguments("task", "serve", "nonsense", "--orchestrator=http://127.0.0.1:1", names="nonsense"),
    of_arguments("task", "serve", "nothing_here:x", "--orchestrator=http://127.0.0.1:1", names="nothing_here"),
    of_arguments("task", "serve", "math:pi", "--orchestrator=nonsense", names="math:pi"),
    of_arguments("bench", "nobody", names="nobody"),
    of_arguments("demo", "--seed=x"),
    of_arguments("demo", "--seed=99999999999999999999", names="seed"),
    of_arguments("demo", "--run-dir=FOLDER", names="exists already"),
    of_arguments("demo", "--train.lr", names="train.lr"),
    of_arguments("trian", names="trian"),
    of_arguments("train"),
    of_arguments("train", "FOLDER/config.toml", "--dryrun", names="--dry-run"),
    of_arguments("train", "FOLDER/config.toml", "second.toml"),
]


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Path]:
    """The current folder, with a configuration that a dry run accepts, a model and what is to be damaged."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for name in ("empty", "garbage"):
        (tmp_path / name).mkdir()
    for name in ("log.sqlite", "metrics.jsonl", "resolved.toml"):
        (tmp_path / "garbage" / name).write_bytes(b"\xff\x00garbage" * 100)
    (tmp_path / "deep.toml").write_text(f"[{'.'.join('a' * 3000)}]")
    (tmp_path / "config.toml").write_text(
        'run_dir = "run"\n[model]\npath = "model"\n[[tasks]]\nname = "sums"\nservice = "jsonl"\npath = "rows.jsonl"\n'
    )
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_cannot_be_used_is_named_in_a_sentence(
    case: Case, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = case.damage(folder)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capfd.readouterr()
    assert ended.value.code == 2, said
    assert "Traceback" not in said.err
    assert case.names in said.err.replace("\n", "")
    assert "pydantic" not in said.err
    assert not (folder / "run").exists()
