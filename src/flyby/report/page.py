"""The report's furniture: how text, numbers, tables and figures look on the page.

Whatever a file says is shown as text, never as markup: :func:`text` escapes it, and every cell of a :func:`table` goes
through that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from flyby.drawing import clean

NONE = "–"


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
    return f'<figure><div class="scroll">{svg}</div>{words}</figure>\n'


def text(value: object) -> str:
    return escape(clean(value))


def strong(value: object) -> str:
    return f"<strong>{text(value)}</strong>"


def name(value: object) -> str:
    return clean(value) if value else NONE


def plural(amount: object, one: str, many: str = "") -> str:
    return f"{text(amount)} {one if amount == 1 else many or one + 's'}"


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

CSS = """
:root{color-scheme:light;--ink:#1c2430;--muted:#5c6673;--rule:#e4e7eb;--accent:#0072B2;
--face:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:var(--ink);font:16px/1.6 var(--face)}
main{max-width:980px;margin:0 auto;padding:48px 30px 80px}
h1{font-size:2rem;line-height:1.2;margin:0 0 .6em;overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.3;margin:0 0 .9em}
h3{font-size:1rem;margin:1.8em 0 .5em}
section{margin-top:60px}
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
.scroll{overflow-x:auto}
.tall{max-height:560px;overflow-y:auto;border-bottom:1px solid var(--rule)}
.tall thead{position:sticky;top:0;background:#fff}
table{border-collapse:collapse;min-width:60%;font-size:.93rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 20px 8px 0;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule);font-weight:400}
th:last-child,td:last-child{padding-right:4px}
thead th{color:var(--muted);font-size:.83rem;line-height:1.35;vertical-align:bottom;white-space:normal;
border-bottom-color:#c9ced5}
tfoot th,tfoot td{color:var(--muted);border-bottom:0;padding-top:9px;padding-bottom:3px}
.n{text-align:right}
thead .n{padding-left:16px}
thead .g{border-bottom:0;padding-bottom:0;padding-left:16px;color:var(--ink);font-weight:600;text-align:center}
.g span:not(:empty){display:block;border-bottom:1px solid #c9ced5;padding-bottom:4px}
td b{font-weight:700}
figure{margin:26px 0 0}
figure svg{display:block;width:100%;min-width:620px;height:auto;overflow:visible}
figure svg *{stroke-linejoin:round}
figure svg text{font-family:var(--face)!important;font-variant-numeric:tabular-nums}
figcaption,.note{color:var(--muted);font-size:.9rem;margin:10px 0 0}
.warn{border-left:3px solid #D55E00;padding:2px 0 2px 12px;margin:14px 0 0}
pre{background:#f6f7f9;border-radius:6px;padding:14px 16px;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.87rem;line-height:1.55}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.95em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:8px 24px;margin:18px 0;font-size:.95rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
details{margin-top:14px}
summary{cursor:pointer;color:var(--accent)}
@media(max-width:600px){main{padding:28px 18px 60px}section{margin-top:44px}.number>strong{font-size:2.6rem}
dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:10px}}
@media print{.tall{max-height:none}nav{display:none}}
"""
