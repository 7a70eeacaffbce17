"""FOL's rows as tables. A few nodes: as the paper's Table 1 has them, a line a method and round, a column a node. Many
nodes: a line a method and round, with means over nodes and seeds, standard errors and a paired test against the local
models. Published figures stand in the same lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, median, stdev
from typing import Any

from flyby.runs.methods import METHODS, PRINTED
from flyby.runs.paired import EXACT, Paired, mean_error
from flyby.study.sheet import THEIRS, Entry, Table, plain

Row = dict[str, Any]
Line = dict[tuple[int, str], Row]  # what was measured of one model, by seed and node
NAMES = {**PRINTED, "dense": ("DENSE", ""), "coboosting": ("Co-Boosting", "")}
FEW = 4  # nodes that have columns of their own
MORE = {"log_loss": "log-loss", "calibration_error": "calibration error, %", "recall": "recall at 5 % false alarms, %"}


def node_tables(rows: list[Row], figures: list[Row], facts: Mapping[str, Any] | None = None) -> list[Table]:
    """One table for every variant and psi of the study, with the numbers of images: a node with few says little."""
    tables = []
    groups = list(dict.fromkeys((row.get("variant", ""), row.get("alpha")) for row in rows))
    for variant, alpha in groups:
        mine = [row for row in rows if (row.get("variant", ""), row.get("alpha")) == (variant, alpha)]
        printed = [f for f in figures if "node" in f and f.get("alpha") in (None, alpha)]
        title = [variant] if variant else []
        title += [f"psi = {alpha:g}"] if len({psi for _, psi in groups}) > 1 else []
        nodes = list(mine[0]["by_round"])
        few = len(nodes) <= FEW and all(list(row["by_round"]) == nodes for row in mine)
        table = _by_node(mine, nodes, printed) if few else _over_nodes(mine, printed)
        below = [*table.below, *([_published(printed)] if printed else [])]
        told = {**(facts or {}), "alpha": alpha, **({"variant": variant} if variant else {})}
        tables.append(replace(table, title=", ".join(title), below=below, facts=told))
    return tables


def _published(figures: list[Row]) -> str:
    """Whose the published figures are, and what goes with them."""
    nodes = ", ".join(dict.fromkeys(str(f["node"]) for f in figures))
    caveats = "; ".join(dict.fromkeys(f["caveat"].rstrip(".") for f in figures if f.get("caveat")))
    sources = ", ".join(dict.fromkeys(f["source"] for f in figures))
    return f"Published, for its own nodes {nodes}: {sources}{f' ({caveats})' if caveats else ''}."


def _by_node(rows: list[Row], nodes: list[str], figures: list[Row]) -> Table:
    found, seeds = measured(rows), sorted({row["seed"] for row in rows})
    images = [sorted({row["by_round"][node]["images"] for row in rows}) for node in nodes]
    heads = [
        f"{node} ({'/'.join(map(str, n))} images)" if len(n) < 4 else f"{node} ({n[0]}-{n[-1]} images)"
        for node, n in zip(nodes, images, strict=True)
    ]
    lines = []
    for name, line in found.items():
        per_node = [[one["own"] for (_, who), one in line.items() if who == node] for node in nodes]
        each = [
            Entry(f"{100 * fmean(v):.2f}", facts={"method": name, "node": node, **_mean_facts(v, "own")})
            for v, node in zip(per_node, nodes, strict=True)
        ]
        every = [v for values in per_node for v in values]
        mean = Entry(f"{100 * fmean(every):.2f}", facts={"method": name, **_mean_facts(every, "own")})
        printed = [f for f in figures if f["method"] == name]
        lines.append(
            [Entry(name), *each, mean, _printed(name, printed, " / ".join(f"{f['value']:.2f}" for f in printed))]
        )
    seconds = ", ".join(f"{row['method']} {row['seconds']:.0f} s" for row in rows if row["seed"] == seeds[0])
    words = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    below = [f"Own-test accuracy in %, {words}; {seconds} ({rows[0]['hardware']})."]
    return Table(["method", *heads, "mean", "published"], "l" + "r" * (len(nodes) + 1) + "l", lines, below=below)


def _mean_facts(values: list[float], measure: str, scale: float = 100.0) -> Row:
    return {
        "measure": measure,
        "mean": scale * fmean(values),
        "std": scale * stdev(values) if len(values) > 1 else None,
        "n": len(values),
    }


def _printed(name: str, figures: list[Row], text: str) -> Entry:
    """The published values of one line, in one cell."""
    if not figures:
        return Entry()
    told = {"published": fmean(f["value"] for f in figures), "source": figures[0]["source"], **THEIRS}
    return Entry(text, facts={"method": name, **told, "caveat": figures[0].get("caveat", "")})


def _over_nodes(rows: list[Row], figures: list[Row]) -> Table:
    """Only nodes that all rows of a seed have: differences are between models of the same node."""
    found = measured(rows)
    local = found.get("Local", {})
    common = any("common" in one for line in found.values() for one in line.values())
    more = [key for key in MORE if any(key in one for line in found.values() for one in line.values())]
    judged = ["own", "common"] if common else ["own"]
    heads = [head for kind in judged for head in (f"{kind}, %", f"{kind} − local", "p", "up / down")]
    heads += [MORE[key] for key in more]
    lines = []
    for name, line in found.items():
        cells = [cell for kind in judged for cell in _against(name, line, local if name != "Local" else {}, kind)]
        for key in more:
            values, scale = [one[key] for one in line.values() if key in one], 1.0 if key == "log_loss" else 100.0
            told = {"method": name, **_mean_facts(values, key, scale)} if values else {}
            cells.append(Entry(_mean(values, scale) if values else "", facts=told))
        printed = [f for f in figures if f["method"] == name]
        text = f"{fmean(f['value'] for f in printed):.2f} (n={len(printed)})" if printed else ""
        lines.append([Entry(name), *cells, _printed(name, printed, text)])
    heads = ["method", *heads, "published, mean"]
    return Table(heads, "l" + "r" * (len(heads) - 2) + "l", lines, below=_footing(rows, found, common))


def _against(name: str, line: Line, local: Line, kind: str) -> list[Entry]:
    """Mean, difference from the local models, its p, and how many nodes rose and fell."""
    values = {where: one[kind] for where, one in line.items() if kind in one}
    if not values:
        return [Entry()] * 4
    told = {"method": name, **_mean_facts([*values.values()], kind)}
    mean = _mean(list(values.values()))
    # A node may have been pretrained more than once: what a row made is compared with what that row began with.
    local = {where: line[where].get("began", local[where]) for where in values if where in local}
    both = [where for where in values if kind in local.get(where, {})]
    if not both:
        return [Entry(mean, facts=told), *plain("", "", "")]
    gap = Paired.of([values[where] for where in both], [local[where][kind] for where in both])
    error = f" ± {100 * gap.error:.2f}" if gap.error is not None else ""
    p = f"{gap.p:.3f}" if gap.p >= 0.001 else f"{gap.p:.0e}"
    told |= {"above_local": 100 * gap.mean, "p": gap.p, "up": gap.up, "down": gap.down}
    return [Entry(mean, facts=told), *plain(f"{100 * gap.mean:+.2f}{error}", p, f"{gap.up} / {gap.down}")]


def _mean(values: list[float], scale: float = 100.0) -> str:
    mean, error = mean_error(values)
    digits = 2 if scale > 1 else 3
    return f"{scale * mean:.{digits}f}" + (f" ± {scale * error:.{digits}f}" if error is not None else "")


def _footing(rows: list[Row], found: dict[str, Line], common: bool) -> list[str]:
    """What the figures stand on."""
    places = sorted({where for line in found.values() for where in line})
    seeds = sorted({row["seed"] for row in rows})
    own = [next(line[where]["images"] for line in found.values() if where in line) for where in places]
    each = sorted({sum(seed == s for s, _ in places) for seed in seeds})
    words = f"{each[0]} nodes" if len(each) == 1 else f"{each[0]} to {each[-1]} nodes"
    words += f", seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}: n = {len(places)}"
    text = (
        f"{words}. Own: accuracy on a node's own {min(own)} to {max(own)} test images (median {median(own):g},"
        f" {sum(own):,} in all)."
    )
    if common:
        sizes = sorted({one["common_images"] for line in found.values() for one in line.values() if "common" in one})
        text += (
            f" Common: accuracy on {' or '.join(f'{n:,}' for n in sizes)} images that no node trains on, each class"
            " weighted as in the node's training images; so are the columns behind it."
        )
    if again := _began_elsewhere(found):
        text += f" {again} began from local models that were pretrained again, and are compared with those."
    exact = "counted exactly" if len(places) <= EXACT else f"exact up to {EXACT} differences, else its normal limit"
    seconds = ", ".join(f"{row['method']} {row['seconds']:.0f} s" for row in rows if row["seed"] == seeds[0])
    return [
        text,
        (
            "± is the standard error over nodes and seeds (nodes of one seed meet the same neighbours, so it is rather"
            f" too small); p is of a paired sign-flip test against the local models, {exact}; up / down are nodes above"
            f" and below them. {seconds} ({rows[0]['hardware']})."
        ),
    ]


def _began_elsewhere(found: dict[str, Line]) -> str:
    """The lines whose local models are not those of the table."""
    local = found.get("Local", {})

    def other(line: Line) -> bool:
        return any(one.get("began", local.get(where)) != local.get(where) for where, one in line.items())

    return ", ".join(dict.fromkeys(name.split(" (E=")[0] for name, line in found.items() if local and other(line)))


def measured(rows: list[Row]) -> dict[str, Line]:
    """Every line of a table by its name: ``Local``, then each method's student and teacher by round. Of each seed only
    the nodes that all its rows have."""
    nodes = {
        row["seed"]: [n for n in row["by_round"] if all(n in r["by_round"] for r in rows if r["seed"] == row["seed"])]
        for row in sorted(rows, key=lambda row: -len(row["by_round"]))
    }
    found: dict[str, Line] = {}
    # A server's sites may have been trained in another way: local models are those of nodes that meet, if there are.
    for row in sorted(rows, key=lambda row: not meets(row)):
        for node in nodes[row["seed"]]:
            if "local" in row["by_round"][node]:
                found.setdefault("Local", {}).setdefault((row["seed"], node), _facts(row["by_round"][node], "local"))
    for row in rows:
        names = NAMES.get(row["method"], (row["method"], ""))
        rule = row.get("fusion") or "own"
        for name, who in zip(names, ("student", "teacher"), strict=True):
            for node in nodes[row["seed"]] if name else ():
                one = row["by_round"][node]
                for number in range(len(one.get(who, ()))):
                    title = f"{name} (E={number + 1})" if meets(row) else name if rule == "own" else f"{name}, {rule}"
                    facts = _facts(one, who, number)
                    if meets(row) and "local" in one:
                        facts["began"] = _facts(one, "local")
                    found.setdefault(title, {})[row["seed"], node] = facts
    return found


def meets(row: Row) -> bool:
    """Whether the row's nodes meet, and there is no server."""
    known = METHODS.get(row["method"])
    return known is None or known.orient is not None


def _facts(node: Row, who: str, number: int | None = None) -> Row:
    """One model at one node: its accuracy on own and common images, and the other figures."""

    def of(series: Any) -> Any:
        return series[who] if number is None else series[who][number]

    found = {"own": of(node), "images": node["images"]}
    if "common" in node:
        found |= {"common": of(node["common"]), "common_images": node["common"]["images"]}
    return found | {key: of(series) for key, series in node.get("more", {}).items() if key in MORE}
