"""Memory that a process freed and did not give back."""

from shoal.trainer.heap import SETTLED, Heap, resident_bytes

PIECE, PIECES = 100_000, 6000


def test_holes_are_given_back_once_the_process_has_grown() -> None:
    heap = Heap()
    for _ in range(SETTLED):
        heap.settle()
    before = resident_bytes()
    pieces = [bytearray(b"x" * PIECE) for _ in range(PIECES)]
    kept = pieces[::10]  # so that most of the rest lies in holes
    del pieces
    held = resident_bytes()
    assert held - before > 0.5 * PIECE * PIECES
    heap.settle()
    assert resident_bytes() - before < 0.3 * PIECE * PIECES
    assert len(kept) == PIECES // 10
