"""A minority of peers against the real node: a short form of `make adversary`."""

from pathlib import Path
from tempfile import mkdtemp

from adversary import WANTED, Attack, simulated


def test_an_owner_of_many_keys_or_many_offers_gets_at_most_twice_the_share_of_one_key(tmp_path: Path) -> None:
    one = float(str(simulated(Attack(1, 1, 20, 120), 0, Path(mkdtemp(dir=tmp_path)))["share"]))
    for keys, offers in ((32, 1), (1, 30)):
        share = float(str(simulated(Attack(keys, offers, 20, 120), 0, Path(mkdtemp(dir=tmp_path)))["share"]))
        assert share <= 2 * one


def test_a_cold_swarm_takes_most_of_its_groups_within_10_steps_beside_a_crowd_of_newcomers_too(tmp_path: Path) -> None:
    for keys in (0, 16):
        found = simulated(Attack(keys, 1, 0, 20), 0, tmp_path)
        assert float(str(found["groups_a_step_from_10"])) >= 0.7 * WANTED
