"""The reward of run.toml. `shoal train run.toml --dry-run` calls it once and shows what it raises."""


def letters_right(prompts, completions, answer, letters, **columns):
    """Gives each answer the share of its letters that are right.

    `answer` and `letters` are columns of questions.jsonl, with one entry per completion.
    """
    rewards = []
    for completion, truth, length in zip(completions, answer, letters, strict=True):
        said = completion[0]["content"].strip()
        right = sum(one == other for one, other in zip(said, truth, strict=False))
        rewards.append(right / max(length, len(said)))
    return rewards
