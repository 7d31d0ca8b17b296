"""A human node asks people its questions and shares their answers as offers.

    listen   consumes frames of the exchange; the ingress filter admits them; the newest offers may be asked
    score    scores peers' answers to an open question; rests as long as it works
    report   writes status.json, reads banned.txt
    share    signs the complete questions as offers and sends them

A question is one of the node's own tasks, or a peer's offer of such a task. Users see peers' answers after their own,
with this node's verdict; no claim of a peer is believed.
"""

import asyncio
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.errors import ExchangeUnavailable, WireError
from shoal.interfaces import Exchange, Recogniser, Scorer
from shoal.swarm import offer as offers
from shoal.swarm.envelope import Kind
from shoal.swarm.human.questions import Given, NotTaken, OpenQuestion, OpenQuestions, Other, QuestionPace, QuestionState
from shoal.swarm.identity import Identity
from shoal.swarm.offer import GeneratorKind, Offer, OfferedRollout
from shoal.swarm.peer import Peer
from shoal.swarm.trust import Reason, VerifiedMessage
from shoal.types import RewardStatus, Task

MOST_OFFERED = 64
"""Newest offers of peers that may be asked."""
SHOWN_OTHERS = 8
MOST_SCORING = 32
"""Answers that wait for a verdict at once."""
SHARE_EVERY_S = 0.25
RETRY_S = 1.0
OUTBOX = 64
MODEL = "people"


@dataclass(frozen=True, slots=True)
class HumanNodeDeps:
    """Dependencies of a human node."""

    exchange: Exchange
    recogniser: Recogniser
    scorer: Scorer
    draw: Callable[[int], Task]
    """Draws a training task of the node by any number. Blocks; raises `TaskError`."""


@dataclass(slots=True)
class HumanNodeCounts:
    """Counts since the start of a human node."""

    answers: int = 0
    shared: int = 0
    unsent: int = 0
    """Complete offers dropped because the exchange was away too long."""


@dataclass(slots=True)
class Outgoing:
    """An offer until it is shared. A signed frame is kept: peers count a second attempt as the same message."""

    offer: Offer
    frame: bytes | None = None


