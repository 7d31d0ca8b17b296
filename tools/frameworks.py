"""Agent frameworks as they are installed, in front of Shoal: plain, in training, and with answers that are cut.

python tools/frameworks.py [NAME ...]

Each framework has its own environment below `.venv-frameworks`, made by pip, and runs the script of its name in
examples/agents. Per mode:

plain    the script answers a question of `shoal serve`
trained  a run of ten steps finishes all groups, its audit is clean, and every logged token is what the engine sampled
cut      in a run with answers of one token, nearly drawn evenly from the vocabulary so that few are the end, the
         truncated rollouts are those whose newest answer is cut, and there are some

A mode that is not right makes the exit code 1. Results go to benchmarks/results/frameworks.jsonl, one line per mode.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine_record import Record, compared, recorded_engine, rollouts

from shoal.experience.audit import audit
from shoal.run.prepare import model_directory
from shoal.types import FinishReason, RolloutStatus

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-frameworks"
RESULTS = ROOT / "benchmarks" / "results" / "frameworks.jsonl"
SHOAL = [sys.executable, "-m", "shoal.cli"]
PLAIN_S = 300.0
TRAINED_S = 3600.0
QUESTIONS = 64
CUT = {"max_tokens": 1, "temperature": 10.0}
"""Settings of answers that are cut. At temperature 1 some frameworks' last question is answered by the end alone."""
CONFIG = """run_dir = "run"
[model]
path = "demo-tools"
device = "cpu"
[[tasks]]
name = "sums"
service = "jsonl"
path = "questions.jsonl"
scorer = "number"
agent = {{ run = {command}, answer_file = "answer.txt", timeout_s = 300 }}
[engine]
urls = ["{url}"]
[rollout]
group_size = 2
max_tokens = {max_tokens}
temperature = {temperature}
[train]
steps = {steps}
groups_per_step = {groups}
lr = 1e-4
[eval]
every_steps = 0
questions = 1
"""


@dataclass(frozen=True)
class Framework:
    """A framework, what pip installs for it, and the modes of its script; the first one is its default."""

    name: str
    packages: tuple[str, ...]
    modes: tuple[str, ...] = ("",)

    @property
    def package(self) -> str:
        """Distribution whose version is meant."""
        return self.packages[0].partition("[")[0]

    @property
    def script(self) -> Path:
        """Example that is run."""
        return ROOT / "examples" / "agents" / f"{self.name.replace('-', '_')}_agent.py"

    @property
    def python(self) -> Path:
        """Interpreter of its environment."""
        return ENVIRONMENTS / self.name / "bin" / "python"

    def command(self, mode: str) -> list[str]:
        """Command that runs its script in a mode."""
        return [str(self.python), str(self.script), *filter(None, [mode])]


FRAMEWORKS = (
    Framework("openai-agents", ("openai-agents",), ("", "chat")),
    Framework("pydantic-ai", ("pydantic-ai-slim[openai]",), ("", "output")),
    Framework("smolagents", ("smolagents[openai]",), ("", "code")),
    Framework("langchain", ("langchain", "langchain-openai"), ("", "output", "functions")),
    Framework("langgraph", ("langgraph", "langchain-openai"), ("", "stream", "graph")),
    Framework("instructor", ("instructor",)),
    Framework("dspy", ("dspy",)),
    Framework("litellm", ("litellm", "mcp")),
    Framework("haystack", ("haystack-ai",)),
    Framework("llama-index", ("llama-index-core", "llama-index-llms-openai-like")),
    Framework("ag2", ("ag2[openai]",)),
    Framework("mini-swe-agent", ("mini-swe-agent", "mcp")),
    Framework("anthropic", ("anthropic",)),
)


class Wrong(Exception):
    """A framework does not work; the text says where."""


def install(framework: Framework) -> str:
    """Makes a framework's environment unless it is there, and returns the framework's version."""
    installed = framework.python.parent / "installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", framework.python.parents[1]], check=True)
        subprocess.run([framework.python, "-m", "pip", "install", "-q", *framework.packages], check=True)
        installed.touch()
    asked = f"import importlib.metadata as m; print(m.version({framework.package!r}))"
    return subprocess.run([framework.python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()


def questions(path: Path) -> None:
    """Writes sums of two digits."""
    rng = random.Random(0)
    pairs = rng.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], QUESTIONS)
    path.parent.mkdir(parents=True)
    path.write_text(
        "".join(json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in pairs)
    )


def plain(framework: Framework, mode: str, url: str) -> str:
    """Answer of a framework that asks a served model. Raises `Wrong`."""
    task = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    with tempfile.TemporaryDirectory() as folder:
        told = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "-", "ANTHROPIC_API_KEY": "-", "HOME": folder}
        told["ANTHROPIC_BASE_URL"] = url.removesuffix("/v1")
        done = subprocess.run(
            framework.command(mode),
            cwd=folder,
            env={"PATH": os.environ["PATH"], **told},
            input=json.dumps(task) + "\n",
            capture_output=True,
            text=True,
            timeout=PLAIN_S,
            check=False,
        )
        answer = Path(folder) / "answer.txt"
        if done.returncode or not answer.is_file():
            raise Wrong(f"plain: code {done.returncode}: {done.stderr[-2000:]}")
        return answer.read_text()


