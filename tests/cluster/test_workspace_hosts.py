"""Other hosts play a run's rollouts in workspaces; trees travel to them, and a host that ends or fails loses none."""

import asyncio
import json
import os
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.work import CoinScorer
from chat_templates import renderer
from gateway_engine import CONTEXT, ScriptedEngine
from joining import TOKEN, joining
from shoal.cluster.registry import RunInfo, WorkspacesRole
from shoal.cluster.workspace_hosts import KEPT_TREES, PlayRequest, WorkspaceHosts, hosted
from shoal.config import TaskConfig
from shoal.environments.workspace import WorkspaceGame
from shoal.errors import TaskError
from shoal.experience.audit import audit
from shoal.gateway.host import Host
from shoal.interfaces import Environment
from shoal.net.identity import Identity
from shoal.net.joining import Answering, hold_lease
from shoal.net.listening import free_port
from shoal.net.run_server import LeasedWorker, RunServer
from shoal.net.server import json as answered
from shoal.rollout.agents.runner import AgentRunner
from shoal.tasks.library import written
from shoal.tasks.sdk import Definition
from shoal.types import Message, Role, Rollout, RolloutStatus, Sampling, Split
from shoal.workspace.task import WorkspaceTask
from shoal.workspace.tree import Tree, arrived, pack, tree_of
from until import until

pytest_plugins = ("small_workspaces",)
MEND = "```bash\nsleep 0.2; sed -i 's/a - b/a + b/' sums.py\n```"
Joins = Callable[[str], Awaitable[Any]]
RUN = Identity.fresh()


async def described(_: Request) -> Response:
    """What the run says about itself."""
    return answered(RunInfo(RUN.public_key, "{}", "{}", Sampling(4), None))


@pytest.fixture
def tasks(source: Path) -> Path:
    wanted = {
        **{"problem": "add subtracts. Mend it.", "tree": "source", "restored": ["tests"]},
        **{"command": ["python", "-m", "pytest", "-q", "tests/test_sums.py"]},
        "red": ["tests/test_sums.py::test_it_adds"],
    }
    lines = [{**wanted, "id": half, "split": half, "problem": f"{half}: mend add."} for half in ("train", "eval")]
    file = source.parent / "tasks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def played(tasks: Path, n: int, joins: Joins, while_playing: Callable[[Any], Awaitable[None]]) -> tuple[Rollout, ...]:
    """`n` rollouts of one answer that mends the task, at a run that a host has joined."""
    params = {"tasks": str(tasks), "turns": 1}
    own: Environment = written(TaskConfig(name="workspace", service="turns", params=params), 0)

    async def main() -> tuple[Rollout, ...]:
        made, server = renderer("qwen3"), RunServer([Route("/v1/run", described)], token=TOKEN)
        engine = ScriptedEngine(made, [MEND] * 4 * n)
        with server, hosted({"workspace": own}, server, RUN) as environments:
            game = environments["workspace"]
            before = game.max_running or 0
            host = await joins(server.url)
            await until(lambda: (game.max_running or 0) > before)
            async with Host.open(engine, made, max_model_len=CONTEXT) as gateway:
                options: Any = {"timeout_s": 120, "most_at_once": lambda: game.max_running}
                runner = AgentRunner(gateway, game.rollout, CoinScorer(), Sampling(400, seed=0), **options)
                doing = asyncio.create_task(runner.rollouts(game.draw(Split.TRAIN, 0), n))
                await while_playing(host)
                return await doing

    return asyncio.run(main())


def a_process(folder: Path) -> tuple[Joins, Path]:
    """`shoal workspace serve` with a cache of its own, and the folder of the trees there."""

    async def joins(url: str) -> Any:
        return joining(folder, "workspace", "serve", "--run", url, XDG_CACHE_HOME=str(folder / "cache"))

    return joins, folder / "cache" / "shoal" / "workspaces" / "trees"


