"""Which engine takes a request: properties of the pure deciding part of the pool."""

from math import ceil

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.engine.pool.replica import Replica, ReplicaState
from shoal.engine.pool.routing import BOUND, chosen, preference, waves
from shoal.engine.server.http_client import HttpEngine

NAMES = [f"http://10.0.0.{i}:8000" for i in range(12)]
KEYS = st.binary(min_size=1, max_size=32)


def replica(name: str, state: ReplicaState, version: int, load: int) -> Replica:
    return Replica(name, HttpEngine(name), version, state, load)


@st.composite
def pools(draw: st.DrawFn) -> list[Replica]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True))
    return [
        replica(name, draw(st.sampled_from(ReplicaState)), draw(st.integers(0, 3)), draw(st.integers(0, 200)))
        for name in names
    ]


@given(KEYS, pools(), st.integers(1, 16), st.integers(0, 3), st.sets(st.sampled_from(NAMES), max_size=3))
def test_a_request_goes_to_an_engine_that_may_have_it_and_is_not_overloaded(
    key: bytes, replicas: list[Replica], count: int, at_least: int, avoid: set[str]
) -> None:
    found = chosen(key, replicas, count=count, at_least=at_least, avoid=avoid)
    may = [s for s in replicas if s.state is not ReplicaState.AWAY and s.version >= at_least and s.name not in avoid]
    ready = [s for s in may if s.state is ReplicaState.READY]
    if found is None:
        assert may == []
        return
    among = ready or may
    assert found in among
    assert found.load < ceil(BOUND * (sum(s.load for s in among) + count) / len(among))


@given(KEYS, pools())
def test_a_session_stays_with_its_engine_while_that_is_not_the_busiest(key: bytes, replicas: list[Replica]) -> None:
    ready = [s for s in replicas if s.state is ReplicaState.READY]
    assume(ready)
    first = preference(key, [s.name for s in ready])[0]
    load = {s.name: s.load for s in ready}
    if load[first] <= sum(load.values()) / len(load):
        found = chosen(key, replicas)
        assert found is not None
        assert found.name == first


@given(st.lists(KEYS, min_size=1, max_size=40), st.lists(st.sampled_from(NAMES), min_size=2, max_size=8, unique=True))
def test_only_the_sessions_of_an_engine_that_leaves_move(keys: list[bytes], names: list[str]) -> None:
    gone, *rest = names
    for key in keys:
        before, after = preference(key, names), preference(key, rest)
        assert after == [name for name in before if name != gone]


def test_sessions_spread_over_the_engines() -> None:
    firsts = [preference(str(i).encode(), NAMES)[0] for i in range(6000)]
    counts = [firsts.count(name) for name in NAMES]
    assert min(counts) > 0.8 * 500
    assert max(counts) < 1.2 * 500


@given(pools(), st.lists(st.tuples(KEYS, st.integers(1, 8)), max_size=60))
def test_no_engine_gets_much_more_than_its_share_whatever_the_sessions_want(
    replicas: list[Replica], requests: list[tuple[bytes, int]]
) -> None:
    load = {s.name: 0 for s in replicas if s.state is ReplicaState.READY}
    assume(load)
    for key, count in requests:
        found = chosen(key, [replica(s, ReplicaState.READY, 0, load[s]) for s in load], count=count)
        assert found is not None
        load[found.name] += count
        assert load[found.name] <= ceil(BOUND * sum(load.values()) / len(load)) + count


@given(st.lists(st.sampled_from(NAMES), max_size=12, unique=True))
def test_all_engines_load_weights_and_never_all_at_once(names: list[str]) -> None:
    order = waves(names)
    assert [name for wave in order for name in wave] == names
    if len(names) > 1:
        assert all(len(wave) < len(names) for wave in order)
