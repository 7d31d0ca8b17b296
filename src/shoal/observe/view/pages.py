"""Templates of all pages, which escape every text."""

import jinja2

from shoal.observe.answers import quoted, reward_text
from shoal.observe.view.prose import prose, visible

MOST_SHOWN = 300
"""Characters of a question or an answer in a table."""
PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("shoal.observe.view"), autoescape=True, undefined=jinja2.StrictUndefined
)
PAGES.filters |= {
    "visible": visible,
    "prose": prose,
    "quoted": lambda text: quoted(str(text), MOST_SHOWN),
    "reward": reward_text,
}
