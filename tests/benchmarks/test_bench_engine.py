"""The engine's benchmark: its limit draws the right tokens, and a shortened run gives every figure."""

import torch

from benchmarks import run_bench
from benchmarks.engine import SHAPES
from benchmarks.limit import StaticLoop
from shoal.run.demo_model.architecture import untrained


def test_the_loop_written_by_hand_draws_what_the_model_draws() -> None:
    model = untrained(SHAPES["5M"], seed=1).eval()
    prompt_BL = torch.randint(6, 100, (3, 7), generator=torch.Generator().manual_seed(0))
    known_BL = prompt_BL
    with torch.inference_mode():
        for _ in range(12):
            known_BL = torch.cat([known_BL, model(known_BL).logits[:, -1:].argmax(-1)], 1)
    assert StaticLoop(model).tokens(prompt_BL, 12).tolist() == known_BL[:, 7:].tolist()


def test_a_shortened_run_gives_every_figure() -> None:
    report = run_bench("engine", quick=True)
    shares = report["share_of_limit"]
    assert isinstance(shares, dict)
    assert shares.keys() == {"5M/8", "50M/8"}
    for figure in (
        *shares.values(),
        *(report[name] for name in ("over_generate", "interrupt_over_drain", "push_stall_over_memcpy")),
    ):
        assert isinstance(figure, float)
        assert 0 < figure < 100
    stall_s, again_s, gap_s, usual_s = (
        report[name] for name in ("push_stall_s", "recompute_s", "gap_around_push_s", "gap_usual_s")
    )
    assert 0 < stall_s < gap_s
    assert 0 < usual_s < again_s < gap_s, "what ran is computed again after a push"
    crowd = report["crowd"]
    assert isinstance(crowd, dict)
    assert (crowd["requests"], crowd["answered"]) == (20, 20)
    assert 0 < crowd["wait_p50_s"] <= crowd["wait_p99_s"]
    pushes = report["pushes"]
    assert isinstance(pushes, dict)
    served = pushes["5M/2 0.5"]
    assert served["recompute_served"] >= served["drain_served"] >= 1
