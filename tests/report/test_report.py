"""The HTML report: right numbers, well-formed, nothing runs, nothing is fetched, same input same bytes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import WAIT
from flyby import drawing
from flyby.errors import BadInput
from flyby.names import natural
from flyby.report import figures, nodes
from flyby.report.page import DAY, NIGHT, folded, size
from flyby.report.read import RunData
from flyby.report.trajectories import lambda_panels
from flyby.report.write import build_html, write_report

SITES = ("site-0", "site-1", "site-2")
CLASSES = ("cat", "dog", "<script>alert(1)</script>", "$x_")
COUNTS = {"site-0": [40, 0, 3, 1], "site-1": [0, 777, 2, 0], "site-2": [5, 5, 5, 5]}
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects what the tests ask about, and fails on a tag that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.bold: list[str] = []
        self.table: list[list[str]] | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.table = self.tables.setdefault(dict(attrs).get("id") or f"table-{len(self.tables)}", [])
        if tag == "tr" and self.table is not None:
            self.table.append([])
        if tag in ("td", "th") and self.table is not None:
            self.table[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open) and self.table:
            self.table[-1][-1] += data
        if self.open and self.open[-1] == "b":
            self.bold.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def drawings(self) -> list[dict[str, str | None]]:
        """Those that wide screens show; phones have others of the same."""
        return [attrs for tag, attrs in self.tags if tag == "svg" and attrs.get("class") != "narrow"]


def result(**changes: Any) -> dict[str, Any]:
    base = {
        "method": "fedavg",
        "objective": "supervised",
        "fusion": "fedavg",
        "model": "cnn-small",
        "data": "digits",
        "split": "dirichlet",
        "split_hash": "0123456789abcdef",
        "clients": 3,
        "alpha": 0.1,
        "epochs": 4,
        "seed": 0,
        "accuracy": 0.8734,
        "per_client": {"site-0": 0.5, "site-1": 1.0, "site-2": 0.75},
        "local_accuracy": {"site-0": 0.31, "site-1": 0.25, "site-2": 0.22},
        "per_class": {"0": 0.9, "1": 0.8, "2": None, "3": 0.1},
        "uploads": 3,
        "bytes_up": 370368,
        "bytes_down": 0,
        "seconds": {"train": 12.3, "fuse": 0.1, "evaluate": 0.2, "total": 13.04},
        "samples_per_second": 5300.0,
        "versions": {"flyby": "0.1.0", "torch": "2.13.0"},
        "command": 'flyby run --method fedavg --data "my  data"',
        "hardware": "2 CPU cores",
    }
    return base | changes


def make_run(
    folder: Path, *, rows: dict[str, Any] | None = None, crossings: list[dict[str, Any]] | None = None, **changes: Any
) -> Path:
    folder.mkdir(parents=True)
    sent = [{"sender": site, "receiver": "server", "bytes": 123456, "digest": "ab" * 32, "round": 0} for site in SITES]
    metrics = [
        {"site": site, "epoch": epoch, "loss": 2.0 / epoch + i, "train_accuracy": 0.2 * epoch} | (rows or {})
        for i, site in enumerate(SITES)
        for epoch in range(1, 5)
    ]
    files = {
        "result": result(**changes),
        "config": {"method": "fedavg", "train": {"lr": 0.05}},
        "split": {
            "name": "dirichlet",
            "hash": "0123456789abcdef",
            "class_names": CLASSES,
            "counts": COUNTS,
            "sites": {"site-0": [987654321]},
        },
        "ledger": {"crossings": sent if crossings is None else crossings},
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


def page_of(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text())


def test_the_result_table_holds_the_numbers(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    head, row = page.tables["results"]
    assert head == ["Method", "Accuracy %", "Own-test accuracy %, mean", "Uploads", "MB up", "Seconds", "Fusion rule"]
    assert row == ["fedavg", "87.3", "75.0", "3", "0.37", "13.0", "fedavg"]
    assert "87.3 % test accuracy after the last epoch" in page.text
    assert "Time spent: train 12.3 s, fuse 0.10 s, evaluate 0.20 s." in page.text


def test_who_finds_uploads_trained_wins_no_race(tmp_path: Path) -> None:
    for name, accuracy, seconds in (("first", 0.5, 60.0), ("later", 0.7, 0.25)):
        make_run(tmp_path / "all" / name, accuracy=accuracy, seconds={"total": seconds})
    page = page_of(tmp_path / "all")
    assert [row[-3] for row in page.tables["results"]] == ["Seconds", "0.25", "60.0"]
    assert page.bold == ["70.0"]
    assert "uploads that several runs share are trained once, and count for the first of them" in page.text


def test_an_accuracy_has_its_interval_beside_it(tmp_path: Path) -> None:
    """Wilson's, by hand: 90 right of 100 give (0.9 + 1.92 / 100 +- 1.96 sqrt(0.0009 + 0.96 / 10^4)) / 1.0384."""
    for name, accuracy in (("a", 0.9), ("b", 0.85)):
        make_run(tmp_path / "all" / name, accuracy=accuracy, test_images=100, method=name)
    page = page_of(tmp_path / "all")
    rows = page.tables["results"]
    assert rows[0][:3] == ["Run", "Accuracy %", "95 % interval"]
    assert [row[:3] for row in rows[1:]] == [["a", "90.0", "82.6 – 94.5"], ["b", "85.0", "76.7 – 90.7"]]
    assert (
        "5.0 points above the next, b (their intervals overlap); 95 % interval 82.6 – 94.5 % (100 images)" in page.text
    )
    assert "With 100 test images 95 % intervals reach up to ± 9.6 points." in page.text
    assert "About 25 images per class: 95 % intervals reach up to ± 18 points." in page.text


