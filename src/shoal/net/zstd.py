"""Decompression of foreign data in bounded memory."""

import zstandard

from shoal.errors import WireError


def decompressed(data: bytes, most_bytes: int) -> bytes:
    """Content of one zstd frame. Raises `WireError` for other data, and for more than `most_bytes`.

    zstandard itself allocates any size that a frame states.
    """
    try:
        if (stated := zstandard.frame_content_size(data)) > most_bytes:
            raise WireError(f"expected at most {most_bytes} bytes in a zstd frame, got {stated}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=most_bytes)
    except zstandard.ZstdError as error:
        raise WireError(f"expected a zstd frame of at most {most_bytes} bytes: {error}") from error
