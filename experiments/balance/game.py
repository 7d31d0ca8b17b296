"""Words backward behind OpenEnv's own server: `python game.py PORT`, with openenv-core installed."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    """What the model says."""

    text: str


class Asked(Observation):
    """What is asked."""

    message: str


class Backward(Environment):
    """One word, one answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        """A word of three to five letters."""
        dice = random.Random(seed)
        self._word = "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(3, 5)))
        return Asked(message=f"reverse {self._word}")

    def step(self, action, timeout_s=None, **kwargs):
        """1 for the word backward."""
        return Asked(message="", reward=float(action.text.strip() == self._word[::-1]), done=True)

    @property
    def state(self):
        """Nothing of interest."""
        return State(step_count=0)


if __name__ == "__main__":
    app = create_fastapi_app(Backward, Answer, Asked, max_concurrent_envs=512)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
