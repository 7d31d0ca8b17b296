"""`shoal bisect` finds the steps of a run, their groups and their tokens whose removal removes a damage.

A trial trains the logged steps once more with a part of them muted, and measures the weights. A part is found when more
than half of the damage is gone without it. Three searches by doubling and halving, one after the other, find the fewest
steps, then the fewest groups of these, then the fewest tokens of those. The most harmful and the largest come first.

Harm is to first order, from the weights and moments before a step: Adam divides by moments, which a harmful step makes
large. With D the score's gradient through Adam, a step raises the logprob of token t by g_t = -dloss/dlogp_t, clipped,
so that the token's harm is -g_t <grad logp_t, D>; that of a group or a step is the sum over its tokens. Two
updates on the held-out answers, with opposite signs, give <grad logp_t, D> as a difference. The sum of |g_t| is the
size: an update that is much too large does harm even where its first order helps.
Source: bisection over revisions (git bisect), and leaving out parts of an input (Zeller and Hildebrandt 2002, ddmin).
"""

import asyncio
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias, TypeVar

from shoal.errors import RunDirError
from shoal.experience.held_out import HeldOutAnswer, answer_files, read_answers
from shoal.model.answer import written
from shoal.model.chat_template import ChatRenderer
from shoal.model.renderer_loading import load_renderer
from shoal.rollout.evaluation import CORRECT
from shoal.run.commands.replay import Replay, described, numbers_by_row, opened_replay, reading_steps
from shoal.run.policy import StepRows
from shoal.run.prepare import model_directory
from shoal.trainer.messages import Logprobs, TokensFile
from shoal.types import Group, RewardStatus, Sample

MOST_ANSWERS = 4
"""Different answers to one question that `reward` weighs."""
SHOWN_TOKENS = 12
"""Tokens of a group in the table."""


class Metric(StrEnum):
    """Measure of weights. Nothing is sampled: both score answers of the run's own evaluations."""

    HELDOUT = "heldout"
    """Mean logprob (nats) of the tokens of right answers, the first to each held-out question."""
    REWARD = "reward"
    """Mean over held-out questions of the reward that the weights expect among a question's logged answers."""


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """Score of weights by a metric. Invariant: it depends on the weights alone."""

    metric: Metric
    rows: tuple[tuple[int, ...], ...]
    """Tokens of each question with an answer."""
    begins: tuple[int, ...]
    """Index of each answer's first token."""
    questions: tuple[str, ...]
    rewards: tuple[float, ...]

    def of(self, logprobs: Logprobs) -> float:
        """Score of weights that give the rows these logprobs."""
        if self.metric is Metric.HELDOUT:
            return fmean(logp for one in self._answers(logprobs) for logp in one)
        return fmean(self._expected(logprobs).values())

    def slopes(self, logprobs: Logprobs) -> list[float]:
        """Derivative of the score by the logprob of each answer, up to a factor."""
        if self.metric is Metric.HELDOUT:
            return [1.0] * len(self.rows)
        expected = self._expected(logprobs)
        return [
            share * (reward - expected[question])
            for share, reward, question in zip(self._shares(logprobs), self.rewards, self.questions, strict=True)
        ]

    def _answers(self, logprobs: Logprobs) -> list[tuple[float, ...]]:
        return [row[begin - 1 :] for row, begin in zip(logprobs, self.begins, strict=True)]

    def _shares(self, logprobs: Logprobs) -> list[float]:
        """Probability of each answer among those to its question."""
        sums = [math.fsum(one) for one in self._answers(logprobs)]
        most = {question: max(self._of(question, sums)) for question in self.questions}
        weights = [math.exp(one - most[question]) for one, question in zip(sums, self.questions, strict=True)]
        total = {question: math.fsum(self._of(question, weights)) for question in most}
        return [weight / total[question] for weight, question in zip(weights, self.questions, strict=True)]

    def _expected(self, logprobs: Logprobs) -> dict[str, float]:
        """Expected reward of each question."""
        parts = [share * reward for share, reward in zip(self._shares(logprobs), self.rewards, strict=True)]
        return {question: math.fsum(self._of(question, parts)) for question in self.questions}

    def _of(self, question: str, values: Sequence[float]) -> list[float]:
        return [value for value, whose in zip(values, self.questions, strict=True) if whose == question]

    def samples(self, logprobs: Logprobs, sign: float, version: int) -> list[tuple[Sample, ...]]:
        """Groups of one row each, whose training moves the score up, or down for a negative sign."""
        found = list[tuple[Sample, ...]]()
        for tokens, begin, row, slope in zip(self.rows, self.begins, logprobs, self.slopes(logprobs), strict=True):
            mask = [int(i >= begin) for i in range(len(tokens))]
            behaviour = [0.0, *(min(0.0, logp) for logp in row)]
            sample = Sample(
                tokens,
                tuple(mask),
                tuple(m * logp for m, logp in zip(mask, behaviour, strict=True)),
                tuple(version if m else -1 for m in mask),
                tuple(m * sign * slope for m in mask),
            )
            found.append((sample,))
        return found


