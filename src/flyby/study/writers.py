"""A :class:`Sheet` as Markdown, LaTeX (booktabs), HTML (one file that needs no other) and CSV (a line per cell)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from flyby.errors import BadInput, unknown
from flyby.files import write_text
from flyby.report import page
from flyby.study.sheet import MISSING, Entry, Sheet, Table

COLUMNS = (
    *("study", "data", "model", "clients", "split", "alpha", "method", "rule"),
    *("mean", "std", "n", "published", "source", "caveat"),
)
CODE = re.compile(r"`([^`]+)`")


# ---------------------------------------------------------------- Markdown


def markdown(sheet: Sheet) -> str:
    lines = [f"# {sheet.title}", "", *([sheet.note, ""] if sheet.note else [])]
    for part in sheet.parts:
        lines += [f"## {part.heading}", ""] if part.heading else []
        lines += [line for table in part.tables for line in [*markdown_table(table), ""]]
    for sentence in sheet.end:
        lines += [sentence, ""]
    return "\n".join(lines) + "\n"


def markdown_table(table: Table) -> list[str]:
    notes = table.remarks()

    def shown(entry: Entry) -> str:
        text = entry.text + "".join(f" [{notes.index(one) + 1}]" for one in entry.remarks)
        return f"*{text}*" if entry.published and text else text

    lines = [f"### {table.title}", ""] if table.title else []
    lines += [table.lead, ""] if table.lead else []
    lines += [f"| {' | '.join(table.heads)} |", "|" + "".join("---|" if a == "l" else "---:|" for a in table.align)]
    lines += [f"| {' | '.join(map(shown, line))} |" for line in table.lines]
    lines += ["", *table.below] if table.below else []
    return lines + ([""] if notes else []) + [f"- [{i}] {note}" for i, note in enumerate(notes, 1)]


# ---------------------------------------------------------------- LaTeX

TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"$<$", ">": r"$>$", "|": r"$|$", "[": "{[}", "]": "{]}", '"': "''"},
    **{"α": r"$\alpha$", "λ": r"$\lambda$", "ψ": r"$\psi$", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "→": r"$\to$"},
    **{"≤": r"$\le$", "≥": r"$\ge$", "…": r"\ldots{}", "–": "--", "’": "'"},
}


def tex(text: str) -> str:
    """Text as LaTeX prints it, letter by letter; brackets are guarded, for one after a line's end is taken for its
    option."""

    def escaped(piece: str) -> str:
        return "".join(TEX.get(character, character) for character in piece)

    pieces = CODE.split(text)  # every second one stood in backticks
    return "".join(rf"\texttt{{{escaped(p)}}}" if i % 2 else escaped(p) for i, p in enumerate(pieces))


def latex(sheet: Sheet) -> str:
    """Tables to be taken into a paper, each with its caption and a label."""
    note = [f"% {' '.join(sheet.note.split())}"] if sheet.note else []
    lines = [f"% {' '.join(sheet.title.split())}", *note, r"% needs \usepackage{booktabs}", ""]
    number = 0
    for part in sheet.parts:
        for table in part.tables:
            number += 1
            heads = [one for one in (sheet.title, part.heading, table.title) if one]
            lines += [*_latex_table(table, ". ".join(heads), f"tab:{sheet.name}-{number}"), ""]
    return "\n".join([*lines, *(f"% {sentence}" for sentence in sheet.end), ""])


def _latex_table(table: Table, caption: str, label: str) -> list[str]:
    notes = table.remarks()

    def shown(entry: Entry) -> str:
        marks = ",".join(str(notes.index(one) + 1) for one in entry.remarks)
        text = "--" if entry.text == MISSING else tex(entry.text)
        text = rf"\textit{{{text}}}" if entry.published and text else text
        return text + (f"$^{{[{marks}]}}$" if marks else "")

    body, before = list[str](), False
    for line in table.lines:
        now = any(entry.published for entry in line)
        body += [r"\midrule"] if now and not before and body else []
        body.append(" & ".join(map(shown, line)) + r" \\")
        before = now
    told = [tex(one) for one in ([table.lead] if table.lead else []) + [*table.below]]
    told += [f"$^{{[{i}]}}$ {tex(note)}" for i, note in enumerate(notes, 1)]
    foot = [r"\smallskip", r"\parbox{\linewidth}{\footnotesize " + r" \par ".join(told) + "}"] if told else []
    return [
        *(r"\begin{table}[htbp]", r"\centering", rf"\caption{{{tex(caption)}}}", rf"\label{{{label}}}", r"\small"),
        *(rf"\begin{{tabular}}{{{table.align}}}", r"\toprule"),
        " & ".join(map(tex, table.heads)) + r" \\",
        *(r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *foot, r"\end{table}"),
    ]


# ---------------------------------------------------------------- HTML

CSS = """tbody th{white-space:normal;min-width:6em}.published th,.published td{font-style:italic;color:var(--muted)}
td:not(.n){white-space:normal;overflow-wrap:anywhere;min-width:7em}.none{color:var(--muted)}
ol.note{padding-left:1.6em}
@media screen and (max-width:600px){tbody th{max-width:none;overflow:visible}table{font-size:.85rem}}"""


def html(sheet: Sheet) -> str:
    """One page: it asks the network for nothing, fits a phone, and is dark where the reader's screen is."""
    body = []
    for number, part in enumerate(sheet.parts):
        inner = "".join(_html_table(table, part.heading or sheet.title) for table in part.tables)
        head = f"<h2>{_marked(part.heading)}</h2>\n" if part.heading else ""
        body.append(f'<section id="s-{number}">{head}{inner}</section>')
    body += [f'<p class="note">{_marked(sentence)}</p>' for sentence in sheet.end]
    lead = f'<p class="lead">{_marked(sheet.note)}</p>\n' if sheet.note else ""
    return page.document(sheet.title, "flyby study", lead, "\n".join(body) + "\n", css=CSS)