def test_nothing_up_where_there_is_no_server_and_one_command_once(tmp_path: Path) -> None:
    for name in ("x", "y"):
        make_run(tmp_path / "all" / name, command="flyby run --method x,y")
    text = write_report(tmp_path / "all").read_text()
    assert text.count("flyby run --method x,y") == 1
    alone = make_run(tmp_path / "local", method="local", fusion=None, uploads=0, bytes_up=0, crossings=[])
    assert "sent up" not in page_of(alone).text


def test_runs_on_different_data_stand_apart(tmp_path: Path) -> None:
    for name, data, accuracy in (("a", "digits", 0.5), ("b", "digits", 0.7), ("c", "cifar10", 0.6)):
        make_run(tmp_path / "all" / name, data=data, accuracy=accuracy)
    page = page_of(tmp_path / "all")
    assert "3 runs on 2 datasets" in page.text
    results = {key: [row[0] for row in rows] for key, rows in page.tables.items() if key.endswith("results")}
    assert results == {"set0-results": ["Method", "fedavg"], "set1-results": ["Run", "b", "a"]}
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert links <= {f"#{one}" for one in ids}
    assert page.text.index("cifar10") < page.text.index("digits")


def test_drawings_are_readable_by_day_and_by_night(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run")).read_text()
    assert "prefers-color-scheme:dark" in text
    used = set(re.findall(r"var\(--([a-z0-9]+)", text))
    day, night = (set(re.findall(r"--([a-z0-9]+):", block)) for block in (DAY, NIGHT))
    assert used <= day | night | {"face"}, "every colour that is asked for is one of the page's"
    assert {"ink", "paper", "accent", "grid", "c0", "c1"} <= night
    svg = text[text.index("<svg") : text.rindex("</svg>")]
    assert "var(--ink,#1c2430)" in svg
    assert not re.findall(r"(?<!,)#1c2430", svg), "no ink that would stay black on black"


def test_labels_that_clash_are_moved_apart() -> None:
    assert nodes._apart({"a": 0.0, "b": 100.0}, 12) == {"a": 0.0, "b": 0.0}
    assert nodes._apart({"a": 50.0, "b": 50.0}, 12) == {"a": -6.0, "b": 6.0}
    moved = nodes._apart({"a": 10.0, "b": 12.0, "c": 30.0}, 12)
    places = [10 + moved["a"], 12 + moved["b"], 30 + moved["c"]]
    assert places == [5.0, 17.0, 30.0]


def test_site_table_and_communication(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    clients = page.tables["clients"]
    assert clients[1] == ["site-0", "44", "50.0", "31.0"]
    assert clients[-1] == ["Mean", "281", "75.0", "26.0"]  # (44 + 779 + 20) / 3
    sent = page.tables["communication"]
    assert sent[1] == ["site-0", "server", "abababababab", "123 kB"]
    assert sent[-1] == ["Total", "3 crossings", "", "370 kB"]
    assert "Every pair crossed once. Nothing was sent back down." in page.text


def test_long_ledgers_are_cut_after_twenty_rows_and_repeats_are_named(tmp_path: Path) -> None:
    crossings = [
        {"sender": f"site-{i}", "receiver": "server", "bytes": 1000, "digest": "", "round": 1} for i in (*range(24), 3)
    ]
    page = page_of(make_run(tmp_path / "run", crossings=crossings))
    rows = page.tables["communication"]
    assert len(rows) == 1 + 20 + 2
    assert rows[0] == ["From", "To", "Round", "Digest", "Size"]
    assert rows[-2][0] == "… and 5 more"
    assert rows[-1] == ["Total", "25 crossings", "", "", "25 kB"]
    assert "Crossed more than once: site-3 → server." in page.text
    assert "Every pair" not in page.text


def test_every_figure_speaks_and_no_id_is_used_twice(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", rows={"lambda": 7.5, "loss_align": 0.5}))
    drawings = page.drawings
    assert len(drawings) == 5  # holdings, classes, training, lambda, its terms
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in drawings)
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    known = {f"#{name}" for name in ids}
    refs = [
        value
        for _, attrs in page.tags
        for key in ("href", "xlink:href")
        if (value := attrs.get(key)) and value.startswith("#")
    ]
    clips = [
        f"#{name}" for _, attrs in page.tags for name in re.findall(r"url\(#([^)]+)\)", attrs.get("clip-path") or "")
    ]
    assert refs
    assert clips
    assert set(refs) | set(clips) <= known


def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path) -> None:
    evil = '"><img src=x onerror=alert(1)><script>alert(2)</script>'
    extra = [
        {"title": evil, "text": evil, "table": {"columns": [evil, "value"], "rows": [[evil, 0.123456], ["b", None]]}}
    ]
    folder = make_run(
        tmp_path / "run", method=evil, hardware=evil, command=evil, per_client={evil: 0.5}, versions={evil: evil}
    )
    (folder / "extra.json").write_text(json.dumps(extra))
    (folder / "metrics.jsonl").write_text(json.dumps({"site": evil, "epoch": 1, "loss": 1.0}) + "\n")
    page = page_of(folder)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "base", "form"}
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on")]
    outside = [
        value
        for _, attrs in page.tags
        for key in ("src", "href", "xlink:href")
        if (value := attrs.get(key)) and value[0] != "#"
    ]
    assert all(value.startswith("data:") for value in outside)
    assert "<script>alert(1…" in page.text  # the class name, as words
    assert "0.1235" in page.text
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_an_extra_section_may_carry_a_drawing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    svg = figures.run_bars("mine", "Two <rules> compared", ["a", "b"], [10.0, 20.0])
    sections = [
        {"title": "Rules", "text": "Both rules.", "svg": svg},
        {"title": "No drawing", "text": "Words.", "svg": None},
    ]
    (folder / "extra.json").write_text(json.dumps(sections))
    text = write_report(folder).read_text()
    assert text.count(svg) == 1
    page = Page(text)
    drawings = page.drawings
    assert len(drawings) == 4  # holdings, classes, training, ours
    assert drawings[-1]["aria-label"] == "Two <rules> compared"
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))


