"""Attacks of peers on the real node under a virtual clock: `make adversary` prints one JSON line per attack and seed.

Honest peers share one informative group a step. An owner with k keys shares true offers under each. The line has the
owner's share of the groups that the node took, and how many groups a step took, of all authors and of honest ones.
"""

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_swarm import MemorySwarm
from benchmarks.processes import commit
from chat_templates import ANSWERING, renderer_of
from shoal import wire
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.net.identity import Identity
from shoal.rehearsal.clock import run_virtual
from shoal.swarm.node import Node
from shoal.swarm.peer import KNOWN_FILE, Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.jsonl import JsonlService
from shoal.types import Reward, Split, Task

NOW_S = 1.8e9
STEP_S = 10.0
PARTS = 200
"""Parts of a step, between which other tasks have their turn."""
HONEST, WANTED = 8, 4


@dataclass(frozen=True)
class Attack:
    """An owner of `keys`, each with some `offers` a step from a step on."""

    keys: int
    offers: int
    from_step: int
    steps: int
    known: int = 0
    """Honest peers that the node's user lists in known.txt."""
    flood_per_s: int = 0
    """Frames a second of strangers, from then on: half of them signed and then repeated, half forged."""


class ExactScorer:
    """A `Scorer` that compares."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        await asyncio.sleep(0.02)
        return [Reward(float(answer == task.answer)) for answer in answers]


def simulated(attack: Attack, seed: int, folder: Path) -> dict[str, object]:
    """Runs an attack and returns its figures."""
    rng, keys, hub = random.Random(seed), random.Random(f"keys {seed}"), MemorySwarm()
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {i}", "answer": f"{i}"}) for i in range(6000)))
    numbers = TaskConfig(name="numbers", service="jsonl", path=str(data), scorer="exact", eval_share=0.01)
    config = Config(tasks=[numbers], swarm=SwarmConfig(external_groups=WANTED), seed=seed)
    own = OwnTasks([service := JsonlService(numbers, 0)])
    claims = iter(_shuffled(service, rng))
    honest, owned = ([identity(keys) for _ in range(n)] for n in (HONEST, attack.keys))
    signers = {one.peer_id: Signer(one, "reef", 1) for one in (*honest, *owned)}

    (folder / KNOWN_FILE).write_text("\n".join(one.peer_id for one in honest[: attack.known]))

    flood, own_identity = _flood(attack.flood_per_s, keys), identity(keys)

    async def main() -> list[list[str]]:
        now_s = asyncio.get_running_loop().time
        joined = Joined(hub.join(), own, own_identity, folder, config, clock=lambda: NOW_S + now_s(), timer=lambda: 0.0)
        node = Node(joined, ExactScorer(), renderer_of(ANSWERING["qwen3"]), 256, threads=False)
        running, taken = asyncio.ensure_future(node.run()), list[list[str]]()
        for step in range(attack.steps):
            authors = [one.peer_id for one in honest]
            authors += [one.peer_id for one in owned] * attack.offers * (step >= attack.from_step)
            rng.shuffle(authors)
            for author in authors:
                claim = await own.claim(next(claims))
                rollouts = OfferedRollout(claim.truth or ""), OfferedRollout(f"{rng.random()}")
                content = Offer(claim, rollouts, GeneratorKind.FROZEN, "model", NOW_S + now_s())
                frame = signers[author].frame(wire.encode(content), NOW_S + now_s())
                hub.put(author, frame)
            for part in range(PARTS):
                for author, frame in flood[part % 20 :: 20] if step >= attack.from_step else ():
                    hub.put(author, frame)
                await asyncio.sleep(STEP_S / PARTS)
            groups = await node.take(step, _logprobs)
            taken.append([group.origin.peer_id for group in groups if group.origin])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return taken

    taken = run_virtual(main())
    bad = {one.peer_id for one in owned}
    during = Counter(author in bad for step in taken[attack.from_step :] for author in step)
    return {
        "commit": commit(),
        **asdict(attack),
        "seed": seed,
        "share": round(during[True] / max(during.total(), 1), 3),
        "groups_a_step_from_10": round(sum(map(len, taken[10:])) / max(len(taken[10:]), 1), 2),
        "groups_a_step_from_attack": round(fmean(map(len, taken[attack.from_step :])), 2),
        "honest_groups_a_step_from_10": round(
            fmean(sum(author not in bad for author in step) for step in taken[10:]), 2
        ),
    }


def identity(keys: random.Random) -> Identity:
    """An identity of the seed: a node chooses by its own peer id."""
    return Identity(Ed25519PrivateKey.from_private_bytes(keys.randbytes(32)))


def _flood(count: int, keys: random.Random) -> list[tuple[str, bytes]]:
    """Names and frames of one second."""
    frames = list[tuple[str, bytes]]()
    payload = wire.encode(
        Offer(Claim("numbers", "say?", "1"), (OfferedRollout("7"),) * 2, GeneratorKind.RULE, "x", NOW_S)
    )
    for number in range(count // 2):
        one = identity(keys)
        frame = Signer(one, "reef", 1).frame(payload, NOW_S)
        frames += [(one.peer_id, frame), (f"{number}", bytes(64) + frame[64:])]
    return frames


def _shuffled(service: JsonlService, rng: random.Random) -> list[Task]:
    tasks = list(service.tasks(Split.TRAIN))
    rng.shuffle(tasks)
    return tasks


async def _logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


ATTACKS = (
    Attack(0, 0, 0, 40),
    Attack(1, 1, 20, 120),
    Attack(1, 30, 20, 120),
    Attack(8, 1, 20, 120),
    Attack(32, 1, 20, 120),
    Attack(16, 1, 0, 40),
    Attack(16, 1, 0, 40, known=4),
    Attack(16, 1, 0, 40, known=8),
    Attack(0, 0, 20, 40),
    Attack(0, 0, 20, 40, flood_per_s=10_000),
)

if __name__ == "__main__":
    for seed_ in map(int, sys.argv[1:] or ["0"]):
        for attack_ in ATTACKS:
            with tempfile.TemporaryDirectory() as folder_:
                print(json.dumps(simulated(attack_, seed_, Path(folder_))), flush=True)