@pytest.mark.parametrize("dies", [False, True])
def test_a_tree_travels_to_a_host_and_one_that_is_killed_loses_no_rollout(
    tasks: Path, tmp_path: Path, dies: bool
) -> None:
    joins, trees = a_process(tmp_path / "host")
    digest = tree_of(tasks.parent / "source").digest

    async def while_playing(host: Any) -> None:
        await until((trees / digest / "tree.json").is_file)
        if dies:
            host.kill()

    rollouts = played(tasks, 6, joins, while_playing)
    assert [(one.status, one.reward.value, len(one.turns)) for one in rollouts] == [
        (RolloutStatus.FINISHED, 1.0, 1)
    ] * 6
    assert all("verdict: 1" in one.reward.evidence for one in rollouts)
    assert [path.name for path in trees.iterdir()] == [digest], "the tree alone, and nothing half done"


def test_a_host_whose_answers_are_wrong_rests_and_others_play(tasks: Path) -> None:
    asked = []

    @asynccontextmanager
    async def work(_: object) -> AsyncIterator[Answering]:
        async def answer(request: bytes) -> bytes:
            asked.append(request)
            failed = b'{"type": "failed", "reason": "full", "retry": true}'
            return [b'{"type": "done", "value": 7}', failed, b"?"][len(asked) % 3]

        yield answer

    leases = []

    async def joins(url: str) -> None:
        role = WorkspacesRole(max_running=1)
        leases.append(asyncio.create_task(hold_lease(url, TOKEN, role, lambda sentence: None, work)))

    async def while_playing(_: None) -> None:
        return

    rollouts = played(tasks, 6, joins, while_playing)
    assert [one.reward.value for one in rollouts] == [1.0] * 6
    assert asked


async def test_no_host_plays_more_at_once_than_it_has_places_nor_a_task_that_plays_otherwise(tmp_path: Path) -> None:
    class Own(WorkspaceGame):
        """Plays in its own way, which another host does not know."""

    hosts = WorkspaceHosts(tmp_path, RUN)
    worker: Any = SimpleNamespace(name="other")
    playing, most, wrong = Counter[str](), Counter[str](), Definition("own", Own())

    async def play(own: Any, *, travels: bool) -> None:
        async with hosts.place(own, travels=travels) as host:
            name = "own" if host.worker is None else "other"
            playing[name] += 1
            most[name] = max(most[name], playing[name])
            await asyncio.sleep(0)
            playing[name] -= 1

    definition = Definition("workspace", WorkspaceGame(), max_running=2)
    forks = Definition("forks", WorkspaceGame(fork_after=1))
    games = {"own": wrong, "workspace": definition, "forks": forks}
    with RunServer() as server, hosted(games, server, RUN) as found:
        assert [*found] == ["workspace"]
        own: Any = found["workspace"]
        async with hosts.joined(WorkspacesRole(max_running=3), worker):
            assert hosts.places == 3
            await asyncio.gather(*(play(own._here, travels=number % 3 > 0) for number in range(60)))
    assert most == {"own": 2, "other": 3}


async def test_a_tree_that_a_host_fetches_stays_whatever_is_packed_meanwhile(source: Path, tmp_path: Path) -> None:
    def changed(number: int) -> Tree:
        (source / "sums.py").write_text(f"{number}")
        return tree_of(source)

    hosts = WorkspaceHosts(tmp_path, RUN)
    async with hosts.serving(first := changed(0)) as fetched:
        for number in range(1, KEPT_TREES + 4):
            async with hosts.serving(changed(number)) as other:
                assert {"tree.json", "tree.tar.gz"} <= {*os.listdir(hosts.directory_of(fetched.number))}
    assert len({str(fetched.number), str(other.number)} & {*os.listdir(tmp_path)}) == 2
    assert len([name for name in os.listdir(tmp_path) if name.isdecimal()]) <= KEPT_TREES + 2
    async with hosts.serving(first) as again:
        assert again == fetched


