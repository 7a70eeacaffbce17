"""The report's furniture: how text, numbers, tables and figures look on the page, and the page around them.

Whatever a file says is shown as text, never as markup: :func:`text` escapes it, and every cell of a :func:`table` goes
through that. A :func:`document` asks the network for nothing and runs no script; it is dark where the reader's screen
is, and fits a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from flyby.drawing import clean

NONE = "–"


def document(title: str, brand: str, head: str, body: str, *, nav: str = "", css: str = "") -> str:
    """A whole page: ``title`` and ``brand`` are text, ``head`` (under the title), ``body`` and ``nav`` markup."""
    menu = f'<nav aria-label="Sections">{nav}</nav>\n' if nav else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{text(title)} · {text(brand)}</title>
<style>{CSS}{css}</style>
</head>
<body>
<main>
<header><p class="brand">{text(brand)}</p><h1>{text(title)}</h1>
{head}</header>
{menu}{body}</main>
</body>
</html>
"""


def section(key: str, heading: str, content: str, *, folded: bool = False) -> str:
    """A part of the page under its heading; ``folded`` shows the heading alone until it is asked for."""
    title = f"<h2>{text(heading)}</h2>"
    mark = ' class="folded"' if folded else ""
    inner = f"<details><summary>{title}</summary>\n{content}</details>" if folded else f"{title}\n{content}"
    return f'<section id="s-{key}"{mark}>{inner}</section>'


def fold(summary: str, content: str) -> str:
    return f"<details><summary>{text(summary)}</summary>\n{content}</details>\n"


def commands(lines: Iterable[str]) -> str:
    """Commands to copy, each once and word for word (spaces may sit inside quotes), but for half characters that no
    file could hold. One click selects a whole one: there is no script on the page."""
    once = dict.fromkeys(line for line in lines if line)
    blocks = [
        f'<pre class="command"><code>{escape(line.encode("utf-8", "replace").decode())}</code></pre>' for line in once
    ]
    return "\n".join(blocks)


