"""Memory that a process freed and did not give back."""

from shoal.trainer.heap import GROWN, SETTLED, Heap, resident_bytes

PIECE, PIECES = 100_000, 6000


def with_holes(count: int) -> list[bytearray]:
    """Every tenth of so many pieces; most of the rest lies in holes."""
    return [bytearray(b"x" * PIECE) for _ in range(count)][::10]


def test_holes_are_given_back_once_the_process_has_grown() -> None:
    heap = Heap()
    for _ in range(SETTLED):
        heap.settle()
    before = resident_bytes()
    kept = with_holes(PIECES)
    held = resident_bytes()
    assert held - before > 0.5 * PIECE * PIECES
    heap.settle()
    assert resident_bytes() - before < 0.3 * PIECE * PIECES
    assert len(kept) == PIECES // 10


def test_growth_that_stays_is_usual_from_the_second_step_on() -> None:
    heap = Heap()
    for _ in range(SETTLED):
        heap.settle()
    stays = bytearray(b"x" * int((GROWN - 0.9) * resident_bytes()))
    for _ in range(SETTLED):
        heap.settle()
    few = int(0.1 * resident_bytes()) // PIECE
    kept = with_holes(few)
    held = resident_bytes()
    heap.settle()
    assert held - resident_bytes() < 0.5 * PIECE * few
    del stays, kept  # they lived until here
