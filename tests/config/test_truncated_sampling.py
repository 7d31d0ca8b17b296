"""Sampling that the trainer cannot compute is refused before a run."""

import pytest

from shoal.config import parse
from shoal.errors import ConfigError

TASKS = {"tasks": [{"name": "chain_sum"}]}


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_a_run_that_draws_from_truncated_distributions_is_refused(truncation: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{next(iter(truncation))}.*whole distributions"):
        parse({**TASKS, "rollout": truncation}, [])
    parse({**TASKS, "rollout": truncation, "train": {"loss": {"name": "positive_only"}}}, [])
