"""A run whose host is lost goes on elsewhere from its backup."""

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from buffer_values import open_buffer, run_group, train
from joining import TOKEN, joining
from shoal.config import MetricsConfig, parse
from shoal.errors import ConfigError, RunDirError
from shoal.experience import checkpoint
from shoal.experience.audit import audit
from shoal.experience.held_out import answers_file, write_answers
from shoal.net.identity import Identity
from shoal.net.listening import free_port
from shoal.observe.metrics import Record, trackers_of
from shoal.rehearsal.clock import run_virtual
from shoal.run.backup import BackupPlace, back_up, check_backup, copy_run, keep_backup, manifest_of, restore
from shoal.run.training import opened_run
from train_runs import events, start, wait_for_steps
from until import until


@pytest.mark.timeout(600)
def test_a_run_goes_on_elsewhere_with_its_engine_from_the_copy_of_what_is_gone(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    backup, here, there, port = tmp_path / "backup", tmp_path / "here", tmp_path / "there", free_port()
    here.mkdir()
    there.mkdir()
    settings = (f"--checkpoint.backup={backup}", "--engine.count=0", f"--cluster.listen=127.0.0.1:{port}")
    engine = joining(tmp_path / "engine", "engine", "join", f"http://127.0.0.1:{port}", "--threads=1")
    first = start(here, tiny_model_dir, *settings, "--train.steps=2000", SHOAL_RUN_TOKEN=TOKEN)
    wait_for_steps(here / "run", 20, first)
    asyncio.run(until(lambda: copied_steps(backup) >= 5))
    while True:  # a copy may end at any moment but while the run stands still
        wait_for_steps(here / "run", copied_steps(backup) + 3, first)
        first.send_signal(signal.SIGSTOP)
        if audit(here / "run").steps >= copied_steps(backup) + 3:
            break
        first.send_signal(signal.SIGCONT)
    first.kill()
    first.communicate()
    trained = audit(here / "run").steps
    shutil.rmtree(here)
    restore(str(backup), there / "run")
    saved = audit(there / "run")
    assert saved.ok, saved.sentences()
    assert saved.steps < trained, "the engine has a Version that the copy has not"
    second = start(there, tiny_model_dir, *settings, f"--train.steps={saved.steps + 5}", "--resume", "--json")
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    engine.terminate()
    assert engine.wait(60) == 0
    assert "the run goes on from an older copy" in (tmp_path / "engine" / "output").read_text()
    after = audit(there / "run")
    assert after.ok, after.sentences()
    assert json.loads(out.splitlines()[-1])["steps"] == after.steps == saved.steps + 5
    assert "resumed" in events(there / "run")
    assert "backup_failed" not in events(there / "run")
    assert copied_steps(backup) == after.steps, "the last copy is that of the end"


def copied_steps(backup: Path) -> int:
    """Steps of the run that a backup restores to; 0 before its first copy."""
    with TemporaryDirectory() as folder:
        found = manifest_of(BackupPlace(str(backup)))
        if found is None or not found.files:
            return 0
        restore(str(backup), Path(folder) / "run")
        return audit(Path(folder) / "run").steps


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket at a real S3 server, which `make backup-s3` brings."""
    packages = os.environ["SHOAL_S3"]
    sys.path.append(packages)
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "PYTHONPATH": packages},
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        asyncio.run(until(lambda: answers(port)))
        import s3fs

        s3fs.S3FileSystem().mkdir("backups")
        try:
            yield "s3://backups"
        finally:
            server.terminate()
            server.wait()


def answers(port: int) -> bool:
    """Whether something listens at a port."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["folder", "file URL", "memory URL", pytest.param("S3", marks=pytest.mark.s3)])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a backup goes."""
    folder = tmp_path / "backup"
    if request.param == "S3":
        if "SHOAL_S3" not in os.environ:
            pytest.skip("needs an S3 server: make backup-s3")
        return f"{request.getfixturevalue('s3_bucket')}{folder}"
    return {"folder": str(folder), "file URL": f"file://{folder}", "memory URL": f"memory:/{folder}"}[request.param]


def other_run(folder: Path) -> Path:
    """The beginning of a run: its key."""
    folder.mkdir()
    Identity.load(folder / "run.key")
    return folder


def test_a_backup_of_another_run_and_a_place_that_cannot_be_had_are_refused(tmp_path: Path, target: str) -> None:
    mine, other = other_run(tmp_path / "mine"), other_run(tmp_path / "other")
    check_backup(mine, target)
    check_backup(mine, target)
    with pytest.raises(RunDirError, match="expected an empty folder or this run's"):
        check_backup(other, target)
    with pytest.raises(RunDirError, match="expected a backup with a finished copy"):
        restore(target, tmp_path / "restored")
    (tmp_path / "file").touch()
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "notes").touch()
    with pytest.raises(RunDirError, match="expected an empty folder or this run's"):
        check_backup(mine, str(tmp_path / "filled"))
    for wrong in (tmp_path / "file" / "inside", "nosuch://host/run"):
        with pytest.raises(RunDirError, match=f"checkpoint.backup: expected a folder or a URL, got {wrong}"):
            check_backup(mine, str(wrong))


