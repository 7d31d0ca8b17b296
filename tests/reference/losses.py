"""The losses as their papers define them: float64, one token at a time, slow. Nothing here is used outside tests.

Arguments are lists of one length: logprobs in nats (`logp` as 0-dimensional float64 tensors that carry the gradient,
the others as floats), the advantage, and a mask of 0 and 1. The result is the sum over the tokens with mask 1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _clip(value: Tensor, low: float, high: float) -> Tensor:
    if value < low:
        return torch.tensor(low, dtype=torch.float64)
    if value > high:
        return torch.tensor(high, dtype=torch.float64)
    return value


def _surrogate(r: Tensor, advantage: float, clip: tuple[float, float], dual: float) -> Tensor:
    """min(r A, clip(r) A); where A < 0, dual clip: the larger of that and dual A (arXiv 1912.09729 Eq. 5)."""
    least = min(r * advantage, _clip(r, 1 - clip[0], 1 + clip[1]) * advantage)
    return (
        max(least, torch.tensor(dual * advantage, dtype=torch.float64)) if advantage < 0 and dual < math.inf else least
    )


def grpo(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    clip_low: float,
    clip_high: float,
    dual: float,
) -> Tensor:
    """DAPO, arXiv 2503.14476 Eq. 8 without its normalisation: sum of -min(r A, clip(r, 1 - low, 1 + high) A)."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            r = torch.exp(logp[t] - behav[t])
            total = total - _surrogate(r, advantage[t], (clip_low, clip_high), dual)
    return total


def decoupled(
    logp: Sequence[Tensor],
    prox: Sequence[float],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    clip_low: float,
    clip_high: float,
    cap: float,
    over_cap: str,
    dual: float,
    correction: bool = True,
) -> Tensor:
    """AReaL, arXiv 2505.24298 Eq. 5: sum of -(pi_prox / pi_behav) min(u A, clip(u) A), u = pi_theta / pi_prox.

    The weight is bounded by `cap`: clamped to it, or the token is left out.
    """
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            weight = math.exp(prox[t] - behav[t]) if correction else 1.0
            if weight > cap:
                weight = cap if over_cap == "clamp" else 0.0
            u = torch.exp(logp[t] - prox[t])
            total = total - weight * _surrogate(u, advantage[t], (clip_low, clip_high), dual)
    return total


def double_sided(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    band_low: float,
    band_high: float,
) -> Tensor:
    """GLM-5, arXiv 2602.15763 §4.1.2: sum of -f(r) A log pi_theta, where f(r) is a coefficient, not differentiated."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            r = math.exp(logp[t].item() - behav[t])
            f = r if 1 - band_low <= r <= 1 + band_high else 0.0
            total = total - f * advantage[t] * logp[t]
    return total


def double_sided_literal(logp: Tensor, behav: float, advantage: float) -> Tensor:
    """One token of the same formula differentiated as it is printed, through r too."""
    return -torch.exp(logp - behav) * advantage * logp


def _spans(rows: Sequence[int]) -> list[list[int]]:
    """The positions of each row; a row may have none."""
    return [[t for t in range(len(rows)) if rows[t] == row] for row in range(max(rows, default=-1) + 1)]


def _exp(x: float) -> float:
    """exp that gives infinity instead of an error."""
    return math.exp(x) if x < 700 else math.inf


def decoupled_by_row(
    logp: Sequence[Tensor],
    prox: Sequence[float],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    rows: Sequence[int],
    clip: tuple[float, float],
    bounds: tuple[float, float],
    over_cap: str,
    dual: float,
) -> Tensor:
    """`decoupled` with one weight per row, the product of its tokens' pi_prox / pi_behav; 0 below the lower bound."""
    total = torch.zeros((), dtype=torch.float64)
    for span in _spans(rows):
        drawn = [t for t in span if mask[t] == 1]
        weight = _exp(math.fsum(prox[t] - behav[t] for t in drawn))
        if weight < bounds[0]:
            weight = 0.0
        if weight > bounds[1]:
            weight = bounds[1] if over_cap == "clamp" else 0.0
        for t in drawn:
            u = torch.exp(logp[t] - prox[t])
            total = total - weight * _surrogate(u, advantage[t], clip, dual)
    return total


def icepop(
    logp: Sequence[Tensor],
    prox: Sequence[float],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    clip: tuple[float, float],
    beta: float,
    dual: float,
) -> Tensor:
    """GLM-5, arXiv 2602.15763 §3.2: sum of -pop(rho) min(r A, clip(r) A).

    pop(rho) = rho if 1/beta <= rho <= beta else 0, rho = pi_old of the trainer / pi_old of the engine, and
    r = pi_theta / pi_old of the trainer.
    """
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            rho = math.exp(prox[t] - behav[t])
            pop = rho if 1 / beta <= rho <= beta else 0.0
            r = torch.exp(logp[t] - prox[t])
            total = total - pop * _surrogate(r, advantage[t], clip, dual)
    return total


