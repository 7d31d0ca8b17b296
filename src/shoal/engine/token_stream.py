"""What a request draws, while it draws it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from shoal.engine.request import Draft, Request
from shoal.engine.step_engine import LocalEngine
from shoal.types import FinishReason


@dataclass(frozen=True, slots=True)
class Part:
    """The drawn tokens `start : end` of a completion; the last part of each has a `reason`."""

    draft: Draft
    start: int
    end: int
    version: int
    """Of the weights that drew the tokens that no closed span of the draft holds."""
    reason: FinishReason | None


async def parts(
    engine: LocalEngine, requests: Sequence[Request], stepped: asyncio.Event, gone: "asyncio.Future[None]"
) -> AsyncIterator[list[Part]]:
    """What was drawn since the last time, whenever `stepped` is set, until all have ended or `gone` is done.

    Reads what another thread appends to. The order makes it safe: the count first, then the version, then (by whoever
    uses the part) the spans. A draft's span is closed before the version changes, so tokens below the count that no
    closed span holds were drawn by the version that was read.
    """
    drafts = [draft for request in requests for draft in request.drafts]
    told = dict.fromkeys(drafts, 0)
    while told and not gone.done():
        await stepped.wait()
        stepped.clear()
        found = []
        for draft, start in list(told.items()):
            reason = draft.finish_reason  # before the count: nothing is drawn after it is set
            end = len(draft.logprobs)
            if end > start or reason is not None:
                found.append(Part(draft, start, end, engine.version, reason))
                told[draft] = end
            if reason is not None:
                del told[draft]
        if found:
            yield found
