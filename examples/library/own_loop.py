"""Own loop: groups are sampled ahead within a staleness bound and trained; the loop says when weights are pushed."""

import asyncio
import sys

import shoal

WORDS = ("sun", "map", "log", "tree", "bird", "rain", "moon", "fish", "leaf", "stone", "river", "apple")


@shoal.environment("backward")
class Backward:
    """Words to be spelled backward, as the embedded model knows to be asked."""

    def draw(self, rng):
        word = "".join(rng.sample(rng.choice(WORDS), 3))
        return shoal.Question(f"reverse {word}", word[::-1])

    def score(self, task, answer):
        return float(answer.strip() == task.answer)


async def main(steps: int) -> None:
    async with shoal.open_policy("demo", Backward, lr=3e-4, max_tokens=12, max_staleness=2) as policy:
        for step in range(steps):
            groups = await policy.groups()
            versions = {v for g in groups for r in g.rollouts for t in r.turns for v in t.completion.versions}
            await policy.step(groups)
            await policy.push()
            reward = sum(r.reward.value for g in groups for r in g.rollouts) / sum(len(g.rollouts) for g in groups)
            print(f"step {step}: reward {reward:.2f}, sampled under Versions {sorted(versions)}")
        print(f"saved: {await policy.save('backward-model')}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