def gspo(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    rows: Sequence[int],
    clip: tuple[float, float],
    dual: float,
) -> Tensor:
    """GSPO, arXiv 2507.18071 Eq. 5 and 7: s = (pi_theta(y) / pi_old(y)) ^ (1 / |y|), and sum over each row's |y| tokens
    of -min(s A, clip(s) A), of which the paper takes the mean."""
    total = torch.zeros((), dtype=torch.float64)
    for span in _spans(rows):
        drawn = [t for t in span if mask[t] == 1]
        if not drawn:
            continue
        mean = torch.zeros((), dtype=torch.float64)
        for t in drawn:
            mean = mean + (logp[t] - behav[t]) / len(drawn)
        s = torch.exp(mean)
        for t in drawn:
            total = total - _surrogate(s, advantage[t], clip, dual)
    return total


def gmpo(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    rows: Sequence[int],
    clip: tuple[float, float],
) -> Tensor:
    """GMPO, arXiv 2507.20673 Eq. 4: the product over a row of min(r^s, clip(r^s, e^-low, e^high))^s, s = sgn(A), to the
    power 1 / |y|, times A; summed over each row's |y| tokens, of which the paper takes the mean."""
    total = torch.zeros((), dtype=torch.float64)
    for span in _spans(rows):
        drawn = [t for t in span if mask[t] == 1]
        product = torch.zeros((), dtype=torch.float64)  # its logarithm: the factors leave the range of floats
        for t in drawn:
            s = (advantage[t] > 0) - (advantage[t] < 0)
            high = clip[1] if s > 0 else clip[0]
            power = s * (logp[t] - behav[t])
            product = product + (s * min(power, _clip(power, -math.inf, high)) if s else logp[t] - behav[t])
        for t in drawn:
            total = total - torch.exp(product / len(drawn)) * advantage[t]
    return total


def dppo(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    divergence: str,
    low: float,
    high: float,
    cap: float,
) -> Tensor:
    """DPPO, arXiv 2602.04879: sum of -M r A log pi_theta, M and r = p / q without gradient; M = 0 where the binary
    divergence of p from q is above its bound and the advantage pushes p further away."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] != 1:
            continue
        p, q = math.exp(logp[t].item()), math.exp(behav[t])
        if divergence == "tv":
            d = abs(p - q)
        else:
            d = q * (behav[t] - logp[t].item()) + (1 - q) * (math.log1p(-q) - math.log1p(-p))
        away = (advantage[t] > 0 and p > q and d > high) or (advantage[t] < 0 and p < q and d > low)
        if not away:
            total = total - min(math.exp(logp[t].item() - behav[t]), cap) * advantage[t] * logp[t]
    return total


def m2po(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    budget: float,
) -> Tensor:
    """M2PO, arXiv 2510.01161: sum of -M r A. Among the tokens that the advantage pushes further from r = 1, that of the
    largest (log r)^2 is masked until the mean of the others' is at most the budget."""
    outward = [t for t in range(len(mask)) if mask[t] == 1 and advantage[t] * (logp[t].item() - behav[t]) > 0]
    square = {t: (logp[t].item() - behav[t]) ** 2 for t in outward}
    while square and sum(square.values()) / len(square) > budget:
        del square[max(square, key=lambda t: square[t])]
    kept = [t for t in range(len(mask)) if mask[t] == 1 and (t not in outward or t in square)]
    return sum((-torch.exp(logp[t] - behav[t]) * advantage[t] for t in kept), torch.zeros((), dtype=torch.float64))


def maxrl(rewards: Sequence[int]) -> list[float]:
    """MaxRL, arXiv 2602.02710: of N answers with K right ones, the gradient is the mean of the right ones' scores less
    the mean of all, or nothing where K = 0. Weights of the scores, times N: a loss takes their mean."""
    n, right = len(rewards), sum(rewards)
    return [n * ((reward / right if right else 0.0) - 1 / n) if right else 0.0 for reward in rewards]


def dr_grpo(
    logp: Sequence[Sequence[Tensor]],
    behav: Sequence[Sequence[float]],
    rewards: Sequence[float],
    clip: float,
) -> Tensor:
    """Dr.GRPO, arXiv 2503.20783: -(1 / G) sum over answers and tokens of min(r A, clip(r) A), A = reward - mean."""
    mean = math.fsum(rewards) / len(rewards)
    total = torch.zeros((), dtype=torch.float64)
    for row, old, reward in zip(logp, behav, rewards, strict=True):
        for now, before in zip(row, old, strict=True):
            total = total - _surrogate(torch.exp(now - before), reward - mean, (clip, clip), math.inf)
    return total / len(rewards)


