"""Sessions that are closed: why, and what they drew, on the disk until it is handed out."""

import tempfile
from hashlib import blake2b
from pathlib import Path
from threading import Lock, get_ident

HANDED_OUT_KEPT = 1000


class ClosedSessions:
    """One file per closed session: a line that says why, then its export.

    What nobody has asked for stays. What was handed out stays for a while, since the client may not have got it.
    """

    def __init__(self, folder: Path | None) -> None:
        """Without a folder a temporary one is used, which goes with this object."""
        self._temporary = tempfile.TemporaryDirectory(prefix="shoal-sessions-") if folder is None else None
        self._folder = Path(self._temporary.name) if self._temporary else Path(folder or "")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._handed_out: dict[Path, None] = {}  # oldest first; threads hand out at the same time
        self._lock = Lock()

    def keep(self, token: str, reason: str, export: bytes, *, handed_out: bool = False) -> None:
        """Writes what a session drew; a file that is there is whole. `handed_out` says that its client gets it now."""
        path = self._path(token)
        part = path.with_suffix(f".{get_ident()}")  # two threads may keep the same session
        part.write_bytes(reason.encode() + b"\n" + export)
        part.replace(path)
        if handed_out:
            self._note(path)

    def reason(self, token: str) -> str | None:
        """Why a session is closed; None for one that is not known to be."""
        try:
            with self._path(token).open("rb") as file:
                return file.readline().decode().rstrip("\n")
        except FileNotFoundError:
            return None

    def hand_out(self, token: str) -> bytes | None:
        """What a session drew; the same again when it is asked for again soon."""
        path = self._path(token)
        try:
            export = path.read_bytes().partition(b"\n")[2]
        except FileNotFoundError:
            return None
        self._note(path)
        return export

    def discard(self) -> None:
        """Removes a temporary folder."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _note(self, path: Path) -> None:
        """Counts a file among those handed out, of which the oldest go."""
        with self._lock:
            self._handed_out.setdefault(path)
            while len(self._handed_out) > HANDED_OUT_KEPT:
                oldest = next(iter(self._handed_out))
                del self._handed_out[oldest]
                oldest.unlink(missing_ok=True)

    def _path(self, token: str) -> Path:
        # Tokens come from anybody, and open sessions: they are no file names.
        return self._folder / f"{blake2b(token.encode(errors='replace'), digest_size=16).hexdigest()}.json"
