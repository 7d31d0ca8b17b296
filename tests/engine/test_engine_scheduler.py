"""The scheduler against a simulation that knows which KV really is stored."""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.engine.compute.scheduler import Scheduler, SequenceState, StepPlan

MAX_MODEL_LEN = 24


@dataclass(slots=True, eq=False)
class Simulated(SequenceState):
    answer_len: int = 1
    stored: int = 0  # tokens whose KV a real cache would hold
    tokens_seen: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt_len: int
    answer_len: int
    n: int
    priority: int


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt_len=st.integers(1, 12),
        answer_len=st.integers(1, 12),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
    max_size=8,
)


def computed(plan: StepPlan[Simulated], max_running: int, chunk_tokens: int) -> list[Simulated]:
    """Does what the plan says, checking each part against the KV stored; the sequences that get a token."""
    for sequence in plan.preempted:
        sequence.stored = 0
    copied = {id(copy.target) for copy in plan.copies}
    for copy in plan.copies:
        assert id(copy.source) not in copied, "all copies are made at once"
        assert copy.source.request_id == copy.target.request_id
        assert 0 < copy.length <= min(copy.source.stored, copy.source.prompt_len)
        copy.target.stored = copy.length
    drawing = list(plan.decode)
    for sequence in plan.decode:
        assert sequence.stored == sequence.total - 1
        sequence.stored += 1
    assert sum(chunk.length for chunk in plan.chunks) <= chunk_tokens
    for chunk in plan.chunks:
        assert chunk.length > 0
        assert chunk.start == chunk.sequence.stored
        chunk.sequence.stored += chunk.length
        assert chunk.completes == (chunk.sequence.stored == chunk.sequence.total)
        assert chunk.completes or not chunk.followers
        for follower in chunk.followers:
            assert follower.stored == 0
            assert not follower.sampled
            assert not chunk.sequence.sampled
            follower.stored = follower.prompt_len
        if chunk.completes:
            drawing += [chunk.sequence, *chunk.followers]
    assert len({id(sequence) for sequence in drawing}) == len(drawing) <= max_running
    return drawing


@example(  # the second prompt of 12 leaves no budget to the third, whose siblings then wait for its prefill
    arrivals=[*[Arrival(0, 1, 1, 1, 0)] * 5, Arrival(0, 12, 6, 1, 0), Arrival(0, 5, 5, 2, 0), Arrival(0, 3, 1, 2, 0)],
    max_running=3,
    chunk_tokens=5,
    spare_tokens=1,
    forget_at=set(),
    stale_at=set(),
    abort_at=set(),
)
@settings(max_examples=150)
@given(
    arrivals=arrivals,
    max_running=st.integers(1, 6),
    chunk_tokens=st.integers(1, 16),
    spare_tokens=st.integers(0, 40),
    forget_at=st.sets(st.integers(0, 40), max_size=5),
    stale_at=st.sets(st.integers(0, 40), max_size=3),
    abort_at=st.sets(st.integers(0, 30), max_size=3),
)
def test_any_traffic_is_computed_from_kv_that_is_stored_and_every_sequence_finishes(
    arrivals: list[Arrival],
    max_running: int,
    chunk_tokens: int,
    spare_tokens: int,
    forget_at: set[int],
    stale_at: set[int],
    abort_at: set[int],
) -> None:
    budget = MAX_MODEL_LEN + 1 + spare_tokens
    scheduler: Scheduler[Simulated] = Scheduler(
        max_running=max_running,
        kv_budget_tokens=budget,
        chunk_tokens=chunk_tokens,
        max_model_len=MAX_MODEL_LEN + 1,
    )
    unfinished: list[Simulated] = []
    step = 0
    while unfinished or step <= max(a.step for a in arrivals):
        assert step < 5000, "something starves"
        for request_id, a in enumerate(arrivals):
            for _ in range(a.n if a.step == step else 0):
                unfinished.append(Simulated(request_id, a.prompt_len, a.priority, answer_len=a.answer_len))
                scheduler.add(unfinished[-1])
        if step in abort_at and unfinished:
            scheduler.remove(unfinished.pop(0))
        if step in forget_at:
            scheduler.forget(scheduler.running)
            for sequence in unfinished:
                sequence.stored = 0
        if step in stale_at:
            scheduler.mark_stale(scheduler.running)
        plan = scheduler.plan()
        assert len(scheduler.running) <= max_running
        assert sum(sequence.total + 1 for sequence in scheduler.running) <= max(budget, MAX_MODEL_LEN + 1)
        assert unfinished == [] or not plan.empty, "work and nothing to compute"
        for sequence in computed(plan, max_running, chunk_tokens):
            sequence.sampled.append(0)
            if len(sequence.sampled) == sequence.answer_len:
                scheduler.remove(sequence)
                unfinished.remove(sequence)
        step += 1
    assert scheduler.waiting == 0
    assert scheduler.running == []


def drained(scheduler: Scheduler[Simulated]) -> list[Simulated]:
    """Sequences in the order in which they draw their first token, one token each."""
    order = []
    while scheduler.running or scheduler.waiting:
        plan = scheduler.plan()
        for sequence in computed(plan, 100, 10_000):
            order.append(sequence)
            scheduler.remove(sequence)
    return order


def test_higher_priority_goes_first_and_equals_go_by_arrival() -> None:
    scheduler: Scheduler[Simulated] = Scheduler(
        max_running=1, kv_budget_tokens=100, chunk_tokens=100, max_model_len=50, fair_every=1000
    )
    sequences = [Simulated(i, 2, priority) for i, priority in enumerate([0, 1, 0, 2, 1])]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [s.request_id for s in drained(scheduler)] == [3, 1, 4, 0, 2]


