"""`model.dtype = "auto"`: bfloat16 only where the machine multiplies it."""

from pathlib import Path

import pytest

from shoal.config import ModelConfig, load
from shoal.config.processor import multiplies_bfloat16


@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ("flags\t\t: fpu avx2 amx_bf16", True),
        ("flags\t\t: fpu avx512_bf16", True),
        ("flags\t\t: avx512bw avx512vl avx512dq", True),
        ("flags\t\t: avx2 avx512bw avx512vl", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("no line of features", False),
    ],
)
def test_bfloat16_is_chosen_by_the_processors_features(tmp_path: Path, flags: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    assert multiplies_bfloat16(system=tmp_path) is fast
    driver = tmp_path / "driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.touch()
    assert multiplies_bfloat16(system=tmp_path)
    assert multiplies_bfloat16(gpus=False, system=tmp_path) is fast


def test_a_machine_that_does_not_tell_computes_in_float32(tmp_path: Path) -> None:
    assert not multiplies_bfloat16(system=tmp_path)


def test_auto_is_replaced_where_the_settings_are_read() -> None:
    expected = "bfloat16" if multiplies_bfloat16(gpus=False) else "float32"
    assert ModelConfig.model_validate({"dtype": "auto", "device": "cpu"}).dtype == expected
    assert ModelConfig(dtype="bfloat16").dtype == "bfloat16"
    assert load(Path(__file__).parents[2] / "examples/smollm2/train.toml").model.dtype in ("bfloat16", "float32")
