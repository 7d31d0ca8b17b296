"""The benches of a real model measure shares and rates; a small model with the same parts stands in here."""

from pathlib import Path

import pytest

from benchmarks import run_bench, smollm2
from benchmarks.model import write_bench_model
from shoal.errors import ConfigError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_bench_model(path)
    return path


def test_decoding_is_set_against_its_matrix_products_and_both_ways_of_transformers(directory: Path) -> None:
    report = smollm2.engine(True, directory)
    assert set(report["share_of_gemm_limit"]) == {"8"}
    assert 0 < report["share_of_gemm_limit"]["8"] < 1, "decoding does more than its products"
    assert set(report["over"]) == {"transformers generate/8", "transformers continuous/8"}


def test_a_training_step_is_set_against_its_matrix_products(directory: Path) -> None:
    report = smollm2.trainer(True, directory)
    assert 0 < report["share_of_gemm_limit"] < 1
    assert report["rows"] == 8


def test_a_model_that_no_bench_measures_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--model smollm2 with engine or trainer, got 'smollm2' with packing"):
        run_bench("packing", quick=True, model="smollm2")
