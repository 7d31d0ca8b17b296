"""The real judge, on simulated time: signed challenges, held-out questions, grades; the takers are stacked models."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import torch

from experiments.sapo.node import REWRITE
from experiments.sapo_stacked.nodes import MOST_QUESTION, Nodes, questions_tensor, text_of
from experiments.sapo_stacked.questions import SETTINGS
from shoal.config import RewardConfig, TaskConfig
from shoal.net.identity import Identity
from shoal.reward.service import RewardService
from shoal.run.commands.swarm import specialty_of
from shoal.swarm.judge.judging import Judge, Rules
from shoal.swarm.judge.messages import (
    Answers,
    Challenge,
    ChallengeRequest,
    ChallengeVerdict,
    Condition,
    opened,
    signed,
)
from shoal.swarm.judge.store import JudgeStore
from shoal.tasks.procedural_client import ProceduralClient

ROUND_S = 120.0
"""Seconds of simulated time in a training round: eighty rounds are 2 h 40 min."""


class Judging:
    """A judge and the keys of its takers. Use as an async context manager."""

    def __init__(self, folder: Path, name: str, nodes: int, each: int) -> None:
        self._folder, self._name, self._each = folder, name, each
        self._takers = [Identity.fresh() for _ in range(nodes)]
        self._now_s = 1.8e9
        self._scores: list[tuple[str, int, float]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts drawer and scorer."""
        drawer = self._stack.enter_context(ProceduralClient())
        tasks = [
            TaskConfig.model_validate({"name": name, "params": params, "rewrite": REWRITE})
            for name, params in SETTINGS.items()
        ]
        scorer = await self._stack.enter_async_context(RewardService(RewardConfig()))
        store = JudgeStore(self._folder)
        self._stack.callback(store.close)
        rules = Rules(each=self._each, peer_every_s=ROUND_S, newcomers_burst=1000.0)
        specialties = [specialty_of(task, drawer) for task in tasks]
        self._judge = Judge(
            store, Identity.fresh(), specialties, drawer, scorer, rules, clock=self._clock, steady=self._clock
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends drawer and scorer."""
        await self._stack.aclose()

    def _clock(self) -> float:
        return self._now_s

    def pass_time(self) -> None:
        """Lets the time of a training round pass."""
        self._now_s += ROUND_S

    async def ask_all(self, nodes: Nodes, condition: Condition, round_: int, generator: torch.Generator) -> None:
        """Challenges every node once; what is too long for the models is answered with nothing, and is wrong."""
        challenges = []
        for number, taker in enumerate(self._takers):
            ask = ChallengeRequest(self._judge.peer_id, f"{self._name}-{number}", condition, round_, self._now_s)
            challenges.append(opened(await self._judge.challenge(signed(taker, ask)), Challenge)[1])
        asked = [[one.messages[-1].content for one in challenge.questions] for challenge in challenges]
        short = [[text if len(text) <= MOST_QUESTION and text.isascii() else "" for text in texts] for texts in asked]
        rows = torch.stack([questions_tensor([text.replace("\n", "/") for text in texts]) for texts in short])
        ids = nodes.answers(rows, 1, generator)
        for number, (taker, challenge) in enumerate(zip(self._takers, challenges, strict=True)):
            said = [text_of(row) if text else "" for row, text in zip(ids[number].tolist(), short[number], strict=True)]
            texts = tuple(text.replace("/", "\n") if "m " in asked[number][i] else text for i, text in enumerate(said))
            answers = signed(taker, Answers(self._judge.peer_id, challenge.id, texts))
            _, verdict = opened(await self._judge.verdict(answers), ChallengeVerdict)
            self._scores.append((str(number), round_, round(verdict.score, 4)))

    def results(self) -> list[list[str | int | float]]:
        """Node, round and pass@1 of each challenge."""
        return [list(one) for one in self._scores]
