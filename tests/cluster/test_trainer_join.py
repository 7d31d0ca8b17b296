"""Ranks and a scorer of other processes work for a run over TLS; it outlives a killed rank without a person."""

import asyncio
import json
from pathlib import Path

import pytest

from joining import TOKEN, certified, joining
from shoal.cluster.rank_role import RankHost
from shoal.errors import ConfigError
from shoal.experience.audit import audit
from shoal.net.listening import free_port
from train_runs import children, events, start, wait_for_steps


@pytest.mark.timeout(900)
def test_a_run_goes_on_with_a_new_rank_after_one_was_killed(tmp_path: Path, tiny_model_dir: Path) -> None:
    port, master_port, trusted = free_port(), free_port(), certified(tmp_path / "tls")
    url = f"https://127.0.0.1:{port}"
    trainer = ("trainer", "join", url, "--threads=1")
    settings = (f"--cluster.listen=127.0.0.1:{port}", "--cluster.trainer.hosts=2", "--reward.workers=0")
    given = {"SHOAL_RUN_TOKEN": TOKEN, **trusted}
    later = ("--checkpoint.asynchronous=true",)
    run = start(tmp_path, tiny_model_dir, *settings, "--checkpoint.every_steps=3", *later, "--json", **given)
    scorer = joining(tmp_path / "scorer", "rewards", "serve", "--run", url, "--workers=1", **trusted)
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port), **trusted}
    ranks = [joining(tmp_path / name, *trainer, RANK=rank, **launched) for name, rank in (("a", "1"), ("b", "0"))]
    wrong = joining(tmp_path / "c", *trainer, WORLD_SIZE="3", **trusted)
    assert wrong.wait(300) == 2
    assert "ranks: expected 2, as the run has them, got WORLD_SIZE=3" in (tmp_path / "c" / "output").read_text()
    wait_for_steps(tmp_path / "run", 5, run)
    for rank in ranks:
        (worker,) = children(rank, "shoal.trainer.worker")
        assert f"--master=127.0.0.1:{master_port}" in worker.cmdline()
    ranks[0].kill()
    ranks[0].wait(60)
    ranks.append(joining(tmp_path / "d", *trainer, **trusted))
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 40
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    assert "resumed" in events(tmp_path / "run")
    assert "replay_not_exact" not in events(tmp_path / "run")
    for process in (scorer, *ranks[1:]):
        process.terminate()
        assert process.wait(60) == 0


def test_places_of_roles_need_an_address_to_join_at() -> None:
    from shoal.config import parse

    tasks = {"tasks": [{"name": "chain_sum"}]}
    for settings, complaint in (
        ({"trainer": {"hosts": 2}}, r"cluster.trainer: expected cluster.listen too"),
        ({"engines": {"count": 2}}, r"cluster.engines: expected cluster.address too"),
        ({"address": "auto", "listen": "10.0.0.1:0"}, r"cluster.address: expected cluster.listen = HOST:PORT too"),
        ({"address": "auto", "listen": "10.0.0.1:1", "rewards": 1}, r"reward.workers: expected 0 with cluster.rewards"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            parse({**tasks, "cluster": settings})


async def test_a_run_plans_the_memory_of_gpus_on_other_hosts(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The rank works on the CPU, and says that it has a GPU."""
    port, settings = free_port(), ("--cluster.trainer.hosts=1", "--train.steps=1", "--eval.questions=1")
    run = start(tmp_path, tiny_model_dir, f"--cluster.listen=127.0.0.1:{port}", *settings, SHOAL_RUN_TOKEN=TOKEN)
    host = RankHost(f"http://127.0.0.1:{port}", TOKEN, tmp_path / "rank", threads=1, gpu_bytes=24_000_000_000)
    working = asyncio.create_task(host.run(print))
    _, err = await asyncio.to_thread(run.communicate)
    working.cancel()
    assert run.returncode == 0, err
    assert "of 24.0 GB of each GPU" in err