def held_out_score(run_dir: Path, metric: Metric, renderer: ChatRenderer) -> HeldOutScore:
    """Score by the answers of a run's evaluations. Raises `RunDirError` where they cannot tell weights apart."""
    chosen: dict[str, dict[str, HeldOutAnswer]] = {}
    for answer in (one for file in answer_files(run_dir) for one in read_answers(file)):
        of_question, right = chosen.setdefault(answer.question_id, {}), answer.reward.value >= CORRECT
        wanted = right if metric is Metric.HELDOUT else True
        room = len(of_question) < (1 if metric is Metric.HELDOUT else MOST_ANSWERS)
        if wanted and room and answer.reward.status is RewardStatus.SCORED and len(answer.messages) > answer.asked:
            of_question.setdefault(written(answer.messages[-1]), answer)
    rows = []
    for question, answers in chosen.items():
        if metric is Metric.REWARD and len({one.reward.value for one in answers.values()}) < 2:
            continue
        for text, answer in answers.items():
            prompt = renderer.prompt_ids(answer.messages[:-1])
            if said := renderer.completion_ids(text, prompt):
                rows.append((tuple(prompt + said), len(prompt), question, answer.reward.value))
    if not rows:
        expected = "a right answer" if metric is Metric.HELDOUT else "answers with differing rewards"
        raise RunDirError(
            f"--metric {metric}: expected {expected} to a held-out question in {run_dir / 'held_out'}, got none of "
            f"{len(chosen)} questions; use the other metric, or a run with eval.every_steps above 0"
        )
    return HeldOutScore(metric, *zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class ReplayTrial:
    """One replay without a part of the log."""

    number: int
    left_out: str
    score: float
    cured: bool

    @property
    def sentence(self) -> str:
        """One line for people."""
        return f"trial {self.number}: {self.left_out}: {self.score:.4g}, {'cured' if self.cured else 'damaged'}"


Token: TypeAlias = tuple[str, int, int]
"""A trained token: its group, the row in the group, the index in the row."""
Part = TypeVar("Part", bound=int | str | Token)
"""A step, a group by its id, or a token."""
Weight: TypeAlias = tuple[float, float]
"""Harm and size of a part."""
NOTHING = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Culprit:
    """Result of a bisection. Steps count from 0."""

    metric: Metric
    ends: tuple[int, int]
    """The good and the bad step."""
    scores: tuple[float, float]
    """Scores after each."""
    steps: Sequence[int]
    groups: Sequence[Group]
    tokens: Sequence[Token]
    """The most harmful first; empty where all groups of the steps are needed."""
    counts: tuple[int, int]
    """Groups of the steps, and trained tokens of the found groups."""
    texts: Mapping[str, Sequence[str]]
    """Found tokens of each group as text."""
    trials: Sequence[ReplayTrial]

    @property
    def sentence(self) -> str:
        """The finding for people."""
        before, after = self.scores
        who = f"step{'s' * (len(self.steps) > 1)} {', '.join(str(step + 1) for step in self.steps)} did it"
        how = f"all {self.counts[0]} groups: fewer are not enough"
        if self.tokens:
            groups, tokens = f"{len(self.groups)} of {self.counts[0]}", f"{len(self.tokens)} of {self.counts[1]}"
            how = f"{groups} groups, and of these by {tokens} tokens"
        return f"{who} by {how}; {self.metric} fell from {before:.4g} to {after:.4g} ({len(self.trials)} trials)."

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table: the groups with their tokens."""
        shown = {name: " ".join(map(repr, texts[:SHOWN_TOKENS])) for name, texts in self.texts.items()}
        return [(*described(group), shown.get(group.id, "")) for group in self.groups]

    @property
    def values(self) -> dict[str, object]:
        """Values for programs."""
        before, after = self.scores
        return {
            "metric": str(self.metric),
            "good": {"step": self.ends[0] + 1, "score": before},
            "bad": {"step": self.ends[1] + 1, "score": after},
            "steps": [step + 1 for step in self.steps],
            "groups": [group.id for group in self.groups],
            "tokens": [{"group": name, "row": row, "index": at} for name, row, at in self.tokens],
            "trials": [{"left_out": one.left_out, "score": one.score, "cured": one.cured} for one in self.trials],
        }


@dataclass(slots=True)
class Bisection:
    """Search for what damaged a run between two steps. Steps count from 0; `good` is -1 for the start."""

    replay: Replay
    score: HeldOutScore
    good: int
    bad: int
    show: Callable[[str], None]
    scores: tuple[float, float] = (math.nan, math.nan)
    """Scores after the good and the bad step."""
    trials: list[ReplayTrial] = field(default_factory=list)
    step_of: dict[str, int] = field(default_factory=dict)
    """Step of each group."""

    async def measured(self) -> float:
        """Score of the trainer's present weights; no number at all is the worst one."""
        value = self.score.of(await self._logprobs(self.score.rows))
        return -math.inf if math.isnan(value) else value

    async def measure_ends(self) -> None:
        """Measures the good and the bad step. Raises `RunDirError` where the bad one is no worse."""
        await self.replay.keep_after(self.good)
        before = await self.measured()
        await self.replay.go_after(self.bad)
        after = await self.measured()
        if not after < before:
            raise RunDirError(
                f"--bad {self.bad + 1}: expected a step worse than step {self.good + 1} by {self.score.metric}, "
                f"got {after:.4g} after {before:.4g}; name a good step before the fall (--good), or another --metric"
            )
        self.scores = (before, after)
        self._note("all steps", after)

    def _note(self, left_out: str, score: float) -> bool:
        before, after = self.scores
        self.trials.append(ReplayTrial(len(self.trials) + 1, left_out, score, score > (before + after) / 2))
        self.show(self.trials[-1].sentence)
        return self.trials[-1].cured

    async def cured(self, left_out: str, parts: Set[int | str | Token]) -> bool:
        """Trains to the bad step without some steps, groups or tokens; says whether that helps."""
        touched = {
            part if isinstance(part, int) else self.step_of[part if isinstance(part, str) else part[0]]
            for part in parts
        }
        await self.replay.keep_after(min(touched) - 1)
        for record in self.replay.logged.between(min(touched), self.bad):
            groups = self.replay.logged.groups(record.step) if record.step in touched else None
            muted = parts | {group.id for group in groups or () if record.step in parts}
            await self.replay.take(record, groups, change=partial(without, muted))
        return self._note(f"without {left_out}", await self.measured())

    async def culprit(self, renderer: ChatRenderer) -> Culprit:
        """Searches steps, groups and tokens. Raises `RunDirError` without a damage."""
        await self.measure_ends()
        weights, places, texts = await self.weights(), list[Token](), dict[str, list[str]]()
        of_group = dict.fromkeys(self.step_of, NOTHING) | summed(weights, {token: token[0] for token in weights})
        of_step = dict.fromkeys(range(self.good + 1, self.bad + 1), NOTHING) | summed(of_group, self.step_of)
        steps = sorted(await self.fewest(of_step, "steps"))
        of_group = {name: weight for name, weight in of_group.items() if self.step_of[name] in steps}
        named = await self.fewest(of_group, "groups")
        weights = {token: weight for token, weight in weights.items() if token[0] in named}
        if len(named) < len(of_group):
            places = await self.fewest(weights, "tokens")
        groups = [group for step in steps for group in self.replay.logged.groups(step) if group.id in named]
        for name, row, at in places:
            ids = (await self._rows(self.step_of[name]))[name][row].tokens
            texts.setdefault(name, []).append(renderer.text([ids[at]]))
        ends, counts = (self.good, self.bad), (len(of_group), len(weights))
        return Culprit(self.score.metric, ends, self.scores, steps, groups, places, counts, texts, tuple(self.trials))

    async def fewest(self, weights: Mapping[Part, Weight], name: str) -> list[Part]:
        """The fewest parts, in the order of their weight, without which the damage is gone; it is without all.

        The most harmful and the largest take turns. The last of them may be enough alone: with one fewer the damage is
        there.
        """
        orders = [sorted(weights, key=lambda one: -weights[one][by]) for by in (0, 1)]
        ranked = [*dict.fromkeys(chain.from_iterable(zip(*orders, strict=True)))]

        async def without_some(some: Sequence[Part]) -> bool:
            numbers = ", ".join(str(one + 1) for one in some if isinstance(one, int))
            words = f"step{'s' * (len(some) > 1)} {numbers}" if numbers else f"{len(some)} of {len(ranked)} {name}"
            return await self.cured(words, set(some))

        async def without_most(count: int) -> bool:
            return await without_some(ranked[:count])

        count = await smallest(len(ranked), without_most)
        if count > 1 and await without_some(ranked[count - 1 : count]):
            return ranked[count - 1 : count]
        return ranked[:count]

    async def weights(self) -> dict[Token, Weight]:
        """Weight of each trained token after the good step, from one replay of all steps."""
        replay, found = self.replay, dict[Token, Weight]()
        config, state = replay.steps.config.train, replay.folder / "state"
        await replay.go_after(self.good)
        for record in replay.logged.between(self.good + 1, self.bad):
            of_group = await self._rows(record.step)
            self.step_of |= dict.fromkeys(of_group, record.step)
            state.mkdir()
            await replay.trainer.save(state)
            answers, moved = await self._logprobs(self.score.rows), []
            flat = [(name, i, row) for name, rows in of_group.items() for i, row in enumerate(rows)]
            for sign in (1.0, -1.0):
                await replay.trainer.step(self.score.samples(answers, sign, record.version), record.version)
                moved.append(await self._logprobs([row.tokens for _, _, row in flat]))
                await replay.trainer.load(state)
            await asyncio.to_thread(shutil.rmtree, state)
            file = TokensFile(str(replay.folder / "tokens.safetensors"), tuple(of_group))
            stats = await replay.take(record, tokens_file=file)
            gradients = await asyncio.to_thread(numbers_by_row, Path(file.path), "gradient_N")
            clip = min(1.0, (config.max_grad_norm or math.inf) / max(stats.grad_norm if stats else 0.0, 1e-30))
            for at, ((name, i, row), up, down) in enumerate(zip(flat, *moved, strict=True)):
                places = [place for place, m in enumerate(row.mask) if m] if at in gradients else []
                for place, gradient in zip(places, gradients.get(at, ()), strict=True):
                    size = gradient * clip
                    found[name, i, place] = -size * (up[place - 1] - down[place - 1]), abs(size)
        return found

    async def _rows(self, step: int) -> dict[str, tuple[Sample, ...]]:
        """Rows of a step by group."""
        logged = self.replay.logged
        return (await self.replay.steps.rows(logged.groups(step), logged.records[step].version)).of_group

    async def _logprobs(self, rows: Sequence[Sequence[int]]) -> Logprobs:
        return await self.replay.trainer.logprobs(rows)


def without(parts: Set[int | str | Token], rows: StepRows) -> StepRows:
    """Rows in which some groups and tokens have no advantage; they still count in the loss's denominator."""

    def muted(name: str, i: int, row: Sample) -> Sample:
        kept = (name not in parts and (name, i, at) not in parts for at in range(len(row.tokens)))
        return replace(row, advantages=tuple(a if keep else 0.0 for a, keep in zip(row.advantages, kept, strict=True)))

    found = {name: tuple(muted(name, i, row) for i, row in enumerate(some)) for name, some in rows.of_group.items()}
    return replace(rows, of_group=found)


def summed(weights: Mapping[Token, Weight] | Mapping[str, Weight], whole: Mapping[Any, Part]) -> dict[Part, Weight]:
    """Weights of wholes, of which `whole` names that of each part."""
    found = dict[Part, Weight]()
    for part, (harm, size) in weights.items():
        others = found.get(whole[part], NOTHING)
        found[whole[part]] = others[0] + harm, others[1] + size
    return found


async def smallest(count: int, cures: Callable[[int], Awaitable[bool]]) -> int:
    """The smallest number that cures: by doubling, then by halving. `count` is known to cure, and 0 not to.

    A number m takes at most 2 log2(m) + 1 trials, rounded up.

    >>> async def five(number: int) -> bool:
    ...     return number >= 5
    >>> asyncio.run(smallest(8, five))
    5
    """
    low, high = 0, 1
    while high < count and not await cures(high):
        low, high = high, min(2 * high, count)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if await cures(middle) else (middle, high)
    return high


async def bisect(run_dir: Path, good: int, bad: int, metric: Metric, show: Callable[[str], None]) -> Culprit:
    """Finds what damaged a run after step `good`, by step `bad`, counted from 0. Raises a `ShoalError`."""
    with reading_steps(run_dir) as logged:
        logged.between(good + 1, bad)
        async with opened_replay(logged) as replay:
            renderer = load_renderer(await asyncio.to_thread(model_directory, replay.steps.config.model.path))
            score = await asyncio.to_thread(held_out_score, run_dir, metric, renderer)
            return await Bisection(replay, score, good, bad, show).culprit(renderer)
