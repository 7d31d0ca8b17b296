"""Two ranks on hosts that share no directory write one Version: the bytes are those that a rank alone writes."""

import asyncio
import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from engine_models import saved
from rank_processes import run_ranks
from shoal.cluster.files import FileShelf, send_files
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import TrainerError
from shoal.files import MODEL_FILE
from shoal.net.client import Client
from shoal.net.listening import free_port
from shoal.net.run_server import RunServer
from shoal.trainer.ranks import ALONE, Ranks, local
from shoal.trainer.row_files import RowLayout, rows_of, write_rows
from shoal.trainer.trainer import Trainer
from shoal.weights.manifest import manifest_of
from shoal.weights.store import WeightStore

RANKS, TOKEN = 2, "a token of this test"
MIXTURE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "moe_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, object], ModelConfig]] = {
    "dense": ("dense", {}, ModelConfig(device="cpu", dtype="bfloat16")),
    "adapters": ("dense", {"lora": {"rank": 2, "alpha": 4.0}}, ModelConfig(device="cpu")),
    "experts": ("mixture", {}, ModelConfig(device="cpu")),
    "joined": ("joined", {}, ModelConfig(device="cpu")),
    "experts apart": ("mixture", {"backend": "experts"}, ModelConfig(device="cpu", dtype="bfloat16")),
}


def trainer(models: dict[str, Path], case: str, ranks: Ranks) -> Trainer:
    model, train, how = CASES[case]
    return Trainer(models[model], how, TrainConfig.model_validate(train), ranks=ranks)


def memory(name: str) -> int:
    """Bytes of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def rank(index: int, models: dict[str, Path], folder: Path, master: str, url: str, tickets: dict[str, str]) -> None:
    """Writes each case into a folder of its own, and sends it; measures the memory that a large Version takes."""
    torch.set_num_threads(1)
    ranks, own = Ranks(index, RANKS), folder / f"host-{index}"
    ranks.meet(master, "cpu")

    async def send(case: str) -> None:
        client = Client(url, token=TOKEN)
        await send_files(client, tickets[case], own / case)
        await client.aclose()

    for case in CASES:
        (own / case).mkdir(parents=True)
        trainer(models, case, ranks).write_weights(own / case / MODEL_FILE)
        asyncio.run(send(case))
    copy = trainer(models, "dense", Ranks(index, RANKS, per_copy=1))
    assert bool([*rows_of(copy.tensors(), ranks)]) == ranks.first, "one of two copies is written"
    large = Trainer(models["large"], ModelConfig(device="cpu"), TrainConfig(), ranks=ranks)
    whole = sum(one.numel() * 4 for one in large.tensors().values())
    assert sum(float(local(one).sum()) for one in large.tensors().values())  # slices are read when they are first used
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    large.write_weights(own / MODEL_FILE)
    assert memory("VmHWM") - before < 0.1 * whole
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_ranks_without_a_directory_in_common_write_the_bytes_of_one_rank(tiny_model_dir: Path, tmp_path: Path) -> None:
    mixture = saved("Qwen3Moe", tmp_path / "mixture", num_experts=4, **MIXTURE)
    large = saved("Llama", tmp_path / "large", vocabulary=100_000)
    joined = saved("OlmoHybrid", tmp_path / "joined")
    models, shelf = {"dense": tiny_model_dir, "mixture": mixture, "joined": joined, "large": large}, FileShelf()
    store = WeightStore(tmp_path / "weights")
    folders = {case: store.begin(version) for version, case in enumerate(CASES)}
    with RunServer(shelf.routes, token=TOKEN) as server, ExitStack() as stack:
        for folder in folders.values():
            stack.enter_context(shelf.opened(folder))
        tickets = {case: shelf.ticket(folder) for case, folder in folders.items()}
        given = (models, tmp_path, f"127.0.0.1:{free_port()}", server.url, tickets)
        run_ranks(rank, given, RANKS)
    for version, case in enumerate(CASES):
        assert store.kept(version) is None, "it is no Version until it is sealed"
        store.seal(version)
        wanted = tmp_path / "alone" / case
        wanted.mkdir(parents=True)
        trainer(models, case, ALONE).write_weights(wanted / MODEL_FILE)
        shutil.copy(store.directory_of(version) / "checksum", wanted)
        assert manifest_of(version, store.directory_of(version)) == manifest_of(version, wanted), case
        rows = [written_by_host(tmp_path / f"host-{index}" / case / MODEL_FILE) for index in range(RANKS)]
        assert sum(rows) == (wanted / MODEL_FILE).stat().st_size, "no byte is written twice, and none is left out"
        # Layers that a checkpoint joins are gathered, and the first rank writes them.
        assert max(rows) < 0.75 * sum(rows) or (case == "joined" and rows[0] > rows[1] > 0), case
    half = len(CASES)  # of which one rank has sent its rows when the other one is killed
    shutil.copy(tmp_path / "host-0" / "dense" / MODEL_FILE, store.begin(half))
    assert (store.kept(half), store.directory_of(half).exists()) == (None, False)
    assert list(store.begin(half).iterdir()) == [], "the next rank group begins it anew"


def written_by_host(file: Path) -> int:
    """Bytes of a file that a rank wrote."""
    ranges: list[list[int]] = json.loads(file.with_name(f"{MODEL_FILE}.ranges").read_text())
    return sum(size for _, size in ranges)


def test_a_file_of_rows_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
    tensors = {f"größe {index}": torch.arange(6).reshape(2, 3).to(dtype) for index, dtype in enumerate(dtypes)}
    tensors |= {"none": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "wanted", metadata={"format": "pt"})
    (tmp_path / "got").write_bytes(b"something longer" * 100)
    write_rows(tmp_path / "got", RowLayout.of(tensors), rows_of(tensors, ALONE), ALONE)
    assert (tmp_path / "got").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert load_file(tmp_path / "got").keys() == tensors.keys()
    with pytest.raises(TrainerError, match="cannot be written"):
        write_rows(tmp_path / "no" / "got", RowLayout.of(tensors), rows_of(tensors, ALONE), ALONE)
