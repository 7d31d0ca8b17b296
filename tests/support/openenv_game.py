"""A game of guessing behind a real OpenEnv server: `python openenv_game.py PORT`, with openenv-core installed."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """One letter."""

    letter: str


class Said(Observation):
    """What the game says."""

    message: str


class Game(Environment):
    """Three guesses; half a point for each letter that is in the word."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.word = "".join(random.Random(seed).sample("abcdefgh", 3))
        self.left = 3
        return Said(message=f"Game {seed}: guess a letter.")

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        hit = action.letter in self.word
        return Said(message="yes" if hit else "no", reward=0.5 * hit, done=self.left == 0)

    @property
    def state(self):
        return State(step_count=3 - self.left)


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Game, Guess, Said, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="error")
