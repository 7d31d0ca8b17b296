"""The swarm bench measures the cost of being in a swarm: admitting offers, and up to 10,000 nodes at once.

offers_per_s      frames of about 8 KB per second of one core's time through the ingress filter: size, schema,
                  signature, sequence, rate, decompression, decoding
intake_core_share largest share of a core that a node spends in the ingress filter, under any flood
with_receipt_per_s  offers per second, with the question drawn again from its receipt by a child process
simulated         one row per size of a swarm in one process, on a clock that jumps: nodes, and of each of `WHOLE` among
                  them, which are the real node with trust and strategy, processor time, calls of functions, external
                  groups taken, bytes per step. All others send signed offers as often, and read nothing:
                  a node meets as many peers as in the whole swarm, in a hundredth of the time
nodes             size of the largest swarm
bytes_per_step    bytes that one of its nodes sent and read per step
cpu_s_per_node_hour  processor time of one of its nodes in an hour of simulated time
growth_exponent   slope of log(calls of all nodes) over log(nodes) over the sizes: 1 is linear, 2 quadratic
quadratic_share   share of the largest swarm's calls in the quadratic term of a least-squares fit of a n + b n^2
cpu_growth_exponent, cpu_quadratic_share  the same of processor time, which other work on the machine disturbs
"""

import asyncio
import cProfile
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression
from string import ascii_letters

from benchmarks import say
from benchmarks.memory_swarm import MemoryExchange, MemorySwarm
from benchmarks.work import coin
from shoal import wire
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.net.identity import Identity
from shoal.rehearsal.clock import run_virtual
from shoal.swarm.node import Node
from shoal.swarm.peer import INTAKE_PER_S, Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.ingress import IngressFilter, TrustLimits, VerifiedMessage
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, Course, GeneratorKind, Offer, OfferedRollout, offer_of
from shoal.tasks.library import Library
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Split, Task, Turn, seed_for

Report = dict[str, object]
ROLLOUTS = 8
FRAME_BYTES = 8192
UNLIMITED = TrustLimits(rate_per_s=1e9, burst=1e9, newcomers_rate_per_s=1e9, newcomers_burst=1e9, author_burst_s=1e9)
AUTHORS = 16
SIZES = (100, 1000, 10_000)
QUICK_SIZES = (100, 300)
SIMULATED_S = 40.0
START_S = 1.8e9
"""Unix time at which a simulation starts."""
WHOLE, QUICK_WHOLE = 100, 10
"""Nodes of each swarm that are simulated whole."""
READ_PER_S = 2.0
"""Frames that a simulated node reads per second, however many others there are."""
STEP_S = 10.0
"""Seconds between two groups of a simulated node."""


def measure(quick: bool) -> Report:
    """Measures all figures of the list above."""
    count = 500 if quick else 10_000
    offers_per_s, frame_bytes = _admission(count)
    sizes = [_simulation(nodes, QUICK_WHOLE if quick else WHOLE) for nodes in (QUICK_SIZES if quick else SIZES)]
    largest = sizes[-1]
    return {
        "offers_per_s": offers_per_s,
        "frame_bytes": frame_bytes,
        "intake_core_share": INTAKE_PER_S / offers_per_s,
        "with_receipt_per_s": _with_receipts(200 if quick else 2000),
        "simulated": [asdict(one) for one in sizes],
        "nodes": largest.nodes,
        "bytes_per_step": largest.bytes_per_step,
        "cpu_s_per_node_hour": largest.cpu_s * 3600 / SIMULATED_S,
        "growth_exponent": growth_exponent([(one.nodes, one.calls * one.nodes) for one in sizes]),
        "quadratic_share": quadratic_share([(one.nodes, one.calls * one.nodes) for one in sizes]),
        "cpu_growth_exponent": growth_exponent([(one.nodes, one.cpu_s * one.nodes) for one in sizes]),
        "cpu_quadratic_share": quadratic_share([(one.nodes, one.cpu_s * one.nodes) for one in sizes]),
    }


@dataclass(frozen=True, slots=True)
class Simulated:
    """Figures of one swarm; of each node but for the first."""

    nodes: int
    cpu_s: float
    calls: float
    """Calls of functions, counted in a second run."""
    groups: float
    """External groups that it took."""
    bytes_per_step: float
    """Bytes that it sent and read per step."""


def growth_exponent(points: Sequence[tuple[int, float]]) -> float:
    """Least-squares slope of log(cost) over log(nodes).

    >>> round(growth_exponent([(10, 1.0), (100, 10.0), (1000, 100.0)]), 6)
    1.0
    """
    return linear_regression([math.log(n) for n, _ in points], [math.log(cost) for _, cost in points]).slope


