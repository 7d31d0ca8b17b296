"""One call: a model and a reward go in; a better model and its report come out."""

import sys

import shoal


def letters_right(prompts, completions, answer, **columns):
    """Gives the share of letters that are right, for each answer; the signature is TRL's."""
    said = [completion[0]["content"].strip() for completion in completions]
    return [sum(map(str.__eq__, one, truth)) / len(truth) for one, truth in zip(said, answer, strict=True)]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    result = shoal.train("demo", reward=letters_right, steps=steps, lr=3e-4, max_tokens=12, questions=64)
    print(f"reward {result.reward_first:.2f} -> {result.reward_last:.2f}; {result.report()}")
