"""Faults that can be planted in a module."""

import ast

import pytest

from faulty_package import SOURCE
from shoal.software.faults import DELETED, faulty, spread

DEFAULTS = """@decorated(1)
def f(a: "list[1]" = 1):
    return a


class C:
    limit = 1

    def g(self):
        def h(b=1):
            return b == 1
        return h
"""


def test_every_fault_is_python_and_changes_one_function_only() -> None:
    module = faulty(SOURCE)
    before = {one.name: ast.dump(one) for one in ast.parse(SOURCE).body if isinstance(one, ast.FunctionDef)}
    assert len(module.sites) > 15
    for site in module.sites:
        planted = module.planted(site)
        assert planted is not None
        after = {one.name: ast.dump(one) for one in ast.parse(planted).body if isinstance(one, ast.FunctionDef)}
        assert [name for name in before if before[name] != after[name]] == [site.function]
        assert planted.count("LIMIT = 10") == 1


def test_defaults_decorators_and_annotations_stay_as_they_are() -> None:
    module = faulty(DEFAULTS)
    assert {site.function for site in module.sites} == {"f", "C.g"}
    for site in module.sites:
        planted = module.planted(site)
        assert planted is not None
        assert planted.startswith('@decorated(1)\ndef f(a: "list[1]" = 1):')
        assert "limit = 1\n" in planted


@pytest.mark.parametrize(
    ("line", "kind", "planted"),
    [
        ("return a[0:n]", "off by one", "return a[1:n]"),
        ("return a < n", "condition", "return a <= n"),
        ("return a and n", "condition", "return a or n"),
        ("return a - n", "operator", "return a + n"),
        ("return max(a, n)", "argument", "return max(a)"),
        ("return a.lstrip()", "method", "return a.rstrip()"),
        ("a.append(n)", DELETED, "pass"),
    ],
)
def test_the_kinds_of_faults(line: str, kind: str, planted: str) -> None:
    module = faulty(f"def f(a, n):\n    {line}\n")
    texts = [(site.kind, (module.planted(site) or "").splitlines()[1].strip()) for site in module.sites]
    normal = [(one, text.replace("(a, )", "(a)")) for one, text in texts]
    assert (kind, planted) in normal


def test_a_fault_is_noticed_from_the_first_line_of_its_statement_on() -> None:
    module = faulty("def f(a):\n    x = [\n        a,\n        a + 1,\n    ]\n    return x\n")
    (site,) = [site for site in module.sites if site.kind == "operator"]
    assert site.lines == range(2, 5)


def test_faults_are_spread_over_functions_and_kinds() -> None:
    sites = faulty(SOURCE).sites
    order = spread(sites, 1)
    pairs = {(site.function, site.kind) for site in sites}
    assert {(site.function, site.kind) for site in order[: len(pairs)]} == pairs
    assert spread(sites, 1) == order != spread(sites, 2)
