"""The other ranks of a trainer as its first rank sees them: processes that are asked everything it is asked."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shoal.errors import ChildDied
from shoal.process import PARENT, receive_frame, send_frame
from shoal.train.messages import Answer, Failed, answer_from

GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Follower:
    process: subprocess.Popen[bytes]
    connection: socket.socket


class Followers:
    """Ranks 1 .. count - 1, started at once; they end with this process."""

    def __init__(self, count: int, device: str) -> None:
        """Each on a device of that kind."""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-ranks-")
        self.meeting = Path(self._folder.name) / "meeting"
        """The file through which the ranks find each other."""
        signal.signal(signal.SIGTERM, self._terminated)
        self._all = [self._started(index, count, device) for index in range(1, count)]

    def _started(self, index: int, count: int, device: str) -> _Follower:
        ours, theirs = socket.socketpair()
        with theirs:
            where = [f"--fd={theirs.fileno()}", f"--rank={index}", f"--ranks={count}"]
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal.train.worker", *where, f"--meeting={self.meeting}", f"--device={device}"],
                stdin=subprocess.DEVNULL,
                env={**os.environ, PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
            )
        return _Follower(process, ours)

    def send(self, frame: bytes) -> None:
        """Has all do what this rank is about to do. Raises `ChildDied`."""
        for index, follower in enumerate(self._all, 1):
            try:
                send_frame(follower.connection, frame)
            except OSError:
                raise ChildDied(f"rank {index} of the trainer has ended") from None

    def agreed(self, own: Answer) -> Answer:
        """This rank's answer; that of a follower if only the follower failed."""
        for index, follower in enumerate(self._all, 1):
            try:
                frame = receive_frame(follower.connection)
            except OSError:
                frame = None
            answer = answer_from(frame) if frame is not None else Failed("it has ended")
            if isinstance(answer, Failed) and (frame is None or not isinstance(own, Failed)):
                own = Failed(f"rank {index} of the trainer: {answer.reason}")
        return own

    def _terminated(self, number: int, _: FrameType | None) -> None:
        """Ends this process as the signal would have, without leaving the folder behind."""
        self._folder.cleanup()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end(self) -> None:
        """Ends them."""
        for follower in self._all:
            follower.connection.close()
        for follower in self._all:
            try:
                follower.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        self._folder.cleanup()