class HumanNode(Peer):
    """Node whose answers come from people. One event loop; nothing is shared unless `run` runs."""

    def __init__(
        self,
        deps: HumanNodeDeps,
        swarm: str,
        identity: Identity,
        folder: Path,
        pace: QuestionPace | None = None,
        *,
        clock: Callable[[], float] = time.time,
        seed: int | None = None,
    ) -> None:
        """`folder` holds banned.txt, which others may add to, and status.json; without `seed`, questions are random."""
        super().__init__(deps.exchange, swarm, identity, folder, clock=clock)
        self.questions = OpenQuestions(pace or QuestionPace())
        self.tally = HumanNodeCounts()
        self._deps = deps
        self._rng = random.Random(seed)
        self._offered: deque[tuple[VerifiedMessage, Offer]] = deque(maxlen=MOST_OFFERED)
        self._outbox: deque[Outgoing] = deque()
        self._peers_turn = True
        self._opening = asyncio.Lock()
        self._unscored: asyncio.Queue[tuple[OpenQuestion, Offer]] = asyncio.Queue(MOST_OFFERED)

    async def run(self) -> None:
        """Listens and shares for ever."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._listen(), name="human UI: listening")
            loops.create_task(self._score_peers(), name="human UI: scoring peers")
            loops.create_task(self._share(), name="human UI: sharing")
            loops.create_task(self._report(), name="human UI: reporting")

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        return {
            **super().status(),
            "generator": GeneratorKind.PERSON.value,
            "open": len(self.questions),
            "dropped": self.questions.dropped,
            **asdict(self.tally),
        }

    async def question_for(self, user: str) -> OpenQuestion:
        """Chooses a question for a user, or opens another. Raises `TaskError` when nothing can be drawn."""
        async with self._opening:  # else a crowd that comes at once gets a question each
            found = self.questions.next_for(user)
            if found is None:
                found = await self._opened()
                self.questions.add(found)
            return found

    async def answer(self, question: OpenQuestion, user: str, text: str) -> Given:
        """Scores an answer and keeps it for the offer. Raises `NotTaken`."""
        self.questions.check(question, user, text)
        if sum(len(one.scoring) for one in self.questions) >= MOST_SCORING:
            raise NotTaken("many answers wait for their verdict; send yours again in a moment")
        question.scoring.add(user)
        try:
            (reward,) = await self._deps.scorer.score(question.task, [text])
        finally:
            question.scoring.remove(user)
        given = Given(user, text, reward, self._clock())
        if self.questions.state(question.id) is not QuestionState.OPEN:
            raise NotTaken("this question is closed")
        self.questions.take(question, given)
        self.tally.answers += 1
        return given

    async def _opened(self) -> OpenQuestion:
        """Opens a question: a peer's and an own task in turn, as long as peers offer own tasks."""
        self._peers_turn, peers = not self._peers_turn, self._peers_turn
        while peers and self._offered:
            message, content = self._offered.pop()
            if message.peer_id in self.ingress.banned:
                continue
            task = await self._deps.recogniser.task(content.claim)
            if isinstance(task, Task):
                question = await self._question(task)
                if not self._unscored.full():
                    self._unscored.put_nowait((question, content))
                return question
            self.ingress.refuse(message.peer_id, Reason(task.value))
        return await self._question(await asyncio.to_thread(self._deps.draw, self._rng.getrandbits(32)))

    async def _question(self, task: Task) -> OpenQuestion:
        claim = await self._deps.recogniser.claim(task)
        return OpenQuestion(secrets.token_urlsafe(12), task, claim, self._clock())

    async def _score_peers(self) -> None:
        """Scores one text at a time: a hanging answer of a peer delays users no longer than one of theirs."""
        while True:
            question, content = await self._unscored.get()
            for rollout in content.rollouts[:SHOWN_OTHERS]:
                began_s = time.monotonic()
                (reward,) = await self._deps.scorer.score(question.task, [rollout.text])
                if reward.status is not RewardStatus.SCORED:
                    break
                other = Other(content.generator.value, content.model, rollout.text, reward)
                question.others = (*question.others, other)
                await asyncio.sleep(time.monotonic() - began_s)

    def _receive(self, message: VerifiedMessage) -> None:
        if isinstance(message.content, Offer):
            self._offered.append((message, message.content))

    async def _share(self) -> None:
        while True:
            for question in self.questions.due(self._clock()):
                self._outbox.append(Outgoing(offer_of_people(question, self._clock())))
                if len(self._outbox) > OUTBOX:
                    self._outbox.popleft()
                    self.tally.unsent += 1
            pause_s = SHARE_EVERY_S
            while self._outbox:
                if not await self._publish(self._outbox[0]):
                    pause_s = RETRY_S
                    break
                self._outbox.popleft()
            await asyncio.sleep(pause_s)

    async def _publish(self, outgoing: Outgoing) -> bool:
        """Sends an offer; returns True if no further attempt is needed."""
        if not self.connected:
            return False
        try:
            if outgoing.frame is None:
                outgoing.frame = self._signer.frame(Kind.OFFER, offers.encode(outgoing.offer), self._clock())
            await self._exchange.publish(Kind.OFFER, self.peer_id, outgoing.frame)
        except ExchangeUnavailable:
            return False
        except WireError:  # too large, though its answers are not
            self.tally.unsent += 1
            return True
        self.tally.shared += 1
        return True


def offer_of_people(question: OpenQuestion, now_s: float) -> Offer:
    """Builds the offer of a question's answers. People appear in it by their text only."""
    rollouts = tuple(OfferedRollout(given.text) for given in question.answers)
    return Offer(question.claim, rollouts, GeneratorKind.PERSON, MODEL, now_s)
