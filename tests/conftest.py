"""What all tests share: one thread per process, a tiny model, and no skipping under CI=true."""

import asyncio
import gc
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports torch: threads of several test processes on few cores would only wait for each other.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ.setdefault(name, value)

# A user whose home cannot be written sets XDG_CACHE_HOME; so do the tests of such a user.
cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
while not cache.exists():
    cache = cache.parent
if not os.access(cache, os.W_OK):
    os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/shoal-tests-{os.getuid()}"

# Collecting while torch and transformers are imported finds nothing, and takes a quarter of that time.
gc.disable()

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

settings.register_profile("shoal", deadline=None, max_examples=50)
settings.load_profile("shoal")

OPTIONAL = ("gpu", "vllm", "cookbook", "torchtitan", "harness", "trackers", "s3")
"""Marks of tests that may be skipped: they need a device, or an environment of their own."""

TINY_CHARACTERS = "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"
TINY_SPECIALS = ("<pad>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def _browser_ends() -> Iterator[None]:
    """Ends the browser that tests share, if one was opened."""
    yield
    if "browser" in sys.modules:
        sys.modules["browser"].close_browser()


@pytest.fixture(autouse=True)
def _background_processes_end() -> Iterator[None]:
    """Ends what a failed test has left running."""
    yield
    if "left_processes" in sys.modules:
        sys.modules["left_processes"].end_all()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: Qwen2 of 2 layers and width 32, one token per character, a chat template."""
    path = tmp_path_factory.mktemp("tiny_model")
    save_tiny_tokenizer(path)
    save_tiny_weights(path)
    return path


def save_tiny_tokenizer(path: Path) -> None:
    """One token per character of `TINY_CHARACTERS`, after the specials; `<|end|>` ends a turn."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*TINY_SPECIALS, *TINY_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TINY_SPECIALS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)


def save_tiny_weights(path: Path) -> None:
    """Random weights from a fixed seed, large enough that the distributions are far from uniform."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = len(TINY_SPECIALS) + len(TINY_CHARACTERS)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=TINY_SPECIALS.index("<pad>"),
        bos_token_id=None,
        eos_token_id=TINY_SPECIALS.index("<|end|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)


STARTING = pytest.StashKey[list[str]]()
"""Node ids, without parameters, of the tests that start something."""


def pytest_configure(config: pytest.Config) -> None:
    """Finds which tests start something, where a selection asks for it; processes of xdist get the answer."""
    if hasattr(config, "workerinput"):
        config.stash[STARTING] = config.workerinput["starting"]
    elif "starts" in config.option.markexpr:
        from starts import starting

        config.stash[STARTING] = starting(sorted(Path(__file__).parent.rglob("test_*.py")))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: "WorkerController") -> None:
    node.workerinput["starting"] = node.config.stash.get(STARTING, [])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files unread that start nothing, where only tests that start something are wanted: a third of them."""
    if not config.option.markexpr.startswith("starts") or not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(Path(__file__).parents[1]).as_posix()
    return None if any(name.startswith(f"{file}::") for name in config.stash[STARTING]) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that start something (tests/support/starts.py), and those of tests/product/."""
    starting = set(config.stash.get(STARTING, []))
    for item in items:
        if item.nodeid.partition("[")[0] in starting:
            item.add_marker("starts")
        if item.path.parent.name == "product":
            item.add_marker("product")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def skips_fail() -> bool:
    """Whether a skipped test is a failure: on a laptop something may be missing, in CI nothing may."""
    return os.environ.get("CI") == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    optional = any(item.get_closest_marker(name) for name in OPTIONAL)
    if report.skipped and skips_fail() and not optional:
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure under CI=true: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and skips_fail():
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure under CI=true: {report.longrepr}"
    return report
