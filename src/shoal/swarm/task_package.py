"""A task package is the source of a task of the Python SDK, content-addressed and signed by its publisher.

    file = wire bytes of a SealedPackage: publisher's public key, signature, body
    body = wire bytes of a TaskPackage: name, entry, modules

A package is accepted by name and digest only, as `NAME@DIGEST`; the digest is the SHA-256 of the body. Equal sources
have equal digests, whoever publishes them. The signature tells people who did. Nothing here runs a module
(`package_worker` does, in a sandbox).
"""

import hashlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shoal import wire
from shoal.errors import ConfigError, TaskError, WireError
from shoal.net.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed_by, peer_id_of
from shoal.swarm.offer import MAX_NAME_CHARACTERS
from shoal.tasks.sdk import Definition

MAX_PACKAGE_BYTES = 192 * 1024
"""Bytes of a package as it travels."""
MAX_MODULES = 16
_SIGNED = b"shoal task package\x00"
_REFERENCE = re.compile(r"([A-Za-z0-9_.-]{1,64})@([0-9a-f]{64})")
_OWN_FILE = "shoal_own_"

ModuleName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$")]


@dataclass(frozen=True, slots=True)
class TaskPackage:
    """The modules of a task, and the name of the task in them."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    entry: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$", max_length=400)]
    """`module:name` of the task."""
    modules: Annotated[dict[ModuleName, str], Meta(min_length=1, max_length=MAX_MODULES)]
    """Source of each module by its dotted name."""

    @property
    def body(self) -> bytes:
        """Bytes that the digest covers; modules are in order of their names."""
        return wire.encode(TaskPackage(self.name, self.entry, dict(sorted(self.modules.items()))))

    @property
    def digest(self) -> str:
        """SHA-256 of the body in hexadecimal digits."""
        return hashlib.sha256(self.body).hexdigest()

    @property
    def reference(self) -> str:
        """Name and digest, as `swarm.packages` lists them."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class SealedPackage:
    """A package as it travels."""

    publisher: Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    body: bytes


def sealed(package: TaskPackage, identity: Identity) -> bytes:
    """Signs a package. Raises `TaskError` for one that is too large."""
    body = package.body
    data = wire.encode(SealedPackage(identity.public_key, identity.sign(_SIGNED + body), body))
    if len(data) > MAX_PACKAGE_BYTES:
        raise TaskError(f"{package.name}: expected a package of at most {MAX_PACKAGE_BYTES} bytes, got {len(data)}")
    return data


def unsealed(data: bytes) -> tuple[TaskPackage, str]:
    """Opens a package; returns it with its publisher's peer id. Raises `WireError`."""
    found = wire.decode(data, SealedPackage, MAX_PACKAGE_BYTES)
    if not is_signed_by(found.publisher, found.signature, _SIGNED + found.body):
        raise WireError("task package: expected its publisher's signature, got another")
    package = wire.decode(found.body, TaskPackage, MAX_PACKAGE_BYTES)
    if package.body != found.body:
        raise WireError("task package: expected its modules in order, each once")
    return package, peer_id_of(found.publisher)


def reference_of(text: str) -> tuple[str, str]:
    """Splits `NAME@DIGEST`. Raises `ConfigError`.

    >>> reference_of("sums@" + "0" * 64)[0]
    'sums'
    """
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ConfigError(f"swarm.packages: expected NAME@DIGEST with 64 hexadecimal digits, got {text[:100]!r}")
    return found[1], found[2]


def package_of(task: Definition) -> TaskPackage:
    """Packages the module of a task. Raises `TaskError` for a task that is at the top of no file."""
    if list(inspect.signature(task.author.draw).parameters)[:2] == ["split", "index"]:
        raise TaskError(f"{task.name}: expected a `draw` from a random generator, so that a seed draws it again")
    module = inspect.getmodule(task.source)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        raise TaskError(f"{task.name}: expected a task in a file of its own, so that it can be packed")
    found = ((name, one) for name, one in vars(module).items() if isinstance(one, Definition))
    entry, original = next(((name, one) for name, one in found if one.source is task.source), ("", task))
    if not entry:
        raise TaskError(f"{task.name}: expected the task at the top of {file}, found none there")
    own_name = Path(file).stem if module.__name__.startswith(_OWN_FILE) else module.__name__
    source = Path(file).read_text(encoding="utf-8")
    return TaskPackage(original.name, f"{own_name}:{entry}", {own_name: source})
