"""Types of the keywords of `shoal.train` and `shoal.open_policy`, for editors and type checkers.

Written by `make docs` from src/shoal/config/; change the field there.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class ModelSettings(TypedDict, total=False):
    """The model being trained."""

    path: str
    """Directory, hub name, or embedded: `demo`, `demo-code`, `demo-turns`, `demo-sums`, `demo-tools`."""
    device: Literal["auto", "cpu", "cuda"]
    """`auto` takes a GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"]
    """Type of weights and activations; `auto` is bfloat16 where the processor multiplies it."""
    gradient_checkpointing: bool | Literal["selective"]
    """Computes activations again to save memory; `selective` keeps products of weights."""

class TaskSettings(TypedDict, total=False):
    """One task service of the mixture."""

    name: str
    """A reasoning-gym dataset, a task of many turns, or any name."""
    service: Literal["reasoning_gym", "jsonl", "turns", "python", "remote"]
    """Source of the tasks; `remote` is `shoal task serve`."""
    weight: float
    """Relative share of the trained groups."""
    params: Mapping[str, Any] | int
    """Settings of the dataset or task, or its curriculum level."""
    path: str | None
    """File, `module:name` (python), workers' address (remote), or game (turns)."""
    scorer: str | Mapping[str, Any] | None
    """Checker by name, or a table with its parameters; `exact` for files when unset."""
    reward: str | Sequence[str] | Callable[..., Any]
    """Hooks after scoring: score, correct (1 or 0), length:PER_TOKEN, dedup, or module:function."""
    eval_share: float
    """Held-out share of a file's questions; the largest holds for all tasks."""
    system_prompt: str
    """Text before every question; `reasoning_gym:default` asks for `<answer>` tags."""
    rewrite: Sequence[Sequence[str]]
    """Pairs of regular expression and replacement that shorten questions."""
    max_running: int | None
    """Rollouts of this task at once, at least one group; unset, what its code and the run allow."""
    agent: str | Sequence[str] | Mapping[str, Any] | None | Callable[..., Any]
    """`module:function`, a command, or a table; see docs/guides/agents.md."""

class RolloutSettings(TypedDict, total=False):
    """How answers are sampled for training."""

    group_size: int
    """Rollouts per task."""
    max_tokens: int
    """Answer budget in tokens."""
    temperature: float
    """Sampling temperature."""
    top_k: int
    """Most likely tokens to sample from; 0 is all."""
    top_p: float
    """Share of the probability to sample from, in 512 tokens at most."""
    ratios: Literal["fixed", "chance", "tokens", "automatic"]
    """Weights are shares of groups, chances of each group (SAPO) or shares of tokens, or follow informative groups."""

class EngineSettings(TypedDict, total=False):
    """Where answers come from."""

    urls: Sequence[str]
    """Running engines (Shoal, vLLM, SGLang); none starts local ones."""
    count: int
    """Local engine processes; with 0 all join from other hosts."""
    gpus: Sequence[int] | Literal["shared"]
    """GPU numbers, one per engine; after the trainer's when empty, or shared with it."""
    max_running: int
    """Sequences decoded at once by the local engine."""
    max_model_len: int | None
    """Tokens per sequence; the model's own limit when unset."""
    adapters: bool
    """Servers of `urls` load adapters instead of merged weights."""
    on_update: Literal["recompute", "keep", "drain"]
    """Treatment of running answers when new weights come."""

class AsyncSettings(TypedDict, total=False):
    """How far generation may run ahead of training."""

    max_staleness: int
    """Staleness bound in versions (AReaL's eta); 0 is synchronous."""
    late: Literal["drop", "mask_tokens", "train"]
    """Treatment of groups older than max_staleness."""

class KLSettings(TypedDict, total=False):
    """Distance to the model that the run began with."""

    coefficient: float
    """Weight of the KL; 0 is off and loads no reference model."""
    estimator: Literal["k1", "k2", "k3"]
    """Of KL(pi_theta, pi_ref) at one sampled token."""
    where: Literal["loss", "reward"]
    """Added to the loss, or taken off each token's return."""

