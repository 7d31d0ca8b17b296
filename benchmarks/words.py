"""The demo's questions as a task service, for a run on several hosts."""

import random

from reasoning_gym import create_dataset

from shoal.tasks.sdk import Question, environment


@environment("words")
def words(rng: random.Random) -> Question:
    """A word of three to five letters, to be spelled backward, in the words of the demo."""
    drawn = create_dataset("spell_backward", size=1, seed=rng.getrandbits(31), min_word_len=3, max_word_len=5)[0]
    return Question(f"reverse {drawn['answer'][::-1]}", answer=drawn["answer"], scorer="exact")