def quadratic_share(points: Sequence[tuple[int, float]]) -> float:
    """Share of b n^2 in the largest n, of the fit of cost = a n + b n^2 by relative least squares; 0 for b < 0.

    >>> round(quadratic_share([(10, 1.0), (100, 10.0), (1000, 100.0)]), 6)
    0.0
    >>> round(quadratic_share([(1, 2.0), (10, 110.0)]), 6)
    0.909091
    """
    each = [(n, cost / n) for n, cost in points]  # per node: a + b n
    fit = linear_regression([n for n, _ in each], [value for _, value in each])
    largest = max(n for n, _ in points)
    return max(0.0, fit.slope * largest / (fit.intercept + fit.slope * largest))


def _texts(rng: random.Random, size: int) -> tuple[OfferedRollout, ...]:
    """Answers that hardly compress, so that a frame is as large as its payload."""
    alphabet = ascii_letters + "0123456789+/" + "".join(map(chr, range(0xC0, 0x100)))
    return tuple(OfferedRollout("".join(rng.choices(alphabet, k=size))) for _ in range(ROLLOUTS))


def _admission(count: int) -> tuple[float, float]:
    """Frames per second through the ingress filter, and their mean size."""
    rng, now_s = random.Random(0), 1.8e9
    signers = [Signer(Identity.fresh(), "reef", session=1) for _ in range(AUTHORS)]
    frames = []
    for i in range(count):
        claim = Claim("bench", f"question {i}", "truth")
        made = Offer(claim, _texts(rng, FRAME_BYTES // ROLLOUTS), GeneratorKind.FROZEN, "model", now_s)
        frames.append(signers[i % AUTHORS].frame(wire.encode(made), now_s))
    ingress = IngressFilter("reef", "", UNLIMITED)
    began_s = time.process_time()
    admitted = sum(isinstance(ingress.admit(frame, now_s), VerifiedMessage) for frame in frames)
    took_s = time.process_time() - began_s
    assert admitted == count, ingress.refused
    return count / took_s, sum(map(len, frames)) / count


def _with_receipts(count: int) -> float:
    """Offers of procedural tasks per second, admitted and drawn again from their receipts."""
    with Library([TaskConfig(name="gcd")], 0) as library:
        own = OwnTasks(library.services)
        try:
            return asyncio.run(_recognised(own, [library.draw(Split.TRAIN, i) for i in range(count)]))
        finally:
            own.close()


async def _recognised(own: OwnTasks, tasks: Sequence[Task]) -> float:
    rng, now_s = random.Random(0), 1.8e9
    signer, ingress = Signer(Identity.fresh(), "reef", session=1), IngressFilter("reef", "", UNLIMITED)
    frames = []
    for task in tasks:
        made = Offer(await own.claim(task), _texts(rng, 1024), GeneratorKind.FROZEN, "model", now_s)
        frames.append(signer.frame(wire.encode(made), now_s))
    began_s = time.perf_counter()
    for frame in frames:
        message = ingress.admit(frame, now_s)
        assert isinstance(message, VerifiedMessage)
        assert isinstance(message.content, Offer)
        assert isinstance(await own.task(message.content.claim), Task)
    return len(frames) / (time.perf_counter() - began_s)


class _Characters:
    """Tokenizer with one token per character."""

    stop_token_ids = (0,)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return [1, *self.token_ids(messages[-1].content)]

    def token_ids(self, text: str) -> list[int]:
        return [ord(character) + 2 for character in text]

    def completion_ids(self, text: str, _: Sequence[int]) -> list[int]:
        return self.token_ids(text)

    def message(self, token_ids: Sequence[int], _: Sequence[int]) -> Message:
        return Message(Role.ASSISTANT, "".join(chr(token - 2) for token in token_ids if token >= 2))


class _Coins:
    """Recogniser and scorer that knows every question, and rewards half of all answers."""

    async def course(self, claim: Claim, task: Task, rollout: OfferedRollout) -> Course | Reason:
        return Course()

    async def claim(self, task: Task) -> Claim:
        return Claim(task.service, task.messages[-1].content, task.answer)

    async def task(self, claim: Claim) -> Task | Reason:
        return Task(claim.question, claim.service, (Message(Role.USER, claim.question),), claim.truth)

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(coin(answer)) for answer in answers]


Sent = tuple[float, str, bytes]
"""Second, author and frame."""


def _simulation(count: int, whole: int) -> Simulated:
    """A swarm of `count` nodes, of which `whole` are simulated whole."""
    say(f"{count} simulated nodes")
    others = sorted(sent for i in range(whole, count) for sent in _sent_by(i))
    cpu_s, calls, (groups, steps, moved_bytes) = _cost(whole, others)
    sending_s, sending_calls, _ = _cost(0, others)  # the others' part of the work is nobody's who is measured
    per_node = (cpu_s - sending_s) / whole, (calls - sending_calls) / whole
    return Simulated(count, *per_node, groups / whole, moved_bytes / steps)


def _cost(whole: int, others: Sequence[Sent]) -> tuple[float, int, tuple[int, int, int]]:
    """Processor time of a swarm, calls of functions in a second run of it, and what its nodes did."""
    counting = cProfile.Profile(builtins=False)
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.process_time()
        found = run_virtual(_swarm(whole, others, Path(folder)))
        cpu_s = time.process_time() - began_s
    with tempfile.TemporaryDirectory() as folder, counting:
        run_virtual(_swarm(whole, others, Path(folder)))
    return cpu_s, sum(entry.callcount for entry in counting.getstats()), found


def _sent_by(i: int) -> list[Sent]:
    """All that a node sends which is not simulated whole, signed before the clock starts."""
    identity, begins_s = Identity.fresh(), STEP_S * random.Random(i).random()
    signer = Signer(identity, "reef", session=1)
    sent = list[Sent]()
    for step in range(int((SIMULATED_S - begins_s) / STEP_S) + 1):
        at_s = begins_s + STEP_S * step
        group = _own_group(i, step)
        claim = Claim(group.task.service, group.task.messages[-1].content, group.task.answer)
        offer = wire.encode(offer_of(group, claim, "model", START_S + at_s))
        sent.append((at_s, identity.peer_id, signer.frame(offer, START_S + at_s)))
    return sent


async def _swarm(count: int, others: Sequence[Sent], folder: Path) -> tuple[int, int, int]:
    """External groups taken, steps made, and bytes sent and read, of all nodes together."""
    swarm = MemorySwarm()
    exchanges = [_Counted(swarm) for _ in range(count)]
    nodes = [_peer(exchange, folder / str(i), i) for i, exchange in enumerate(exchanges)]
    made = Counter[int]()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(node.run()) for node in nodes]
        running += [tasks.create_task(_steps(node, i, made)) for i, node in enumerate(nodes)]
        running.append(tasks.create_task(_send(swarm, others)))
        await asyncio.sleep(SIMULATED_S)
        for task in running:
            task.cancel()
    moved_bytes = sum(exchange.moved_bytes for exchange in exchanges)
    return sum(node.tally.taken for node in nodes), made.total(), moved_bytes


