"""Sentences of the documents and summaries of docstrings name the thing, then say what it does.

`python tests/house/test_prose.py` lowers the allowance to the truth; with paths it prints their unclear sentences.
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
    return [
        f"{fault}: {sentence}"
        for paragraph in prose(page)
        for sentence in sentences(paragraph)
        for fault in faults(sentence)
    ]


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
    """The faults of each page and of each module's docstring summaries, by path; without faults a path is left out."""
    found = {page.relative_to(ROOT).as_posix(): page_faults(page.read_text()) for page in PAGES}
    for path in sorted(SOURCE.rglob("*.py")):
        wrong = [f"{fault}: {text}" for text in summaries(path.read_text()) for fault in faults(text)]
        found[path.relative_to(ROOT).as_posix()] = wrong
    return {path: wrong for path, wrong in found.items() if wrong}


def allowance() -> dict[str, int]:
    """How many faults each file may still have."""
    rows = [line.split() for line in ALLOWANCE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: int(number) for name, number in sorted(rows, key=lambda row: -int(row[1]))}  # a merge leaves both


def test_no_page_and_no_module_has_more_unclear_sentences_than_its_allowance() -> None:
    allowed = allowance()
    assert {path: wrong for path, wrong in counted().items() if len(wrong) > allowed.get(path, 0)} == {}


def test_no_allowance_is_higher_than_the_truth() -> None:
    found = counted()
    better = {path for path, most in allowance().items() if len(found.get(path, [])) < most}
    assert not better, "fewer are left: run `python tests/house/test_prose.py`, which lowers the allowance"


def test_the_lint_finds_a_planted_violation_of_each_kind_and_passes_over_code() -> None:
    long = " ".join(["word"] * (MOST_WORDS + 1))
    page = (
        f"# What a heading may say\n\nWhoever reads this. A log is\nkept.\n\n- The same once more\n- Of use\n\n"
        f"| What | a table |\n\n    What is code\n\n```sh\nWhat is code\n```\n\n{long}.\n"
        f"<!-- x:begin -->\nWhat is generated\n<!-- x:end -->\n"
    )
    kinds = Counter(fault.partition(":")[0] for fault in page_faults(page))
    assert kinds == {"begins with Whoever": 1, "begins with The same": 1, "begins with Of": 1, "has 26 words": 1}


def test_the_lint_reads_the_docstrings_of_modules_classes_functions_and_constants() -> None:
    source = (
        '"""Of it."""\nX = 1\n"""By hand."""\nclass A:\n    """A log."""\n'
        '    def f(self):\n        """Who asks.\n\n        Of use."""\n'
    )
    found = [fault for text in summaries(source) for fault in faults(text)]
    assert sorted(found) == ["begins with By", "begins with Of", "begins with Who"]


def write_allowance() -> None:
    """Lowers each number of the allowance to the truth; a number is raised by hand only, where a review sees it."""
    allowed = allowance() if ALLOWANCE.exists() else None
    rows = []
    for path, wrong in counted().items():
        if number := len(wrong) if allowed is None else min(len(wrong), allowed.get(path, 0)):
            rows.append(f"{path} {number}\n")
    head = "# Sentences of each file that still break the rule of tests/house/test_prose.py. May only shrink.\n"
    ALLOWANCE.write_text(head + "".join(rows))


if __name__ == "__main__":
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(name, *counted().get(name, []), sep="\n  ")
    else:
        write_allowance()
