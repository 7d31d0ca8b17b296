"""Rewards by content: an answer that was scored once is not scored again."""

from hashlib import blake2b

import msgspec

from shoal.checker import Code, Function, LLMJudge, Spec
from shoal.types import Reward, RewardStatus, Task

MOST = 1 << 16
"""Number of rewards kept; some 20 MB."""


class RewardCache:
    """The most recently used rewards of deterministic checkers; only repeatable scores are kept."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._rewards: dict[bytes, Reward] = {}
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._rewards)

    def get(self, key: bytes) -> Reward | None:
        """The reward under a key, which becomes the most recently used."""
        reward = self._rewards.pop(key, None)
        if reward is not None:
            self._rewards[key] = reward
        self.hits += reward is not None
        self.misses += reward is None
        return reward

    def put(self, key: bytes, reward: Reward) -> None:
        """Keeps a repeatable score; a full cache drops the least recently used."""
        if reward.status is RewardStatus.SCORED and reward.is_repeatable:
            self._rewards[key] = reward
            if len(self._rewards) > self._most:
                del self._rewards[next(iter(self._rewards))]


def is_cacheable(spec: Spec) -> bool:
    """True if a checker always gives equal answers equal rewards, unlike a model's or a user's opinion."""
    return not isinstance(spec, LLMJudge | Function)


def key_of(spec: Spec, task: Task) -> bytes:
    """The key of all that decides a reward besides the answer: checker, parameters, truth or receipt, tests."""
    tests = task.info if isinstance(spec, Code) else ""
    content = (spec, task.answer, task.receipt, tests)
    return blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def answer_key(task_key: bytes, answer: str) -> bytes:
    """The key of one answer."""
    return blake2b(answer.encode(errors="surrogatepass"), digest_size=16, key=task_key).digest()