def rloo(logp: Sequence[Sequence[Tensor]], rewards: Sequence[float]) -> Tensor:
    """RLOO, arXiv 2402.14740: -(1 / k) sum over answers of (r_i - mean of the other rewards) log pi(y_i)."""
    k = len(rewards)
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(logp):
        others = math.fsum(reward for j, reward in enumerate(rewards) if j != i) / (k - 1)
        for token in row:
            total = total - (rewards[i] - others) * token
    return total / k


def cispo(
    logp: Sequence[Tensor], behav: Sequence[float], advantage: Sequence[float], mask: Sequence[int], cap: float
) -> Tensor:
    """MiniMax-M1, arXiv 2506.13585 Eq. 4 and 5, without a lower bound: sum of -sg(min(r, cap)) A log pi_theta."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            total = total - min(math.exp(logp[t].item() - behav[t]), cap) * advantage[t] * logp[t]
    return total


def reinforce(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    rows: Sequence[int],
    cap: float,
    level: str,
    over_cap: str,
) -> Tensor:
    """Sum of -w A log pi_theta, w = pi_theta / pi_behav of the token or its row, truncated or masked at cap."""
    total = torch.zeros((), dtype=torch.float64)
    for span in _spans(rows):
        drawn = [t for t in span if mask[t] == 1]
        of_row = _exp(math.fsum(logp[t].item() - behav[t] for t in drawn))
        for t in drawn:
            weight = of_row if level == "sequence" else math.exp(logp[t].item() - behav[t])
            if weight > cap:
                weight = cap if over_cap == "clamp" else 0.0
            if over_cap == "band" and weight < 1 / cap:
                weight = 0.0
            total = total - weight * advantage[t] * logp[t]
    return total


def soft_adaptive(
    logp: Sequence[Tensor],
    behav: Sequence[float],
    advantage: Sequence[float],
    mask: Sequence[int],
    tau_positive: float,
    tau_negative: float,
) -> Tensor:
    """Soft Adaptive Policy Optimization, arXiv 2511.20347: sum of -(4 / tau) sigmoid(tau (r - 1)) A."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            tau = tau_positive if advantage[t] > 0 else tau_negative
            r = torch.exp(logp[t] - behav[t])
            total = total - 4 / tau / (1 + torch.exp(-tau * (r - 1))) * advantage[t]
    return total


def positive_only(logp: Sequence[Tensor], advantage: Sequence[float], mask: Sequence[int]) -> Tensor:
    """RAFT, arXiv 2504.11343 Eq. 3, weighted with the advantage: sum of -A log pi_theta over the tokens with A > 0."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1 and advantage[t] > 0:
            total = total - advantage[t] * logp[t]
    return total


def log_linear_prox(logp: float, behav: float, drew: int, before: int, now: int) -> float:
    """log pi_behav + alpha (log pi_theta - log pi_behav), alpha = (v_prox - v_behav) / (v_theta - v_behav), where
    weights are counted by the updates that made them: those that drew the token, before the step, and now."""
    alpha = (before - drew) / (now - drew) if now > before else 1.0
    return behav + alpha * (logp - behav)


def reinforce_pp(rewards: Sequence[float], kl: Sequence[Sequence[float]], coefficient: float) -> list[list[float]]:
    """REINFORCE++, arXiv 2501.03262: A_t = r - coefficient * sum of kl_i over i >= t, of each token of each answer,
    less the mean over all tokens of the batch, by their standard deviation."""
    left = [
        [reward - coefficient * math.fsum(row[t:]) for t in range(len(row))]
        for reward, row in zip(rewards, kl, strict=True)
    ]
    every = [value for row in left for value in row]
    mean = math.fsum(every) / len(every)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in every) / len(every))
    return [[(value - mean) / deviation for value in row] for row in left]


def kl(logp: Sequence[Tensor], ref: Sequence[float], mask: Sequence[int], estimator: str) -> Tensor:
    """Sum of Schulman's estimators, with ratio = pi_ref / pi.

    k1 = -log ratio, k2 = (log ratio)^2 / 2, k3 = ratio - 1 - log ratio.
    """
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(mask)):
        if mask[t] == 1:
            log_ratio = ref[t] - logp[t]
            terms = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(log_ratio) - 1 - log_ratio}
            total = total + terms[estimator]
    return total
