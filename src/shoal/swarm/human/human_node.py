"""A human node asks people its questions; their answers become offers once a question has enough.

An offer is a group: several answers to one question, of several people or of one who tried again. Nodes can use it only
if its rewards differ. A question therefore stays open until they do, and then for a while, for more answers. A question
that expires with equal rewards is dropped and counted.

    score    scores peers' answers to an open question; rests as long as it works
    share    signs the complete questions as offers and sends them

A question is one of the node's own tasks, or a peer's offer of such a task. Users see peers' answers after their own,
with this node's verdict; no claim of a peer is believed.
"""

import asyncio
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.errors import ShoalError, WireError
from shoal.interfaces import Scorer
from shoal.swarm.peer import Joined, Peer, PeerCounts
from shoal.swarm.trust.ingress import VerifiedMessage
from shoal.swarm.trust.rates import Recent
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.types import Message, Reward, RewardStatus, Task

MOST_OPEN = 64
MOST_ANSWERS = 16
"""Answers to one question."""
MOST_CHARACTERS = 4000
"""Characters of one answer."""
TRIES = 3
"""Attempts of one user at one question."""
REMEMBERED = 1024
"""Closed questions whose end is remembered, for users who ask for it."""


class QuestionState(StrEnum):
    """State of a question."""

    OPEN = "open"
    SHARED = "shared"
    """Question whose answers are an offer."""
    DROPPED = "dropped"
    """Question that expired with too few answers, or with equal rewards."""


class NotTaken(ShoalError):
    """Refusal of an answer; the text says why."""

    http_status = 409


@dataclass(frozen=True, slots=True)
class QuestionPace:
    """Conditions on which answers become an offer."""

    answers: int = 4
    """Answers that complete a question, once their rewards differ."""
    wait_s: float = 30.0
    """Seconds since the last answer, after which fewer answers suffice."""
    open_s: float = 3600.0
    """Seconds that a question waits for answers."""


@dataclass(frozen=True, slots=True)
class Given:
    """One answer of a user or a peer, with this node's verdict."""

    user: str
    """User; empty for a peer."""
    text: str
    reward: Reward
    at_s: float
    generator: GeneratorKind = GeneratorKind.PERSON
    model: str = ""


@dataclass(slots=True)
class OpenQuestion:
    """One question with the answers of users and peers."""

    id: str
    task: Task
    claim: Claim
    opened_s: float
    others: tuple[Given, ...] = ()
    """Answers of peers."""
    answers: list[Given] = field(default_factory=list)
    passed_by: set[str] = field(default_factory=set)
    """Users who passed the question over."""
    unscored: Counter[str] = field(default_factory=Counter)
    """Answers of each user that the scorer gave up on: no part of an offer, but attempts."""
    scoring: set[str] = field(default_factory=set)
    """Users with an answer at the scorer."""

    def of(self, user: str) -> list[Given]:
        """Scored answers of one user."""
        return [given for given in self.answers if given.user == user]

    def tries_left(self, user: str) -> int:
        """Attempts that a user has left; none after a right answer."""
        own = self.of(user)
        right = any(is_right(given.reward) for given in own)
        return 0 if right else max(0, TRIES - len(own) - self.unscored[user])

    @property
    def is_full(self) -> bool:
        """True if the question can have no more answers."""
        return len(self.answers) + len(self.scoring) >= MOST_ANSWERS


def is_right(reward: Reward) -> bool:
    """Tells whether an answer has the full reward."""
    return reward.status is RewardStatus.SCORED and reward.value >= 1


class OpenQuestions(dict[str, OpenQuestion]):
    """All open questions, oldest first. Invariant: at most `MOST_OPEN`, each with at most `MOST_ANSWERS` answers."""

    def __init__(self, pace: QuestionPace) -> None:
        super().__init__()
        self._pace = pace
        self._ended: Recent[str, QuestionState] = Recent(REMEMBERED)
        self.dropped = 0
        """Answered questions that became no offer."""

    def add(self, question: OpenQuestion) -> None:
        """Opens a question. The oldest without answers, also at the scorer, makes room, else the oldest."""
        if len(self) >= MOST_OPEN:
            unanswered = (one for one in self.values() if not one.answers and not one.scoring)
            self._end(next(unanswered, next(iter(self.values()))), QuestionState.DROPPED)
        self[question.id] = question

    def state(self, id_: str) -> QuestionState | None:
        """State of a question; None for a forgotten one."""
        return QuestionState.OPEN if id_ in self else self._ended.get(id_)

    def next_for(self, user: str) -> OpenQuestion | None:
        """Chooses a user's question: their current one, else the most answered one; None when nothing is left."""
        seen = [one for one in self.values() if user not in one.passed_by and one.tries_left(user) and not one.is_full]
        return max(seen, key=lambda one: (len(one.of(user)), len(one.answers)), default=None)

    def check(self, question: OpenQuestion, user: str, text: str) -> None:
        """Raises `NotTaken` for an answer that needs no verdict."""
        refusals = {
            "write an answer first": not text.strip(),
            f"an answer has at most {MOST_CHARACTERS} characters": len(text) > MOST_CHARACTERS,
            "wait for the verdict": user in question.scoring,
            "you have answered this question": not question.tries_left(user),
            "you said that already": any(given.text == text for given in question.of(user)),
            "this question has all the answers that it can have": question.is_full,
        }
        if why := next((why for why, is_so in refusals.items() if is_so), ""):
            raise NotTaken(why)

    def take(self, question: OpenQuestion, given: Given) -> None:
        """Keeps an answer with its verdict; an unscored answer counts as an attempt only."""
        if given.reward.status is RewardStatus.SCORED:
            question.answers.append(given)
        else:
            question.unscored[given.user] += 1

    def due(self, now_s: float) -> list[OpenQuestion]:
        """Closes the complete questions and returns them; expired questions are dropped."""
        complete = [one for one in self.values() if not one.scoring and self._is_complete(one, now_s)]
        for one in complete:
            self._end(one, QuestionState.SHARED)
        for one in [one for one in self.values() if one.opened_s + self._pace.open_s < now_s and not one.scoring]:
            self._end(one, QuestionState.DROPPED)
        return complete

    def _is_complete(self, question: OpenQuestion, now_s: float) -> bool:
        if len({given.reward.value for given in question.answers}) < 2:
            return False
        waited_s = now_s - question.answers[-1].at_s
        return len(question.answers) >= self._pace.answers or waited_s >= self._pace.wait_s

    def _end(self, question: OpenQuestion, state: QuestionState) -> None:
        del self[question.id]
        self.dropped += state is QuestionState.DROPPED and bool(question.answers)
        self._ended[question.id] = state


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
