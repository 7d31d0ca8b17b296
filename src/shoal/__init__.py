"""Shoal post-trains language models with reinforcement learning, inside a node and between nodes.

    train         one call: a model, tasks and a reward in, a better model out
    open_policy   a model with its engine and trainer, for a loop of the caller's
    environment   makes an environment of a class that draws questions, and perhaps converses and scores
    load          the configuration in a TOML file

The other names are types of these, and errors that an environment raises. All are loaded when they are first used;
`import shoal` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.config import Config as Config
    from shoal.config import load as load
    from shoal.errors import ShoalError as ShoalError
    from shoal.interfaces import Engine as Engine
    from shoal.interfaces import Environment as Environment
    from shoal.interfaces import Model as Model
    from shoal.interfaces import RewardFunction as RewardFunction
    from shoal.library.calls import open_policy as open_policy
    from shoal.library.calls import train as train
    from shoal.run.policy import Policy as Policy
    from shoal.run.result import Result as Result
    from shoal.tasks.sdk import EnvironmentFailed as EnvironmentFailed
    from shoal.tasks.sdk import PolicyFailed as PolicyFailed
    from shoal.tasks.sdk import Question as Question
    from shoal.tasks.sdk import environment as environment
    from shoal.trainer.messages import StepStats as StepStats
    from shoal.trainer.streams import Streams as Streams
    from shoal.trainer.streams import TokenLoss as TokenLoss
    from shoal.types import Completion as Completion
    from shoal.types import Group as Group
    from shoal.types import Message as Message
    from shoal.types import Outcome as Outcome
    from shoal.types import Reward as Reward
    from shoal.types import Rollout as Rollout
    from shoal.types import Sampling as Sampling
    from shoal.types import Task as Task
    from shoal.types import Turn as Turn

_HOMES = {
    name: home
    for home, names in {
        "config": ("Config", "load"),
        "errors": ("ShoalError",),
        "interfaces": ("Engine", "Environment", "Model", "RewardFunction"),
        "library.calls": ("open_policy", "train"),
        "run.policy": ("Policy",),
        "run.result": ("Result",),
        "tasks.sdk": ("EnvironmentFailed", "PolicyFailed", "Question", "environment"),
        "trainer.messages": ("StepStats",),
        "trainer.streams": ("Streams", "TokenLoss"),
        "types": ("Completion", "Group", "Message", "Outcome", "Reward", "Rollout", "Sampling", "Task", "Turn"),
    }.items()
    for name in names
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"shoal.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
