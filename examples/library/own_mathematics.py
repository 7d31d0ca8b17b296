"""Own mathematics: the loss and the advantage are functions of this file, carried to every rank of the trainer."""

import sys

import shoal


def loss(streams: shoal.Streams):
    """REINFORCE with importance weights cut at 2; every stream is [T], logprobs in nats."""
    ratio_T = (streams.logp_T - streams.behav_T).exp().detach().clamp(max=2)
    return -ratio_T * streams.advantage_T * streams.logp_T


def advantage(rewards):
    """Distance of each reward from its group's mean."""
    return [[reward - sum(group) / len(group) for reward in group] for group in rewards]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    result = shoal.train(loss=loss, advantage=advantage, steps=steps, lr=3e-4, max_tokens=12, questions=64)
    print(f"held-out accuracy {result.accuracy_before:.2f} -> {result.accuracy_after:.2f}; {result.run_dir}")