def test_command_is_kept_word_for_word_and_indices_stay_out(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run")).read_text()
    assert "--data &quot;my  data&quot;" in text
    assert "987654321" not in text


def test_same_files_same_bytes_and_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rows={"lambda": 7.5, "lambda_align": 2.5})
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert len(first) < 200_000
    assert not list(folder.glob(".*"))


def test_result_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(
        json.dumps({"method": "local", "split_hash": "00", "accuracy": 0.5, "seconds": 2.5, "fusion": None})
    )
    page = page_of(tmp_path)
    assert page.tables["results"][1] == ["local", "50.0", "–", "–", "–", "2.5", "–"]
    assert set(page.tables) == {"results"}
    assert "svg" not in {tag for tag, _ in page.tags}


@pytest.mark.parametrize("absent", ["config.json", "split.json", "metrics.jsonl", "ledger.json"])
def test_a_missing_file_leaves_out_its_section_only(tmp_path: Path, absent: str) -> None:
    folder = make_run(tmp_path / "run")
    whole = page_of(folder).text
    (folder / absent).unlink()
    page = page_of(folder)
    heading = {
        "config.json": "Full configuration",
        "split.json": "Who holds what",
        "metrics.jsonl": "Training loss",
        "ledger.json": "Communication",
    }
    assert heading[absent] in whole
    assert heading[absent] not in page.text
    assert "results" in page.tables