class CriticSettings(TypedDict, total=False):
    """The value head of `train.advantage = "gae"` (PPO)."""

    gae_lambda: float
    """0 trusts the critic alone, 1 the rewards alone."""
    lr: float | None
    """Peak learning rate; train.lr when unset."""

class LoRASettings(TypedDict, total=False):
    """Low-rank adapters instead of all weights; own engines merge them."""

    rank: int
    """Rank of each adapter; 0 trains all weights."""
    alpha: float
    """Adapters are scaled by alpha / rank."""
    targets: Sequence[str]
    """Names of adapted layers, such as q_proj; all linear ones when empty."""

class TrainSettings(TypedDict, total=False):
    """The optimizer's side."""

    steps: int
    """Training steps of the run."""
    groups_per_step: int
    """Groups consumed by one step."""
    minibatches: int
    """Optimizer updates a step's groups are split into."""
    push_every: int
    """Steps between loads of new weights by the engines (K)."""
    loss: str | Mapping[str, Any] | Callable[..., Any]
    """Loss by name, with its own parameters."""
    loss_mean: Literal["tokens", "rows", "budget", "sums"] | None
    """Mean over tokens, over rows' own means, over rows of rollout.max_tokens, or over rows' sums."""
    kl: KLSettings
    teacher: str | None
    """On-policy distillation in place of rewards: a model with the same tokens, or a URL up to /v1 of OpenAI's text completions."""
    entropy_bonus: float
    """Weight of the entropy, subtracted from the loss."""
    advantage: Literal["grpo", "grpo_no_std", "rloo", "maxrl", "batch", "group_batch", "gae"] | str | Callable[..., Any]
    """Baseline and scale: by group, by batch, from a critic (`gae`), or your `module:function`."""
    turn_discount: float
    """Weight of a turn's reward for the turn before it."""
    critic: CriticSettings
    lora: LoRASettings
    router_replay: bool
    """Train each token with the experts that sampled it (R3)."""
    short_groups: Literal["pad", "keep"]
    """`pad` replaces failed rollouts by repeated finished ones (GLM-5)."""
    overlong_tokens: int
    """Last tokens of rollout.max_tokens, over which the reward sinks by 1 (DAPO)."""
    dynamic_sampling: bool | Literal["pool"]
    """`true` replaces groups of equal rewards (DAPO), up to a bound. `pool` asks those questions of a file whose rewards will likely differ."""
    lr: float
    """Peak learning rate."""
    warmup_steps: int
    """Updates over which the learning rate rises, at first and after each reset."""
    lr_schedule: Literal["constant", "cosine", "linear"]
    """Decay to 0 over the remaining updates."""
    betas: Sequence[float]
    """Adam's moving averages."""
    weight_decay: float
    """AdamW's weight decay."""
    max_grad_norm: float
    """Global gradient norm above which gradients are scaled down; 0 is off."""
    reset_optimizer_at_push: bool
    """Forget Adam's moments at every push (GLM-5)."""
    tokens_per_microbatch: int | None
    """Packing budget; derived when unset."""
    offload: Literal["none", "optimizer"]
    """Keep Adam's moments in main memory between updates; refused without a GPU."""
    gpus: Sequence[int]
    """GPU numbers, one per rank; the first ones when empty."""
    ranks: int
    """Trainer processes that share sharded weights and moments."""
    backend: Literal["sharded", "experts"] | str
    """`sharded` gathers layers, `experts` sends tokens to experts, `torchtitan:N` splits layers over N ranks."""

class RewardSettings(TypedDict, total=False):
    """Where answers are scored."""

    workers: int
    """Scoring processes, and sandboxes at once; with 0 scorers join from other hosts."""
    timeout_s: float
    """Processor time per answer; one that takes more is wrong."""

class EvalSettings(TypedDict, total=False):
    """Held-out questions."""

    every_steps: int
    """Steps between evaluations; 0 evaluates only before and after."""
    questions: int | None
    """Held-out questions, by weight. Unset: 8 to 128, at most a quarter of the answers trained between evaluations."""
    samples: int
    """Sampled answers per question; 2 or more give pass@k."""

