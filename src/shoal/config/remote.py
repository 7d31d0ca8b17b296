"""Sections `[cluster]` and `[swarm]`: roles of other hosts, and other nodes."""

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field, field_validator

from shoal.config.section import Section
from shoal.config.training import TrainConfig


class TrainerPlaces(Section):
    """Hosts of the trainer's ranks."""

    hosts: int = Field(1, ge=1, le=1024, description="Hosts of the ranks.")
    gpus: int = Field(0, ge=0, le=64, description="Ranks of each host, one to a GPU; 0 is one rank on the CPU.")

    @property
    def ranks(self) -> int:
        """Number of ranks in all."""
        return self.hosts * max(self.gpus, 1)


class EnginePlaces(Section):
    """Engines that Ray places."""

    count: int = Field(1, ge=1, le=1024, description="Engines.")
    gpus: int = Field(0, ge=0, le=64, description="GPUs of each engine.")
    command: list[str] = Field([], description="Server command of another project; own engines when empty.")


class ClusterConfig(Section):
    """Roles of other hosts that join the run; see docs/guides/hosts.md."""

    listen: str = Field("", description="HOST:PORT where engines, scorers, ranks and tasks register.")
    address: str = Field("", description="Ray cluster (auto or HOST:PORT) that starts the roles below.")
    engines: EnginePlaces | None = Field(None, description="Engines that Ray starts, in addition to engine.count.")
    rewards: int = Field(0, ge=0, le=1024, description="Scorers that Ray starts; they need reward.workers = 0.")
    trainer: TrainerPlaces | None = Field(
        None,
        description="Hosts and GPUs of joining ranks; unset starts train.ranks here.",
    )

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value and not re.fullmatch(r".+:\d{1,5}", value):
            raise ValueError(f"expected HOST:PORT, got {value!r}")
        return value

    def complaints(self, train: TrainConfig, workers: int) -> Iterator[str]:
        """Complaints about roles that could not join or would not be started; `workers` score on the run's host."""
        if self.trainer is not None and not self.listen:
            yield "cluster.trainer: expected cluster.listen too, where ranks join, got none"
        if self.trainer is not None and self.trainer.ranks % train.ranks:
            yield (
                f"train.ranks: expected the ranks of one copy of the weights, which divide the {self.trainer.ranks} of "
                f"cluster.trainer, got {train.ranks}"
            )
        if self.trainer is not None and train.teacher_model is not None:
            yield "train.teacher: expected a URL or none with cluster.trainer, whose hosts get the trained model only"
        if (self.engines is not None or self.rewards > 0) and not self.address:
            yield "cluster.engines: expected cluster.address too, the Ray cluster that starts them, got none"
        if self.address and (not self.listen or self.listen.endswith(":0")):
            got = self.listen or "none"
            yield f"cluster.address: expected cluster.listen = HOST:PORT too, where what Ray starts joins, got {got}"
        if self.rewards and workers:
            yield f"reward.workers: expected 0 with cluster.rewards, got {workers}"


Credit: TypeAlias = Literal["group", "group_likely"]
"""Treatment of peers' advantages."""


class SwarmConfig(Section):
    """Sharing rollouts with other nodes (SAPO); without servers the node is alone."""

    servers: list[str] = Field([], description="nats://HOST:PORT or tls://HOST:PORT; one reachable server suffices.")
    name: str = Field("reef", description="Swarm whose frames are read.")
    external_groups: int = Field(
        0,
        ge=0,
        le=4096,
        description="At most so many groups of peers per step, besides its own (J).",
    )
    share: str = Field(
        "all",
        description="Own groups shared: all, informative, budget:N (bytes/s) or module:function.",
    )
    take: str = Field(
        "trusted",
        description="Peers' groups taken: uniform (as in SAPO), trusted (newcomers have "
        "15 % at most) or module:function.",
    )
    credit: Credit = Field(
        "group_likely",
        description="Peers' negative advantages: kept (`group`, SAPO), or 0 with less weight of unlikely tokens "
        "(`group_likely`).",
    )
    datasets: Literal["mine", "any"] | list[str] = Field(
        "mine",
        description="Procedural tasks taken of peers: own ones (mine), any with the peer's settings, or these.",
    )
    wait_s: float = Field(
        0.0,
        ge=0,
        description="Seconds that a step waits for groups of peers; 0 takes those that are ready.",
    )
    round_offers: int = Field(
        0,
        ge=0,
        description="New offers that a step waits for, at most `wait_s`, and takes alone (SAPO); 0 waits for J groups "
        "of any age.",
    )
    fresh_s: float = Field(600.0, gt=0, description="Maximum age of peers' groups, in seconds.")
    reuse: int = Field(1, ge=1, description="Times that one group may be trained.")