def test_comparison_marks_the_best_and_shows_a_shared_split_once(tmp_path: Path) -> None:
    for name, accuracy in (("run-10", 0.512), ("run-2", 0.734), ("run-1", 0.25)):
        make_run(tmp_path / "all" / name, method=name, accuracy=accuracy)
    (tmp_path / "all" / ".part").mkdir()
    (tmp_path / "all" / "notes").mkdir()
    page = page_of(tmp_path / "all")
    rows = page.tables["results"]
    assert [row[0] for row in rows] == ["Run", "run-2", "run-10", "run-1"], "the most accurate first"
    assert [row[1] for row in rows[1:]] == ["73.4", "51.2", "25.0"]
    assert "73.4" in page.bold
    assert not {"25.0", "51.2", "75.0"} & set(page.bold)  # equal columns have no best
    assert "run-2 , 22.2 points above the next, run-10" in page.text
    labels = [attrs["aria-label"] or "" for attrs in page.drawings]
    assert sum("held by" in label for label in labels) == 1
    assert "Test accuracy by run: run-2 73.4 %; run-10 51.2 %; run-1 25.0 %" in labels
    assert "All runs share one split" in page.text
    assert page.tables["clients"][0] == ["", "run-2", "run-10", "run-1"]
    assert len({len(row) for row in page.tables["clients"][1:]}) == 1


def test_comparison_over_different_splits_says_so(tmp_path: Path) -> None:
    make_run(tmp_path / "all" / "a", split_hash="a" * 16)
    make_run(tmp_path / "all" / "b", split_hash="b" * 16, seed=1)
    page = page_of(tmp_path / "all")
    assert "do not all share one split" in page.text
    assert "They differ in seed." in page.text
    assert sum("held by" in (attrs["aria-label"] or "") for attrs in page.drawings) == 2
    assert "a and b , level" in page.text