class Best(str):
    """A cell to print in bold."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    label: str,
    numeric: Iterable[int] = (),
    foot: Sequence[Sequence[str]] = (),
    groups: Sequence[tuple[str, int]] = (),
    key: str = "",
    tall: bool = False,
) -> str:
    """A table in its own scrolling box; every cell is escaped here. ``groups`` puts names over spans of columns."""
    right = set(numeric)

    def line(cells: Sequence[str], tag: str = "td") -> str:
        out = []
        for i, cell in enumerate(cells):
            shown = f"<b>{text(cell)}</b>" if isinstance(cell, Best) else text(cell)
            element, scope = ("th", ' scope="col"') if tag == "th" else ("th", ' scope="row"') if i == 0 else ("td", "")
            side = ' class="n"' if i in right else ""
            out.append(f"<{element}{scope}{side}>{shown}</{element}>")
        return f"<tr>{''.join(out)}</tr>"

    over = "".join(
        f'<th scope="colgroup" colspan="{span}" class="g"><span>{text(name)}</span></th>' for name, span in groups
    )
    top = (f"<tr>{over}</tr>" if over else "") + line(head, "th")
    body = "\n".join(line(row) for row in rows)
    bottom = f"<tfoot>{''.join(line(row) for row in foot)}</tfoot>" if foot else ""
    mark = f' id="{key}"' if key else ""
    kind = "scroll tall" if tall else "scroll"
    box = f'<div class="{kind}" role="region" tabindex="0" aria-label="{text(label)}">'
    return f"{box}<table{mark}><thead>{top}</thead>\n<tbody>{body}</tbody>{bottom}</table></div>\n"


def figure(svg: str, caption: str) -> str:
    words = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{words}</figure>\n"


def text(value: object) -> str:
    return escape(clean(value))


def strong(value: object) -> str:
    return f"<strong>{text(value)}</strong>"


def name(value: object) -> str:
    return clean(value) if value else NONE


def plural(amount: object, one: str, many: str = "") -> str:
    return f"{text(amount)} {one if amount == 1 else many or one + 's'}"


def folded(rows: Sequence[Sequence[str]], names: int = 1) -> list[list[str]]:
    """Rows that say the same but for their first ``names`` cells, as one row that names all of them."""
    groups: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[names:]), []).append(row)
    found = []
    for rest, same in groups.items():
        each = [list(dict.fromkeys(row[i] for row in same)) for i in range(names)]
        heads = [
            ", ".join(words) if len(words) <= 3 else f"{len(words)} alike: {words[0]} … {words[-1]}" for words in each
        ]
        found.append([*heads, *rest])
    return found


def listed(names: Sequence[str]) -> str:
    """'a, b and c', not yet escaped."""
    words = [clean(name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(value: object) -> float | None:
    return (
        float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def nan(value: float | None) -> float:
    return math.nan if value is None else value


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}"


def short(value: float | None) -> str:
    return NONE if value is None else f"{value:#.3g}".rstrip(".")


def whole(value: float) -> str:
    return f"{value:.0f}"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def interval(ends: tuple[float, float] | None) -> str:
    """An interval of shares, in per cent."""
    return NONE if ends is None else f"{100 * ends[0]:.1f} – {100 * ends[1]:.1f}"


def seconds(value: float | None) -> str:
    return (
        NONE if value is None else f"{value:.2f}" if value < 1 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
    )


def megabytes(total: float | None) -> str:
    return NONE if total is None else f"{total / 1e6:,.2f}" if total >= 1e5 or not total else f"{total / 1e6:.2g}"


def size(total: float | None) -> str:
    if total is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if total >= scale:
            return f"{total / scale:.3g} {unit}" if total < 999.5 * scale else f"{total / scale:,.0f} {unit}"
    return f"{total:.0f} B"


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        NONE
        if value is None
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else clean(value)
    )


GLOSSARY = """<section id="s-glossary"><details><summary>Words used here</summary><dl>
<dt>Accuracy</dt><dd>The share of the global test images classified correctly, after the last epoch. Test images
choose nothing: no epoch, no setting.</dd>
<dt>Own-test accuracy</dt><dd>The same, on one site’s own test data; where a site keeps none, on the global test
images weighted to that site’s mix of classes.</dd>
<dt>Common images</dt><dd>Test and validation images that came with the data; nobody trains on them or chooses by
them. A node’s accuracy on them is weighted to its own mix of classes: thousands of images where its own are a few.</dd>
<dt>±, p</dt><dd>The standard error of a mean over nodes; and how often a difference as large would come about if each
node’s might as well have had the other sign.</dd>
<dt>Alone</dt><dd>The model a site trained by itself, before anything was shared, on the global test set: what it
would have had without the others.</dd>
<dt>Split</dt><dd>Who holds which samples. Runs with equal split hashes had the same data in the same hands. The
smaller α is, the more the sites’ classes differ.</dd>
<dt>Parcel</dt><dd>The one file a site sends: its model, what its method adds (class counts, prototypes …) and where
it came from.</dd>
<dt>One crossing</dt><dd>One parcel going from one sender to one receiver. In one-shot learning each pair crosses
once.</dd>
<dt>Fusion rule</dt><dd>How the server makes one predictor of the parcels that arrived.</dd>
</dl></details></section>
"""

# By day, and on paper; by night the same names have other values. The drawings ask for these too (flyby.drawing).
DAY = """--ink:#1c2430;--muted:#5c6673;--rule:#e4e7eb;--edge:#c9ced5;--soft:#f6f7f9;--paper:#fff;--accent:#0072B2;
--warn:#D55E00;--shade:rgba(20,30,45,.22)"""
NIGHT = """--ink:#e7eaef;--muted:#a3adba;--rule:#2a313b;--edge:#444e5b;--soft:#1b212a;--paper:#12161c;--accent:#56B4E9;
--warn:#F28C4B;--shade:rgba(0,0,0,.75);--quiet:#566575;--grid:#252c36;
--c0:#4BA3DE;--c1:#F28C4B;--c2:#2CBF97;--c3:#DD94BB;--c4:#EDB33A;--c5:#8CCBF0;--c6:#a8a8a8"""
CSS = (
    f":root{{color-scheme:light dark;{DAY}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{NIGHT}}}}}"
    + """
:root{--face:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.6 var(--face);-webkit-text-size-adjust:100%}
main{max-width:980px;margin:0 auto;padding:48px 30px 80px}
h1{font-size:2rem;line-height:1.2;margin:0 0 .6em;overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.3;margin:0 0 .9em}
h3{font-size:1rem;margin:1.8em 0 .5em}
section{margin-top:56px}
.set{border-top:3px solid var(--rule);padding-top:30px;margin-top:70px}
.set>h2{font-size:1.6rem}
.folded{margin-top:18px}
.folded+section:not(.folded){margin-top:46px}
.folded summary h2,.folded summary h3{display:inline;font-size:1.1rem}
.folded details[open]>summary{margin-bottom:.9em}
.brand{color:var(--accent);font-weight:600;font-size:.85rem;margin:0 0 .3em}
.lead{font-size:1.1rem;max-width:46em;margin:0 0 1.2em}
.number{display:flex;flex-wrap:wrap;align-items:baseline;gap:.2em .9em;margin:0 0 1.2em}
.number>strong{font-size:3.2rem;line-height:1;font-weight:650;color:var(--accent);white-space:nowrap;
font-variant-numeric:tabular-nums}
.number>span{flex:1 1 16em;color:var(--muted)}
.facts{list-style:none;padding:0;margin:0;display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));
gap:14px 28px}
.facts li{border-top:2px solid var(--rule);padding-top:10px;color:var(--muted);font-size:.9rem;line-height:1.45}
.facts b{display:block;color:var(--ink);font-size:1.15rem;font-variant-numeric:tabular-nums}
nav{margin-top:34px;padding:10px 0;border:solid var(--rule);border-width:1px 0;font-size:.9rem;display:flex;
flex-wrap:wrap;gap:2px 22px}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
.scroll{overflow-x:auto;background:linear-gradient(to right,var(--paper) 40%,transparent),
linear-gradient(to left,var(--paper) 40%,transparent) 100% 0,
linear-gradient(to right,var(--shade),transparent),linear-gradient(to left,var(--shade),transparent) 100% 0;
background-repeat:no-repeat;background-size:40px 100%,40px 100%,12px 100%,12px 100%;
background-attachment:local,local,scroll,scroll}
.tall{max-height:560px;overflow-y:auto;border-bottom:1px solid var(--rule)}
.tall thead{position:sticky;top:0;background:var(--paper)}
table{border-collapse:collapse;min-width:60%;font-size:.93rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 20px 8px 0;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule);font-weight:400}
th:last-child,td:last-child{padding-right:4px}
thead th{color:var(--muted);font-size:.83rem;line-height:1.35;vertical-align:bottom;white-space:normal;
border-bottom-color:var(--edge)}
tfoot th,tfoot td{color:var(--muted);border-bottom:0;padding-top:9px;padding-bottom:3px}
.n{text-align:right}
thead .n{padding-left:16px}
thead .g{border-bottom:0;padding-bottom:0;padding-left:16px;color:var(--ink);font-weight:600;text-align:center}
.g span:not(:empty){display:block;border-bottom:1px solid var(--edge);padding-bottom:4px}
td b{font-weight:700}
figure{margin:26px 0 0}
figure svg{display:block;width:100%;max-width:920px;height:auto;overflow:visible}
figure svg *{stroke-linejoin:round}
figure svg text{font-family:var(--face)!important;font-variant-numeric:tabular-nums}
.narrow{display:none!important}
figcaption,.note{color:var(--muted);font-size:.9rem;margin:10px 0 0}
.warn{border-left:3px solid var(--warn);padding:2px 0 2px 12px;margin:14px 0 0}
pre{background:var(--soft);border-radius:6px;padding:14px 16px;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.87rem;line-height:1.55}
.command{user-select:all;-webkit-user-select:all;cursor:copy;border:1px solid var(--rule)}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.95em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:8px 24px;margin:18px 0;font-size:.95rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
details{margin-top:14px}
summary{cursor:pointer;color:var(--accent)}
@media screen and (max-width:600px){main{padding:28px 18px 60px}section{margin-top:44px}.number>strong{font-size:2.6rem}
dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:10px}th,td{padding-right:14px}thead .n{padding-left:8px}
.wide{display:none!important}.narrow{display:block!important}table{min-width:100%}
tbody th,tfoot th{max-width:9.5em;overflow:hidden;text-overflow:ellipsis}}
@media print{.tall{max-height:none}nav{display:none}.scroll{background:none}}
"""
)
