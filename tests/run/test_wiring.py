"""What the loop hands to the trainer: pushes, and rows in which late tokens are masked. The rest is real."""

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from buffer_values import group
from buffer_values import rollout as sampled
from chat_templates import renderer
from gateway_engine import ScriptedEngine
from shoal.config import Config, parse
from shoal.experience.audit import Check, audit
from shoal.experience.buffer import Buffer
from shoal.experience.counts import task_counts
from shoal.experience.log import FILE
from shoal.files import MODEL_FILE as WEIGHTS
from shoal.interfaces import EngineInfo
from shoal.observe.metrics import JsonlTracker, Trackers
from shoal.run.checkpoints import Checkpoints
from shoal.run.learning import STEPS as WARNED_STEPS
from shoal.run.learning import UNINFORMATIVE, Learning
from shoal.run.loop import EvaluationCost, RunParts, TrainLoop
from shoal.run.parts import orchestrator, own_scorer, playing
from shoal.run.policy import Policy
from shoal.run.prepare import Prepared
from shoal.run.run_dir import run_meta
from shoal.tasks.sdk import Definition
from shoal.trainer.advantage import is_informative, returns_of
from shoal.trainer.messages import StepStats, TokensFile
from shoal.types import Group, Reward, Sample, Sampling, Task
from shoal.weights.store import WeightStore

STEPS = 5
CONFIG = parse(
    {
        "tasks": [{"name": "gcd"}],
        "train": {"groups_per_step": 1, "steps": STEPS, "push_every": 2},
        "asynchrony": {"max_staleness": 0, "late": "mask_tokens"},
        "eval": {"every_steps": 0},
        "checkpoint": {"every_steps": 1, "keep": 1},
        "log": {"keep_steps": 1},
    }
)
NOTHING = StepStats()