def test_bad_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither result\.json nor run folders"):
        write_report(tmp_path)
    with pytest.raises(BadInput, match=r"neither result\.json nor run folders"):
        write_report(tmp_path / "absent")
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(BadInput, match="does not hold a JSON object"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_metrics_line_cut_short_is_passed_over_only_at_the_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    good = json.dumps({"site": "site-0", "epoch": 1, "loss": 1.0})
    (folder / "metrics.jsonl").write_text(good + '\n{"site": "si')
    assert RunData.read(folder).metrics == [json.loads(good)]
    (folder / "metrics.jsonl").write_text('{"site"\n' + good + "\n")
    with pytest.raises(BadInput, match="line 1 is not JSON"):
        write_report(folder)


def test_lambda_section_has_the_manual_schedule_and_the_product(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rows={"lambda": 4.0, "loss_align": 0.5})
    text = write_report(folder).read_text()
    assert "a manual schedule, 18 → 0" in text
    plain = write_report(make_run(tmp_path / "plain")).read_text()
    assert "manual schedule" not in plain
    weight, term = lambda_panels(RunData.read(folder))
    assert list(weight.guide) == [(0.0, 18.0), (4.0, 0.0)]  # 18 (1 - epoch / 4), the `linear` weighting
    assert term.lines["site-1"] == [(epoch, 2.0) for epoch in (1.0, 2.0, 3.0, 4.0)]


LAMBDA = {"lambda": 3.0, "loss_align": 0.5}


def svg_of(page_text: str, label: str) -> str:
    """The one drawing whose spoken name begins so."""
    (found,) = re.findall(
        rf'<svg class="wide" role="img" aria-label="{re.escape(label)}.*?</svg>', page_text, flags=re.S
    )
    return str(found)


def shown_in(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_high_manual_line_does_not_flatten_the_sites(tmp_path: Path) -> None:
    low = shown_in(svg_of(write_report(make_run(tmp_path / "low", rows=LAMBDA)).read_text(), "λ and λ · L_align"))
    assert "↖ from 18" in low  # the frame ends at 3 / 0.6 = 5, and says where the dashed line comes from
    assert {"4", "5"} & set(low)
    assert not {"8", "12", "15", "16", "18"} & set(low)
    high = shown_in(
        svg_of(
            write_report(make_run(tmp_path / "high", rows={**LAMBDA, "lambda": 9.5})).read_text(), "λ and λ · L_align"
        )
    )
    assert not [text for text in high if "from 18" in text]  # half the frame or more: the whole line is there
    assert {"15", "16"} & set(high)
    nothing = write_report(make_run(tmp_path / "zero", rows={**LAMBDA, "lambda": 0.0})).read_text()
    assert "a manual schedule" in nothing


def test_an_exploded_lambda_is_drawn_on_a_log_scale(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rows=LAMBDA)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["lambda"] = 1e6
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = shown_in(svg_of(write_report(folder).read_text(), "λ and λ · L_align"))
    assert {"λ, the weight of alignment (log scale)", "10", "1000", "1e5"} <= set(shown)


def test_lists_in_metrics_are_passed_over(tmp_path: Path) -> None:
    rows: dict[str, Any] = {
        **LAMBDA,
        "proto_norms": [1.0, 2.0],
        "loss_local": [3.0],
        "proto_norm": 1.5,
        "kind": "x",
        "flag": True,
    }
    text = write_report(make_run(tmp_path / "run", rows=rows)).read_text()
    shown = shown_in(svg_of(text, "L_align and Prototype norm"))
    assert "Prototype norm, mean over classes" in shown
    assert "L_local" not in shown


def test_runs_of_one_training_share_their_curves(tmp_path: Path) -> None:
    for name in ("ensemble", "fedavg"):
        make_run(tmp_path / "all" / name, method=name)
    make_run(tmp_path / "all" / "aurora", method="aurora", rows=LAMBDA | {"loss": 9.0})
    page = page_of(tmp_path / "all")
    labels = [attrs["aria-label"] or "" for attrs in page.drawings]
    assert [label.partition("sites, ")[2] for label in labels if label.startswith("Training loss")] == [
        "aurora",
        "ensemble and fedavg",
    ]
    assert "ensemble and fedavg (one training for all)" in page.text
    assert sum(label.startswith("λ") for label in labels) == 1
    assert not [label for label in labels if label.startswith("L_align")]  # the terms are for a single run's page


CHECKPOINTS = [{"epoch": 2, "accuracy": 0.9}, {"epoch": 1, "accuracy": 0.85}]


def test_what_stopping_earlier_would_have_given(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run", checkpoints=CHECKPOINTS)).read_text()
    page = Page(text)
    assert "Had they stopped earlier" in page.text
    assert "Accuracy if the sites had stopped earlier (offline; nothing was sent)" in page.text
    assert "85.0 % after epoch 1, 90.0 % after epoch 2." in page.text
    svg = svg_of(text, "Accuracy if the sites had stopped earlier: run 85.0 % at epoch 1, 90.0 % at epoch 2")
    assert {"1", "2", "80 %", "100 %"} <= set(shown_in(svg))
    assert "run" not in shown_in(svg)  # one line needs no legend
    make_run(tmp_path / "all" / "a", checkpoints=CHECKPOINTS)
    make_run(tmp_path / "all" / "b", checkpoints=[{"epoch": 1, "accuracy": 0.3}, {"epoch": 2, "accuracy": 0.6}])
    make_run(tmp_path / "all" / "c")
    svg = svg_of(write_report(tmp_path / "all").read_text(), "Accuracy if the sites had stopped earlier: a 85.0 %")
    assert {"a", "b", "0 %"} <= set(shown_in(svg))
    assert "c" not in shown_in(svg)


MEASURED = {
    "feature_agreement": 0.32,
    "drift": 0.113,
    "proto_consistency": 0.03179,
    "proto_matrix_std": 0.989,
    "inter_client_std": 0.0431,
}


def test_how_alike_the_sites_became(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", consistency=MEASURED))
    assert page.tables["consistency"] == [
        ["Measure", "More alike if", "Value"],
        ["Feature agreement", "higher", "0.320"],
        ["Drift", "lower", "0.113"],
        ["Prototype consistency", "lower", "0.0318"],
        ["Std of the mean prototypes", "–", "0.989"],
        ["Std between sites", "lower", "0.0431"],
    ]
    assert "mean linear CKA between two sites’ features of the same held-out images" in page.text


def test_a_comparison_has_a_column_a_run_and_explains_only_what_it_shows(tmp_path: Path) -> None:
    make_run(tmp_path / "all" / "aurora", consistency=MEASURED)
    make_run(tmp_path / "all" / "fedavg", consistency={"feature_agreement": 0.25, "drift": 100.0, "new": 1.0})
    make_run(tmp_path / "all" / "old")
    rows = page_of(tmp_path / "all").tables["consistency"]
    assert rows[0] == ["Measure", "More alike if", "aurora", "fedavg"]
    assert [row[2:] for row in rows[1:4]] == [["0.320", "0.250"], ["0.113", "100"], ["0.0318", "–"]]
    plain = page_of(make_run(tmp_path / "plain", consistency={"drift": 0.5}))
    assert [row[0] for row in plain.tables["consistency"]] == ["Measure", "Drift"]
    assert "CKA" not in plain.text


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoints": None, "consistency": None},
        {"checkpoints": [], "consistency": {}},
        {"checkpoints": {"epoch": 1}, "consistency": [1]},
        {"checkpoints": [3, {"epoch": 1}, {"epoch": "x", "accuracy": 0.5}], "consistency": {"drift": None, "new": 1.0}},
    ],
)
def test_odd_or_empty_facts_leave_their_section_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    page = page_of(make_run(tmp_path / "run", **changes))
    assert "stopped earlier" not in page.text
    assert "How alike" not in page.text


def test_many_sites_and_classes_become_one_picture_with_the_counts_beside_it() -> None:
    rng = np.random.default_rng(0)
    counts = {f"site-{i}": rng.integers(0, 500, 100).tolist() for i in range(70)}
    rows = [{"site": site, "epoch": epoch, "loss": 1 / epoch} for site in counts for epoch in range(1, 301)]
    run = RunData(
        "big", result(), split={"class_names": [f"class {i}" for i in range(100)], "counts": counts}, metrics=rows
    )
    text = build_html([run], "big")
    assert len(text) < 600_000
    page = Page(text)
    assert "Each faint line is one of 70 sites" in page.text
    numbers = next(table for table in page.tables.values() if table[0][:3] == ["Site", "Total", "class 0"])
    assert numbers[70] == ["site-69", f"{sum(counts['site-69']):,}", *(str(n) if n else "" for n in counts["site-69"])]
    assert any(
        (attrs.get("xlink:href") or "").startswith("data:image/png") for tag, attrs in page.tags if tag == "image"
    )


def test_small_grid_prints_every_count(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run")).read_text()
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert {"40", "777", "3", "779"} <= set(shown)
    assert "$x_" in shown
    assert "DejaVu" not in text


@pytest.mark.parametrize(
    ("total", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (999_600, "1,000 kB"), (44_700_000, "44.7 MB")],
)
def test_sizes(total: float | None, text: str) -> None:
    assert size(total) == text


def test_natural_order() -> None:
    assert sorted(["site-10", "b", "10", "site-2", "site-2b", "9"], key=natural) == [
        "9",
        "10",
        "b",
        "site-2",
        "site-2b",
        "site-10",
    ]


@settings(max_examples=6, deadline=None)
@given(name=st.text(max_size=40), site=st.text(max_size=20))
def test_any_text_gives_a_well_formed_page(name: str, site: str) -> None:
    run = RunData(
        name,
        result(method=name, per_client={site: 0.5}, per_class={name: 0.25, site: 1.0}),
        split={"class_names": [name, site], "counts": {site: [3, 0]}},
        metrics=[{"site": site, "epoch": 1, "loss": 0.5}],
        extra=[{"title": name, "text": site}],
    )
    page = Page(build_html([run], name))
    page.text.encode()
    assert page.tables["results"][1][1] == "87.3"
    assert "script" not in {tag for tag, _ in page.tags}


@given(st.text(), st.integers(2, 30))
def test_clean_is_one_printable_line_within_its_limit(text: str, limit: int) -> None:
    shown = drawing.clean(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    assert shown == drawing.clean(shown, limit)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_in_a_browser(tmp_path: Path) -> None:
    assert BROWSER is not None
    path = write_report(make_run(tmp_path / "run", rows={"lambda": 7.5, "loss_align": 0.5}))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [BROWSER, *flags, "--enable-logging=stderr", "--v=0", "--dump-dom", path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    page = Page(done.stdout)
    assert page.tables["results"][1][1] == "87.3"
    assert len(page.drawings) == 5
    assert "script" not in {tag for tag, _ in page.tags}
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


# -- runs whose nodes met


def node_facts(local: float, answer: float, sender: str) -> dict[str, Any]:
    candidates = [
        {"sender": sender, "score": 0.9, "chosen": True, "weight": 0.75},
        {"sender": "self", "score": 0.5, "chosen": False, "weight": None},
    ]
    theorem = {"risk_gap": None, "printed": 2.0, "ours": 1.0, "logit_gap": 0.5, "logit_bound": 0.25}
    bounds = {"says_nothing": True, "largest_rate": 0.1}
    one = {"round": 1, "student": answer, "teacher": 0.5, "candidates": candidates, "log": ["refused <x>: bad"]}
    one |= {"theorem_1": theorem, "theorem_2": bounds}
    return {"model": "mlp", "train": 40, "val": 9, "test": 9, "local": local, "answer": answer, "rounds": [one]}


def make_population(folder: Path) -> Path:
    make_run(folder, method="fol", fusion=None, rounds=1, per_client={"site-2": 0.75, "site-0": 0.5})
    (folder / "nodes").mkdir()
    for name, facts in {
        "site-0": node_facts(0.5, 0.5, "site-1"),
        "site-1": node_facts(0.9, 0.9, "a node that was not judged"),
        "site-2": node_facts(0.25, 0.75, "site-0"),
    }.items():
        (folder / "nodes" / f"{name}.json").write_text(json.dumps(facts))
    return folder


def test_nodes_that_met_are_read_from_the_folder(tmp_path: Path) -> None:
    folder = make_population(tmp_path / "run")
    page = page_of(folder)
    head, first, second, mean, error, over, spread, p = next(t for t in page.tables.values() if t and t[0][0] == "node")
    assert head == ["node", "model", "train", "val", "test", "local %", "FOL E=1 %", "FOL-A E=1 %"]
    assert first == ["site-2", "mlp", "40", "9", "9", "25.0", "75.0", "50.0"], "in the result's order"
    assert second[0] == "site-0"
    assert mean == ["mean", "", "40", "9", "9", "37.5", "62.5", "50.0"]
    assert error == ["±", "", "–", "–", "–", "12.5", "12.5", "0.0"]
    assert over == ["over local", "", "–", "–", "–", "–", "25.0", "12.5"], "at the same nodes"
    assert spread == ["±", "", "–", "–", "–", "–", "25.0", "12.5"]
    assert p == ["p", "", "–", "–", "–", "–", "1", "1"], "one node moved: either sign is as likely"
    lines = page.tables["nodes"]
    assert lines[0] == ["Model", "Own test %", "95 % interval", "Over local, points", "Nodes up / down", "p"]
    # 62.5 +- 1.96 x 12.5, of two nodes at 50 and 75.
    assert lines[1] == ["FOL", "62.5", "38.0 – 87.0", "+25.0", "1 / 0", "1.000"]
    assert [line[:2] for line in lines[2:]] == [["FOL-A", "50.0"], ["local", "37.5"]]
    assert "sent up" not in page.text
    assert "sent from node to node" in page.text
    assert "On common images" not in page.text, "there were none"
    assert "a node that was not judged" not in page.text
    assert "refused <x>: bad" in page.text
    assert "site-0 (0.75)" in page.text
    bounds = next(t for t in page.tables.values() if t and "Theorem 1, ours" in t[0])
    assert bounds[1] == ["site-2, site-0", "1", "–", "2", "1", "0.5", "0.25", "says nothing", "0.1"], (
        "no number is a dash, and both say the same"
    )
    assert any("site-2 75.0" in word for word in page.words), "the slope chart names few nodes"


def test_nodes_on_common_images(tmp_path: Path) -> None:
    folder = make_population(tmp_path / "run")
    for name in ("site-0", "site-2"):
        path = folder / "nodes" / f"{name}.json"
        facts = json.loads(path.read_text())
        figures = {"accuracy": 0.5, "log_loss": 0.7, "calibration_error": 0.1}
        better = figures | {"accuracy": 0.75, "log_loss": 0.6}
        facts["common"] = {"images": 1234, "local": figures}
        facts["rounds"][0]["common"] = {"images": 1234, "student": better, "teacher": better}
        path.write_text(json.dumps(facts | {"answer_common": 0.75}))
    page = page_of(folder)
    assert "on 1,234 images that no node trained on" in page.text
    assert "local 50.0 ± 0.0 %, FOL E=1 75.0 ± 0.0 % (+25.0 points; 2 up, 0 down, p 0.500)" in page.text
    table = next(t for t in page.tables.values() if t and t[0][1:] == ["train", "local %", "FOL E=1 %", "FOL-A E=1 %"])
    assert table[1] == ["site-2", "40", "50.0", "75.0", "75.0"]
    more = next(t for t in page.tables.values() if t and "log-loss" in t[0])
    assert more == [
        ["", "log-loss", "calibration error"],
        ["local", "0.700 ± 0.000", "10.0 ± 0.0 %"],
        ["FOL E=1", "0.600 ± 0.000", "10.0 ± 0.0 %"],
        ["FOL-A E=1", "0.600 ± 0.000", "10.0 ± 0.0 %"],
    ]


def test_rows_that_say_the_same_are_one() -> None:
    rows = [[f"site-{i}", str(n), "6", "0"] for i in range(4) for n in (1, 2)] + [["site-9", "1", "6", "1"]]
    assert folded(rows, 2) == [["4 alike: site-0 … site-3", "1, 2", "6", "0"], ["site-9", "1", "6", "1"]]
    assert folded([["a", "x"], ["b", "y"]]) == [["a", "x"], ["b", "y"]]


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_nodes_is_not_long_and_nothing_is_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    assert BROWSER is not None
    folder = make_run(
        tmp_path / "run", method="fol", fusion=None, rounds=1, per_client={f"n{i}": 0.5 for i in range(20)}
    )
    (folder / "nodes").mkdir()
    for i in range(20):
        (folder / "nodes" / f"n{i}.json").write_text(json.dumps(node_facts(0.5, 0.5 + i / 50, "n1")))
    text = write_report(folder).read_text()
    # The page itself lets no script run; a copy of it without that rule is measured.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    ask = "const e=document.documentElement;e.dataset.size=[e.scrollWidth,e.clientWidth,e.scrollHeight].join()"
    (tmp_path / "measured.html").write_text(text.replace("</body>", f"<script>{ask}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    command = [BROWSER, *flags, "--dump-dom", (tmp_path / "measured.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    found = re.search(r'data-size="(\d+),(\d+),(\d+)"', done.stdout)
    assert found is not None
    across, room, high = map(int, found.groups())
    assert across <= room
    assert high < 4000 if width == 1280 else high < 6000


def test_what_distillation_and_pruning_did_is_drawn(tmp_path: Path) -> None:
    folder = make_population(tmp_path / "run")
    assert not {"How the students learned", "Accuracy against size"} & set(page_of(folder).words)
    for name in ("site-0", "site-2"):
        path = folder / "nodes" / f"{name}.json"
        facts = json.loads(path.read_text())
        steps = [
            {"stage": "distill", "epoch": e, "loss": 1 / e, "val_loss": None if e == 2 else 2 / e} for e in (1, 2, 3)
        ]
        sizes = [{"share": share, "accuracy": 0.9 * share, "log_loss": 0.5} for share in (1.0, 0.5)]
        facts["rounds"][0] |= {"distill_history": steps, "curve": sizes}
        path.write_text(json.dumps(facts))
    page = page_of(folder)
    assert "How the students learned" in page.text
    assert "Accuracy against size" in page.text
    assert {"loss on training images", "loss on validation images", "% of the parameters"} <= set(page.words)


def test_a_section_of_one_s_own_stands_beside_the_nodes(tmp_path: Path) -> None:
    folder = make_population(tmp_path / "run")
    (folder / "extra.json").write_text(
        json.dumps([{"title": "Node by node", "text": "an older copy"}, {"title": "Ours", "text": "our own words"}])
    )
    text = page_of(folder).text
    assert "an older copy" not in text
    assert "our own words" in text


def test_a_damaged_node_is_one_sentence(tmp_path: Path) -> None:
    folder = make_population(tmp_path / "run")
    (folder / "nodes" / "site-0.json").write_text("{}")
    with pytest.raises(BadInput, match=r"nodes/ of the run run does not hold .*KeyError"):
        write_report(folder)
    (folder / "nodes" / "site-0.json").write_text("[]")
    with pytest.raises(BadInput, match="does not hold a JSON object"):
        write_report(folder)
