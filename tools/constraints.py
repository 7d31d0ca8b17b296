"""Prints the versions installed here of everything `shoal[dev]` needs, torch first: the text of constraints.txt."""

import re
from importlib.metadata import distribution

from packaging.requirements import Requirement


def closure(root: str, extras: frozenset[str]) -> dict[str, str]:
    """Name -> version of every distribution that `root[extras]` needs here, itself excluded."""
    found: dict[tuple[str, frozenset[str]], str] = {}
    pending = [(root, extras)]
    while pending:
        name, wanted = pending.pop()
        key = (canonical(name), wanted)
        if key in found:
            continue
        installed = distribution(name)
        found[key] = installed.version.partition("+")[0]  # a local build tag such as +cpu fits one machine only
        for text in installed.requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                pending.append((requirement.name, frozenset(requirement.extras)))
    return {name: version for (name, _), version in found.items() if name != canonical(root)}


def canonical(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    versions = closure("shoal", frozenset({"dev"}))
    print("# Versions that Shoal is tested with. Written by `make constraints`.")
    for name in sorted(versions, key=lambda name: (name != "torch", name)):
        print(f"{name}=={versions[name]}")