async def run_of(
    framework: Framework,
    mode: str,
    folder: Path,
    *,
    steps: int,
    groups: int,
    max_tokens: int = 192,
    temperature: float = 1.0,
) -> tuple[Path, Record]:
    """Run directory of a training run with the framework as its agent, and the record of its engine. Raises `Wrong`."""
    async with recorded_engine(model_directory("demo-tools"), folder / "run" / "weights") as record:
        command = json.dumps(framework.command(mode))
        (folder / "run.toml").write_text(
            CONFIG.format(
                **{"command": command, "url": record.url, "steps": steps, "groups": groups},
                **{"max_tokens": max_tokens, "temperature": temperature},
            )
        )
        with (folder / "output").open("w") as output:
            train = await asyncio.create_subprocess_exec(
                *(*SHOAL, "train", "run.toml"),
                cwd=folder,
                env={**os.environ, "SHOAL_ENGINE_TOKEN": record.token},
                stdout=output,
                stderr=output,
            )
            try:
                code = await asyncio.wait_for(train.wait(), TRAINED_S)
            finally:
                if train.returncode is None:
                    train.terminate()
    if code:
        raise Wrong(f"train ended with code {code}: {(folder / 'output').read_text()[-2000:]}")
    return folder / "run", record


async def measured(framework: Framework, mode: str, url: str, folder: Path, groups: int) -> dict[str, object]:
    """Result of one mode. Raises `Wrong`."""
    began = time.monotonic()
    answer = plain(framework, mode, url)
    for part in ("trained", "cut"):
        questions(folder / part / "questions.jsonl")
    run, record = await run_of(framework, mode, folder / "trained", steps=10, groups=groups)
    report, found = audit(run), rollouts(run)
    turns, equal = compared(found, record)
    failed = collections.Counter(one.reason for one in found if one.status is RolloutStatus.FAILED)
    cut, _ = await run_of(framework, mode, folder / "cut", steps=1, groups=1, **CUT)
    cut_rollouts = rollouts(cut)
    truncated = {at for at, one in enumerate(cut_rollouts) if one.status is RolloutStatus.TRUNCATED}
    newest = {at: one.turns[-1].completion.finish_reason for at, one in enumerate(cut_rollouts) if one.turns}
    cut_last = {at for at, end in newest.items() if end is FinishReason.LENGTH}
    result: dict[str, object] = {
        "plain": answer,
        "groups": [report.consumed, 10 * groups],
        "groups_failed": report.failed,
        "rollouts": len(found),
        "failed": dict(failed),
        "reward": round(sum(one.reward.value for one in found) / max(1, len(found)), 3),
        "truncated": [len(truncated), len(cut_last)],
        "ended_by_themselves": len(cut_rollouts) - len(cut_last),
        "audit": sorted(report.findings),
        "turns": [equal, turns],
        "seconds": round(time.monotonic() - began),
    }
    right = report.consumed == 10 * groups and not failed and not report.failed and report.ok
    if not (right and turns and equal == turns and cut_last and truncated == cut_last):
        reasons = [f"{cut_rollouts[at].status}: {cut_rollouts[at].reason}" for at in sorted(cut_last ^ truncated)]
        raise Wrong(json.dumps(result | {"not_truncated": reasons}))
    return result


def serve(folder: Path) -> tuple["subprocess.Popen[str]", str]:
    """A process that serves the model as `policy`, the name that the scripts ask for, and its URL."""
    shutil.copytree(model_directory("demo-tools"), folder / "policy", dirs_exist_ok=True)
    process = subprocess.Popen(
        [*SHOAL, "serve", "--model", str(folder / "policy"), "--port", "0", "--quiet", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=(folder / "serve.log").open("w"),
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def written(results: list[dict[str, object]]) -> None:
    """Writes results in the place of older ones of the same mode."""
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = {(one["framework"], one["mode"]) for one in results}
    order = [(framework.name, mode) for framework in FRAMEWORKS for mode in framework.modes]
    rows = [one for one in kept if (one["framework"], one["mode"]) not in known] + results
    rows.sort(key=lambda one: order.index((one["framework"], one["mode"])))
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in rows))


def commit() -> str:
    """Commit of the source."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Runs the frameworks that are named, or all of them."""
    names = [framework.name for framework in FRAMEWORKS]
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"NAME or NAME:MODE of {', '.join(names)}")
    arguments.add_argument("--groups", type=int, default=1, help="groups of each step, of two rollouts")
    arguments.add_argument("--keep", type=Path, help="folder that keeps the runs")
    given = arguments.parse_args()
    named = set(given.names or names)
    chosen = [(one, mode) for one in FRAMEWORKS for mode in one.modes if {one.name, f"{one.name}:{mode}"} & named]
    if unknown := {name.partition(":")[0] for name in named} - set(names):
        arguments.error(f"no framework {sorted(unknown)}; there are {names}")
    code = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    with tempfile.TemporaryDirectory(prefix="frameworks-") as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        server, url = serve(folder)
        try:
            for framework, mode in chosen:
                head = {"framework": framework.name, "version": install(framework), "mode": mode, "commit": commit()}
                try:
                    place = folder / f"{framework.name}-{mode or 'default'}"
                    result = asyncio.run(measured(framework, mode, url, place, given.groups))
                    written([head | result])
                    print(json.dumps(head | result), flush=True)
                except (Wrong, subprocess.TimeoutExpired) as wrong:
                    code = 1
                    print(f"{framework.name} {mode}: {wrong}", file=sys.stderr, flush=True)
        finally:
            server.terminate()
            server.wait()
    return code


if __name__ == "__main__":
    sys.exit(main())
