"""Keys and table of the experiment in which SmolLM2 learns from reasoning-gym; its runs need an hour."""

import tomllib

from experiments.rates.__main__ import HERE, keys, summaries, table
from experiments.rates.datasets import NUMBERS, REWRITTEN, SMALLER, TRIED


def test_every_data_set_has_its_rewrite_and_every_key_is_one_cell() -> None:
    plan = tomllib.loads((HERE / "experiment.toml").read_text()) | {"groups": [3, 12], "seeds": [0, 1, 2]}
    found = keys(plan)
    assert len(found) == len(set(found))
    assert set(REWRITTEN) <= set(TRIED)
    assert set(NUMBERS) <= set(SMALLER)
    assert {key.split("/")[0] for key in found} == {"sums", *REWRITTEN, *NUMBERS}


def test_three_seeds_of_a_cell_have_an_interval_of_their_gains() -> None:
    shares = {"length_mean": [20.0, 4.0], "cut_share": [0.5, 0.0], "informative_share": [0.4, 0.6]}
    runs = [
        {"task": "gcd", "rate": "1e-05", "groups": 6, "seed": seed, "minutes": 3.0, "reward": [0.1, 0.5]}
        | {"sampled": [0.1, after], "greedy": [0.2, after], **shares}
        for seed, after in enumerate([0.4, 0.5, 0.6])
    ]
    (cell,) = summaries(runs)
    assert cell["sampled_gain"] == [0.152, 0.648]  # 0.4 +- 4.303 * 0.1 / sqrt(3)
    assert "gain" not in str(summaries(runs[:2]))
    assert "| gcd | 1e-05 | 6 | 3 | 0.100 to 0.500 | +0.152 to +0.648 |" in table([cell])
