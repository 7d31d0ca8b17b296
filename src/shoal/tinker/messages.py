"""Messages between the Tinker server and its trainer process."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import msgspec
from msgspec import Meta

from shoal import wire
from shoal.trainer.messages import Adam, Adapter

MOST_TTL_S = 10 * 365 * 86_400
"""Ten years, as the Tinker documentation bounds a time to live."""
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Open(msgspec.Struct, frozen=True, tag=True):
    """Start training a model, from a base or from a saved state."""

    model_id: str
    base: str
    adapter: Adapter | None
    folder: str = ""
    optimizer: bool = False


class Close(msgspec.Struct, frozen=True, tag=True):
    """Forget a model."""

    model_id: str


class ForwardBackward(msgspec.Struct, frozen=True, tag=True):
    """ForwardBackwardRequests of the API, of one model each, to be computed together."""

    bodies: tuple[bytes, ...]


class OptimStep(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step."""

    model_id: str
    adam: Adam


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a model's state, or what engines serve of it, into a folder."""

    model_id: str
    folder: str
    served: bool = False


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load a saved state into a model."""

    model_id: str
    folder: str
    optimizer: bool


Request = Open | Close | ForwardBackward | OptimStep | Save | Load


class CarriedOut(msgspec.Struct, frozen=True, tag=True):
    """The request was carried out; `version` is the model's number of optimizer steps."""

    version: int = 0
    body: bytes = b""
    metrics: dict[str, float] = {}
    parts: tuple["CarriedOut | Failed", ...] = ()
    """Answers to each of several requests."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request failed; `refused` says that the request itself is wrong, and that it changed nothing."""

    reason: str
    refused: bool


Answer = CarriedOut | Failed


def with_folder(request: Request, place: Callable[[str], Path]) -> Request:
    """Request with another folder in place of its own, if it has one."""
    folder = folder_of(request)
    return msgspec.structs.replace(request, folder=str(place(folder))) if folder else request


def folder_of(request: Request) -> str:
    """Folder of a request; empty without one."""
    return request.folder if isinstance(request, Open | Save | Load) else ""


def request_from(frame: bytes) -> Request:
    """Request in a frame. Raises `WireError`."""
    return wire.decode(frame, cast(type[Request], Request))


def answer_from(frame: bytes) -> Answer:
    """Answer in a frame. Raises `WireError`."""
    return wire.decode(frame, cast(type[Answer], Answer))
