"""An identity is the Ed25519 key that signs a node's messages. First use creates its file, readable by the owner only.

A peer's id is a hash of its public key: ids need no registry, and no peer can claim another's.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from shoal.errors import ConfigError

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64


class Identity:
    """One private key and the peer id derived from it."""

    __slots__ = ("_key", "peer_id", "public_key")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def fresh(cls) -> "Identity":
        """Makes an identity without a file."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Loads the identity in a PEM file, or makes both. Raises `ConfigError`."""
        try:
            if not path.exists():
                key = Ed25519PrivateKey.generate()
                _write_once(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            readable = stat.S_IMODE(path.stat().st_mode) & 0o077
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"identity {path}: cannot be read or made: {error.strerror}") from error
        if readable:
            raise ConfigError(f"identity {path}: others can read it; chmod 600 it, or remove it to get a new one")
        try:
            found = load_pem_private_key(data, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"identity {path}: expected a private key in PEM: {error}") from None
        if not isinstance(found, Ed25519PrivateKey):
            raise ConfigError(f"identity {path}: expected an Ed25519 key, got {type(found).__name__}")
        return cls(found)

    def sign(self, data: bytes) -> bytes:
        """Signs `data`; the signature has 64 bytes."""
        return self._key.sign(data)


def peer_id_of(public_key: bytes) -> str:
    """Hashes a public key to a peer id of 32 hexadecimal digits."""
    return hashlib.blake2b(public_key, digest_size=16, person=b"shoal-peer").hexdigest()


def is_signed_by(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Tells whether the key's owner signed `data`. Never raises: malformed bytes are no signature."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _write_once(path: Path, data: bytes) -> None:
    """Writes a file whole; the first of two processes wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name) as file:  # mode 0600
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
