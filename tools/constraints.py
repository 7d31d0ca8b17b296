"""Prints the installed versions of everything that pyproject.toml needs, torch first: the text of constraints.txt."""

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Name -> version of every distribution that the requirements need here, directly or not."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [(Requirement(text), frozenset({""})) for text in requirements]
    while pending:
        requirement, asked_with = pending.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in asked_with):
            continue
        name, extras = canonical(requirement.name), frozenset({"", *requirement.extras})
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = distribution(name)
        found[name] = installed.version.partition("+")[0]  # a local build tag such as +cpu fits one machine only
        pending += [(Requirement(text), extras) for text in installed.requires or []]
    return found


def canonical(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    project = tomllib.loads(PROJECT.read_text())["project"]
    versions = closure([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    print("# Versions that Shoal is tested with. Written by `make constraints`.")
    for name in sorted(versions, key=lambda name: (name != "torch", name)):
        print(f"{name}=={versions[name]}")
