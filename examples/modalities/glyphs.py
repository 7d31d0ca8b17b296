"""Digits as images, and as text: one task shares pictures, the other reads them.

A rule node draws `Pictures` and shares answered questions about them. A node that trains `Grids`, which asks the same
digits as text, reads the pictures of its peers: `read` turns a PNG into a grid of its own. A node without such a task
ignores them.

    shoal swarm join pictures.toml --rule truth
    shoal train grids.toml
"""

import random
import struct
import zlib
from dataclasses import dataclass

from shoal.tasks.sdk import Question, environment

SIDE = 8
DIGITS = (
    "###.#.##.##.###",
    ".#.##..#..#.###",
    "##...#.#.#..###",
    "##...#.#...###.",
    "#.##.####..#..#",
    "####..##...###.",
    ".###..####.####",
    "###..#.#..#..#.",
    "####.#####.####",
    "####.####..###.",
)
"""Ten digits, three wide and five high, row by row."""
MOST_SIDE = 32
HEAD = b"\x89PNG\r\n\x1a\n"
Grid = list[str]


def drawn(rng: random.Random, side: int = SIDE) -> tuple[Grid, str]:
    """A digit somewhere in a grid of `side` by `side` dots, and its truth; a digit is 3 wide and 5 high."""
    digit, x, y = rng.randrange(10), rng.randrange(side - 2), rng.randrange(side - 4)
    rows = [["."] * side for _ in range(side)]
    for place, mark in enumerate(DIGITS[digit]):
        rows[y + place // 3][x + place % 3] = mark
    return ["".join(row) for row in rows], str(digit)


def asked(grid: Grid) -> str:
    """The question as text."""
    return "\n".join(grid)


def png_of(grid: Grid) -> bytes:
    """A grid as a grey PNG of one byte per dot."""
    lines = b"".join(b"\x00" + bytes(255 * (dot == "#") for dot in row) for row in grid)
    head = struct.pack(">IIBBBBB", len(grid[0]), len(grid), 8, 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return HEAD + b"".join(_chunk(name, data) for name, data in parts)


def grid_of(data: bytes) -> Grid:
    """The grid of a grey PNG without filters, at most `MOST_SIDE` wide and high. Raises `ValueError`."""
    chunks = dict(_chunks(data))
    if len(chunks.get(b"IHDR", b"")) != 13 or b"IDAT" not in chunks:
        raise ValueError("expected a PNG with a head and data")
    width, height, depth, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if not (1 <= width <= MOST_SIDE and 1 <= height <= MOST_SIDE) or (depth, kind) != (8, [0, 0, 0, 0]):
        raise ValueError(f"expected a grey PNG of at most {MOST_SIDE} by {MOST_SIDE}, got {width} by {height}")
    size = height * (width + 1)
    try:
        inflating = zlib.decompressobj()
        pixels = inflating.decompress(chunks[b"IDAT"], size + 1)
    except zlib.error as error:
        raise ValueError(f"expected zlib data: {error}") from None
    lines = [pixels[i : i + width + 1] for i in range(0, size, width + 1)]
    if len(pixels) != size or not inflating.eof or any(line[0] for line in lines):
        raise ValueError(f"expected {size} bytes of lines without filters")
    return ["".join("#" if value > 127 else "." for value in line[1:]) for line in lines]


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """Name and data of each chunk. Raises `ValueError`."""
    if not data.startswith(HEAD):
        raise ValueError("expected a PNG")
    found, at = [], len(HEAD)
    while at < len(data):
        if at + 12 > len(data):
            raise ValueError("a chunk is cut off")
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, body, end = data[at + 4 : at + 8], data[at + 8 : at + 8 + size], at + 12 + size
        if end > len(data) or data[end - 4 : end] != struct.pack(">I", zlib.crc32(name + body)):
            raise ValueError("a chunk is cut off or damaged")
        found.append((name, body))
        at = end
    if not found or found[-1][0] != b"IEND":
        raise ValueError("expected an end")
    return found


@environment("glyphs", version="1")
@dataclass(frozen=True)
class Pictures:
    """Asks which digit a picture of `side` by `side` dots shows."""

    side: int = SIDE

    def draw(self, rng: random.Random) -> Question:
        """A picture of a digit."""
        grid, digit = drawn(rng, self.side)
        picture = ("image/png", png_of(grid))
        return Question("Which digit is this?", digit, scorer="exact", split_by=asked(grid), attachments=(picture,))


@environment("glyphs", version="1")
@dataclass(frozen=True)
class Grids:
    """Asks which digit a grid of characters shows, and reads pictures of peers."""

    side: int = SIDE
    media = ("image/png",)

    def draw(self, rng: random.Random) -> Question:
        """A digit as text."""
        grid, digit = drawn(rng, self.side)
        return Question(asked(grid), digit, scorer="exact")

    def read(self, question: str, attachments: list[bytes]) -> Question:
        """The question of this task about the picture of a peer. Raises `ValueError` for any other file."""
        (picture,) = attachments
        return Question(asked(grid_of(picture)))