class CheckpointSettings(TypedDict, total=False):
    """Checkpoints, which a resumed run loads."""

    asynchronous: bool
    """The next step runs while copies of weights and moments, or of a Version, are written."""
    every_steps: int
    """Steps between checkpoints; fewer if these take over 2 minutes and 20 times as long as saving."""
    keep: int
    """Checkpoints kept."""
    backup: str | PathLike[str]
    """Folder or URL to which log and checkpoints are copied all along; empty is off."""

class LogSettings(TypedDict, total=False):
    """How much of the experience log stays in one file."""

    keep_steps: int
    """Steps in log.sqlite; older ones go to Parquet files; 0 keeps all."""

class MetricsSettings(TypedDict, total=False):
    """Further targets of metrics."""

    trackers: Sequence[str | Callable[..., Any]]
    """tensorboard, wandb:PROJECT, mlflow:EXPERIMENT (extras of that name), or module:function."""

class SwarmSettings(TypedDict, total=False):
    """Sharing rollouts with other nodes (SAPO); without servers the node is alone."""

    servers: Sequence[str]
    """nats://HOST:PORT or tls://HOST:PORT; one reachable server suffices."""
    name: str
    """Swarm whose frames are read."""
    external_groups: int
    """At most so many groups of peers per step, besides its own (J)."""
    share: str | Callable[..., Any]
    """Own groups shared: all, informative, budget:N (bytes/s) or module:function."""
    take: str | Callable[..., Any]
    """Peers' groups taken: uniform (as in SAPO), trusted (newcomers have 15 % at most) or module:function."""
    credit: Literal["group", "group_likely"]
    """Peers' negative advantages: kept (`group`, SAPO), or 0 with less weight of unlikely tokens (`group_likely`)."""
    datasets: Literal["mine", "any"] | Sequence[str]
    """Procedural tasks taken of peers: own ones (mine), any with the peer's settings, or these."""
    wait_s: float
    """Seconds that a step waits for groups of peers; 0 takes those that are ready."""
    round_offers: int
    """New offers that a step waits for, at most `wait_s`, and takes alone (SAPO); 0 waits for J groups of any age."""
    fresh_s: float
    """Maximum age of peers' groups, in seconds."""
    reuse: int
    """Times that one group may be trained."""

class EnginePlacesSettings(TypedDict, total=False):
    """Engines that Ray places."""

    count: int
    """Engines."""
    gpus: int
    """GPUs of each engine."""
    command: Sequence[str]
    """Server command of another project; own engines when empty."""

class TrainerPlacesSettings(TypedDict, total=False):
    """Hosts of the trainer's ranks."""

    hosts: int
    """Hosts of the ranks."""
    gpus: int
    """Ranks of each host, one to a GPU; 0 is one rank on the CPU."""

class ClusterSettings(TypedDict, total=False):
    """Roles of other hosts that join the run; see docs/guides/hosts.md."""

    listen: str
    """HOST:PORT where engines, scorers, ranks and tasks register."""
    address: str
    """Ray cluster (auto or HOST:PORT) that starts the roles below."""
    engines: EnginePlacesSettings | None
    """Engines that Ray starts, in addition to engine.count."""
    rewards: int
    """Scorers that Ray starts; they need reward.workers = 0."""
    trainer: TrainerPlacesSettings | None
    """Hosts and GPUs of joining ranks; unset starts train.ranks here."""

class StageSettings(TypedDict, total=False):
    """One of several stages; each begins with the model of the stage before."""

    kind: Literal["sft", "dpo", "rl"]
    """Imitation, preference pairs, or reinforcement learning."""
    data: str | None | PathLike[str]
    """JSONL rows with `messages`, or for dpo `chosen` and `rejected`, which end in the answers."""
    train: Mapping[str, Any]
    """Settings of [train] for this stage."""

