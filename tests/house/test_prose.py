"""Pages and code use plain sentences: no relative clause as a subject, at most 25 words, no idiom of the list.

`prose_allowance.txt` has a budget of faults per file, a line each; a missing file has none. Budgets only shrink:
`python tests/house/test_prose.py` lowers them to the counts of today, and moves the budgets of renamed files. With
paths it prints the faults of these files.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
ALLOWANCE = Path(__file__).with_name("prose_allowance.txt")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MOST_WORDS = 25
OPENERS = re.compile(r"(What|Who|Whoever|Whatever|Whom|Of|Those|By|The same|That which)\b")
IDIOMS = re.compile(
    r"\b(?:(?i:of (?:its|their|one's) own|beside|for ever|told|what (?:it|they) (?:is|are)|whoever|whatever|nobody"
    r"|anybody)|(?:is|are) none)\b"
)
"""Idioms that an engineer seldom writes; the budget leaves room where one is right."""
SLACK = 3
"""Faults by which a budget may be above the count, so that mending a sentence needs no other change."""
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+>]|\d+\.)\s)")
ITEM = re.compile(r"^\s*(?:[-*+>]|\d+\.)\s+")
ABBREVIATION = re.compile(r"\b(Eq|eqs?|e\.g|i\.e|vs|al|approx|No)\.\s")
END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+")


def prose(page: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without code, tables, headings and generated parts."""
    text = re.sub(r"<!--.*?-->", "\n\n", GENERATED.sub("\n\n", FENCE.sub("\n\n", page)), flags=re.DOTALL)
    lines = [
        "" if re.match(r"\s*(\||#|!\[|\[[\w-]+\]:|    )", line) and not ITEM.match(line) else line
        for line in text.split("\n")
    ]
    for block in BREAK.split("\n".join(lines)):
        if block.strip():
            yield ITEM.sub("", block.strip("\n"))


def sentences(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph; code in backticks and the target of a link count as one word or none."""
    text = re.sub(r"``.*?``|`[^`]*`", "`code`", paragraph, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", text)
    for sentence in END.split(ABBREVIATION.sub(r"\1 ", " ".join(text.split()))):
        if sentence:
            yield sentence


def faults(sentence: str) -> list[str]:
    """The ways in which one sentence breaks the rule."""
    words = [word for word in sentence.split() if re.search(r"\w", word)]
    found = []
    if opener := OPENERS.match(sentence):
        found.append(f"begins with {opener[1]}")
    if len(words) > MOST_WORDS:
        found.append(f"has {len(words)} words")
    return found


def page_faults(page: str) -> list[str]:
    """Each fault of a page, with the sentence."""
    unclear = [
        f"{fault}: {sentence}"
        for paragraph in prose(page)
        for sentence in sentences(paragraph)
        for fault in faults(sentence)
    ]
    return unclear + idioms(GENERATED.sub("\n\n", FENCE.sub("\n\n", page)))


def idioms(text: str) -> list[str]:
    """Each idiom of a text, with its line."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return [f"says {found[0]}: {line}" for line in lines for found in IDIOMS.finditer(line)]


def summaries(source: str) -> Iterator[str]:
    """The first sentence of every docstring of a module: its own, of classes, functions, fields and constants."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from list(sentences(value.value.strip().split("\n\n")[0]))[:1]


def counted() -> dict[str, list[str]]:
    """The faults of each page, and of each module's docstrings and comments, by path; flawless files are left out."""
    found = {page.relative_to(ROOT).as_posix(): page_faults(page.read_text()) for page in PAGES}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        wrong = [f"{fault}: {text}" for text in summaries(source) for fault in faults(text)]
        found[path.relative_to(ROOT).as_posix()] = wrong + idioms(source)
    return {path: wrong for path, wrong in found.items() if wrong}


def allowance() -> dict[str, int]:
    """How many faults each file may still have."""
    rows = [line.split() for line in ALLOWANCE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: int(number) for name, number in sorted(rows, key=lambda row: -int(row[1]))}  # a merge leaves both


def test_no_page_and_no_module_has_more_faults_than_its_budget() -> None:
    allowed = allowance()
    over = {path: wrong for path, wrong in counted().items() if len(wrong) > allowed.get(path, 0)}
    assert over == {}, "for a renamed file, run `python tests/house/test_prose.py`, which moves its budget"


def test_no_budget_is_far_above_the_count() -> None:
    found = counted()
    high = {path for path, most in allowance().items() if len(found.get(path, [])) < most - SLACK}
    assert not high, "run `python tests/house/test_prose.py`, which lowers the budgets"


def test_the_lint_finds_a_planted_violation_of_each_kind_and_passes_over_code() -> None:
    long = " ".join(["word"] * (MOST_WORDS + 1))
    page = (
        f"# What a heading may say\n\nWhoever reads this. A log is\nkept.\n\n- The same once more\n- Of use\n\n"
        f"| What | a table |\n\n    What is code\n\n```sh\nWhat is code\n```\n\n{long}.\n"
        f"<!-- x:begin -->\nWhat is generated\n<!-- x:end -->\nA room of its own, beside\nnobody.\n"
    )
    kinds = Counter(fault.partition(":")[0] for fault in page_faults(page))
    assert kinds == {
        **{"begins with Whoever": 1, "begins with The same": 1, "begins with Of": 1, "has 26 words": 1},
        **{"says Whoever": 1, "says of its own": 1, "says beside": 1, "says nobody": 1},
    }


def test_the_lint_reads_the_docstrings_of_modules_classes_functions_and_constants() -> None:
    source = (
        '"""Of it."""\nX = 1\n"""By hand."""\nclass A:\n    """A log."""\n'
        '    def f(self):\n        """Who asks.\n\n        Of use."""\n'
    )
    found = [fault for text in summaries(source) for fault in faults(text)]
    assert sorted(found) == ["begins with By", "begins with Of", "begins with Who"]


def lowered(allowed: dict[str, int], found: dict[str, int], there: set[str]) -> dict[str, int]:
    """Budgets no higher than the counts; new files share what vanished files had. A budget is raised by hand only."""
    spare = sum(most for path, most in allowed.items() if path not in there)
    budgets = {}
    for path, count in sorted(found.items()):
        new = path not in allowed
        budgets[path] = min(count, spare if new else allowed[path])
        spare -= budgets[path] if new else 0
    return {path: most for path, most in budgets.items() if most}


def test_a_renamed_file_takes_its_budget_along_and_no_budget_rises() -> None:
    found = {"a": 2, "b": 5, "new": 4, "newer": 3}
    assert lowered({"a": 3, "b": 4, "gone": 5}, found, {*found}) == {"a": 2, "b": 4, "new": 4, "newer": 1}


def write_allowance() -> None:
    """Lowers the budgets to the counts of today."""
    found = {path: len(wrong) for path, wrong in counted().items()}
    there = {path for path in allowance() if (ROOT / path).is_file()} | set(found)
    rows = [f"{path} {most}\n" for path, most in lowered(allowance(), found, there).items()]
    head = "# Faults that each file may still have by tests/house/test_prose.py. Budgets only shrink.\n"
    ALLOWANCE.write_text(head + "".join(rows))


if __name__ == "__main__":
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(name, *counted().get(name, []), sep="\n  ")
    else:
        write_allowance()