async def _send(swarm: MemorySwarm, others: Sequence[Sent]) -> None:
    """Sends each frame at its time, those of a tenth of a second together."""
    loop = asyncio.get_running_loop()
    for at_s, author, frame in others:
        if at_s > loop.time():
            await asyncio.sleep(at_s - loop.time() + 0.1)
        swarm.put(author, frame)


class _Counted(MemoryExchange):
    """An exchange that counts the bytes that its node sends and reads."""

    def __init__(self, swarm: MemorySwarm) -> None:
        super().__init__(swarm)
        self.moved_bytes = 0

    async def publish(self, author: str, frame: bytes) -> None:
        self.moved_bytes += len(frame)
        await super().publish(author, frame)

    async def receive(self, most: int) -> list[bytes]:
        frames = await super().receive(most)
        self.moved_bytes += sum(map(len, frames))
        return frames

    async def receive_from(self, authors: frozenset[str], most: int) -> list[bytes]:
        frames = await super().receive_from(authors, most)
        self.moved_bytes += sum(map(len, frames))
        return frames


def _peer(exchange: MemoryExchange, folder: Path, i: int) -> Node:
    """Small node in a large swarm that reads two frames a second."""
    coins = _Coins()
    loop = asyncio.get_running_loop()
    joined = Joined(
        exchange,
        coins,
        Identity.fresh(),
        folder,
        Config(seed=i, tasks=[TaskConfig(name="coins")], swarm=SwarmConfig(external_groups=2)),
        clock=lambda: START_S + loop.time(),
        timer=lambda: 0.0,
        frames_per_s=READ_PER_S,
    )
    return Node(joined, coins, _Characters(), 4096, threads=False)


async def _steps(node: Node, i: int, made: Counter[int]) -> None:
    """Repeats an own group and a step."""
    await asyncio.sleep(STEP_S * random.Random(i).random())
    step = 0
    while True:
        node.offer(_own_group(i, step))
        await node.take(step, _uniform)
        step += 1
        made[i] = step
        await asyncio.sleep(STEP_S)


async def _uniform(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


def _own_group(node: int, step: int) -> Group:
    question = Message(Role.USER, f"question {node} {step}")
    task = Task(f"{node}-{step}", "coins", (question,), "truth")
    rollouts = []
    for k in range(ROLLOUTS):
        text = f"{seed_for('simulated', node, step, k):x}"
        turn = Turn((1,), Completion((2,), (-1.0,), (0,), FinishReason.STOP))
        rollouts.append(Rollout(f"{k}", (question, Message(Role.ASSISTANT, text)), (turn,), Reward(coin(text))))
    return Group(task.id, task, tuple(rollouts), 0)
