"""Processes of a trainer's other ranks; the first rank passes every request on to them."""

import os
import signal
import tempfile
from pathlib import Path
from types import FrameType

from shoal.errors import ChildDied
from shoal.net.process import BlockingChild, rank_environment
from shoal.trainer.messages import ANSWER_TIMEOUT_S, Answer, TrainerFailed, answer_from


class Followers:
    """Ranks 1 .. count - 1, started at construction; they end with this process."""

    def __init__(self, count: int, device: str) -> None:
        """Starts each rank on a device of the kind `device`."""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-ranks-")
        self.meeting = Path(self._folder.name) / "meeting"
        """File through which the ranks find each other."""
        signal.signal(signal.SIGTERM, self._terminated)
        self._all = [self._start(index, count, device) for index in range(1, count)]

    def _start(self, index: int, count: int, device: str) -> BlockingChild:
        where = [f"--rank={index}", f"--ranks={count}", f"--meeting={self.meeting}", f"--device={device}"]
        return BlockingChild("shoal.trainer.worker", where, rank_environment(index), own_group=False)

    def send(self, frame: bytes) -> None:
        """Sends a request to all ranks. Raises `ChildDied`."""
        for index, follower in enumerate(self._all, 1):
            try:
                follower.send(frame, ANSWER_TIMEOUT_S)
            except OSError:
                raise ChildDied(f"rank {index} of the trainer has ended") from None

    def agreed(self, own: Answer) -> Answer:
        """Answer on which the ranks agree: this rank's, or a follower's failure if only the follower failed."""
        for index, follower in enumerate(self._all, 1):
            gone = False
            try:
                answer = answer_from(follower.receive(ANSWER_TIMEOUT_S))
            except OSError:  # a timeout is one
                answer, gone = TrainerFailed("it has ended"), True
            if isinstance(answer, TrainerFailed) and (gone or not isinstance(own, TrainerFailed)):
                own = TrainerFailed(f"rank {index} of the trainer: {answer.reason}")
        return own

    def _terminated(self, number: int, _: FrameType | None) -> None:
        """Ends this process as the signal would have, and removes the folder first."""
        self._folder.cleanup()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end(self) -> None:
        """Ends the ranks."""
        for follower in self._all:
            follower.end()
        self._folder.cleanup()