def _html_table(table: Table, label: str) -> str:
    notes = table.remarks()
    side = [' class="n"' if one == "r" else "" for one in table.align]

    def shown(place: int, entry: Entry) -> str:
        marks = "".join(f"<sup>[{notes.index(one) + 1}]</sup>" for one in entry.remarks)
        kind, scope = ("th", ' scope="row"') if place == 0 else ("td", "")
        text = f'<span class="none">{page.text(entry.text)}</span>' if entry.text == MISSING else page.text(entry.text)
        return f"<{kind}{scope}{side[place]}>{text}{marks}</{kind}>"

    def line(entries: Iterable[Entry]) -> str:
        cells = [*entries]
        mark = ' class="published"' if any(one.published for one in cells) else ""
        return f"<tr{mark}>{''.join(shown(i, one) for i, one in enumerate(cells))}</tr>"

    heads = "".join(f'<th scope="col"{side[i]}>{page.text(head)}</th>' for i, head in enumerate(table.heads))
    made = f"<h3>{_marked(table.title)}</h3>\n" if table.title else ""
    made += f"<p>{_marked(table.lead)}</p>\n" if table.lead else ""
    made += f'<div class="scroll" role="region" tabindex="0" aria-label="{page.text(label)}"><table><thead><tr>'
    made += f"{heads}</tr></thead>\n<tbody>" + "\n".join(map(line, table.lines)) + "</tbody></table></div>\n"
    made += "".join(f'<p class="note">{_marked(sentence)}</p>\n' for sentence in table.below)
    told = "".join(f"<li>{_marked(note)}</li>" for note in notes)
    return made + (f'<ol class="note">{told}</ol>\n' if told else "")


def _marked(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", page.text(text))


# ---------------------------------------------------------------- CSV


def tidy(sheet: Sheet) -> str:
    """A line per cell, with the columns that every study has, and behind them what these cells have beside."""
    rows = sheet.facts()
    more = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    out = io.StringIO()
    writer = csv.DictWriter(out, [*COLUMNS, *more], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _number(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _number(value: object) -> object:
    return f"{value:.10g}" if isinstance(value, float) else "" if value is None else value


FORMATS: dict[str, tuple[str, Callable[[Sheet], str]]] = {
    "markdown": (".md", markdown),
    "latex": (".tex", latex),
    "html": (".html", html),
    "csv": (".csv", tidy),
}


def formats(asked: Iterable[str]) -> list[str]:
    """The formats of an option that may be repeated, or be a list with commas; Markdown if there is none."""
    names = list(dict.fromkeys(name.strip() for one in asked for name in one.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    return names or ["markdown"]


def write_sheet(sheet: Sheet, stem: Path, asked: Iterable[str] = ()) -> list[Path]:
    """The sheet in every asked format, as STEM.md and so on."""
    paths = []
    for name in formats(asked):
        suffix, write = FORMATS[name]
        path = stem.with_name(stem.name + suffix)
        if path.is_dir():
            raise BadInput(f"{path} is a folder, and a table should be written there; move it away")
        write_text(path, write(sheet))
        paths.append(path)
    return paths