class Settings(TrainSettings, total=False):
    """A whole run."""

    run_dir: str | PathLike[str]
    """Everything the run writes."""
    seed: int
    """Name in every seed of the run."""
    stall_s: float
    """Seconds without progress before a standstill is handled."""
    preset: Literal["areal", "glm5", "sapo", "dapo"] | None
    """Published settings, listed below."""
    rollout: RolloutSettings
    engine: EngineSettings
    asynchrony: AsyncSettings
    train: TrainSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    log: LogSettings
    metrics: MetricsSettings
    swarm: SwarmSettings
    cluster: ClusterSettings
    stages: Sequence[StageSettings]
    """Stages, in order; by default one of kind rl."""
    device: Literal["auto", "cpu", "cuda"]
    """`auto` takes a GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"]
    """Type of weights and activations; `auto` is bfloat16 where the processor multiplies it."""
    gradient_checkpointing: bool | Literal["selective"]
    """Computes activations again to save memory; `selective` keeps products of weights."""
    group_size: int
    """Rollouts per task."""
    max_tokens: int
    """Answer budget in tokens."""
    temperature: float
    """Sampling temperature."""
    top_k: int
    """Most likely tokens to sample from; 0 is all."""
    top_p: float
    """Share of the probability to sample from, in 512 tokens at most."""
    ratios: Literal["fixed", "chance", "tokens", "automatic"]
    """Weights are shares of groups, chances of each group (SAPO) or shares of tokens, or follow informative groups."""
    urls: Sequence[str]
    """Running engines (Shoal, vLLM, SGLang); none starts local ones."""
    count: int
    """Local engine processes; with 0 all join from other hosts."""
    max_running: int
    """Sequences decoded at once by the local engine."""
    max_model_len: int | None
    """Tokens per sequence; the model's own limit when unset."""
    adapters: bool
    """Servers of `urls` load adapters instead of merged weights."""
    on_update: Literal["recompute", "keep", "drain"]
    """Treatment of running answers when new weights come."""
    max_staleness: int
    """Staleness bound in versions (AReaL's eta); 0 is synchronous."""
    late: Literal["drop", "mask_tokens", "train"]
    """Treatment of groups older than max_staleness."""
    workers: int
    """Scoring processes, and sandboxes at once; with 0 scorers join from other hosts."""
    timeout_s: float
    """Processor time per answer; one that takes more is wrong."""
    questions: int | None
    """Held-out questions, by weight. Unset: 8 to 128, at most a quarter of the answers trained between evaluations."""
    samples: int
    """Sampled answers per question; 2 or more give pass@k."""
    asynchronous: bool
    """The next step runs while copies of weights and moments, or of a Version, are written."""
    keep: int
    """Checkpoints kept."""
    backup: str | PathLike[str]
    """Folder or URL to which log and checkpoints are copied all along; empty is off."""
    keep_steps: int
    """Steps in log.sqlite; older ones go to Parquet files; 0 keeps all."""
    trackers: Sequence[str | Callable[..., Any]]
    """tensorboard, wandb:PROJECT, mlflow:EXPERIMENT (extras of that name), or module:function."""
    servers: Sequence[str]
    """nats://HOST:PORT or tls://HOST:PORT; one reachable server suffices."""
    name: str
    """Swarm whose frames are read."""
    external_groups: int
    """At most so many groups of peers per step, besides its own (J)."""
    share: str | Callable[..., Any]
    """Own groups shared: all, informative, budget:N (bytes/s) or module:function."""
    take: str | Callable[..., Any]
    """Peers' groups taken: uniform (as in SAPO), trusted (newcomers have 15 % at most) or module:function."""
    credit: Literal["group", "group_likely"]
    """Peers' negative advantages: kept (`group`, SAPO), or 0 with less weight of unlikely tokens (`group_likely`)."""
    datasets: Literal["mine", "any"] | Sequence[str]
    """Procedural tasks taken of peers: own ones (mine), any with the peer's settings, or these."""
    wait_s: float
    """Seconds that a step waits for groups of peers; 0 takes those that are ready."""
    round_offers: int
    """New offers that a step waits for, at most `wait_s`, and takes alone (SAPO); 0 waits for J groups of any age."""
    fresh_s: float
    """Maximum age of peers' groups, in seconds."""
    reuse: int
    """Times that one group may be trained."""
    listen: str
    """HOST:PORT where engines, scorers, ranks and tasks register."""
    address: str
    """Ray cluster (auto or HOST:PORT) that starts the roles below."""
    engines: EnginePlacesSettings | None
    """Engines that Ray starts, in addition to engine.count."""
    rewards: int
    """Scorers that Ray starts; they need reward.workers = 0."""
    trainer: TrainerPlacesSettings | None
    """Hosts and GPUs of joining ranks; unset starts train.ranks here."""
