"""A human node asks people its questions and shares their answers as offers.

    score    scores peers' answers to an open question; rests as long as it works
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
from dataclasses import dataclass

from shoal.errors import WireError
from shoal.interfaces import Scorer
from shoal.swarm.human.questions import Given, NotTaken, OpenQuestion, OpenQuestions, QuestionPace, QuestionState
from shoal.swarm.peer import Joined, Peer, PeerCounts
from shoal.swarm.trust.ingress import VerifiedMessage
from shoal.swarm.wire.offer import GeneratorKind, Offer, OfferedRollout
from shoal.types import Message, RewardStatus, Task

MOST_OFFERED = 64
"""Newest offers of peers that may be asked."""
SHOWN_OTHERS = 8
MOST_SCORING = 32
"""Answers that wait for a verdict at once."""
DRAWS = 8
"""Draws at most until a question differs from the one before."""
SHARE_EVERY_S = 0.25
MODEL = "people"


@dataclass(slots=True)
class HumanNodeCounts(PeerCounts):
    """Counts since the start of a human node."""

    answers: int = 0


class HumanNode(Peer):
    """Node whose answers come from people. One event loop; nothing is shared unless `run` runs."""

    def __init__(
        self,
        joined: Joined,
        scorer: Scorer,
        draw: Callable[[int], Task],
        pace: QuestionPace,
        *,
        seed: int | None = None,
    ) -> None:
        """`draw` draws a training task by any number; it blocks and raises `TaskError`.

        Without `seed`, questions are random.
        """
        super().__init__(joined)
        self.questions = OpenQuestions(pace)
        self.tally: HumanNodeCounts = HumanNodeCounts()
        self._scorer, self._draw, self._rng = scorer, draw, random.Random(seed)
        self._last_asked: tuple[Message, ...] = ()
        self._offered: deque[tuple[VerifiedMessage, Offer]] = deque(maxlen=MOST_OFFERED)
        self._peers_turn = True
        self._opening = asyncio.Lock()
        self._unscored: asyncio.Queue[tuple[OpenQuestion, Offer]] = asyncio.Queue(MOST_OFFERED)

    async def run(self) -> None:
        """Listens and shares until cancelled."""
        await self.beside(scoring=self._score_peers(), sharing=self._share())

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        return {
            **super().status(),
            "generator": GeneratorKind.PERSON.value,
            "open": len(self.questions),
            "dropped": self.questions.dropped,
        }

    async def question_for(self, user: str) -> OpenQuestion:
        """Chooses a question for a user, or opens another. Raises `TaskError` when nothing can be drawn."""
        async with self._opening:  # else users who arrive together get a question each
            found = self.questions.next_for(user)
            if found is None:
                found = await self._opened()
                self.questions.add(found)
            return found

    async def answer(self, question: OpenQuestion, user: str, text: str) -> Given:
        """Scores an answer and keeps it for the offer. Raises `NotTaken`."""
        self.questions.check(question, user, text)
        if sum(len(one.scoring) for one in self.questions.values()) >= MOST_SCORING:
            raise NotTaken("many answers wait for their verdict; send yours again in a moment")
        question.scoring.add(user)
        try:
            (reward,) = await self._scorer.score(question.task, [text])
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
            task = await self._own.task(content.claim)
            if isinstance(task, Task):
                question = await self._question(task)
                if not self._unscored.full():
                    self._unscored.put_nowait((question, content))
                return question
            self.ingress.refuse(message.peer_id, task)
        for _ in range(DRAWS):
            own = await asyncio.to_thread(self._draw, self._rng.getrandbits(32))
            if own.messages != self._last_asked:
                break
        self._last_asked = own.messages
        return await self._question(own)

    async def _question(self, task: Task) -> OpenQuestion:
        claim = await self._own.claim(task)
        return OpenQuestion(secrets.token_urlsafe(12), task, claim, self._clock())

    async def _score_peers(self) -> None:
        """Scores one text at a time: a hanging answer of a peer delays users no longer than one of theirs."""
        while True:
            question, content = await self._unscored.get()
            for rollout in content.rollouts[:SHOWN_OTHERS]:
                began_s = time.monotonic()
                (reward,) = await self._scorer.score(question.task, [rollout.text])
                if reward.status is not RewardStatus.SCORED:
                    break
                other = Given("", rollout.text, reward, content.made_s, content.generator, content.model)
                question.others = (*question.others, other)
                await asyncio.sleep(time.monotonic() - began_s)

    def _receive(self, message: VerifiedMessage, offer: Offer) -> None:
        if not offer.claim.source:  # people are shown text, and speak once
            self._offered.append((message, offer))

    async def _share(self) -> None:
        while True:
            for question in self.questions.due(self._clock()):
                try:
                    rollouts = tuple(OfferedRollout(given.text) for given in question.answers)
                    made = Offer(question.claim, rollouts, GeneratorKind.PERSON, MODEL, self._clock())
                    await self._share_offer(made)  # without anything that identifies the person
                except WireError:  # too large, though its answers are not
                    self.tally.unsent += 1
            await asyncio.sleep(SHARE_EVERY_S)
