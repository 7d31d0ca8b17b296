"""The bytes of each token; its text lacks them where several tokens share a character."""

import json
import re
from functools import lru_cache

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"
"""Text before a token, since some tokenizers drop the space with which a text begins."""
KEPT = 1 << 16


def _byte_characters() -> dict[str, int]:
    """Characters by which byte-level vocabularies spell the 256 bytes (GPT-2, `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


class TokenBytes:
    """Function from a token id to its bytes; tokens that the vocabulary lacks have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelt = json.loads(tokenizer.to_str())
        decoder = json.dumps(spelt["decoder"])
        self._byte_level = '"ByteLevel"' in decoder
        self._byte_fallback = '"ByteFallback"' in decoder
        self._added = {entry["id"]: str(entry["content"]).encode() for entry in spelt["added_tokens"]}
        self.special = frozenset(entry["id"] for entry in spelt["added_tokens"] if entry["special"])
        """Ids of special tokens."""
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        self._before = tokenizer.decode(self._anchor, skip_special_tokens=False)
        self._of = lru_cache(KEPT)(self._found)

    def __call__(self, token: int) -> bytes:
        """Bytes of one token; a special token's spell its name."""
        return self._of(token)

    def _found(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        text = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        return text.removeprefix(self._before).encode()
