"""Faults at any await of the real control code break no promise; a seed replays."""

from pathlib import Path

from rehearsal_faults import KINDS, run_seed
from rehearsal_seeds import run_seeds

SEEDS = 40


def test_no_seed_loses_doubles_or_trains_stale_groups_or_stands_still() -> None:
    found = run_seeds(range(SEEDS))
    assert {kind: found[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0), found["failing"]
    assert int(str(found["processes"])) > 2 * SEEDS  # most runs were killed, some several times


def test_a_seed_replays(tmp_path: Path) -> None:
    for seed in range(12):
        worlds = []
        for name in "ab":
            (tmp_path / f"{seed}{name}").mkdir()
            worlds.append(run_seed(seed, tmp_path / f"{seed}{name}"))
        first, second = worlds
        assert (first.history, first.lives, first.served) == (second.history, second.lives, second.served), seed


def test_seeds_differ_in_their_settings_and_deaths(tmp_path: Path) -> None:
    lives = {run_seed(seed, tmp_path).lives for seed in range(16)}
    assert len(lives) > 2
