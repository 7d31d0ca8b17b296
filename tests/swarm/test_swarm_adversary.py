"""A minority of peers against the real node: a short form of `make adversary`."""

from pathlib import Path
from tempfile import mkdtemp

from adversary import HONEST, WANTED, Attack, simulated


def test_an_owner_of_many_keys_or_many_offers_gets_at_most_twice_an_even_share(tmp_path: Path) -> None:
    for keys, offers in ((32, 1), (1, 30)):
        found = simulated(Attack(keys, offers, 20, 120), 0, Path(mkdtemp(dir=tmp_path)))
        assert float(str(found["share"])) <= 2 / (HONEST + 1)


def test_a_cold_swarm_takes_most_of_its_groups_within_10_steps_beside_a_crowd_of_newcomers_too(tmp_path: Path) -> None:
    for keys in (0, 16):
        found = simulated(Attack(keys, 1, 0, 20), 0, tmp_path)
        assert float(str(found["groups_a_step_from_10"])) >= 0.7 * WANTED


def test_a_crowd_of_newcomers_in_a_cold_swarm_delays_no_node_that_knows_its_peers(tmp_path: Path) -> None:
    """Nobody can tell sixteen keys of one owner from sixteen honest peers, unless somebody names the latter."""
    found = simulated(Attack(16, 1, 0, 20, known=HONEST), 0, tmp_path)
    assert float(str(found["honest_groups_a_step_from_10"])) >= 0.7 * WANTED
    assert float(str(found["share"])) <= 0.3


def test_a_flood_of_strangers_takes_less_than_half_of_the_groups_of_known_authors(tmp_path: Path) -> None:
    attacks = [Attack(0, 0, 10, 24, flood_per_s=rate) for rate in (0, 2000)]
    alone, flooded = (
        float(str(simulated(attack, 0, Path(mkdtemp(dir=tmp_path)))["groups_a_step_from_attack"])) for attack in attacks
    )
    assert flooded >= alone / 2
