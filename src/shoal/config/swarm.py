"""Section `[swarm]`: sharing with other nodes."""

from typing import Literal, TypeAlias

from pydantic import Field

from shoal.config.section import Section

Credit: TypeAlias = Literal["group", "group_drop", "group_likely"]
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
        description="Peers' negative advantages: kept (`group`, SAPO) or 0 (`group_drop`); `group_likely` also "
        "lowers unlikely tokens.",
    )
    datasets: Literal["mine", "any"] | list[str] = Field(
        "mine",
        description="Procedural tasks taken of peers: own ones (mine), any with the peer's settings, or these.",
    )
    checkers: list[Literal["exact", "number", "math", "regex", "code"]] = Field(
        [], description="Checkers for peers' questions that this node does not have; truths are the peers'."
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
