"""Loading of the tokenizer and chat template of a Hugging Face model directory.

`PreTrainedTokenizerFast` reads `tokenizer.json` and renders the template in a sandboxed environment, both without
torch, which the main process lacks.
"""

import json
from pathlib import Path

from shoal.errors import ModelError
from shoal.files import cache_directory
from shoal.model.chat_template import ChatRenderer
from shoal.model.quantised import convert, dequantised, gguf_file, name_of
from shoal.net.collection import uncollected


def local_directory(path: str) -> Path:
    """Directory of a model: the named one, the download of a hub name, or what was made of their quantised weights.

    Raises `ModelError`.
    """
    file = gguf_file(path)
    if file is not None:
        return convert(file)
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(f"model directory {path!r} has neither config.json nor a GGUF file")
        return dequantised(directory)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"model directory {path!r} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        fetched = snapshot_download(path, ignore_patterns=["*.bin", "*.gguf", "*.pth", "original/*"])
    except (HFValidationError, OSError) as error:  # the hub's own errors are OSErrors too
        raise ModelError(f"model {path!r}: no such directory is here, and {_refusal(error)}") from error
    return dequantised(Path(fetched))


def found_directory(path: str) -> Path | None:
    """Directory with a model's tokenizer that is here already; None where it would have to be made or fetched."""
    try:
        file = gguf_file(path)
    except ModelError:
        return None
    if file is not None:
        return cache_directory() / name_of(file)
    directory = Path(path).expanduser()
    if directory.is_dir() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        return directory
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "tokenizer.json")
    return Path(found).parent if isinstance(found, str) else None


def _refusal(error: Exception) -> str:
    """Says why the hub gave no model, and what to do."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "the hub gives it to those only who accepted its terms on its page and logged in (hf auth login)"
        case errors.RepositoryNotFoundError():
            return "the hub has none of this name, or a private one; see its spelling, or log in (hf auth login)"
        case errors.HFValidationError():
            return "invalid hub name: expected OWNER/NAME"
        case errors.LocalEntryNotFoundError():
            return "the hub cannot be reached from here; fetch it where the network is, and give its directory"
    return f"the hub did not send it: {str(error).strip().splitlines()[0]}"


def load_renderer(path: Path) -> ChatRenderer:
    """Renderer of a model directory. Raises `ModelError` without a tokenizer."""
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"model directory {str(path)!r} has no tokenizer.json")
    with uncollected():
        from transformers import PreTrainedTokenizerFast  # not AutoTokenizer, which imports torch

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # a damaged file makes transformers raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model {str(path)!r} has no usable tokenizer: {why}") from error
    stops = _stop_token_ids(path, tokenizer.eos_token_id)
    if not stops:
        raise ModelError(f"model {str(path)!r} names no end-of-sequence token, so that no answer could end")
    return ChatRenderer(tokenizer, stops)


def _stop_token_ids(path: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """End-of-sequence token of the tokenizer, and the tokens that the generation config adds."""
    stops = [] if eos_token_id is None else [eos_token_id]
    generation = path / "generation_config.json"
    if generation.is_file():
        try:
            listed = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ModelError(f"{generation}: expected a JSON object: {error}") from None
        stops += listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(type(stop) is int and stop >= 0 for stop in stops):
            raise ModelError(f"{generation}: eos_token_id: expected token ids, got {listed!r}")
    return tuple(dict.fromkeys(stops))
