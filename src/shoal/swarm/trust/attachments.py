"""Questions with attachments: bytes are stored by hash and fetched only by nodes that read their media type.

A task that reads has a method `read` and the media types that it knows (`tasks.sdk`). The node fetches the attachments
of a claim with the task's name, and checks size, hash and type. Then `read` makes an own question, in the task's
sandbox. Nothing else ever decodes an attachment. The truth is the peer's, and a checker compares with it.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shoal.errors import ExchangeUnavailable, TaskError
from shoal.interfaces import Attachments
from shoal.swarm.trust.limits import USUAL, QuestionLimits
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.exchange import MAX_ATTACHMENT_BYTES
from shoal.swarm.wire.offer import TEXT, Attached, Claim
from shoal.tasks.sdk import Definition
from shoal.types import Split, Task

if TYPE_CHECKING:
    from shoal.swarm.trust.python_tasks import PythonTasks

BEGINNINGS: Mapping[str, tuple[bytes, ...]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "audio/wav": (b"RIFF",),
    "audio/flac": (b"fLaC",),
    "audio/ogg": (b"OggS",),
}
"""First bytes of each media type; an attachment that begins differently is refused."""


class AttachmentReader:
    """Reads and writes claims with attachments, for the own tasks that have a reader."""

    def __init__(
        self,
        services: Iterable[object],
        python: "PythonTasks",
        attachments: Attachments,
        limits: QuestionLimits = USUAL,
    ) -> None:
        self._limits, self._python, self._attachments = limits, python, attachments
        tasks = [one for one in services if isinstance(one, Definition)]
        # Peers' texts reach no code outside of a sandbox: a task that scores by itself takes none of these questions.
        self._readers = {one.name: one for one in tasks if one.media and not (one.scores or one.converses)}

    async def claim(self, task: Task) -> Claim | None:
        """Builds the claim of a task with attachments and sends their bytes; None for a task without any.

        Raises `TaskError` for attachments that are too large, or when the swarm cannot be reached.
        """
        parts: list[tuple[str, str]] = json.loads(task.info).get("attachments", [])
        if not parts:
            return None
        attached = []
        for media_type, text in parts:
            data = base64.b64decode(text)
            if len(data) > MAX_ATTACHMENT_BYTES:
                raise TaskError(f"{task.id}: expected attachments of at most {MAX_ATTACHMENT_BYTES} bytes")
            attached.append(Attached(hashlib.sha256(data).hexdigest(), media_type, len(data)))
            try:
                await self._attachments.attach(attached[-1].digest, data)
            except ExchangeUnavailable as error:
                raise TaskError(f"{task.id}: its attachment was not sent: {error}") from error
        modality = attached[0].media_type.partition("/")[0]
        question = task.messages[-1].content
        return Claim(task.service, question, task.answer, modality=modality, attachments=tuple(attached))

    async def task(self, claim: Claim) -> Task | Reason:
        """Makes an own training task of a peer's question with attachments. Fetches no attachment of an unread type."""
        reader = self._readers.get(claim.service)
        types = {one.media_type for one in claim.attachments}
        if reader is None or claim.modality == TEXT or not types <= reader.media:
            return Reason.OTHER_MODALITY
        if claim.truth is None or not claim.attachments:
            return Reason.UNKNOWN_TASK
        if max(one.size_bytes for one in claim.attachments) > self._limits.attachment_bytes:
            return Reason.OUT_OF_BOUNDS
        parts = []
        for attached in claim.attachments:
            data = await self._fetched(attached)
            if data is None:
                return Reason.NOT_SENT
            parts.append(data)
        digest = hashlib.sha256("".join(one.digest for one in claim.attachments).encode()).hexdigest()
        drawn = await self._python.read(reader.name, claim, parts, f"{reader.name}/{digest[:32]}")
        if isinstance(drawn, Reason):
            return drawn
        if len(drawn.question) + len(claim.truth) > self._limits.characters:
            return Reason.OUT_OF_BOUNDS
        return Reason.HELD_OUT if drawn.split is Split.EVAL else drawn.task

    async def _fetched(self, attached: Attached) -> bytes | None:
        """The bytes of an attachment; None unless size, hash and beginning are as stated."""
        try:
            data = await self._attachments.fetch(attached.digest, attached.size_bytes)
        except ExchangeUnavailable:
            return None
        if data is None or hashlib.sha256(data).hexdigest() != attached.digest:
            return None
        return data if data.startswith(BEGINNINGS.get(attached.media_type, ())) else None