def test_a_sequence_of_low_priority_is_admitted_although_higher_ones_never_stop_coming() -> None:
    scheduler: Scheduler[Simulated] = Scheduler(
        max_running=1, kv_budget_tokens=100, chunk_tokens=100, max_model_len=50, fair_every=8
    )
    low = Simulated(0, 2, -5)
    scheduler.add(low)
    for i in range(1, 10):
        scheduler.add(Simulated(i, 2, 5))
        for sequence in computed(scheduler.plan(), 1, 100):
            if sequence is low:
                return
            scheduler.remove(sequence)
    raise AssertionError("the low priority starved")


def test_completions_of_one_prompt_prefill_it_once() -> None:
    scheduler: Scheduler[Simulated] = Scheduler(max_running=8, kv_budget_tokens=1000, chunk_tokens=4, max_model_len=50)
    for _ in range(8):
        scheduler.add(Simulated(0, 10))
    plans = [scheduler.plan() for _ in range(3)]
    assert [chunk.length for plan in plans for chunk in plan.chunks] == [4, 4, 2]
    assert len(plans[2].chunks[0].followers) == 7
    assert [len(plan.sequences) for plan in plans] == [1, 1, 8]  # those whose KV is written


def test_a_completion_waits_for_a_sibling_whose_prompt_gets_no_budget() -> None:
    scheduler: Scheduler[Simulated] = Scheduler(max_running=8, kv_budget_tokens=1000, chunk_tokens=8, max_model_len=50)
    older, first, second = Simulated(0, 8), Simulated(1, 12), Simulated(1, 12)
    scheduler.add(older)
    scheduler.plan()
    older.sampled.append(0)
    for sequence in (first, second):
        scheduler.add(sequence)
    scheduler.plan()
    scheduler.forget([older])
    plans = [scheduler.plan() for _ in range(2)]  # the first has no budget left for the second prompt
    assert [[(chunk.sequence, chunk.length) for chunk in plan.chunks] for plan in plans] == [
        [(older, 8)],
        [(first, 4)],
    ]
    assert not any(plan.copies for plan in plans)
    assert plans[1].chunks[0].followers == (second,)


def begun(count: int, *, max_running: int, steps: int = 1) -> tuple[Scheduler[Simulated], list[Simulated]]:
    """A scheduler with so many completions of one prompt of 10 tokens, after some steps."""
    scheduler: Scheduler[Simulated] = Scheduler(
        max_running=max_running, kv_budget_tokens=1000, chunk_tokens=100, max_model_len=50
    )
    sequences = [Simulated(0, 10) for _ in range(count)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(steps):
        for sequence in computed(scheduler.plan(), max_running, 100):
            sequence.sampled.append(0)
    return scheduler, sequences


def test_a_completion_admitted_later_copies_the_prompt_of_a_running_one() -> None:
    scheduler, sequences = begun(3, max_running=2)
    scheduler.remove(sequences[0])
    plan = scheduler.plan()
    assert [(copy.source, copy.target, copy.length) for copy in plan.copies] == [(sequences[1], sequences[2], 9)]
    assert plan.chunks == ()
    assert set(plan.decode) == set(plan.sequences) == {sequences[1], sequences[2]}


def test_after_an_update_one_completion_of_a_prompt_is_computed_again_and_then_all_others_at_once() -> None:
    scheduler, sequences = begun(8, max_running=8, steps=3)
    scheduler.forget(scheduler.running)
    for sequence in sequences:
        sequence.stored = 0
    plans = []
    for _ in range(2):
        plans.append(scheduler.plan())
        for sequence in computed(plans[-1], 8, 100):
            sequence.sampled.append(0)
    assert [(len(plan.copies), [chunk.length for chunk in plan.chunks]) for plan in plans] == [(0, [13]), (7, [3] * 7)]


def test_all_copies_of_a_step_have_a_source_that_was_there_before_it() -> None:
    scheduler, sequences = begun(3, max_running=3)
    scheduler.forget(sequences[:2])
    assert [(copy.source, copy.target) for copy in scheduler.plan().copies] == [
        (sequences[2], sequences[0]),
        (sequences[2], sequences[1]),
    ]


def test_kv_of_older_weights_is_never_copied() -> None:
    scheduler, sequences = begun(3, max_running=2)
    scheduler.mark_stale(scheduler.running)
    scheduler.remove(sequences[0])
    plan = scheduler.plan()
    assert plan.copies == ()
    assert [chunk.sequence for chunk in plan.chunks] == [sequences[2]]


def test_the_plan_is_the_same_object_while_only_decoding_goes_on() -> None:
    scheduler: Scheduler[Simulated] = Scheduler(
        max_running=2, kv_budget_tokens=1000, chunk_tokens=100, max_model_len=50
    )
    scheduler.add(Simulated(0, 3))
    for sequence in computed(scheduler.plan(), 2, 100):
        sequence.sampled.append(0)
    plan = scheduler.plan()
    assert scheduler.plan() is plan
    scheduler.add(Simulated(1, 3))
    assert scheduler.plan() is not plan


def test_memory_is_taken_from_the_latest_arrival() -> None:
    scheduler: Scheduler[Simulated] = Scheduler(max_running=3, kv_budget_tokens=20, chunk_tokens=100, max_model_len=20)
    first, second = Simulated(0, 8, priority=-1), Simulated(1, 8, priority=1)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):
        for sequence in computed(scheduler.plan(), 3, 100):
            sequence.sampled.append(0)
    plan = scheduler.plan()
    assert plan.preempted == (second,)
    assert plan.decode == (first,)
    assert second.kv_len == 0
    assert scheduler.waiting == 1
