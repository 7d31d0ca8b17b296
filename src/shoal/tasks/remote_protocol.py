"""The messages between a run and the workers of its tasks, as JSON in the frames of `net.joining`.

A worker connects to the run; the run never calls a worker, which may therefore sit behind any firewall. When the
connection breaks, other workers get its jobs.
"""

from typing import Annotated, TypeAlias

import msgspec

from shoal.net.joining import RunRole
from shoal.types import Split, Task

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class TaskRole(RunRole, frozen=True, tag="task", forbid_unknown_fields=True):
    """A worker of a task. Several workers may serve one name, in one version."""

    name: Name
    version: Word
    converses: bool = False
    """True if the worker speaks with the model through a session; otherwise the run asks the model one question."""
    scores: bool = False
    """True if the worker scores answers; otherwise an outcome has its reward, or the task names a checker."""
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    """Number of rollouts at once."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Seconds that one rollout may take."""


class DrawJob(msgspec.Struct, frozen=True, tag="draw"):
    """Asks for the task at an index. Equal arguments give equal tasks, and the splits share no question."""

    split: Split
    index: int


class RolloutJob(msgspec.Struct, frozen=True, tag="rollout"):
    """Asks for a rollout on a task, through a session. A procedural task has its receipt.

    The session records all sampled tokens; the run ends it.
    """

    task: Task
    base_url: str
    anthropic_base_url: str
    api_key: str


class ScoreJob(msgspec.Struct, frozen=True, tag="score"):
    """Asks for one reward per answer, in order."""

    task: Task
    answers: list[str]


class JobDone(msgspec.Struct, frozen=True, tag="done"):
    """The result of a job: the `Task` of a draw, the `Outcome` of a rollout, or the `Reward`s of answers."""

    value: msgspec.Raw


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A job failed, for a reason. Training uses a failure of the policy, and drops a failure of the environment."""

    reason: Word
    retry: bool = False
    """True if another attempt may help."""
    by_policy: bool = False


Job: TypeAlias = DrawJob | RolloutJob | ScoreJob
Result: TypeAlias = JobDone | JobFailed
