"""Roots of container images, unpacked by the container engine that this machine has. Programs never run in an engine.

An engine builds or pulls an image; its files become a `Tree`, whose commands run in Shoal's sandbox as all others.
"""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shoal.errors import TaskError
from shoal.workspace.tree import Tree, prepare_as, prepared_as, tree_of

_TIMEOUT_S = 1800.0


class ContainerEngine(Protocol):
    """Unpacks images."""

    name: str

    def why_not(self) -> str:
        """Reason why the engine cannot be used; empty when it can."""

    def unpack(self, image: str, context: Path | None, target: Path) -> None:
        """Puts the files of an image, or of one built from a context, into an empty folder. Raises `TaskError`."""


def _said(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> str:
    """Output of a command. Raises `TaskError` with its last line when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise TaskError(f"{command[0]} {command[1]}: {(done.stderr.strip() or done.stdout.strip())[-300:]}")
    return done.stdout.strip()


class DockerLike:
    """Docker and Podman, which take the same commands."""

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self) -> str:
        """The client may be there without its server."""
        if shutil.which(self.name) is None:
            return f"{self.name} is not installed"
        try:
            _said([self.name, "info"], 20.0)
        except TaskError as error:
            return str(error)
        return ""

    def unpack(self, image: str, context: Path | None, target: Path) -> None:
        """Exports a container that never runs."""
        name = image or _said([self.name, "build", "-q", str(context)])
        container = _said([self.name, "create", name, "true"])
        archive = target.with_suffix(".tar")
        try:
            _said([self.name, "export", "-o", str(archive), container])
        finally:
            _said([self.name, "rm", container])
        with tarfile.open(archive) as opened:
            opened.extractall(target, [one for one in opened if not one.isdev()], filter="tar")


class Apptainer:
    """Apptainer takes images of registries and archives, and no Dockerfile."""

    name = "apptainer"

    def why_not(self) -> str:
        """It has no server."""
        return "" if shutil.which(self.name) else f"{self.name} is not installed"

    def unpack(self, image: str, context: Path | None, target: Path) -> None:
        """Builds a folder of the image."""
        if not image:
            raise TaskError(f"{context}/Dockerfile: apptainer builds no Dockerfile; use Docker or Podman")
        _said([self.name, "build", "--force", "--sandbox", str(target), f"docker://{image}"])


ENGINES: tuple[ContainerEngine, ...] = (DockerLike("docker"), DockerLike("podman"), Apptainer())


def image_tree(
    image: str,
    place: str,
    *,
    context: Path | None = None,
    why: str = "",
    engines: Sequence[ContainerEngine] = ENGINES,
) -> Tree:
    """The root of an image as a tree, made once for each named image. Raises `TaskError` without an engine."""
    key = f"image {image} {place}"
    if image and (known := prepared_as(key)):
        return known
    if image.startswith("-"):
        raise TaskError(f"image: expected a name, got {image!r}, which an engine would take for an option")
    reasons = [(engine, engine.why_not()) for engine in engines]
    usable = [engine for engine, reason in reasons if not reason]
    if not usable:
        needed = image or f"{context}/Dockerfile ({why})"
        raise TaskError(f"{needed} needs a container engine: {'; '.join(reason for _, reason in reasons)}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        usable[0].unpack(image, context, root)
        tree = tree_of(root, place=place)
    return prepare_as(key, tree) if image else tree
