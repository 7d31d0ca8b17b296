"""Faults that can be planted in the functions of a Python module, by mutmut's operators and by deleting lines. Pure.

Operators that only change texts are left out: `"XXnameXX"` shows at once where it was planted.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

Operator: TypeAlias = Callable[[cst.CSTNode], Iterable[cst.CSTNode]]
KINDS: dict[str, str] = {
    "operator_number": "off by one",
    "operator_name": "constant",
    "operator_assignment": "assignment",
    "operator_augmented_assignment": "operator",
    "operator_remove_unary_ops": "condition",
    "operator_arg_removal": "argument",
    "operator_symmetric_string_methods_swap": "method",
    "operator_unsymmetrical_string_methods_swap": "method",
    "operator_keywords": "condition",
    "operator_swap_op": "operator",
    "operator_match": "condition",
    "operator_if_exp": "condition",
}
"""mutmut's operators, and the kinds of their faults."""
DELETED = "deleted line"
_CONDITIONS = (cst.BooleanOperation, cst.ComparisonTarget)
_DELETABLE = (cst.Expr, cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Raise, cst.Assert, cst.Return, cst.Continue)


@dataclass(frozen=True, slots=True)
class Site:
    """One fault that can be planted: a node of a module, and the node that replaces it."""

    function: str
    """Qualified name of the outermost function or method."""
    first: int
    """First line of the function."""
    last: int
    kind: str
    lines: range
    """Lines of the statement, as far as the fault; only tests that run them can notice."""
    node: cst.CSTNode
    new: cst.CSTNode


@dataclass(frozen=True, slots=True)
class FaultyModule:
    """A parsed module and the faults that can be planted in it."""

    module: cst.Module
    sites: Sequence[Site]

    def planted(self, site: Site) -> str | None:
        """The module's text with one fault; None when it is no Python or no other text."""
        changed = self.module.deep_replace(site.node, site.new)
        text = changed.code if isinstance(changed, cst.Module) else ""
        try:
            compile(text, "planted", "exec")
        except (SyntaxError, ValueError):
            return None
        return text if text and text != self.module.code else None


def faulty(source: str) -> FaultyModule:
    """The faults of a module's text. Raises `libcst.ParserSyntaxError`.

    >>> module = faulty("def f(a):\\n    return a + 1\\n")
    >>> [(site.kind, module.planted(site).splitlines()[1].strip()) for site in module.sites]
    [('deleted line', 'pass'), ('operator', 'return a - 1'), ('off by one', 'return a + 2')]
    """
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    finder = _Finder()
    wrapper.visit(finder)
    return FaultyModule(wrapper.module, finder.sites)


class _Finder(cst.CSTVisitor):
    """Collects the sites of a module's functions, in the order of the text."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.names: list[str] = []
        self.functions: list[tuple[str, int, int]] = []
        self.statements: list[int] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self.statements.append(self.get_metadata(PositionProvider, node).start.line)
        if isinstance(node, cst.FunctionDef):
            self._function(node)
            return False
        if isinstance(node, cst.ClassDef):
            self.names.append(node.name.value)
        elif self.functions:
            self.sites += self._sites(node)
        return not isinstance(node, cst.Annotation)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self.statements.pop()
        if isinstance(original_node, cst.ClassDef):
            self.names.pop()

    def _function(self, node: cst.FunctionDef) -> None:
        """Visits the body only: defaults, decorators and annotations run when the module is imported."""
        if self.functions:
            node.body.visit(self)
            return
        at = self.get_metadata(PositionProvider, node)
        self.functions.append((".".join([*self.names, node.name.value]), at.start.line, at.end.line))
        node.body.visit(self)
        self.functions.pop()

    def _sites(self, node: cst.CSTNode) -> Iterator[Site]:
        function, first, last = self.functions[0]
        for kind, new in _changes(node):
            end = self.get_metadata(PositionProvider, node).end.line
            yield Site(function, first, last, kind, range(self.statements[-1], end + 1), node, new)


def _changes(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    """Kinds of faults and the nodes that replace this one."""
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 and isinstance(node.body[0], _DELETABLE):
        (only,) = node.body
        if not (isinstance(only, cst.Expr) and isinstance(only.value, cst.SimpleString | cst.ConcatenatedString)):
            yield DELETED, node.with_changes(body=[cst.Pass()])
    for kind_of_node, operator in mutators.mutation_operators:
        if isinstance(node, kind_of_node) and (kind := KINDS.get(operator.__name__)):
            swapped = kind == "operator" and isinstance(node, _CONDITIONS)
            for new in operator(node):
                yield "condition" if swapped else kind, new


def spread(sites: Sequence[Site], seed: int) -> list[Site]:
    """The sites in a random order that takes one of each function and kind before a second one of any."""
    order = random.Random(seed)
    taken: Counter[tuple[str, str]] = Counter()
    turns = []
    for site in order.sample(sites, len(sites)):
        taken[site.function, site.kind] += 1
        turns.append((taken[site.function, site.kind], order.random(), site))
    return [site for _, _, site in sorted(turns, key=lambda one: one[:2])]