def test_a_run_cannot_name_a_folder_of_the_host(source: Path, tmp_path: Path) -> None:
    """What a rollout's commands print would reach the run."""
    (source / "secret.txt").write_text("swordfish")
    script = ["```bash\ncat secret.txt; ls -a\n```", "DONE"]

    async def main() -> str:
        made, joined = renderer("qwen3"), asyncio.Event()
        workers: list[LeasedWorker] = []

        @asynccontextmanager
        async def use(_: object, worker: LeasedWorker) -> AsyncIterator[None]:
            workers.append(worker)
            joined.set()
            yield

        with RunServer([Route("/v1/run", described)], token=TOKEN) as server:
            server.open(WorkspacesRole, use)
            await a_process(tmp_path / "host")[0](server.url)
            async with Host.open(ScriptedEngine(made, script), made, max_model_len=CONTEXT) as gateway:
                model = gateway.session(Sampling(400), 0, 60.0)
                wanted = WorkspaceTask(id="a", problem="b", tree=str(source))
                asked = (Message(Role.USER, "go"),)
                urls = model.base_url, model.anthropic_base_url, model.api_key
                request = PlayRequest(WorkspaceGame(turns=2), wanted, asked, None, *urls)
                async with asyncio.timeout(120):
                    await joined.wait()
                answer = await workers[0].call(msgspec.json.encode(request), 60)
                assert b'"done"' in answer, answer
                return "".join(message.content for message in model.tree.messages())

    said = asyncio.run(main())
    assert "No such file" in said
    assert "swordfish" not in said


def test_a_tree_that_came_is_the_wanted_one_or_is_refused(tree: Tree, tmp_path: Path, monkeypatch: Any) -> None:
    pack(tree, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert arrived(tmp_path, tree.digest).digest == tree.digest
    with pytest.raises(TaskError, match=f"expected its files from the run, got {tree.digest[:16]}"):
        arrived(tmp_path, "0" * 64)
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    (tmp_path / "linked").hardlink_to(secret)
    outside, linked, device = tarfile.TarInfo("../outside"), tarfile.TarInfo("./workspace/a"), tarfile.TarInfo("./null")
    linked.type, linked.linkname, device.type = tarfile.LNKTYPE, str(secret), tarfile.CHRTYPE
    placed = tarfile.TarInfo("./workspace")
    placed.type, placed.linkname = tarfile.SYMTYPE, str(tmp_path)
    for member, says in (
        (outside, "outside"),
        (linked, "symbolic links"),
        (device, "symbolic links"),
        (placed, "a link"),
    ):
        with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as archive:
            archive.addfile(member)
        with pytest.raises(TaskError, match=says):
            arrived(tmp_path, tree.digest)
    assert secret.read_text() == "swordfish"
    (tmp_path / "tree.tar.gz").write_bytes(b"no archive")
    with pytest.raises(TaskError, match="cannot be kept"):
        arrived(tmp_path, tree.digest)


@pytest.mark.timeout(600)
def test_a_host_with_nothing_but_the_token_plays_for_a_run(tasks: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    run.mkdir()
    (run / "config.toml").write_text(
        f'run_dir = "out"\n[model]\npath = "{tiny_model_dir}"\n[cluster]\nlisten = "127.0.0.1:{port}"\n'
        f'[[tasks]]\nname = "workspace"\nservice = "turns"\nparams = {{ tasks = "{tasks}", turns = 1 }}\n'
        "[rollout]\ngroup_size = 4\nmax_tokens = 4\n[train]\nsteps = 2\ngroups_per_step = 2\n"
        "[eval]\nevery_steps = 0\nquestions = 2\n"
    )
    joins, trees = a_process(tmp_path / "host")
    host = asyncio.run(joins(f"http://127.0.0.1:{port}"))  # type: ignore[arg-type]
    done = joining(run, "train", "config.toml", "--train.dynamic_sampling=off")
    assert done.wait(500) == 0, (run / "output").read_text()
    report = audit(run / "out")
    assert report.ok, report.sentences()
    assert len(list(trees.iterdir())) == 1
    host.terminate()
    assert host.wait(60) == 0
