"""One table in four formats, lines compared in pairs by hand numbers, and figures."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from factories import call, done, one_line
from flyby.errors import BadInput
from flyby.study.catalogue import Study
from flyby.study.charts import charts, write_charts
from flyby.study.grid import Standing, cells, standing
from flyby.study.pairs import Duel, Gap, best_of, lines_of, named, pairs, t_quantile, t_share
from flyby.study.sheet import Entry, Part, Sheet, Table, plain
from flyby.study.tables import sheet
from flyby.study.writers import COLUMNS, formats, html, latex, markdown, markdown_table, tex, tidy, write_sheet

Accuracy = Callable[[Any], float | None]


def make(**changes: Any) -> Study:
    words = {"methods": ["fafi"], "fusions": ["fedavg", "experts"], "model": "mlp", "epochs": 1, "seeds": [0, 1, 2]}
    return Study(title="Tiny", **{**words, **changes})


def settled(folder: Path, study: Study, accuracy: Accuracy, kept: Accuracy = lambda _: 1.0) -> Standing:
    """The study with invented rows: those of cells that are kept."""
    rows = [
        {
            **{"key": c.key, "method": c.config.method, "fusion": c.rule, "data": c.data, "accuracy": accuracy(c)},
            **{"split": c.config.split.name, "alpha": c.config.split.alpha, "seed": c.config.seed, "model": "mlp"},
            **{"epochs": 1, "clients": c.config.split.clients, "split_hash": f"s{c.config.seed}"},
            **{"trained": 0, "timings": {"train": 1.0}, "hardware": "an abacus"},
        }
        for c in cells(study)
        if kept(c)
    ]
    (folder / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return standing(study, folder / "tiny.jsonl")


PUBLISHED = [{"data": "digits", "alpha": 0.1, "method": "Old_50%", "value": 66.5, "source": "A & B", "caveat": "Few."}]


@pytest.fixture
def shown(tmp_path: Path) -> Sheet:
    """Two rules at two alphas, three seeds; experts was not run at .5."""
    study = make(alphas=[0.1, 0.5], note="A `note`.")
    now = settled(
        tmp_path,
        study,
        lambda c: 0.5 + 0.1 * c.config.seed,
        lambda c: (c.rule, c.config.split.alpha) != ("experts", 0.5),
    )
    return sheet(now, tmp_path / "tiny.jsonl", PUBLISHED)


# -- formats


def test_markdown(shown: Sheet) -> None:
    lines = markdown_table(shown.parts[0].tables[0])
    assert lines[:5] == [
        "| clients' method | server rule | α = 0.1 | α = 0.5 |",
        "|---|---|---:|---:|",
        "| fafi | fedavg | 60.00 ± 10.00 (n=3) | 60.00 ± 10.00 (n=3) |",
        "| fafi | experts | 60.00 ± 10.00 (n=3) | - |",
        "| *Old_50%* | *published: A & B [1]* | *66.50* |  |",
    ]
    assert "3 of 12 cells have no row yet (-: none of its seeds); `flyby study tiny.yaml` runs them." in lines
    assert lines[-1] == "- [1] Few."


def test_csv_has_a_line_per_cell(shown: Sheet) -> None:
    text = tidy(shown)
    assert text.splitlines()[0].split(",")[: len(COLUMNS)] == list(COLUMNS)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(r["method"], r["rule"], r["alpha"], r["mean"], r["std"], r["n"]) for r in rows[:4]] == [
        ("fafi", "fedavg", "0.1", "60", "10", "3"),
        ("fafi", "fedavg", "0.5", "60", "10", "3"),
        ("fafi", "experts", "0.1", "60", "10", "3"),
        ("fafi", "experts", "0.5", "", "", "0"),
    ]
    assert {(r["study"], r["data"], r["model"], r["clients"], r["split"]) for r in rows[:4]} == {
        ("tiny", "digits", "mlp", "5", "dirichlet")
    }
    paper = {k: v for k, v in rows[4].items() if v}
    assert paper == {
        **{"study": "tiny", "data": "digits", "alpha": "0.1", "method": "Old_50%", "published": "66.5"},
        **{"source": "A & B", "caveat": "Few."},
    }
    assert len(rows) == 5


def balanced(text: str) -> None:
    """Braces close in order, and so do environments; every line of a tabular has its columns."""
    depth = 0
    for mark in re.findall(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(mark, 0)
        assert depth >= 0
    assert depth == 0
    open_ones: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_ones.append(name)
        else:
            assert open_ones.pop() == name
    assert not open_ones
    for columns, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, flags=re.S):
        for line in body.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1


def test_latex(shown: Sheet) -> None:
    text = latex(shown)
    balanced(text)
    assert r"fafi & experts & 60.00 $\pm$ 10.00 (n=3) & -- \\" in text
    published = r"\textit{Old\_50\%} & \textit{published: A \& B}$^{[1]}$ & \textit{66.50} &"
    assert f"\\midrule\n{published}" in text
    assert r"\texttt{dirichlet} split" in text
    assert all(word in text for word in (r"\toprule", r"\bottomrule", r"\caption{Tiny. digits", r"\label{tab:tiny-1}"))


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("a_b & 50% {x}", r"a\_b \& 50\% \{x\}"),
        ("\\ ~ ^ # $", r"\textbackslash{} \textasciitilde{} \textasciicircum{} \# \$"),
        ("`a_b` c", r"\texttt{a\_b} c"),
        ("α ± 1 [2]", r"$\alpha$ $\pm$ 1 {[}2{]}"),
    ],
)
def test_letters_that_mean_something_to_latex(text: str, made: str) -> None:
    assert tex(text) == made


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not any(name in ("src", "href") and not (value or "").startswith("data:") for name, value in attrs)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_html_stands_alone(shown: Sheet) -> None:
    tags = Tags()
    tags.feed(html(shown))
    assert not tags.open
    text = html(shown)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert "<code>note</code>" in text
    assert '<tr class="published"><th scope="row">Old_50%</th><td>published: A &amp; B<sup>[1]</sup></td>' in text
    assert '<td class="n"><span class="none">-</span></td>' in text
    assert "<li>Few.</li>" in text


def test_what_a_stranger_wrote_is_text_in_every_format() -> None:
    evil = "<script>|&%\\end{table}"
    made = Sheet("t", evil, evil, [Part(evil, [Table([evil], "l", [[Entry(evil, (evil,))]], evil, evil, [evil])])])
    tags = Tags()
    tags.feed(html(made))
    assert "script" not in tags.open
    assert "<script" not in html(made)
    code = "\n".join(line for line in latex(made).splitlines() if not line.startswith("%"))
    balanced(code)
    assert code.count(r"\end{table}") == 1


def test_formats_are_named_with_commas_or_again_and_wrong_ones_refused(tmp_path: Path, shown: Sheet) -> None:
    assert formats([]) == ["markdown"]
    assert formats(["latex, csv", "html", "csv"]) == ["latex", "csv", "html"]
    with pytest.raises(BadInput, match="unknown format 'latx'; did you mean 'latex'"):
        formats(["latx"])
    made = write_sheet(shown, tmp_path / "a.b", ["markdown,latex,html,csv"])
    assert [path.name for path in made] == ["a.b.md", "a.b.tex", "a.b.html", "a.b.csv"]
    assert made[0].read_text() == markdown(shown)


# -- cells without a row


def test_a_variant_with_other_epochs_is_no_missing_line_of_this_table(tmp_path: Path) -> None:
    study = make(epochs=None, variants=["train.epochs=1", "train.epochs=9"], seeds=[0])
    now = settled(tmp_path, study, lambda _: 0.5, lambda c: c.variant == "train.epochs=1")
    made = sheet(now, tmp_path / "tiny.jsonl", [])
    (table,) = made.parts[0].tables
    assert [line[0].text for line in table.lines] == ["fafi, train.epochs=1"] * 2
    assert made.end == ["2 cells of other tables have no row yet; `flyby study tiny.yaml` runs them."]


def test_fewer_seeds_than_asked_are_counted_and_one_is_one(tmp_path: Path) -> None:
    now = settled(tmp_path, make(), lambda _: 0.5, lambda c: (c.rule, c.config.seed) != ("fedavg", 2))
    (table,) = sheet(now, tmp_path / "tiny.jsonl", []).parts[0].tables
    assert [line[2].text for line in table.lines] == ["50.00 ± 0.00 (n=2)", "50.00 ± 0.00 (n=3)"]
    assert table.below[-1] == "1 of 6 cells has no row yet; `flyby study tiny.yaml` runs it."


def test_cells_under_attack_are_shown_as_missing_too(tmp_path: Path) -> None:
    study = make(methods=["ensemble"], seeds=[0], attacks=["none", "random:share=0.4"])
    now = settled(tmp_path, study, lambda _: 0.5, lambda c: (c.rule, c.attack) != ("experts", "random:share=0.4"))
    (table,) = sheet(now, tmp_path / "tiny.jsonl", []).parts[0].tables
    assert [[e.text for e in line[1:]] for line in table.lines] == [
        ["fedavg", "50.00 (n=1)", "50.00 (n=1)"],
        ["experts", "50.00 (n=1)", "-"],
    ]
    assert table.below == ["1 of 4 cells has no row yet (-: none of its seeds); `flyby study tiny.yaml` runs it."]


# -- pairs


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_of_t_are_those_of_the_printed_tables(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, abs=1e-5)
    assert t_share(t, freedom) == pytest.approx(0.975, abs=1e-6)
    assert t_share(0.0, freedom) == 0.5


def test_a_gap_by_hand() -> None:
    # Differences .02, .04, .06: mean .04, deviation .02, error .02 / sqrt(3) = .011547; times 4.302653 is .049683.
    gap = Gap.of([0.52, 0.64, 0.76], [0.5, 0.6, 0.7])
    assert gap.mean == pytest.approx(0.04)
    assert gap.interval == pytest.approx((-0.009683, 0.089683), abs=1e-6)
    assert str(gap) == "+4.00 [-0.97, +8.97] (n=3)"
    assert str(Gap.of([0.5], [0.6])) == "-10.00 (n=1)"


@pytest.mark.parametrize(
    ("above", "below", "p"),
    [(3, 0, 0.25), (0, 5, 0.0625), (7, 2, 92 / 512), (2, 2, 1.0), (0, 0, 1.0), (1, 0, 1.0)],
)
def test_sign_tests_by_hand(above: int, below: int, p: float) -> None:
    # 7 of 9: 2 (C(9, 7) + C(9, 8) + C(9, 9)) / 2^9 = 2 (36 + 9 + 1) / 512.
    assert Duel(above, below, level=4).p == pytest.approx(p)


def accuracies(c: Any) -> float | None:
    """experts is .02, .04 and .06 above fedavg at .1; at .5 level at first, then .1 below, then one diverged."""
    base = 0.5 + 0.1 * c.config.seed
    if c.rule == "fedavg":
        return base
    if c.config.split.alpha == 0.1:
        return base + 0.02 * (c.config.seed + 1)
    return (base, base - 0.1, None)[c.config.seed]


def test_pairs_of_a_study_by_hand(tmp_path: Path) -> None:
    now = settled(tmp_path, make(alphas=[0.1, 0.5]), accuracies)
    lines = lines_of(now)
    assert [len(line) for line in lines.values()] == [6, 5]
    assert Duel.of(lines["fafi/experts"], lines["fafi/fedavg"]) == Duel(above=3, below=1, level=1)
    made = pairs(now)
    (gaps,), (duels,) = (part.tables for part in made.parts)
    assert [[e.text for e in line] for line in gaps.lines] == [
        ["fafi/fedavg", "-4.00 [-8.97, +0.97] (n=3)", "base: 60.00"],
        ["fafi/experts", "base: 64.00", "-5.00 [-68.53, +58.53] (n=2)"],  # 12.7062 times .1 / sqrt(2) / sqrt(2)
    ]
    assert [[e.text for e in line] for line in duels.lines] == [
        ["fafi/experts", "5", "3", "1", "1", "0.625", "+0.40"],  # (2 + 4 + 6 + 0 - 10) / 5; 2 (4 + 1) / 16
    ]
    named_base = pairs(now, "fafi/experts").parts[0].tables[0]
    assert named_base.lines[1][2].text.startswith("base: ")
    assert named_base.lines[0][2].text == "+5.00 [-58.53, +68.53] (n=2)"
    ours = list(csv.DictReader(io.StringIO(tidy(sheet(now, tmp_path / "tiny.jsonl", [])))))
    assert [(row["n"], row["diverged"]) for row in ours] == [("3", ""), ("3", ""), ("3", ""), ("2", "1")]
    text = tidy(made)
    assert "difference,low,high" in text.splitlines()[0]
    balanced(latex(made))
    assert rf"\label{{tab:{now.name}-pairs-1}}" in latex(made), "the study's own table is -1 in the same paper"


def test_the_best_is_of_those_with_the_most_runs(tmp_path: Path) -> None:
    now = settled(tmp_path, make(), lambda c: 0.9 if c.rule == "experts" else 0.5, lambda c: c.config.seed != 2)
    assert best_of(lines_of(now)) == "fafi/experts"
    now = settled(
        tmp_path,
        make(),
        lambda c: 0.9 if c.rule == "experts" else 0.5,
        lambda c: c.rule == "fedavg" or c.config.seed == 0,
    )
    assert best_of(lines_of(now)) == "fafi/fedavg"


def test_other_splits_are_no_pair(tmp_path: Path) -> None:
    now = settled(tmp_path, make(), lambda _: 0.5)
    for row in now.rows.values():
        if row["fusion"] == "experts":
            row["split_hash"] += "x"
    assert Duel.of(*lines_of(now).values()).n == 0


def test_three_lines_are_compared_all_with_all(tmp_path: Path) -> None:
    study = make(fusions=["fedavg", "experts", "ensemble"], seeds=[0])
    now = settled(tmp_path, study, lambda c: len(c.rule) / 10)
    made = pairs(now)
    assert made.end == ["No table has two seeds yet, so no difference has an interval."]
    (part,) = made.parts
    assert [e.text for e in part.tables[1].lines[0]] == ["fafi/fedavg", "", "0 of 1, p 1.000", "0 of 1, p 1.000"]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    now = settled(tmp_path, make(), lambda _: 0.5)
    assert named("fafi / experts", lines_of(now)) == "fafi/experts"
    with pytest.raises(BadInput, match="fafi has several rules; name one, such as --against 'fafi/fedavg'"):
        pairs(now, "fafi")
    with pytest.raises(BadInput, match="unknown line 'fafi/expert'; did you mean 'fafi/experts'"):
        pairs(now, "fafi/expert")
    alone = settled(tmp_path, make(fusions=["fedavg"]), lambda _: 0.5)
    with pytest.raises(BadInput, match="there is nothing to compare"):
        pairs(alone)


# -- figures


def test_figures_of_lines_and_of_bars(tmp_path: Path) -> None:
    study = make(alphas=[0.1, 0.5], clients=[3, 5])
    now = settled(tmp_path, study, accuracies, lambda c: c.config.split.clients == 3 or c.config.split.alpha == 0.1)
    few, many = charts(now)
    assert (few.stem, many.stem) == ("tiny-3-clients", "tiny-5-clients")
    line = few.lines["fafi", "experts"]
    assert line[0.1] == (pytest.approx(64.0), pytest.approx(12.0))
    assert line[0.5] == (pytest.approx(50.0), pytest.approx(0.0)), "of the two that did not diverge"
    paths = write_charts(now, tmp_path)
    assert [path.name for path in paths] == [f"tiny-{n}-clients.{kind}" for n in (3, 5) for kind in ("svg", "pdf")]
    svg, pdf, bars = paths[0].read_text(), paths[1].read_bytes(), paths[2].read_text()
    assert svg.startswith("<svg ")
    assert "fafi experts 64.0 % at 0.1" in svg
    assert ">alpha<" in svg
    assert ">alpha<" not in bars
    assert ">64.0<" in bars
    assert pdf.startswith(b"%PDF")
    write_charts(now, tmp_path)
    assert (paths[0].read_text(), paths[1].read_bytes()) == (svg, pdf), "equal rows, equal bytes"


def test_a_study_of_attacks_has_no_figure(tmp_path: Path) -> None:
    study = make(methods=["ensemble"], seeds=[0], attacks=["none", "random:share=0.4"])
    with pytest.raises(BadInput, match="no figure can be drawn of tiny"):
        charts(settled(tmp_path, study, lambda _: 0.5))


# -- the command line


def test_the_command_line_writes_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    study = make(alphas=[0.1, 0.5])
    settled(tmp_path / "results", study, accuracies)
    (tmp_path / "tiny.yaml").write_text(json.dumps(study.model_dump(exclude_defaults=True)))
    words = ("study", "tiny.yaml", "--render")
    found = done(*words, "--format", "latex,csv", "--format", "html", "--pairs", "--figure", "--json").json
    assert found["table"] == "results/tiny.tex"
    names = [f"tiny{kind}.{end}" for kind in ("", ".pairs") for end in ("tex", "csv", "html")]
    assert found["files"] == [f"results/{name}" for name in [*names, "tiny.svg", "tiny.pdf"]]
    assert all((tmp_path / path).exists() for path in found["files"])
    said = done(*words, "--pairs", "--against", "fafi/fedavg").out
    assert "table written to results/tiny.md, results/tiny.pairs.md\n" in said
    assert "| fafi/experts | +4.00 [-0.97, +8.97] (n=3) |" in said
    assert "did you mean 'latex'" in one_line(call(*words, "--format", "latx"))
    assert "add --pairs" in one_line(call(*words, "--against", "fafi/fedavg"))


def test_plain_cells_are_in_no_csv() -> None:
    made = Sheet("t", "T", "", [Part("", [Table(["a"], "l", [plain("x")])])])
    assert tidy(made).splitlines() == [",".join(COLUMNS)]
