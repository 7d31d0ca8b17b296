"""The settings of a run: sections of fields, read from TOML, with everything wrong in them named."""

from shoal.config.losses import (
    LOSSES,
    CISPOLoss,
    DecoupledLoss,
    DoubleSidedLoss,
    GRPOLoss,
    GSPOLoss,
    LossConfig,
    OwnLoss,
    PositiveOnlyLoss,
    ReinforceLoss,
    SoftAdaptiveLoss,
)
from shoal.config.reading import load, parse, to_toml
from shoal.config.section import Section
from shoal.config.settings import (
    Config,
    Credit,
    EngineConfig,
    LoRAConfig,
    MetricsConfig,
    ModelConfig,
    RewardConfig,
    SwarmConfig,
    TaskConfig,
    TrainConfig,
)

__all__ = [
    "LOSSES",
    "CISPOLoss",
    "Config",
    "Credit",
    "DecoupledLoss",
    "DoubleSidedLoss",
    "EngineConfig",
    "GRPOLoss",
    "GSPOLoss",
    "LoRAConfig",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "OwnLoss",
    "PositiveOnlyLoss",
    "ReinforceLoss",
    "RewardConfig",
    "Section",
    "SoftAdaptiveLoss",
    "SwarmConfig",
    "TaskConfig",
    "TrainConfig",
    "load",
    "parse",
    "to_toml",
]