class Recording:
    """A trainer that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[list[Sample]] = []
        self.pushes: list[bool] = []
        self.moments: list[tuple[int, int]] = []

    async def step(
        self, groups: Sequence[Sequence[Sample]], version: int, since_push: int, *, tokens_file: TokensFile | None
    ) -> StepStats:
        self.moments.append((version, since_push))
        self.given.append([row for rows in groups for row in rows])
        return NOTHING

    async def write_version(self, path: Path, *, push: bool = True, later: bool = False) -> float:
        self.pushes.append(push)
        path.write_text("weights")  # noqa: ASYNC240
        return 0.0

    async def save(self, directory: Path, *, later: bool = False) -> float:
        (directory / "weights").write_text("weights")
        return 0.0


class Serving:
    """An engine that serves whatever it is given."""

    async def update_weights(self, version: int, path: Path) -> None:
        pass

    async def info(self) -> EngineInfo:
        return EngineInfo(0, "", 64, 0.5, 10, 10, 0, 1, 0)


class Unmasked(TrainLoop):
    """Gives the trainer every token, as a loop without its late policy would."""

    def __init__(self, policy: Policy, parts: RunParts, **more: Any) -> None:
        super().__init__(policy, parts, **more)
        late = policy.config.asynchrony.model_copy(update={"late": "train"})
        policy.config = policy.config.model_copy(update={"asynchrony": late})


def differing(group_id: str, version: int, tokens: Sequence[int], rewards: Sequence[float]) -> Group:
    """A group whose answers have these numbers of tokens and these rewards."""
    plain = group(group_id, admitted=version)
    rollouts = (
        replace(sampled(one.id, (version,) * length), reward=Reward(value))
        for one, length, value in zip(plain.rollouts, tokens, rewards, strict=True)
    )
    return replace(plain, rollouts=tuple(rollouts))


async def draw_wrong_then_differing(buffer: Buffer) -> None:
    """Before each group of which one answer is right a group of wrong answers of two lengths; for ever."""
    for number in count():
        version = await buffer.admit(f"g{number}", "chain_sum")
        await buffer.add(differing(f"g{number}", version, (2, 8), (0.0, float(number % 2))))


class CopiedLogs(Checkpoints):
    """Copies the log at each checkpoint as it then is, without its write-ahead log."""

    async def seal(self, tasks: asyncio.TaskGroup) -> None:
        step = self.saved
        await super().seal(tasks)
        if step is not None:
            alone = self.run_dir / f"alone-{step}"
            alone.mkdir()
            shutil.copy(self.run_dir / FILE, alone)


class Copied(TrainLoop):
    """A loop whose log is copied at each checkpoint."""

    def __init__(self, policy: Policy, parts: RunParts, **more: Any) -> None:
        super().__init__(policy, parts, **more)
        self.checkpoints = CopiedLogs(policy.config, parts.run_dir, policy.trainer, policy.buffer)


async def draw_groups(buffer: Buffer) -> None:
    """Groups whose first token is of the version before, and whose rewards differ; for ever."""
    known: Any = SimpleNamespace(memory=0, answered=lambda group: None, counts=lambda: {"hard": 3})
    buffer.follow("chain_sum", known)
    number = 0
    while True:
        version = await buffer.admit(f"g{number}", "chain_sum")
        one = group(f"g{number}", (max(0, version - 1), version), admitted=version)
        rollouts = (replace(rollout, reward=Reward(float(i))) for i, rollout in enumerate(one.rollouts))
        await buffer.add(replace(one, rollouts=tuple(rollouts)))
        number += 1


async def draw_beside_other_weights(buffer: Buffer) -> None:
    """Groups of a run whose log has another checksum of Version 1."""
    await buffer.record_version(1, "of other weights")
    await draw_groups(buffer)


class Refusing(Recording):
    """A trainer whose gradients are never finite."""

    async def step(
        self, groups: Sequence[Sequence[Sample]], version: int, since_push: int, *, tokens_file: TokensFile | None
    ) -> StepStats:
        return replace(await super().step(groups, version, since_push, tokens_file=tokens_file), refused_updates=1)


class Useless(TrainLoop):
    """Takes every answer to be worth the same, and has done so in the steps before."""

    def __init__(self, policy: Policy, parts: RunParts, **more: Any) -> None:
        super().__init__(policy, parts, **more)
        before = WARNED_STEPS - STEPS
        self.learning = Learning(lambda rollout: [0.0], within_groups=True, steps=before, useless=before)
        fallen: Any = SimpleNamespace(
            stepped=lambda reward: f"fell to {reward:g}" if len(self.totals.rewards) == 2 else ""
        )
        self._collapse = fallen


def ran(
    run_dir: Path,
    kind: type[TrainLoop] = TrainLoop,
    trainer: Recording | None = None,
    *,
    config: Config = CONFIG,
    drawing: Callable[[Buffer], Coroutine[None, None, None]] = draw_groups,
) -> Recording:
    """What the trainer was given in a whole run."""
    trainer = trainer or Recording()

    async def main() -> None:
        buffer = Buffer.open(run_dir, run_meta(config), max_running=9)
        trackers = Trackers(JsonlTracker(run_dir / "metrics.jsonl"))
        prepared: Any = SimpleNamespace(config=config, version_file=WEIGHTS)
        store = WeightStore(run_dir / "weights")
        more: dict[str, Any] = dict.fromkeys(("runner", "scorer", "engines", "draw"))
        policy = Policy(config, trainer, None, prepared, Serving(), buffer=buffer, store=store, **more)
        loop = kind(policy, RunParts(run_dir, (), trackers), first_step=0)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(drawing(buffer)), tasks.create_task(policy.versions.keep_loaded())]
            await loop.run(tasks)
            for task in background:
                task.cancel()
        trackers.close()
        await buffer.close()

    asyncio.run(main())
    return trainer


def test_the_trainer_hears_of_each_push_of_a_run(tmp_path: Path) -> None:
    assert ran(tmp_path).pushes == [True] * 3  # after steps 2 and 4, and at the end


def test_the_trainer_hears_with_each_step_of_the_version_and_of_the_steps_since_its_push(tmp_path: Path) -> None:
    assert ran(tmp_path).moments == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_refused_updates_a_fallen_reward_and_steps_that_teach_nothing_are_events_of_their_step(tmp_path: Path) -> None:
    ran(tmp_path, Useless, Refusing())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [(one["name"], one["step"]) for one in records if one["kind"] == "event"]
    steps = [one["step"] for one in records if one["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    refused = [("updates_refused", step) for step in steps]
    assert events == [*refused[:2], ("reward_collapsed", 2), *refused[2:], ("cannot_learn", STEPS)]
    assert [one["reason"] for one in records if one.get("name") == "reward_collapsed"] == ["fell to 0.5"]
    assert [one["questions/hard"] for one in records if one["kind"] == "step"] == [3] * STEPS


def test_a_version_of_which_the_log_has_other_weights_is_an_event_with_its_number(tmp_path: Path) -> None:
    ran(tmp_path, drawing=draw_beside_other_weights)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["version"] for one in records if one.get("name") == "replay_not_exact"] == [1]


class Evaluated(TrainLoop):
    """Was evaluated for ten seconds before its first step, and trains in none."""

    def __init__(self, policy: Policy, parts: RunParts, **more: Any) -> None:
        super().__init__(policy, parts, **more)
        now = iter([0.0, 10.0, 10.0, 10.0])
        self.evaluations.cost = EvaluationCost(8, lambda: next(now), evaluation_s=10.0)


def test_the_seconds_of_an_evaluation_before_the_first_step_are_not_those_of_training(tmp_path: Path) -> None:
    ran(tmp_path, Evaluated)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [one["reason"] for one in records if one.get("name") == "evaluation_costs"]
    assert [reason.partition("; ")[0] for reason in told] == [
        f"an evaluation takes 10 s, more than the 0 s of the {STEPS} steps between two"
    ]


def test_a_task_whose_reward_is_correct_is_worth_one_or_zero_and_the_others_keep_their_marks(tmp_path: Path) -> None:
    tasks = [{"name": "marked"}, {"name": "strict", "reward": "correct"}]
    config = parse({"tasks": tasks, "reward": {"workers": 0}, "cluster": {"listen": "127.0.0.1:9"}})
    author = SimpleNamespace(draw=lambda rng: "?", score=lambda asked, answer: float(answer))
    environments = {name: Definition(name, author) for name in ("marked", "strict")}
    prepared: Any = SimpleNamespace(config=config, environments=environments)

    async def scored() -> list[list[float]]:
        async with own_scorer(prepared, tmp_path / "log") as scorer:
            rewards = [await scorer.score(Task("t", name, ()), ["0.5", "1"]) for name in ("marked", "strict")]
        return [[reward.value for reward in of_task] for of_task in rewards]

    assert asyncio.run(scored()) == [[0.5, 1.0], [0.0, 1.0]]


def test_all_that_a_config_says_of_sampling_reaches_the_engine(tmp_path: Path) -> None:
    said = {"max_tokens": 17, "temperature": 0.5}
    config = CONFIG.model_copy(update={"seed": 3, "rollout": CONFIG.rollout.model_copy(update=said)})
    nothing: Any = SimpleNamespace(stop_token_ids=(9,))
    prepared = Prepared(config, tmp_path, nothing, nothing, 64, 8)
    assert prepared.sampling == Sampling(**said, stop_token_ids=(9,), seed=3)


def test_late_tokens_of_a_run_are_masked_and_the_others_are_not(tmp_path: Path) -> None:
    trainer = ran(tmp_path)
    assert len(trainer.given) == STEPS
    for step, rows in enumerate(trainer.given):
        version = step // 2
        for row in rows:
            trained = {v for drawn, v, a in zip(row.mask, row.versions, row.advantages, strict=True) if drawn and a}
            assert trained == {version}, (step, row)
    report = audit(tmp_path)
    assert report.ok, report.sentences()


def test_dynamic_sampling_drops_all_wrong_groups_of_which_the_trainer_would_punish_the_longer_answers(
    tmp_path: Path,
) -> None:
    train = CONFIG.train.model_copy(update={"dynamic_sampling": True, "overlong_tokens": 4})
    rollouts = CONFIG.rollout.model_copy(update={"max_tokens": 8})
    config = CONFIG.model_copy(update={"train": train, "rollout": rollouts})
    assert is_informative(differing("g", 0, (2, 8), (0.0, 0.0)), returns_of(train, 8))
    ran(tmp_path, config=config, drawing=draw_wrong_then_differing)
    counts = task_counts(tmp_path)["chain_sum"]
    assert (counts.consumed, counts.dropped[UNINFORMATIVE]) == (STEPS, STEPS)


def test_steps_that_are_too_old_to_be_replayed_leave_the_log(tmp_path: Path) -> None:
    ran(tmp_path)
    assert len(list((tmp_path / "archive").iterdir())) > 0
    report = audit(tmp_path)
    assert report.ok, report.sentences()
    assert report.steps == STEPS


def test_at_each_checkpoint_of_a_run_the_log_s_file_alone_has_all_its_steps(tmp_path: Path) -> None:
    ran(tmp_path, Copied, config=CONFIG.model_copy(update={"log": CONFIG.log.model_copy(update={"keep_steps": 0})}))
    assert [audit(tmp_path / f"alone-{step}").steps for step in range(STEPS)] == list(range(1, STEPS + 1))


def test_the_audit_finds_a_run_whose_loop_masked_nothing(tmp_path: Path) -> None:
    ran(tmp_path, Unmasked)
    assert audit(tmp_path).findings.keys() == {Check.STALENESS}


async def plays(task: Task, client: object) -> None:
    """An agent that does nothing."""


def test_no_more_of_a_task_plays_at_once_than_its_agent_or_environment_allows(tmp_path: Path) -> None:
    agent = {"run": f"{__file__}:plays"}
    tasks = [
        {"name": "game"},
        {"name": "acted", "agent": agent, "max_running": 5},
        {"name": "asked"},
        {"name": "slowed", "max_running": 5},
        {"name": "slow game", "max_running": 1},
    ]
    config = parse({"tasks": tasks, "rollout": {"group_size": 2}})
    author, single = SimpleNamespace(draw=lambda rng: "?"), SimpleNamespace(draw=lambda rng: "?", rollout=plays)
    environments = {name: Definition(name, author, max_running=3) for name in ("acted", "asked", "slowed")}
    environments |= {name: Definition(name, single, max_running=3) for name in ("game", "slow game")}
    made = renderer("qwen3")
    prepared: Any = SimpleNamespace(
        config=config, environments=environments, renderer=made, max_model_len=64, service=None, sampling=Sampling(4)
    )

    async def allowed() -> tuple[dict[str, int | None], dict[str, int | None]]:
        buffer = Buffer.in_memory(run_meta(config), max_running=9)
        answers: Any = SimpleNamespace(scorer=None)
        async with playing(prepared, ScriptedEngine(made), answers) as runner:
            parts: Any = runner
            groups = orchestrator(prepared, runner, buffer)._sources
            rollouts = {name: one.most_at_once() for name, one in parts.by_service.items()}
            return rollouts, {name: one.groups_at_once() for name, one in groups.items()}

    rollouts, groups = asyncio.run(allowed())
    assert rollouts == {"game": 3, "acted": 5, "slow game": 1}
    assert groups == {"game": 2, "acted": 3, "asked": None, "slowed": 2, "slow game": 1}


def test_a_worker_that_joins_later_adds_its_places() -> None:
    service: Any = SimpleNamespace(rollout=plays, converses=True, max_running=2, timeout_s=1.0)
    config, made = parse({"tasks": [{"name": "game"}, {"name": "slow", "max_running": 3}]}), renderer("qwen3")
    environments = {"game": service, "slow": service}
    prepared: Any = SimpleNamespace(
        config=config, environments=environments, renderer=made, max_model_len=64, sampling=Sampling(4)
    )

    async def allowed() -> list[dict[str, int | None]]:
        single: Any = SimpleNamespace(scorer=None)
        async with playing(prepared, ScriptedEngine(made), single) as runner:
            parts: Any = runner
            seen = []
            for service.max_running in (2, 5):
                seen.append({name: one.most_at_once() for name, one in parts.by_service.items()})
            return seen

    assert asyncio.run(allowed()) == [{"game": 2, "slow": 2}, {"game": 5, "slow": 3}]
