"""Command `python -m shoal.model.dequantise DIRECTORY FILE`: writes the Hugging Face directory of a GGUF file."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from shoal.net.process import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Writes the directory of a GGUF file; prints an error and returns 1 when the file cannot be read."""
    die_with_parent()
    torch.set_num_threads(1)
    directory, file = Path(arguments[0]), Path(arguments[1])
    sys.stderr.write(f"reading {file.name} (once)\n")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
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
