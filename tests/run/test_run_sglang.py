"""A run on the engine of another project, behind SGLang's documented routes (sglang_contract.py)."""

import json
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from engine_server import threaded
from external_engine import adapter_version
from sglang_contract import contract
from shoal.experience.audit import audit
from train_runs import start


@pytest.mark.parametrize("adapters", [True, False])
def test_a_run_with_adapters_sends_them_by_name_where_it_is_told_to_and_merged_weights_elsewhere(
    tmp_path: Path, tiny_model_dir: Path, adapters: bool
) -> None:
    """The adapter of an ended run is unloaded. A synchronous run overtakes no version before an engine has it."""
    old, _ = adapter_version(tiny_model_dir, tmp_path, 7)
    with threaded(tiny_model_dir) as engine, contract(engine.url) as (url, server):
        left = json.dumps({"lora_name": "shoal-ended-v7", "lora_path": str(old.parent)}).encode()
        urlopen(Request(f"{url}/load_lora_adapter", left)).close()
        server.asked.clear()
        settings = (f'--engine.urls=["{url}"]', f"--engine.adapters={json.dumps(adapters)}", "--train.lora.rank=2")
        run = start(tmp_path, tiny_model_dir, *settings, "--asynchrony.max_staleness=0", "--train.steps=3", "--json")
        out, err = run.communicate(timeout=200)
        assert run.returncode == 0, err
        named = [body["lora_name"] for path, body in server.asked if path == "/load_lora_adapter"]
        sampled = {body.get("lora_path") for path, body in server.asked if path == "/generate"}
    assert [str(name).rpartition("-")[2] for name in named] == (["v1", "v2", "v3"] if adapters else [])
    assert ("shoal-ended-v7" in server.adapters) is not adapters
    assert (sampled & set(named) != set()) is adapters
    assert json.loads(out.splitlines()[-1])["parity"] < 1e-4
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    assert report.steps == 3
