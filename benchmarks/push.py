"""Bytes and seconds of new weights on their way to another host, over real steps of the embedded model and of SmolLM2.

delta_bytes   bytes of one Version as differences to the one before, mean over the steps
full_bytes    bytes of the whole Version
share         the first over the second
apply_s       seconds to fetch, decode, check and write a Version over loopback, mean

`adapter` has a Version of SmolLM2 with adapters of rank 8, written whole and as its adapter, on the same disk:

full_bytes, adapter_bytes   of the Version's files
full_s, adapter_s           seconds from the trainer's write until the engine serves it, the least of some
"""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import fmean

import uvloop

from benchmarks import Report, say
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.interfaces import Purpose
from shoal.net.client import Client
from shoal.net.identity import Identity
from shoal.net.run_server import RunServer
from shoal.run.commands.demo import demo_config, real_config
from shoal.run.parts import answering
from shoal.run.prepare import Prepared, prepare
from shoal.trainer.advantage import step_samples
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Group, Split
from shoal.weights.pull import VersionPuller
from shoal.weights.serving import VersionServer
from shoal.weights.store import WeightStore

STEPS, QUICK_STEPS = 20, 4
RANK = 8


def measure(quick: bool) -> Report:
    """Trains both models; `quick` takes fewer steps."""
    steps = QUICK_STEPS if quick else STEPS
    report: Report = {"steps": steps}
    for name, made in (("embedded", demo_config), ("smollm2", real_config)):
        with tempfile.TemporaryDirectory(prefix="shoal-push-") as folder:
            config = made(Path(folder) / "run", 0, [])
            with prepare(config) as prepared:
                report[name] = uvloop.run(_pushed(prepared, Path(folder), steps))
        say(f"{name}: {report[name]}")
    with tempfile.TemporaryDirectory(prefix="shoal-push-") as folder:
        config = real_config(Path(folder) / "run", 0, [f"train.lora.rank={RANK}"])
        with prepare(config) as prepared:
            report["adapter"] = uvloop.run(_pushed_adapter(prepared, Path(folder), QUICK_STEPS))
    return report


async def _pushed_adapter(prepared: Prepared, folder: Path, rounds: int) -> dict[str, float]:
    config = prepared.config
    threads, store = prepared.threads, WeightStore(folder / "weights")
    sizes: dict[str, int] = {}
    seconds: dict[str, list[float]] = {MODEL_FILE: [], ADAPTER_FILE: []}
    async with (
        local_ranks(folder / "trainer.log", threads.trainer) as ranks,
        answering(prepared) as parts,
    ):
        trainer = TrainerProcess(ranks)
        await trainer.start(prepared.model_dir, config, threads.trainer)
        for version, name in enumerate([*seconds] * rounds, 1):
            began_s = time.monotonic()
            unfinished = store.begin(version) / name
            await trainer.write_version(unfinished)
            written = await asyncio.to_thread(store.seal, version)
            await parts.engines.pool.update_weights(version, written.path)
            seconds[name].append(time.monotonic() - began_s)
            sizes[name] = written.path.stat().st_size
            store.remove_before(version)
    return {
        "full_bytes": sizes[MODEL_FILE],
        "adapter_bytes": sizes[ADAPTER_FILE],
        "full_s": min(seconds[MODEL_FILE]),
        "adapter_s": min(seconds[ADAPTER_FILE]),
    }


async def _pushed(prepared: Prepared, folder: Path, steps: int) -> dict[str, float]:
    config = prepared.config
    threads, store, identity = prepared.threads, WeightStore(folder / "weights"), Identity.fresh()
    sent: list[int] = []
    full: list[int] = []
    seconds: list[float] = []
    server = RunServer(VersionServer(store, prepared.model_dir, identity).routes, token="bench")
    async with (
        local_ranks(folder / "trainer.log", threads.trainer) as ranks,
        answering(prepared) as parts,
    ):
        trainer = TrainerProcess(ranks)
        await trainer.start(prepared.model_dir, config, threads.trainer)
        with server:
            client = Client(server.url, token="bench")
            puller = VersionPuller(client, folder / "host", identity.public_key)
            for step in range(steps + 1):
                version, per_step = step + 1, config.train.groups_per_step
                tasks = [prepared.service.draw(Split.TRAIN, step * per_step + index) for index in range(per_step)]
                rollouts = await asyncio.gather(
                    *(parts.runner.rollouts(task, config.rollout.group_size, Purpose.TRAIN) for task in tasks)
                )
                groups = [Group(f"{task.id}", task, each, step) for task, each in zip(tasks, rollouts, strict=True)]
                await trainer.step(step_samples(groups, config.train, config.rollout.max_tokens), step)
                await trainer.write_version(store.begin(version) / MODEL_FILE)
                written = await asyncio.to_thread(store.seal, version)
                began_s = time.monotonic()
                await puller.pull(version)
                if step:  # the first one has no base
                    seconds.append(time.monotonic() - began_s)
                    sent.append(puller.last.sent_bytes)
                    full.append(puller.last.full_bytes)
                await parts.engines.pool.update_weights(version, written.path)
                store.remove_before(version)
                puller.remove_before(version)
            await client.aclose()
    return {
        "delta_bytes": fmean(sent),
        "full_bytes": fmean(full),
        "share": fmean(sent) / fmean(full),
        "apply_s": fmean(seconds),
    }
