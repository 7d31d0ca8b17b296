"""Section `[swarm]`: sharing with other nodes."""

from typing import Literal, TypeAlias

from pydantic import Field

from shoal.config.section import Section

Credit: TypeAlias = Literal["group", "group_drop"]
"""Treatment of peers' negative advantages."""


class SwarmConfig(Section):
    """Sharing rollouts with other nodes (SAPO); without servers the node is alone."""

    servers: list[str] = Field([], description="nats://HOST:PORT or tls://HOST:PORT; any of them will do.")
    name: str = Field("reef", description="Name of the swarm; a node reads frames of its swarm only.")
    external_groups: int = Field(
        0,
        ge=0,
        le=4096,
        description="Groups of peers that a step trains besides its own (J), fewer when fewer are there.",
    )
    share: str = Field(
        "all",
        description="Own groups shared: all, informative, budget:N (bytes/s), demand or module:function.",
    )
    take: str = Field(
        "trusted",
        description="Peers' groups taken: uniform (as in SAPO), trusted (newcomers have "
        "15 % at most) or module:function.",
    )
    credit: Credit = Field(
        "group_drop",
        description="Negative advantages of peers' answers: as they are (`group`, as in SAPO), or 0 (`group_drop`).",
    )
    datasets: Literal["mine", "any"] | list[str] = Field(
        "mine",
        description="Procedural tasks taken of peers: the node's own tasks with its own settings (mine); any "
        "dataset with the peer's settings; or these datasets.",
    )
    checkers: list[Literal["exact", "number", "math", "regex", "code"]] = Field(
        [], description="Checkers with which peers' questions are taken that this node has not; truths are the peers'."
    )
    wait_s: float = Field(
        0.0,
        ge=0,
        description="Seconds that a step waits for its groups of peers; 0 takes what is there. A node whose steps are "
        "faster than the machine verifies offers trains on fewer of them.",
    )
    round_offers: int = Field(
        0,
        ge=0,
        description="Offers of peers in a round: a step waits, for `wait_s` at most, until it has read as many more, "
        "and takes its groups of these only (SAPO's rounds). 0: it waits for J groups, and takes older ones too.",
    )
    fresh_s: float = Field(600.0, gt=0, description="Age in seconds above which peers' groups are not taken.")
    reuse: int = Field(1, ge=1, description="Number of times that one group of a peer may be trained.")
