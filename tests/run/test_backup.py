"""A run whose host is lost goes on elsewhere from its backup."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from joining import TOKEN, joining
from shoal.errors import RunDirError
from shoal.experience.audit import audit
from shoal.net.listening import free_port
from shoal.run.backup import back_up, check_backup, place_of
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
    first = start(
        here, tiny_model_dir, *settings, "--checkpoint.backup_s=5", "--train.steps=2000", SHOAL_RUN_TOKEN=TOKEN
    )
    wait_for_steps(here / "run", 20, first)
    asyncio.run(until(lambda: (backup / "log.sqlite").exists() and audit(backup).steps >= 5))
    wait_for_steps(here / "run", audit(backup).steps + 3, first)
    first.kill()
    first.communicate()
    trained = audit(here / "run").steps
    shutil.rmtree(here)
    saved = audit(backup)
    assert saved.ok, saved.sentences()
    assert saved.steps < trained, "the engine has a Version that the copy has not"
    shutil.copytree(backup, there / "run")
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
    assert audit(backup).steps == after.steps, "the last copy is that of the end"


@pytest.fixture(params=["folder", "file URL", "memory URL"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a backup goes."""
    folder = tmp_path / "backup"
    return {"folder": str(folder), "file URL": f"file://{folder}", "memory URL": f"memory:/{folder}"}[request.param]


def test_a_backup_of_another_run_and_a_place_that_cannot_be_had_are_refused(tmp_path: Path, target: str) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    check_backup(mine, target)
    place_of(target).put(mine / "run.key", "run.key")
    check_backup(mine, target)
    with pytest.raises(RunDirError, match="expected an empty folder or this run's"):
        check_backup(other, target)
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file" / "inside", "nosuch://host/run"):
        with pytest.raises(RunDirError, match=f"checkpoint.backup: expected a folder or a URL, got {wrong}"):
            check_backup(mine, str(wrong))


def test_what_is_gone_from_a_run_is_gone_from_its_backup_and_what_is_not_whole_never_comes(
    tmp_path: Path, target: str
) -> None:
    import sqlite3

    run = tmp_path / "run"
    for name in ("step-1", "step-2", "step-3.unfinished"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "model").write_text(name)
    with sqlite3.connect(run / "log.sqlite") as log:
        log.execute("CREATE TABLE t (x)")
    back_up(run, target)
    place = place_of(target)
    assert place.names("checkpoints") == {"step-1", "step-2"}
    shutil.rmtree(run / "checkpoints" / "step-1")
    back_up(run, target)
    assert place.names("checkpoints") == {"step-2"}
    assert place.names("checkpoints/step-2") == {"model"}
    assert place.names() == {"checkpoints", "log.sqlite"}
    place.get("checkpoints/step-2/model", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_text() == "step-2"
