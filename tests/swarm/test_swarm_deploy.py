"""The files of deploy/ name commands, options, volumes and secrets that exist; invitations and the status page."""

import json
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]
import typer
import yaml
from typer.testing import CliRunner

from shoal.cli import app
from shoal.config import load
from shoal.net.identity import Identity

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOKEN = "coral"


def resolved(words: list[str]) -> None:
    """Parses a command line as `shoal` does, without running it. Raises for whatever it would refuse."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("shoal", list(words), resilient_parsing=False)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    if "config" in context.params and context.obj is not None:
        load(DEPLOY / "run.toml", context.obj)


def words_of(container: dict[str, Any]) -> list[str]:
    """The words after `shoal`, with variables filled in as the container's shell does."""
    if "sh" in (container.get("entrypoint") or container.get("command") or [])[:1]:
        line = (container.get("args") or container["command"])[0].removeprefix("exec shoal ")
        for variable, value in (("${SHOAL_SWARM_TOKEN}", TOKEN), ("${POD##*-}", "1")):
            line = line.replace(variable, value)
        head, _, tail = line.partition("$$(od")
        line = head + "7" + tail.partition(")")[2] if tail else line.partition("$(test")[0]
        return shlex.split(line)
    words = container.get("args") or container["command"]
    return [word.replace("${SHOAL_SWARM_TOKEN}", TOKEN).replace("$(SHOAL_SWARM_TOKEN)", TOKEN) for word in words]


def test_compose_runs_commands_that_exist_and_mounts_what_it_declares() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"server", "node", "people", "judge"}
    for name, service in compose["services"].items():
        resolved(words_of(service))
        for volume in service["volumes"]:
            assert volume == "/runs" or volume.partition(":")[0] in compose["volumes"], name
        for config in service.get("configs", []):
            assert (DEPLOY / compose["configs"][config["source"]]["file"]).is_file()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "nothing is open to the world"


def kubernetes() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


def test_kubernetes_runs_commands_that_exist_and_its_services_find_their_pods() -> None:
    parts = list(kubernetes())
    ports = {part["metadata"]["name"]: part["spec"]["ports"][0]["port"] for part in parts if part["kind"] == "Service"}
    sets = {part["metadata"]["name"]: part["spec"] for part in parts if part["kind"] == "StatefulSet"}
    assert set(sets) == {"shoal-server", "shoal-node", "shoal-people", "shoal-judge"}
    for name, spec in sets.items():
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == {"app": name}
        (container,) = spec["template"]["spec"]["containers"]
        words = words_of(container)
        resolved(words)
        assert f"@shoal-server:{ports['shoal-server']}" in " ".join(words) or name in ("shoal-server", "shoal-judge")
        if name in ports:
            assert container["ports"][0]["containerPort"] == ports[name]
        volumes = {one["name"] for one in spec["template"]["spec"].get("volumes", [])}
        volumes |= {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_an_invitation_is_a_line_that_joins_with_address_key_and_data_sets(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'run_dir = "{tmp_path}/runs/latest"\n'
        '[[tasks]]\nname = "gcd"\n[[tasks]]\nname = "guess_number"\nservice = "turns"\n'
        '[swarm]\nservers = ["nats://10.0.0.7:4222"]\nname = "reef"\n'
    )
    key = tmp_path / "guest.nk"
    swarm = tmp_path / "runs" / "latest" / "swarm"
    own, known = Identity.load(swarm / "identity.pem").peer_id, [f"{number:032x}" for number in range(20)]
    (swarm / "known.txt").write_text("\n".join([own, *known]))
    done = CliRunner().invoke(app, ["swarm", "invite", str(config), "--token", "a b", "--nkey", str(key), "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.output.splitlines()[-1])
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert made["public_key"].startswith("U")
    assert nkeys.from_seed(bytearray(key.read_bytes().strip())).public_key.decode() == made["public_key"]
    credentials, peers, *words = shlex.split(made["line"])
    assert credentials == f"SHOAL_NATS_CREDENTIALS={key}"
    assert peers == f"SHOAL_SWARM_KNOWN={','.join([own, *known[:15]])}"
    assert words[:3] == ["shoal", "train", "RUN.toml"]
    guest = tmp_path / "guest.toml"
    guest.write_text('[[tasks]]\nname = "chain_sum"\n')
    joined = load(guest, words[3:]).swarm
    assert joined.servers == ["nats://a%20b@10.0.0.7:4222"]
    assert (joined.name, joined.datasets, joined.external_groups) == ("reef", ["gcd"], 4)
    again = CliRunner().invoke(app, ["swarm", "invite", str(config), "--nkey", str(key)])
    assert again.exit_code != 0
