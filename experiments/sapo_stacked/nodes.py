"""Many small decoders side by side: one tensor per weight with the nodes as its first axis.

Axes: N nodes, B rows of a node, T positions of a row, V vocabulary, D width, H heads. Each node has its own weights and
its own Adam moments; they only share the kernel that multiplies them. Rows are a question, padded on the left, and room
for an answer.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.sapo_stacked.questions import MOST_ANSWER, MOST_QUESTION

CHARACTERS = "".join(map(chr, range(32, 127)))
PAD, END = 0, 1
VOCABULARY = len(CHARACTERS) + 2
ROOM = MOST_QUESTION + MOST_ANSWER


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one node."""

    width: int = 64
    layers: int = 2
    heads: int = 2
    feed_forward: int = 192


def token_ids(text: str) -> list[int]:
    """One per character."""
    return [ord(character) - 30 for character in text]


def text_of(ids: list[int]) -> str:
    """Up to the end; the characters of the rest."""
    return "".join(chr(i + 30) for i in (ids[: ids.index(END)] if END in ids else ids) if i > END)


def questions_tensor(texts: list[str]) -> Tensor:
    """[rows, MOST_QUESTION], padded on the left."""
    return torch.tensor([[PAD] * (MOST_QUESTION - len(text)) + token_ids(text) for text in texts])


