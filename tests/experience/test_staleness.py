"""One value says which tokens are late, for every reader of the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.staleness import Staleness

SMALL = st.integers(0, 6)


@given(bound=SMALL, version=SMALL, oldest=SMALL, length=SMALL)
def test_a_group_is_refused_by_its_oldest_token_and_with_masks_by_its_newest(bound, version, oldest, length):
    newest = oldest + length
    assert Staleness(bound, "drop").refuses(oldest, newest, version) == (version - oldest > bound)
    assert Staleness(bound, "mask_tokens").refuses(oldest, newest, version) == (version - newest > bound)
    assert not Staleness(bound, "train").refuses(oldest, newest, version)


@given(bound=SMALL, version=SMALL)
def test_tokens_are_masked_below_the_oldest_accepted_version_and_only_with_that_policy(bound, version):
    masked = Staleness(bound, "mask_tokens").masked_below(version)
    assert [v < masked for v in range(8)] == [v < version - bound for v in range(8)]
    assert Staleness(bound, "drop").masked_below(version) == Staleness(bound, "train").masked_below(version) == 0


@given(bound=SMALL, version=SMALL)
def test_a_group_admitted_now_is_not_late_when_training_has_taken_all_that_may_be_there(bound, version):
    last_trained = Staleness(bound).versions_admitted(version) - 1  # one Version for each
    assert Staleness(bound).oldest(last_trained) == version


def test_a_bound_below_zero_is_refused_by_its_setting():
    with pytest.raises(ValueError, match="max_staleness: expected a number >= 0, got -1"):
        Staleness(-1)
