"""AdamW with warm-up, clipping and resets at a push; its state as named tensors."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shoal.config.training import TrainConfig
from shoal.errors import TrainerError
from shoal.trainer.messages import Adam
from shoal.trainer.ranks import copies, is_sharded, like, local, norm, whole

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
Block: TypeAlias = tuple[Tensor, Tensor, Tensor, float]
"""Moments, their squares and weights of some numbers, and the share of their norm that this rank counts."""
BLOCK: Final = 1 << 16
"""Elements of a parameter processed together, so that intermediate results stay in a core's cache."""
BLOCK_OF_GPU: Final = 1 << 26
"""Elements of a block on a GPU, where a launch takes longer than the work of a small one."""
LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer update."""

    lr: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    update_norm: float
    """Norm of the change of the weights."""
    taken: bool
    """Whether the update was taken; an infinite or NaN gradient leaves weights, moments and schedule unchanged.

    The bounds of the settings keep weights and moments finite after every other one.
    """


def learning_rate(config: TrainConfig, update: int, since_reset: int | None) -> float:
    """Learning rate of update `update` (from 0), which is number `since_reset` after the last reset (None: no reset).

    The rate rises linearly over the first `warmup_steps` updates, then falls as `lr_schedule` says. It is 0
    after the last of steps * minibatches updates, so that none is taken at that rate. After each reset it rises again,
    because Adam's first step after a reset is lr * sign(gradient) for any gradient norm.

    >>> config = TrainConfig(lr=1.0, warmup_steps=4)
    >>> [learning_rate(config, k, None) for k in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> [learning_rate(config, 10 + k, k) for k in range(3)]
    [0.25, 0.5, 0.75]
    >>> falling = TrainConfig(lr=1.0, steps=4, lr_schedule="linear")
    >>> [learning_rate(falling, k, None) for k in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """
    rate = config.lr * _share_of_peak(config, update)
    taken = update if since_reset is None else since_reset
    return rate * (taken + 1) / config.warmup_steps if taken < config.warmup_steps else rate


def _share_of_peak(config: TrainConfig, update: int) -> float:
    falling = max(1, config.steps * config.minibatches - config.warmup_steps)
    progress = min(1.0, max(0.0, (update - config.warmup_steps) / falling))
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")


class Optimizer:
    """AdamW over named parameters; its moments may stay in main memory between updates.

    Invariant: `updates` counts the updates taken since the start of the run, across resets and resumes. Together with
    the moments it determines every later update.
    """

    def __init__(
        self, trained: Mapping[str, nn.Parameter], config: TrainConfig, critic: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """`critic` holds parameters under other names and with another rate."""
        self._config = config
        self._named = {**trained, **(critic or {})}
        # Norms and biases are not decayed: pulling a norm's scale to zero is no regularisation.
        # Biases of experts are matrices, too: [expert, output].
        groups = [
            {"params": [p for n, p in part.items() if _is_matrix(n, p) is matrices], "weight_decay": w, "peak": peak}
            for part, peak in ((trained, config.lr), (critic or {}, config.critic.lr or config.lr))
            for matrices, w in ((True, config.weight_decay), (False, 0.0))
        ]
        self._sharded = any(map(is_sharded, self._named.values()))
        self._offloads = config.offload == "optimizer"
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=True)
        self.updates = 0
        self._since_reset: int | None = None
        self._steps: dict[nn.Parameter, int] = {}
        """Adam's steps of each parameter since its moments were zero; Adam's own counts are on the device."""

    def clear_gradient(self) -> None:
        """Clears the gradient accumulated since the last update."""
        self._adam.zero_grad()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Accumulated gradients, which the optimizer then forgets."""
        found = {p: p.grad for p in self._named.values() if p.grad is not None}
        self._adam.zero_grad()
        return found

    @torch.no_grad()
    def sensitivity(
        self, gradients: Mapping[nn.Parameter, Tensor]
    ) -> tuple[float, dict[nn.Parameter, tuple[Tensor, Tensor]]]:
        """Factor by which `update` would shorten these gradients, and the change that it would make to each parameter.

        With each change comes its derivative by the shortened gradient. The decay of weights is left out.

        With m and v the moments after the update:  change = -lr m^ / (sqrt(v^) + eps),  both corrected for their bias.
        """
        norm = float(nn.utils.get_total_norm(list(gradients.values())))
        clip = min(1.0, (self._config.max_grad_norm or math.inf) / max(norm, 1e-30))
        lr, found = learning_rate(self._config, self.updates, self._since_reset), {}
        for group in self._adam.param_groups:
            rate, eps, (beta, beta_sq) = lr * group["peak"] / self._config.lr, group["eps"], group["betas"]
            for parameter in (one for one in group["params"] if one in gradients):
                state, g = self._adam.state.get(parameter, {}), gradients[parameter] * clip
                step = float(state.get("step", 0.0)) + 1
                first, second = (1 - beta) / (1 - beta**step), (1 - beta_sq) / (1 - beta_sq**step)
                mean, square = (state[key].to(g.device) if state else torch.zeros_like(g) for key in MOMENTS)
                mean = first * (g + beta / (1 - beta) * mean)
                root = (second * (g.square() + beta_sq / (1 - beta_sq) * square)).sqrt()
                slope = first - mean * second * g / (root * (root + eps)).clamp(min=1e-30)
                found[parameter] = -rate * mean / (root + eps), -rate * slope / (root + eps)
        return clip, found

    def update(self) -> Update:
        """Clips the accumulated gradient, takes one update and clears the gradient."""
        lr = learning_rate(self._config, self.updates, self._since_reset)
        for group in self._adam.param_groups:
            group["lr"] = lr * group["peak"] / self._config.lr
        changed = [p for p in self._named.values() if p.grad is not None]
        # Everything is launched before the first number is read.
        grad_norm, update_norm = torch.stack([one.double() for one in self._launched()]).tolist()
        self._adam.zero_grad()
        if not math.isfinite(grad_norm):
            return Update(lr=lr, grad_norm=grad_norm, update_norm=0.0, taken=False)
        self._count(changed)
        if self._since_reset is not None:
            self._since_reset += 1
        return Update(lr=lr, grad_norm=grad_norm, update_norm=update_norm, taken=True)

    def _count(self, changed: Iterable[nn.Parameter]) -> None:
        """Counts an update, and Adam's steps of the parameters that it changed."""
        self.updates += 1
        for parameter in changed:
            self._steps[parameter] = self._steps.get(parameter, 0) + 1

    @torch.no_grad()
    def _launched(self) -> tuple[Tensor, Tensor]:
        """Norms of the gradient and of the change by an update, which Adam leaves out if the first is not finite."""
        norm = whole(nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None]))
        self._clip(norm, self._config.max_grad_norm or math.inf)
        self._adam.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        change = self._offloaded_step() if self._offloads else self._step()
        return norm, change.to(norm.device)

    @torch.no_grad()
    def update_as(self, adam: Adam) -> tuple[float, bool]:
        """Takes one update with these settings; a parameter without a gradient has one of zeros.

        Returns the gradient's norm before clipping, and whether the update was taken: it is not where a weight or a
        moment would not be finite. Each parameter's update is tried before any is taken, since copies of all
        parameters would need more memory.
        """
        for parameter in self._named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for group in self._adam.param_groups:
            group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
            group["weight_decay"] = adam.weight_decay
        norm = nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])
        self._clip(norm, adam.grad_clip_norm or math.inf)
        finite = torch.stack([norm.isfinite(), *(self._stays_finite(p, adam) for p in self._named.values())])
        taken = bool(finite.all())
        if taken:
            self._adam.found_inf = None  # type: ignore[attr-defined]
            self._adam.step()
            self._count(self._named.values())
        self._adam.zero_grad()
        return float(norm), taken

    def _stays_finite(self, parameter: nn.Parameter, adam: Adam) -> Tensor:
        """Whether an update leaves a parameter and its moments finite; computes it on copies."""
        assert parameter.grad is not None
        state, zero = self._adam.state.get(parameter, {}), torch.zeros_like(parameter)
        copies = [t.clone() for t in (parameter, parameter.grad, *(state.get(key, zero) for key in MOMENTS))]
        step = state["step"].clone() if state else torch.zeros((), device=parameter.device)
        weight, grad, first, second = ([one] for one in copies)
        adamw(
            weight,
            grad,
            first,
            second,
            [],
            [step],
            fused=True,
            grad_scale=self._adam.grad_scale,  # type: ignore[attr-defined]
            amsgrad=False,
            maximize=False,
            beta1=adam.beta1,
            beta2=adam.beta2,
            lr=adam.learning_rate,
            weight_decay=adam.weight_decay,
            eps=adam.eps,
        )
        return torch.stack([one.isfinite().all() for one in copies]).all()

    def _clip(self, norm: Tensor, most: float) -> None:
        """Has the gradient shortened to the largest norm: by Adam as it reads it, or before that if it is sharded."""
        if self._sharded:
            nn.utils.clip_grads_with_norm_(self._named.values(), most, norm)
        else:
            # torch.amp's protocol: fused optimizers divide by this attribute.
            self._adam.grad_scale = (norm / most).clamp(1.0, LARGEST)  # type: ignore[attr-defined]

    def _step(self) -> Tensor:
        """Takes Adam's step; the norm of the change that it made."""
        self._adam.step()
        return self._norm(self._change_norms())

    def _offloaded_step(self) -> Tensor:
        """Takes the same step parameter by parameter; only one parameter's moments are on the device at a time."""
        gradients = {p: p.grad for p in self._named.values() if p.grad is not None}
        norms: list[Tensor] = []
        self._adam.zero_grad()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
            self._move_moments(parameter, parameter.device)
            self._adam.step()
            norms += self._change_norms()
            self._move_moments(parameter, torch.device("cpu"))
            parameter.grad = None
        return self._norm(norms)

    def _move_moments(self, parameter: nn.Parameter, device: torch.device) -> None:
        state = self._adam.state.get(parameter, {})
        for key in MOMENTS:
            if key in state:
                state[key] = state[key].to(device)

    @torch.no_grad()
    def _change_norms(self) -> Iterator[Tensor]:
        """Norm of the change that the last step made to each block of numbers, from the moments alone."""
        for group in self._adam.param_groups:
            decay, (beta, beta_sq) = group["lr"] * group["weight_decay"], group["betas"]
            for step, blocks in self._blocks(group["params"]):
                # lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), with constants folded
                root = math.sqrt(1 - beta_sq**step)
                rate, eps = group["lr"] * root / (1 - beta**step), group["eps"] * root
                moments, squares, weights, shares = zip(*blocks, strict=True)
                divisors = torch._foreach_sqrt(squares)
                torch._foreach_add_(divisors, eps)
                changes = torch._foreach_div(moments, divisors)
                if decay:
                    torch._foreach_add_(changes, weights, alpha=decay / rate)
                factors = [rate / (1 - decay) * share for share in shares]
                yield from torch._foreach_mul(torch._foreach_norm(changes), factors)

    def _blocks(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[int, list[Block]]]:
        """Numbers of Adam's steps, and blocks that took them, a few at a time."""
        block = BLOCK_OF_GPU if next(iter(self._named.values())).is_cuda else BLOCK
        at, blocks, room = 0, list[Block](), block
        for parameter in parameters:
            if parameter.grad is None or not (state := self._adam.state.get(parameter)):
                continue
            step = self._steps.get(parameter, 0) + 1
            tensors = [local(tensor) for tensor in (state["exp_avg"], state["exp_avg_sq"], parameter)]
            small = tensors[0].numel() <= block
            parts = [(one,) if small else torch.split(one.flatten(), block) for one in tensors]
            share = copies(parameter) ** -0.5
            for part in zip(*parts, repeat(share, len(parts[0])), strict=True):
                room -= part[0].numel()
                if blocks and (step != at or room < 0):
                    yield at, blocks
                    blocks, room = [], block - part[0].numel()
                at = step
                blocks.append(part)
        if blocks:
            yield at, blocks

    def _norm(self, changes: Iterable[Tensor]) -> Tensor:
        return norm(changes, sharded=self._sharded)

    def reset(self) -> None:
        """Clears moments and counters."""
        self._clear()
        self.updates, self._since_reset = 0, None

    def count_push(self) -> None:
        """Resets the moments at a push of weights, if the config says so."""
        if self._config.reset_optimizer_at_push:
            self._clear()
            self._since_reset = 0

    def _clear(self) -> None:
        self._adam.state.clear()
        self._steps.clear()

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, sharded as the parameters are, and the counters."""
        tensors = {"updates": torch.tensor(self.updates)}
        tensors["since_reset"] = torch.tensor(-1 if self._since_reset is None else self._since_reset)
        for name, parameter in self._named.items():
            # Adam makes zero moments for an update that it leaves out, too.
            moments = self._adam.state[parameter] if parameter in self._steps else {}
            for key in (*MOMENTS, "step"):
                if key in moments:
                    tensors[f"{key}/{name}"] = moments[key].detach()
        return tensors

    def places(self) -> dict[str, Tensor]:
        """Parameter as which each tensor of a state is sharded, by the tensor's name."""
        return {f"{key}/{name}": parameter for name, parameter in self._named.items() for key in MOMENTS}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads a `state`, of whole or sharded tensors. Raises `TrainerError` for the state of another model."""
        wanted = self.places()
        moments = {key: tensor for key, tensor in tensors.items() if "/" in key and not key.startswith("step/")}
        strange = [key for key, one in moments.items() if key not in wanted or wanted[key].shape != one.shape]
        if strange or not {"updates", "since_reset"} <= tensors.keys():
            raise TrainerError(f"optimizer state: expected that of this model, got {sorted(strange or tensors)[:1]}")
        self._clear()
        for name, parameter in self._named.items():
            found = {key: tensors[f"{key}/{name}"] for key in (*MOMENTS, "step") if f"{key}/{name}" in tensors}
            if found:
                step = found.pop("step").clone()
                self._steps[parameter] = int(step)
                step = step.to(parameter.device)
                moments = {key: like(value.clone(), parameter) for key, value in found.items()}
                moments = {key: value.cpu() for key, value in moments.items()} if self._offloads else moments
                self._adam.state[parameter] = {**moments, "step": step}
        self.updates = int(tensors["updates"])
        since = int(tensors["since_reset"])
        self._since_reset = None if since < 0 else since