class Nodes:
    """The weights of all nodes, and Adam for each."""

    def __init__(self, shape: Shape, nodes: int, seed: int) -> None:
        self.shape, self.nodes = shape, nodes
        generator = torch.Generator().manual_seed(seed)
        d, f = shape.width, shape.feed_forward
        sizes: dict[str, tuple[int, ...]] = {"token": (VOCABULARY, d), "place": (ROOM, d), "head": (d, VOCABULARY)}
        for i in range(shape.layers):
            sizes |= {f"{i}.qkv": (d, 3 * d), f"{i}.out": (d, d), f"{i}.up": (d, f), f"{i}.down": (f, d)}
        self.weights = {
            name: (torch.randn(size, generator=generator) * (0.02 if name in ("token", "place") else size[0] ** -0.5))
            .expand(nodes, *size)
            .clone()
            .requires_grad_()
            for name, size in sizes.items()
        }
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self._updates = torch.zeros(nodes)

    def load(self, weights: dict[str, Tensor]) -> None:
        """The same weights for every node: [...] without N."""
        with torch.no_grad():
            for name, value in weights.items():
                self.weights[name].copy_(value.expand_as(self.weights[name]))

    def logits(self, tokens_NBt: Tensor, pad_NB: Tensor, start: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Of the next tokens [N, B, t, V]; `cache` holds keys and values of the positions before `start`."""
        n, b, t = tokens_NBt.shape
        w, d, heads = self.weights, self.shape.width, self.shape.heads
        node = torch.arange(n)[:, None, None]
        at_t = torch.arange(start, start + t)
        place_NBt = (at_t - pad_NB[..., None]).clamp(min=0)
        x = w["token"][node, tokens_NBt] + w["place"][node, place_NBt]
        key_T = torch.arange(start + t)
        mask = (key_T <= at_t[:, None]) & ((key_T >= pad_NB[..., None, None]) | (key_T == at_t[:, None]))
        mask = mask.view(n * b, 1, t, start + t)
        for i in range(self.shape.layers):
            qkv = _times(F.rms_norm(x, (d,)), w[f"{i}.qkv"]).view(n * b, t, 3, heads, d // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            if start:
                k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
            if len(cache) > i:
                cache[i] = (k, v)
            else:
                cache.append((k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + _times(mixed.transpose(1, 2).reshape(n, b, t, d), w[f"{i}.out"])
            x = x + _times(F.silu(_times(F.rms_norm(x, (d,)), w[f"{i}.up"])), w[f"{i}.down"])
        return _times(F.rms_norm(x, (d,)), w["head"])

    @torch.no_grad()
    def answers(self, questions_NGQ: Tensor, each: int, generator: torch.Generator, *, greedy: bool = False) -> Tensor:
        """`each` answers to every question: [N, G * each, MOST_ANSWER] token ids, PAD after END."""
        n, g, length = questions_NGQ.shape
        pad_NG = (questions_NGQ == PAD).sum(-1)
        cache: list[tuple[Tensor, Tensor]] = []
        logits = self.logits(questions_NGQ, pad_NG, 0, cache)[:, :, -1]
        cache = [(_repeated(k, each), _repeated(v, each)) for k, v in cache]
        pad_NB, logits = pad_NG.repeat_interleave(each, 1), logits.repeat_interleave(each, 1)
        ended, drawn = torch.zeros(n, g * each, dtype=torch.bool), []
        for i in range(MOST_ANSWER):
            logits[..., PAD] = -math.inf
            if greedy:
                token = logits.argmax(-1)
            else:
                uniform = torch.rand(logits.shape, generator=generator).clamp_(min=1e-20)
                token = (logits - (-uniform.log()).log()).argmax(-1)  # Gumbel: a draw from the softmax
            token = torch.where(ended, PAD, token)
            drawn.append(token)
            ended = ended | (token == END)
            if i + 1 < MOST_ANSWER and not bool(ended.all()):
                logits = self.logits(token[..., None], pad_NB, length + i, cache)[:, :, -1]
        return torch.stack(drawn, -1)

    def logprobs(self, questions_NGQ: Tensor, answers_NBA: Tensor) -> tuple[Tensor, Tensor]:
        """([N, B, A] nats of the answers' tokens at temperature 1, whether there is a token).

        Each question has the same number of answers, one after the other; it is computed once for all of them.
        """
        each = answers_NBA.shape[1] // questions_NGQ.shape[1]
        pad_NG = (questions_NGQ == PAD).sum(-1)
        cache: list[tuple[Tensor, Tensor]] = []
        first = self.logits(questions_NGQ, pad_NG, 0, cache)[:, :, -1:].repeat_interleave(each, 1)
        cache = [(_repeated(k, each), _repeated(v, each)) for k, v in cache]
        pad_NB = pad_NG.repeat_interleave(each, 1)
        rest = self.logits(answers_NBA[..., :-1], pad_NB, questions_NGQ.shape[-1], cache)
        logits = torch.cat([first, rest], 2).index_fill(-1, torch.tensor([PAD]), -math.inf)
        logp = logits.log_softmax(-1).gather(-1, answers_NBA[..., None])[..., 0]
        there = answers_NBA != PAD
        return torch.where(there, logp, 0.0), there

    def update(self, loss_N: Tensor, lr: float, learns_N: Tensor) -> None:
        """One step of Adam for each node that learns; gradients clipped to a norm of 1 within each node."""
        names = list(self.weights)
        gradients = torch.autograd.grad(loss_N.sum(), [self.weights[name] for name in names])
        norm_N = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        scale_N = (1 / norm_N.clamp(min=1.0)) * learns_N
        self._updates += learns_N
        age_N = self._updates.clamp(min=1.0)
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                wide = (-1, *(1 for _ in gradient.shape[1:]))
                first, second = self._moments[name]
                learns, g = learns_N.view(wide).bool(), gradient * scale_N.view(wide)
                first.copy_(torch.where(learns, 0.9 * first + 0.1 * g, first))
                second.copy_(torch.where(learns, 0.999 * second + 0.001 * g * g, second))
                m = first / (1 - 0.9**age_N).view(wide)
                v = second / (1 - 0.999**age_N).view(wide)
                self.weights[name] -= torch.where(learns, lr * m / (v.sqrt() + 1e-8), 0.0)


def _times(x: Tensor, weight_N: Tensor) -> Tensor:
    """[N, ..., in] with [N, in, out]."""
    return torch.bmm(x.flatten(1, -2), weight_N).view(*x.shape[:-1], weight_N.shape[-1])


def _repeated(cached: Tensor, each: int) -> Tensor:
    return cached.repeat_interleave(each, 0)
