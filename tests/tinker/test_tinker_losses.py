"""The losses of the Tinker API equal their published definitions, computed in float64."""

import math

import numpy as np
import pytest
import torch

from shoal.errors import RequestRefused
from shoal.tinker.data import check_inputs, settings_of
from shoal.trainer.datum_loss import LOSSES

LOGP = [-0.2, -1.5, -3.0, -0.7]
SAMPLED = [-0.9, -1.4, -0.5, -0.75]
ADVANTAGES = [1.5, -2.0, 0.7, -0.3]
MASK = [0.0, 1.0, 1.0, 1.0]


def ratios() -> list[float]:
    return [math.exp(p - q) for p, q in zip(LOGP, SAMPLED, strict=True)]


def clipped(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def expected(name: str) -> float:
    rows = list(zip(LOGP, SAMPLED, ADVANTAGES, ratios(), strict=True))
    match name:
        case "cross_entropy":
            return -sum(p * a for p, _, a, _ in rows)
        case "importance_sampling":
            return -sum(r * a for _, _, a, r in rows)
        case "ppo":
            return -sum(min(r * a, clipped(r, 0.8, 1.2) * a) for _, _, a, r in rows)
        case "cispo":
            return -sum(clipped(r, 0.0, 4.0) * p * a for p, _, a, r in rows)
        case "dro":
            return -sum(p * a - 0.025 * (p - q) ** 2 for p, q, a, _ in rows)
        case "gspo":
            mean = sum(m * (p - q) for m, (p, q, _, _) in zip(MASK, rows, strict=True)) / sum(MASK)
            s = math.exp(mean)
            return -sum(min(s * a, clipped(s, 0.8, 1.2) * a) for _, _, a, _ in rows)
    raise AssertionError(name)


def inputs() -> dict[str, torch.Tensor]:
    return {
        "logprobs": torch.tensor(SAMPLED, dtype=torch.float64),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "weights": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "sequence_ratio_mask": torch.tensor(MASK, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_its_published_value(name: str) -> None:
    logp = torch.tensor(LOGP, dtype=torch.float64)
    assert float(LOSSES[name][0](logp, inputs(), settings_of(name, {}))) == pytest.approx(expected(name), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected_grad"),
    [
        ("cispo", lambda r, a: -min(r, 4.0) * a),  # the ratio is a constant
        ("importance_sampling", lambda r, a: -r * a),
    ],
)
def test_a_gradient_goes_where_the_definition_says(name: str, expected_grad: object) -> None:
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    LOSSES[name][0](logp, inputs(), settings_of(name, {})).backward()  # type: ignore[no-untyped-call]
    assert callable(expected_grad)
    assert logp.grad is not None
    wanted = [expected_grad(r, a) for r, a in zip(ratios(), ADVANTAGES, strict=True)]
    assert logp.grad.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("stable_reinforce", {}, "no published definition"),
        ("nonsense", {}, "expected one of cross_entropy"),
        ("ppo", {"beta": 1.0}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": "low"}, "expected a finite number"),
    ],
)
def test_an_unknown_loss_or_setting_is_refused_by_name(name: str, settings: dict[str, float | str], words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        settings_of(name, settings)


def test_a_missing_or_short_tensor_is_refused_by_name() -> None:
    with pytest.raises(RequestRefused, match="advantages is missing"):
        check_inputs("ppo", (4,), {"logprobs": np.array(LOGP)})
    with pytest.raises(RequestRefused, match=r"loss_fn_inputs.weights: expected .* \[4\]; got \[2\]"):
        check_inputs("cross_entropy", (4,), {"weights": np.ones(2)})
