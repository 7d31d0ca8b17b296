"""Files for clusters and containers are of the form that their readers want, and start commands that Shoal has."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from typer.main import get_command

from shoal.cli import app
from shoal.cli.services import TEMPLATES
from shoal.config import parse

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
HADOLINT = Path(sys.executable).parent / "hadolint"
KUBERNETES = "1.34"
"""Version whose schemas are used."""


@pytest.mark.parametrize("path", sorted(TEMPLATES.iterdir()), ids=lambda path: path.stem)
def test_a_template_starts_a_run_where_roles_join(path: Path) -> None:
    text = path.read_text()
    assert "shoal train" in text
    assert "--cluster.listen=" in text
    assert "SHOAL_RUN_TOKEN" in text
    assert ("--cluster.address=" in text) == (path.stem != "kubernetes")
    if path.suffix == ".sh":
        subprocess.run(["bash", "-n", str(path)], check=True)


def objects() -> Iterator[Any]:
    """Kubernetes objects of the templates; a pod of KubeRay, whose own kinds have no schema here, by itself."""
    yield from yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())
    spec = yaml.safe_load((TEMPLATES / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "shoal"}, **group["template"]}


def test_kubernetes_takes_every_object_of_the_templates() -> None:
    found = list(objects())
    for one in found:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    assert [one["kind"] for one in found].count("Pod") == 2
    found[0]["spec"]["ports"][0]["port"] = "8200"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[0], KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_hadolint_finds_nothing_in_a_dockerfile(name: str, tmp_path: Path) -> None:
    linted = subprocess.run([HADOLINT, str(CONTAINERS / name)], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")
    (tmp_path / name).write_text((CONTAINERS / name).read_text().replace(" --no-install-recommends", ""))
    assert subprocess.run([HADOLINT, str(tmp_path / name)], capture_output=True, check=False).returncode == 1


def test_the_files_that_every_image_gets_make_the_package(tmp_path: Path) -> None:
    copied = {
        re.sub(r"(?m)^(?!COPY).*\n?", "", (ROOT / name).read_text())
        for name in ("containers/Dockerfile", "containers/Dockerfile.cuda", "deploy/Dockerfile")
    }
    (lines,) = copied
    for *sources, target in (line.split()[1:] for line in lines.splitlines()):
        for source in sources:
            assert (ROOT / source).exists()
            place = tmp_path / target / (Path(source).name if target.endswith("/") else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():  # Python replaces compiled files there at any time
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").glob("shoal-*.whl")
    assert {"shoal/cli/__init__.py", "shoal/cluster/templates/slurm.sh"} <= set(ZipFile(wheel).namelist())


def commands() -> Iterator[list[str]]:
    """Arguments of `shoal` in the containers of compose and Kubernetes."""
    for service in yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["services"].values():
        if service["image"].startswith("shoal"):
            yield service["command"]
    for one in objects():
        for container in one["spec"].get("template", {}).get("spec", {}).get("containers", []):
            words = container["args"]
            yield words if "command" not in container else re.findall(r"shoal (.*) \$resume", words[0])[0].split()


def test_compose_takes_its_file_and_shoal_every_command_of_the_containers() -> None:
    PyCompose.from_json(json.dumps(yaml.safe_load((CONTAINERS / "compose.yaml").read_text())))
    found = list(commands())
    assert len(found) == 6
    for words in found:
        verb: Any = get_command(app)
        rest = list(words)
        while hasattr(verb, "commands"):
            verb = verb.commands[rest.pop(0)]
        if rest[0].endswith(".toml"):
            parse({"tasks": [{"name": "chain_sum"}]}, rest[1:])
        else:
            verb.make_context(verb.name, rest)
