"""The model that the benchmarks share: 4.25 million parameters with random weights."""

from pathlib import Path

from shoal.small_model import Shape, save, untrained

SHAPE = Shape(width=256, layers=4, heads=4, feed_forward=1024)


def write_bench_model(directory: Path) -> None:
    """Writes the model as a Hugging Face directory."""
    save(untrained(SHAPE, seed=0), directory)
