"""The leaderboard is one HTML page without a script; every text of a taker is escaped."""

from collections.abc import Sequence
from html import escape

from shoal.swarm.judge.store import NEWEST, Standing

POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --muted: #5b6772; --paper: #fff; --ground: #f5f7f9; --line: #e0e5ea; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --muted: #9aa7b3; --paper: #1a222b; --ground: #11171d; --line: #2b3641; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; margin: 0; }
p { color: var(--muted); max-width: 46rem; }
.scroll { overflow-x: auto; background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .5rem .8rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; }
th.name, td.name { text-align: left; }
td.name { overflow: hidden; text-overflow: ellipsis; max-width: 16rem; }
tbody tr { border-top: 1px solid var(--line); }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
meter { width: 6rem; vertical-align: middle; }
"""
_HEADS = ("Rank", "Peer", "Model", "Condition", "Round", "Challenges", "Unanswered", "pass@1", "at least")
_NAMES = frozenset({"Peer", "Model", "Condition"})


def leaderboard_html(judge: str, standings: Sequence[Standing], specialties: Sequence[str]) -> str:
    """Page of the judge with this peer id, best peer first."""
    heads = "".join(
        f'<th scope="col"{" class=name" if head in _NAMES else ""}>{escape(head)}</th>'
        for head in (*_HEADS, *specialties)
    )
    rows = "".join(_row(rank, one, specialties) for rank, one in enumerate(standings, 1))
    empty = "" if standings else "<p>Nobody was judged yet.</p>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Leaderboard - Shoal</title>
<link rel="stylesheet" href="style.css">
</head>
<body>
<main>
<h1>Leaderboard</h1>
<p>pass@1 is the mean of a peer's newest {NEWEST} challenges, whatever it called its models; one that was not answered
in time counts 0. Peers are in the order of what that says at least, given how many questions and peers there are.
The columns after it are the share of each specialty's questions that was answered right.
Judge: <code>{escape(judge)}</code></p>
{empty}
<div class="scroll" tabindex="0" role="region" aria-label="Leaderboard">
<table>
<thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody>
</table>
</div>
</main>
</body>
</html>
"""


def _row(rank: int, one: Standing, specialties: Sequence[str]) -> str:
    passed = dict(one.specialties)
    shares = "".join(f"<td>{f'{passed[name]:.0%}' if name in passed else ''}</td>" for name in specialties)
    return (
        f'<tr><td>{rank}</td><td class=name><code title="{escape(one.peer_id)}">{escape(one.peer_id[:12])}</code></td>'
        f'<td class=name title="{escape(one.model)}">{escape(one.model)}</td><td class=name>{escape(one.arm)}</td>'
        f"<td>{one.round:,}</td><td>{one.challenges:,}</td><td>{one.unanswered:,}</td>"
        f'<td><meter min="0" max="1" value="{one.score:.4f}" aria-hidden="true"></meter> {one.score:.3f}</td>'
        f"<td>{one.at_least:.3f}</td>{shares}</tr>"
    )