def test_a_new_run_that_fails_at_its_start_leaves_the_place_of_its_backup_to_others(
    tmp_path: Path, target: str
) -> None:
    tree = {"run_dir": str(tmp_path / "run"), "tasks": [{"name": "gcd"}], "checkpoint": {"backup": target}}

    async def started() -> None:
        async with opened_run(parse(tree), (), resume=False):
            check_backup(tmp_path / "run", target)
            raise ConfigError("no engine starts")

    with pytest.raises(ConfigError, match="no engine starts"):
        asyncio.run(started())
    assert not (tmp_path / "run").exists()
    check_backup(other_run(tmp_path / "other"), target)
    with pytest.raises(RunDirError, match="got something else"):
        asyncio.run(started())
    with pytest.raises(RunDirError, match="got something else"):
        asyncio.run(started())  # the first leaves the other's mark


class LiveRun:
    """A run directory whose run takes steps, saves checkpoints, also anew, and archives whenever it is asked to."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = other_run(run_dir)
        self.step = 0
        (run_dir / "resolved.toml").write_text("")
        (run_dir / "run.token").write_text("secret")
        (run_dir / "run.token").chmod(0o600)

    def go_on(self, steps: int = 2) -> None:
        asyncio.run(self._go_on(steps))

    async def _go_on(self, steps: int) -> None:
        buffer = open_buffer(self.run_dir, resume=self.step > 0)
        for step in range(self.step, self.step + steps):
            await run_group(buffer, f"{step}a")
            await run_group(buffer, f"{step}b")
            await train(buffer, step, step)
            with (self.run_dir / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"kind": "step", "step": step + 1}) + "\n")
        self.step += steps
        await buffer.sync()
        for anew in range(2):
            folder = checkpoint.begin(self.run_dir, self.step - 1)
            (folder / "model").mkdir()
            for name in ("model/weights", "optimizer"):
                (folder / name).write_text(f"{name} of {self.step - 1}, saved {anew} times before")
            checkpoint.seal(self.run_dir, self.step - 1)
        if self.step % 4 == 0:
            await buffer.archive(checkpoint.checkpoints(self.run_dir)[0].step)
        await buffer.close()


class Stopped(BaseException):
    """The copying process was killed."""


class WatchedPlace(BackupPlace):
    """Place at which something happens before each operation."""

    def __init__(self, folder: Path, before: Callable[[], None]) -> None:
        super().__init__(str(folder))
        self._before = before

    def names(self, folder: str = "") -> set[str]:
        self._before()
        return super().names(folder)

    def put(self, source: Path, name: str) -> None:
        self._before()
        super().put(source, name)

    def remove(self, name: str) -> None:
        self._before()
        super().remove(name)


def check_restored(backup: Path, folder: Path) -> int:
    """Steps of the run that a backup restores to; a resume finds all that it reads."""
    restore(str(backup), folder)
    found = audit(folder)
    assert found.ok, found.sentences()

    async def replayed() -> int:
        saved = checkpoint.intact(folder, pytest.fail)
        assert saved is not None
        words = {(saved.path / name).read_text().partition(" of ")[2] for name in ("model/weights", "optimizer")}
        assert len(words) == 1, "the files of a checkpoint were saved together"
        buffer = open_buffer(folder, resume=True)
        records = await buffer.steps_after(saved.step)
        for record in records:
            assert len(await buffer.groups_of(record.step)) == 2
        await buffer.close()
        return saved.step + len(records) + 1

    steps = asyncio.run(replayed())
    assert steps == found.steps
    metrics = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(1, len(metrics) + 1))
    assert len(metrics) <= steps
    assert stat.S_IMODE((folder / "run.token").stat().st_mode) == 0o600
    return steps


def test_a_copy_that_is_stopped_before_any_operation_leaves_a_backup_to_go_on_from(tmp_path: Path) -> None:
    """The run goes on between the operations."""
    run, backup = LiveRun(tmp_path / "run"), tmp_path / "backup"
    run.go_on(4)
    back_up(run.run_dir, str(backup))
    steps = check_restored(backup, tmp_path / "restored")
    stopped_at = 0
    while True:
        passed = 0

        def before(stopped_at: int = stopped_at) -> None:
            nonlocal passed
            if passed == stopped_at:
                raise Stopped
            passed += 1
            if passed in (2, 5):
                run.go_on(1)

        run.go_on(1)
        ended = False
        try:
            copy_run(run.run_dir, WatchedPlace(backup, before))
            ended = True
        except Stopped:
            pass
        shutil.rmtree(tmp_path / "restored")
        now = check_restored(backup, tmp_path / "restored")
        assert now >= steps
        steps = now
        if ended:
            break
        stopped_at += 1
    assert stopped_at > 8
    named = json.loads((backup / "backup.json").read_bytes())["files"]
    assert {path.name for path in (backup / "objects").iterdir()} == {file["checksum"] for file in named}
    assert not list(run.run_dir.glob("backup*"))


def test_a_run_that_archives_and_replaces_checkpoints_while_it_is_staged_is_copied_whole(tmp_path: Path) -> None:
    """A thread takes steps as fast as it can while copies are made."""
    run, backup, over = LiveRun(tmp_path / "run"), tmp_path / "backup", threading.Event()
    run.go_on(4)

    def live() -> None:
        while not over.is_set():
            run.go_on(1)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        for copy in range(8):
            back_up(run.run_dir, str(backup))
            check_restored(backup, tmp_path / f"restored-{copy}")
    finally:
        over.set()
        thread.join()


def test_contents_and_modes_come_back_from_any_place_and_nothing_is_copied_twice(tmp_path: Path, target: str) -> None:
    run = LiveRun(tmp_path / "run")
    run.go_on()
    peer, answers = Identity.load(run.run_dir / "swarm" / "identity.pem"), answers_file(run.run_dir, 0)
    write_answers(run.run_dir, 0, [])
    for name in ("session", "banned.txt", "known.txt"):
        (run.run_dir / "swarm" / name).write_text(name)
    back_up(run.run_dir, target)
    first = BackupPlace(target).names("objects")
    (run.run_dir / "backup.unfinished" / "objects").mkdir(parents=True)  # a run was killed during a copy
    back_up(run.run_dir, target)
    assert len(BackupPlace(target).names("objects") ^ first) <= 2, "only the log has other bytes"
    restore(target, tmp_path / "restored")
    assert stat.S_IMODE((tmp_path / "restored" / "run.token").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "restored" / "run.key").stat().st_mode) == 0o600
    assert audit(tmp_path / "restored").steps == 2
    assert answers_file(tmp_path / "restored", 0).read_bytes() == answers.read_bytes()
    swarm = tmp_path / "restored" / "swarm"
    assert Identity.load(swarm / "identity.pem").peer_id == peer.peer_id
    assert stat.S_IMODE((swarm / "identity.pem").stat().st_mode) == 0o600
    assert all((swarm / name).read_text() == name for name in ("session", "banned.txt", "known.txt"))
    with pytest.raises(RunDirError, match="expected a new folder"):
        restore(target, tmp_path / "restored")


def test_a_copy_that_fails_is_an_event_with_its_place_and_another_one_follows(tmp_path: Path) -> None:
    """The run has no log to copy; the clock is virtual."""
    run, place, told = other_run(tmp_path / "run"), tmp_path / "backup", list[Record]()

    def tell(record: Record) -> None:
        told.append(record)
        if len(told) == 2:
            raise Stopped

    with closing(trackers_of(MetricsConfig(), run, [tell])) as trackers, pytest.raises(Stopped):
        run_virtual(asyncio.wait_for(keep_backup(run, str(place), trackers), timeout=3600))
    assert all(record["name"] == "backup_failed" and str(place) in str(record["reason"]) for record in told)


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_only_its_owner_can_read_what_is_in_a_backup(tmp_path: Path, protocol: str) -> None:
    run, backup = LiveRun(tmp_path / "run"), tmp_path / "backup"
    run.go_on()
    back_up(run.run_dir, f"{protocol}{backup}")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in backup.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(modes, 0o600)


@pytest.mark.parametrize("damage", ["an object is lost", "an object has other bytes", "a name leads out", "no JSON"])
def test_a_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    run, backup = LiveRun(tmp_path / "run"), tmp_path / "backup"
    run.go_on()
    back_up(run.run_dir, str(backup))
    manifest, objects = backup / "backup.json", sorted((backup / "objects").iterdir())
    match damage:
        case "an object is lost":
            objects[0].unlink()
        case "an object has other bytes":
            objects[-1].write_bytes(objects[-1].read_bytes() + b" ")
        case "a name leads out":
            manifest.write_text(manifest.read_text().replace("run.token", "../token"))
        case "no JSON":
            manifest.write_bytes(b"\xff")
    with pytest.raises(RunDirError, match="cannot be copied"):
        restore(str(backup), tmp_path / "there" / "run")
    assert not (tmp_path / "there").exists() or not list((tmp_path / "there").iterdir())
    assert not (tmp_path / "token").exists()
