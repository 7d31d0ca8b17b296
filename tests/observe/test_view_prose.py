"""Texts of models become HTML of a short list of tags, whatever they say."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from payloads import PAYLOADS
from shoal.observe.view.prose import ATTRIBUTES, MATH_TAGS, TEXT_TAGS, markdown_of_a_page, prose

PIECES = (
    *("$", "$$", "\\(", "\\)", "\\[", "\\]", "\\begin{align}", "\\end{align}", "\\text{", "\\href{", "}"),
    *("<script>", "</script>", "<img src=x onerror=y>", "</math>", "<svg>", "<mi>", "<style>", "<!--", "-->", "&lt;"),
    *("```", "`", "**", "[a](javascript:b)", "![a](b)", "<http://a>", "\n", "\n\n", "| a |\n|--|\n", "# ", "> ", "- "),
    *("\\frac{a}{b}", "x", "\x00"),
)


class Seen(HTMLParser):
    """Tags and attributes of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data


def assert_harmless(text: str) -> None:
    seen = Seen(str(prose(text)))
    assert seen.tags <= TEXT_TAGS | MATH_TAGS
    assert seen.attributes <= {(tag, name) for tag, names in ATTRIBUTES.items() for name in names}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_leaves_nothing_but_text(payload: str) -> None:
    assert_harmless(payload)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25))
def test_no_mixture_of_markdown_mathematics_and_html_gets_another_tag_through(pieces: list[str]) -> None:
    assert_harmless("".join(pieces))


def test_markdown_code_and_mathematics_look_like_themselves() -> None:
    page = str(
        prose(
            "# Sum\n\n1. **two** and `x < y`\n\n```python\nif a < b:\n    c\n```\n\nso \\(\\frac{1}{2}\\)\n\n\\[x^2\\]"
        )
    )
    for part in ("<h1>Sum</h1>", "<strong>two</strong>", "<code>x &lt; y</code>", "    c\n", "<mfrac>", "<msup>"):
        assert part in page
    assert 'display="block"' in page


@pytest.mark.parametrize(
    "text",
    [
        "$5 and $6",
        "[press](javascript:x)",
        "![x](http://a/b.png)",
        "&lt;b&gt;",
        "<b>x</b>",
        "$\\text{<b>x</b>}$",
        "\\(open",
    ],
)
def test_what_is_no_markdown_of_ours_stays_as_written(text: str) -> None:
    assert Seen(str(prose(text))).words.strip() == text.replace("\\(open", "(open")


def test_a_broken_formula_stays_as_written() -> None:
    assert "\\frac{" in Seen(str(prose("$\\frac{$"))).words


def test_a_huge_text_is_shown_without_being_parsed() -> None:
    page = str(prose("**a** " * 10_000))
    assert page.startswith("<pre>")
    assert "<strong>" not in page


@pytest.mark.parametrize(
    "piece", ["- a\n", "$&&&$", "**a** ", "*a_", "\\(x\\) ", "> - ", "| a |\n|--|\n", "`", "[", "# a\n"]
)
def test_the_texts_of_a_page_share_a_bound_of_markdown(piece: str) -> None:
    """What is beyond it is shown whole, as written."""
    few = piece * (2000 // (2 * len(piece)))
    written = Markup("<pre>{}</pre>").format(few)
    with markdown_of_a_page():
        shown = [prose(few) == written for _ in range(60)]
    assert shown[0] is False
    assert shown[-1] is True
    assert prose(few) != written, "the next page has a bound for itself"
