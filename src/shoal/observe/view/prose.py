"""Texts of models as HTML: markdown, code and mathematics, without a link, an image or a script.

Three independent defences, each sufficient: markdown-it escapes HTML, nh3 admits a short list of tags and few
attributes, and the page's policy runs only its own scripts. Links stay as written. LaTeX becomes MathML, which browsers
draw natively.
"""

import html
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
import nh3
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from markupsafe import Markup
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin

from shoal.observe.progress import quoted, reward_text

MOST_FORMULA_CHARACTERS = 1000
MOST_FORMULAS = 100
"""Formulas of one text; later ones stay as written."""
MOST_MARKS, MOST_MARKS_OF_A_PAGE = 3000, 9000
"""Most markdown characters of a text; one with more is shown as written. 3,000 take up to 65 ms."""
FORMULAS = ("math_inline", "math_inline_double", "math_block", "amsmath")
BRACKETS = {r"\(": r"\)", r"\[": r"\]"}
TEXT_TAGS = frozenset(
    {"p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ol", "ul", "li"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"}
)
MATH_TAGS = frozenset(
    {"math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup"}
    | {"munder", "mover", "munderover", "mmultiscripts", "mprescripts", "mtable", "mtr", "mtd", "mpadded", "mphantom"}
    | {"menclose", "mstyle", "mfenced", "none"}
)
ATTRIBUTES = {
    "math": {"display"},
    "mo": {"stretchy", "fence", "form", "separator", "largeop", "movablelimits", "minsize", "maxsize"},
    "mi": {"mathvariant"},
    "mspace": {"width"},
    "mfrac": {"linethickness"},
    "mtable": {"columnalign", "rowspacing"},
    "mover": {"accent"},
    "ol": {"start"},
}
_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_MARK = re.compile(r"[*_`~$\\|<>&\[\]!#\n+-]")
_marks_left: ContextVar[list[int]] = ContextVar("marks of a page")
_TAG = re.compile(r"</?([A-Za-z][^\s/>]*)")


def visible(text: object) -> str:
    """Escapes the control, direction and zero-width characters of a text, so that they are visible and have no effect.

    >>> visible("a\\u202eb")
    'a\\\\u202eb'
    """
    shown = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return shown.replace("\r\n", "\n").replace("\r", "\\r")


def prose(text: str) -> Markup:
    """Renders a text of a model as safe HTML.

    >>> print(prose("**so** $x$ <script>"), end="")
    <p><strong>so</strong> <math display="inline"><mrow><mi>x</mi></mrow></math> &lt;script&gt;</p>
    """
    shown, left = visible(text), _marks_left.get(None) or [MOST_MARKS]
    marks = len(_MARK.findall(shown))
    if marks > min(MOST_MARKS, left[0]):
        return Markup("<pre>{}</pre>").format(shown)
    left[0] -= marks
    unsafe = _MARKDOWN.render(shown, {"formulas": 0})
    clean = nh3.clean(unsafe, tags=set(TEXT_TAGS | MATH_TAGS), attributes=ATTRIBUTES, url_schemes=set(), link_rel=None)
    return Markup(clean)


@contextmanager
def markdown_of_a_page() -> Iterator[None]:
    """Bounds the marks of all texts that are rendered inside."""
    before = _marks_left.set([MOST_MARKS_OF_A_PAGE])
    try:
        yield
    finally:
        _marks_left.reset(before)


def _formula(_renderer: RendererHTML, tokens: Sequence[Token], at: int, _options: object, env: dict[str, Any]) -> str:
    """Renders a formula as MathML; text that fails to parse stays as written."""
    token = tokens[at]
    in_line = token.type == "math_inline"
    env["formulas"] += 1
    if env["formulas"] <= MOST_FORMULAS and len(token.content) <= MOST_FORMULA_CHARACTERS:
        try:
            mathml: str = convert(token.content.strip(), display="inline" if in_line else "block")
        except Exception:  # the parser raises many kinds of errors on invalid LaTeX
            mathml = ""
        # The parser does not escape tags in a formula's text.
        if mathml and set(_TAG.findall(mathml)) <= MATH_TAGS:
            return mathml if in_line else f"{mathml}\n"
    mark = "" if token.type == "amsmath" else token.markup
    return f"<code>{html.escape(mark + token.content + BRACKETS.get(mark, mark))}</code>"


def _brackets(state: StateInline, silent: bool) -> bool:
    r"""Finds a formula between \( and \), or \[ and \]: a rule of markdown-it."""
    opening = state.src[state.pos : state.pos + 2]
    if opening not in BRACKETS:
        return False
    start = state.pos + 2
    end = state.src.find(BRACKETS[opening], start, min(state.posMax, start + MOST_FORMULA_CHARACTERS))
    if end < 0:
        return False
    if not silent:
        token = state.push("math_inline" if opening == r"\(" else "math_inline_double", "math", 0)
        token.content, token.markup = state.src[start:end], opening
    state.pos = end + 2
    return True


def _markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": 20}).enable("table")
    parser.disable(["link", "image", "autolink", "reference", "entity", "html_inline", "html_block"])
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=True)
    parser.use(amsmath_plugin)
    parser.inline.ruler.before("escape", "brackets", _brackets)
    for name in FORMULAS:
        parser.add_render_rule(name, _formula)
    return parser


_MARKDOWN = _markdown()
MOST_SHOWN = 300
"""Characters of a question or an answer in a table."""
PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("shoal.observe.view"), autoescape=True, undefined=jinja2.StrictUndefined
)
"""Templates of all pages; they escape every text that is not `Markup`."""
PAGES.filters |= {
    "visible": visible,
    "prose": prose,
    "quoted": lambda text: quoted(str(text), MOST_SHOWN),
    "reward": reward_text,
}
