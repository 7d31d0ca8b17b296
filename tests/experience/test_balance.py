"""Which groups a step trains when tasks are due different numbers of them."""

from dataclasses import replace

from buffer_values import group
from shoal.experience.balance import PATIENCE_S, Balance, WaitingGroup


def waiting(*services: str) -> list[WaitingGroup]:
    """Groups of these tasks, from the oldest to the newest."""
    return [WaitingGroup(i, i, group(f"g{i}", (i, i), service=service)) for i, service in enumerate(services)]


def halves(used, groups) -> dict[str, float]:
    each = (used.get("quick", 0) + used.get("slow", 0) + groups) / 2
    return {"quick": each, "slow": each}


def ids(choice) -> list[str]:
    return [one.group.id for one in choice.groups]


def test_the_newest_version_of_a_group_is_that_of_its_newest_token_or_of_its_admission() -> None:
    one = group("g", (2, 3, 5), admitted=1)
    assert WaitingGroup(2, 0, one).newest_version == 5
    silent = replace(one, rollouts=tuple(replace(rollout, turns=()) for rollout in one.rollouts))
    assert WaitingGroup(1, 0, silent).newest_version == 1


def test_without_dues_the_oldest_groups_come_first() -> None:
    assert ids(Balance().next(waiting("quick", "quick", "slow"), 2, {}, 0.0)) == ["g0", "g1"]


def test_a_task_that_is_ahead_waits_for_one_that_is_due_a_group_and_what_is_behind_comes_first() -> None:
    balance = Balance()
    balance.due = halves
    assert ids(balance.next(waiting("quick", "quick", "quick", "slow"), 2, {}, 0.0)) == ["g0", "g3"]
    assert ids(balance.next(waiting("quick", "slow", "slow"), 2, {"quick": 6, "slow": 4}, 0.0)) == ["g1", "g2"]
    held = balance.next(waiting("quick", "quick", "quick"), 2, {}, 0.0)
    assert held.groups == ()
    assert held.wait_s == PATIENCE_S


def test_a_silent_task_is_waited_for_once_and_again_only_after_it_delivered() -> None:
    balance, quick = Balance(), waiting("quick", "quick", "quick")
    balance.due = halves
    assert balance.next(quick, 2, {}, 100.0).wait_s == PATIENCE_S
    assert balance.next(quick, 2, {}, 110.0).wait_s == PATIENCE_S - 10
    assert ids(balance.next(quick, 2, {}, 100.0 + PATIENCE_S)) == ["g0", "g1"]
    assert ids(balance.next(quick, 2, {"quick": 2}, 101.0 + PATIENCE_S)) == ["g0", "g1"]
    balance.delivered("slow")
    assert balance.next(quick, 2, {"quick": 4}, 102.0 + PATIENCE_S).wait_s == PATIENCE_S


def test_nobody_waits_for_a_task_that_is_away_and_what_it_left_is_used() -> None:
    balance = Balance()
    balance.due = lambda used, groups: {"quick": used.get("quick", 0) + float(groups)}
    assert ids(balance.next(waiting("slow", "quick", "quick"), 2, {}, 0.0)) == ["g0", "g1"]
    assert ids(balance.next(waiting("quick", "quick"), 2, {}, 0.0)) == ["g0", "g1"]
