"""Who holds which images: every split by name, seeded, hashed, saved.

The same alpha is not the same difficulty: ``dirichlet`` balances client sizes, ``dirichlet-plain`` does not,
``dirichlet-overlap`` lets clients share images, ``dirichlet-client`` draws a class prior per client. So the name and
the hash of a split travel with every result. All draws come from numpy's frozen ``RandomState`` streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, ValidationError

from flyby.data.dataset import Dataset
from flyby.data.places import parts_by_block, regions
from flyby.drawing import clean, grid
from flyby.errors import BadInput
from flyby.files import digest, read_json, unwritable, write_text
from flyby.names import as_name
from flyby.registry import Registry
from flyby.rng import legacy_numpy
from flyby.settings import Grown, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = npt.NDArray[np.int64]
Random = np.random.RandomState
MAX_REDRAWS = 2000
MANY = 20  # more sites or classes than this are not spelt out in a notebook


class SplitSettings(Grown):
    """How to divide a dataset; ``alpha`` is FOL's psi too, ``labels`` serves ``by-label``, ``val`` is held out per
    site."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    later = frozenset({"holdout", "block_km", "patches"})

    name: str = Field("dirichlet", description="how the data is divided, one of `flyby data`")
    clients: int = Field(5, ge=1, le=100_000, description="how many sites")
    alpha: float = Field(0.1, description="Dirichlet concentration: .05 very uneven, 100 nearly even")
    min_size: int | None = Field(None, ge=0, description="default 10; 100 for the `fol` split; 1 for `dirichlet-plain`")
    labels: int = Field(2, ge=1, description="labels a client, for `by-label`")
    val: float | None = Field(
        None, ge=0, lt=1, description="validation share of each site; default 0, .15 for `fol` and `by-place`"
    )
    test: float | None = Field(
        None, ge=0, lt=1, description="own-test share of each site; default 0, .15 for `fol` and `by-place`"
    )
    holdout: Literal["random", "blocks"] | None = Field(
        None, description="held out image by image, or by blocks of ground; default random, blocks for `by-place`"
    )
    block_km: float | None = Field(
        None, gt=0, description="side of a block; default the largest of 16, 8, 4 .. km that can be held out"
    )
    patches: int = Field(8, ge=1, le=1000, description="patches of ground that a site sees, for `by-place`")
    replicas: int = Field(0, ge=0, le=100, description="augmented copies of every training image, made after the split")
    seed: int | None = Field(None, description="default: the run's seed")

    @property
    def uses_alpha(self) -> bool:
        return self.name.startswith("dirichlet") or self.name == "fol"


@dataclass(frozen=True)
class Share:
    """One site's indices into the training pool. ``test`` is empty where the site is judged on the common test set."""

    train: Indices
    val: Indices
    test: Indices


@dataclass(frozen=True)
class Split:
    """Shares by site name, with the settings that made them. ``hash`` names who holds what of which data, however it
    was made; the file also has a seal over all it says."""

    settings: SplitSettings
    seed: int
    data_digest: str
    class_names: tuple[str, ...]
    shares: dict[str, Share]
    counts: dict[str, list[int]]

    def __repr__(self) -> str:
        shape = f", alpha {self.settings.alpha:g}" if self.settings.uses_alpha else ""
        held = sum(sum(row) for row in self.counts.values())
        what = f"{len(self.shares)} sites hold {held:,} training images of {len(self.class_names)} classes"
        return f"Split({self.settings.name}{shape}, seed {self.seed}: {what}; {self.hash})"

    def rows(self) -> list[list[str | int]]:
        """Who holds what, a heading first: per site its training images of each class and in all, then its own
        validation and test images where it has some; the sums last."""
        parts = [part for part in ("val", "test") if any(len(getattr(s, part)) for s in self.shares.values())]
        numbers = {
            name: [*self.counts[name], sum(self.counts[name]), *(len(getattr(share, part)) for part in parts)]
            for name, share in self.shares.items()
        }
        found: list[list[str | int]] = [["site", *self.class_names, "total", *parts]]
        found += [[name, *row] for name, row in numbers.items()]
        return [*found, ["all", *(sum(column) for column in zip(*numbers.values(), strict=True))]]

    def table(self) -> str:
        """:meth:`rows` as text: sites down, classes across; a dot where a site has none."""
        cells = [[clean(cell or "·", 16) for cell in row] for row in self.rows()]
        first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
        return "\n".join(
            "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
            for row in cells
        )

    def plot(self, path: Path | str | None = None) -> Figure:
        """Who holds what, drawn as in the report: sites down, classes across. ``path`` also keeps it as a file, whose
        ending says its kind (.png, .svg, .pdf)."""
        held = np.array(list(self.counts.values()), dtype=np.float64)
        totals = [f"{total:,.0f}" for total in held.sum(axis=1)]
        shown = np.where(held > 0, held, np.nan)
        drawn = grid.figure(
            list(self.shares), self.class_names, shown, "{:.0f}".format, totals=totals, unit="samples of the class"
        )
        if path is not None:
            try:
                drawn.savefig(path, dpi=144, facecolor="white")
            except OSError as error:
                raise unwritable(path, error) from error
            except ValueError as error:
                raise BadInput(f"cannot draw {path}: {error}; end its name with .png, .svg or .pdf") from None
        return drawn

    def _repr_html_(self) -> str:
        """A small table for a notebook: the first sites, and beyond a few classes only how many each site holds."""
        head, *rows, sums = self.rows()
        if len(self.class_names) > MANY:
            picked = slice(len(self.class_names) + 1, None)
            held = [sum(n > 0 for n in self.counts[name]) for name in self.shares]
            head = ["site", "classes", *head[picked]]
            rows = [[row[0], n, *row[picked]] for row, n in zip(rows, held, strict=True)]
            sums = ["all", len(self.class_names), *sums[picked]]
        more: list[list[str | int]] = [[f"… {len(rows) - MANY} more"]] if len(rows) > MANY else []
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(clean(cell))}</td>' for cell in line)}</tr>"
            for line in (head, *rows[:MANY], *more, sums)
        )
        return f"<table><caption>{escape(repr(self))}</caption>{body}</table>"

    @property
    def hash(self) -> str:
        lists = {name: [s.train.tolist(), s.val.tolist(), s.test.tolist()] for name, s in self.shares.items()}
        copies = self.settings.replicas
        # "train": once all parts were copied, and what was trained on them is not what is trained now.
        return digest({"data": self.data_digest, "shares": lists, "replicas": copies and ["train", copies]})

    def to_json(self) -> dict[str, Any]:
        sites = {
            name: {"train": s.train.tolist(), "val": s.val.tolist(), "test": s.test.tolist()}
            for name, s in self.shares.items()
        }
        content = {
            "name": self.settings.name,
            "hash": self.hash,
            "seed": self.seed,
            "data": self.data_digest,
            "settings": self.settings.model_dump(mode="json"),
            "class_names": list(self.class_names),
            "counts": self.counts,
            "sites": sites,
        }
        return content | {"seal": digest(content)}

    def save(self, path: Path) -> None:
        import json

        write_text(path, json.dumps(self.to_json(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> Split:
        raw = read_json(path)
        try:
            shares = {
                n: Share(*(np.asarray(s[p], dtype=np.int64) for p in ("train", "val", "test")))
                for n, s in raw["sites"].items()
            }
            split = cls(
                SplitSettings(**raw["settings"]),
                raw["seed"],
                raw["data"],
                tuple(raw["class_names"]),
                shares,
                raw["counts"],
            )
        except ValidationError as error:
            raise BadInput(f"{path} is not a split file: {sentence(error)}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(
                f"{path} is not a split file ({type(error).__name__}: {str(error).splitlines()[0]})"
            ) from None
        # Not compared with what would be written now: settings that were added since have their default there.
        sealed = {key: value for key, value in raw.items() if key != "seal"}
        if (raw.get("hash"), raw.get("seal")) != (split.hash, digest(sealed)):
            raise BadInput(
                f"{path} was changed after it was written (its hash or its seal does not fit); make the split again"
            )
        return split


def make_split(data: Dataset, settings: SplitSettings, seed: int = 0) -> Split:
    """Divide ``data`` among ``settings.clients`` sites by the named rule, then hold out each site's own val and test
    parts."""
    rule = SPLITS[settings.name]
    _check(data, settings)
    seed = settings.seed if settings.seed is not None else seed
    rng = legacy_numpy(seed, "split", settings.name)
    parts = rule(data, settings, rng)
    smallest = min(parts, key=lambda name: len(parts[name]))
    if len(parts[smallest]) < (settings.min_size or 0):
        raise BadInput(
            f"{settings.name} with {len(parts)} clients leaves {smallest} {len(parts[smallest])} samples, under"
            f" min_size {settings.min_size}; lower --clients or --min-size"
        )
    shares = _held_out(data, settings, {name: np.sort(rows) for name, rows in parts.items()}, seed)
    counts = {name: data.counts(share.train) for name, share in shares.items()}
    return Split(settings, seed, data.digest, data.class_names, shares, counts)


def _held_out(data: Dataset, settings: SplitSettings, parts: dict[str, Indices], seed: int) -> dict[str, Share]:
    """Each site's own validation and test parts: image by image, or by blocks of ground.

    Where sites see ground of their own, each holds out blocks of its own. Elsewhere all hold out the same blocks: a
    neighbour's model must not have seen the ground on which this site is judged.
    """
    own = 0.15 if settings.name in ("fol", "by-place") else 0.0
    val, test = (own if share is None else share for share in (settings.val, settings.test))
    if val + test >= 1:
        raise BadInput(f"split.val {val} + split.test {test} leave nothing to train on; keep their sum under 1")
    if (settings.holdout or ("blocks" if settings.name == "by-place" else "random")) == "random" or val + test == 0:
        # A generator per site: a site's parts do not change when another site's do.
        return {
            name: hold_out(rows, data.labels, val, test, legacy_numpy(seed, name, "hold-out"))
            for name, rows in parts.items()
        }
    places, role = _places(data), np.zeros(len(data), dtype=np.int64)
    together = parts if settings.name == "by-place" else {"all sites": np.arange(len(data))}
    for name, rows in together.items():
        rng = legacy_numpy(seed, name, "blocks")
        role[rows], _ = parts_by_block(places[rows], data.labels[rows], (val, test), settings.block_km, rng)
    shares = {name: Share(*(rows[role[rows] == part] for part in (0, 1, 2))) for name, rows in parts.items()}
    for name, share in shares.items():
        if not len(share.train):
            raise BadInput(f"all images of {name} lie in blocks that are held out; lower split.block_km or --clients")
    return shares


def _places(data: Dataset) -> npt.NDArray[np.float64]:
    if data.places is None:
        raise BadInput(
            "the data does not say where its images were taken: the file name of each must be its longitude and"
            " latitude with decimals, such as -73.9911,45.1203.jpg"
        )
    return data.places


def _check(data: Dataset, settings: SplitSettings) -> None:
    if settings.uses_alpha and not 0 < settings.alpha < np.inf:
        raise BadInput(
            f"alpha must be above 0, got {settings.alpha}; small values (.05) are very uneven, 100 is nearly even"
        )
    if settings.name != "by-column" and settings.clients > len(data):
        raise BadInput(f"{settings.clients} clients cannot share {len(data)} samples; use fewer --clients")
    if np.count_nonzero(data.counts()) < 2:
        raise BadInput("the training data holds one class only; a classifier needs at least two")


def _floor(settings: SplitSettings, default: int) -> int:
    return default if settings.min_size is None else settings.min_size


def _named(parts: list[Indices]) -> dict[str, Indices]:
    return {f"site-{k}": part for k, part in enumerate(parts)}


def _shares(rng: Random, alpha: float, clients: int) -> npt.NDArray[np.float64]:
    """Dir(alpha); tiny alphas can underflow to all zeros, which is drawn again as the corner it stands for."""
    share = rng.dirichlet(np.full(clients, alpha))
    if not np.isfinite(share).all() or share.sum() <= 0:
        share = np.eye(clients)[rng.randint(clients)]
    return np.asarray(share)


def _per_class(data: Dataset, rng: Random) -> list[Indices]:
    return [rng.permutation(np.flatnonzero(data.labels == c)) for c in range(data.classes)]


def _cut(pool: Indices, share: npt.NDArray[np.float64]) -> list[Indices]:
    cuts = (np.cumsum(share)[:-1] * len(pool) + 1e-9).astype(np.int64)
    return list(np.split(pool, cuts))


def _redraw(settings: SplitSettings, floor: int, draw: Callable[[], list[Indices]]) -> dict[str, Indices]:
    """Draw until every client has at least ``floor`` samples; a bound, then an error that names what to change."""
    for _ in range(MAX_REDRAWS):
        parts = draw()
        if min(len(part) for part in parts) >= floor:
            return _named(parts)
    raise BadInput(
        f"no {settings.name} split with alpha {settings.alpha:g}, {settings.clients} clients and min_size {floor} was"
        f" found in {MAX_REDRAWS} draws; raise alpha, or lower --clients or --min-size"
    )


def dirichlet(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Per class, shares ~ Dir(alpha); clients that already hold >= N/K get none of it; redrawn until all reach
    min_size."""

    def draw() -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(settings.clients)]
        held = np.zeros(settings.clients)
        for pool in _per_class(data, rng):
            share = _shares(rng, settings.alpha, settings.clients)
            open_ = held < len(data) / settings.clients  # never all shut while a sample is left
            share = np.where(open_, share, 0.0)
            if share.sum() <= 0:  # the whole share fell on full clients: the open ones divide it evenly
                share = (open_ | ~open_.any()).astype(float)
            for k, piece in enumerate(_cut(pool, share / share.sum())):
                parts[k].append(piece)
                held[k] += len(piece)
        return [np.concatenate(p) for p in parts]

    return _redraw(settings, _floor(settings, 10), draw)


def dirichlet_plain(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Per class, shares ~ Dir(alpha), nothing else; redrawn only while a client has nothing at all."""

    def draw() -> list[Indices]:
        pieces = [_cut(pool, _shares(rng, settings.alpha, settings.clients)) for pool in _per_class(data, rng)]
        return [np.concatenate([p[k] for p in pieces]) for k in range(settings.clients)]

    return _redraw(settings, _floor(settings, 1), draw)


def dirichlet_overlap(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Per class, a client takes min(n_c, 10 n_c share) samples of the WHOLE class: clients share samples."""

    def draw() -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(settings.clients)]
        for pool in _per_class(data, rng):
            share = _shares(rng, settings.alpha, settings.clients)
            for k in range(settings.clients):
                take = min(len(pool), int(10 * len(pool) * share[k]))
                parts[k].append(rng.permutation(pool)[:take])
        return [np.concatenate(p) for p in parts]

    return _redraw(settings, _floor(settings, 10), draw)


def dirichlet_client(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Each client has its own class prior ~ Dir(alpha) and the same size; when a class runs out, the others fill in.

    Clients draw in many small turns, so that no client is left with what the others refused.
    """
    clients = settings.clients
    pools = [list(pool) for pool in _per_class(data, rng)]
    priors = [_shares(rng, settings.alpha, data.classes) for _ in range(clients)]
    quota = [len(data) * (k + 1) // clients - len(data) * k // clients for k in range(clients)]
    turn = max(1, min(quota) // 50)
    parts: list[list[int]] = [[] for _ in range(clients)]
    while any(len(parts[k]) < quota[k] for k in range(clients)):
        for k in rng.permutation(clients):
            wanted = min(turn, quota[k] - len(parts[k]))
            while wanted > 0:
                left = np.array([len(pool) for pool in pools], dtype=float)
                prior = np.where(left > 0, priors[k], 0.0)
                prior = prior if prior.sum() > 1e-12 else left
                for c, n in enumerate(rng.multinomial(wanted, prior / prior.sum())):
                    n = min(int(n), len(pools[c]))
                    parts[k].extend(pools[c].pop() for _ in range(n))
                    wanted -= n
    return _named([np.array(part, dtype=np.int64) for part in parts])


def fol(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Per class, shares ~ Dir(psi), then repaired: the largest clients give random samples to those under min_size
    (100)."""
    floor = _floor(settings, 100)
    if floor * settings.clients > len(data):
        raise BadInput(
            f"{settings.clients} clients with at least {floor} samples need {floor * settings.clients}, the data has"
            f" {len(data)}; lower --clients or --min-size"
        )
    pieces = [_cut(pool, _shares(rng, settings.alpha, settings.clients)) for pool in _per_class(data, rng)]
    parts = [rng.permutation(np.concatenate([p[k] for p in pieces])) for k in range(settings.clients)]
    for k in range(settings.clients):
        while len(parts[k]) < floor:
            donor = int(np.argmax([len(p) for p in parts]))
            give = min(floor - len(parts[k]), max(1, (len(parts[donor]) - floor) // 2))
            parts[k], parts[donor] = np.concatenate([parts[k], parts[donor][:give]]), parts[donor][give:]
    return _named(parts)


def iid(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Every class dealt evenly; the remainders go round, so that client sizes differ by at most one."""
    order = np.concatenate(_per_class(data, rng))
    return _named([order[k :: settings.clients] for k in range(settings.clients)])


def by_label(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """Each client holds ``labels`` classes; a class is divided evenly among its holders (a rare one may not reach them
    all)."""
    clients, each = settings.clients, settings.labels
    present = np.flatnonzero(np.bincount(data.labels, minlength=data.classes))
    if each > len(present):
        raise BadInput(
            f"by-label with {each} labels a client needs at least {each} classes, the data has {len(present)}; lower"
            " split.labels"
        )
    if clients * each < len(present):
        raise BadInput(
            f"{clients} clients with {each} labels each cannot hold all {len(present)} classes; raise --clients or"
            " split.labels"
        )
    holders: list[list[int]] = [[] for _ in range(data.classes)]
    for k in range(clients):
        # The classes with the fewest holders first, ties at random: every class is held, and holders stay balanced.
        order = sorted(present, key=lambda c: (len(holders[c]), rng.random_sample()))
        for held in order[:each]:
            holders[held].append(k)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for c, pool in enumerate(_per_class(data, rng)):
        for i, k in enumerate(holders[c]):
            parts[k].append(pool[i :: len(holders[c])])
    sizes = [sum(len(piece) for piece in part) for part in parts]
    if min(sizes) < 1:
        raise BadInput(f"by-label leaves client {int(np.argmin(sizes))} without samples; use fewer --clients")
    return _named([np.concatenate(part) for part in parts])


def by_column(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """One site per value of a natural column (a user, a hospital); sites smaller than min_size are left out."""
    if data.groups is None:
        raise BadInput("by-column needs a column that says whose each image is; name it with --set data.column=NAME")
    members: dict[str, list[int]] = {}
    for i, value in enumerate(data.groups):
        members.setdefault(value, []).append(i)
    floor = _floor(settings, 1)
    kept: dict[str, Indices] = {}
    for value in sorted(members):
        # A site's name goes into file names and parcels, so what those do not take, a dot at the beginning among it,
        # becomes a hyphen.
        name = as_name(value)
        if len(members[value]) >= floor:
            if name in kept:
                raise BadInput(
                    f"two values of the column would both be named {name!r}, one of them {value!r}; rename one of them"
                )
            kept[name] = np.array(members[value], dtype=np.int64)
    if not kept:
        raise BadInput(f"no value of the column has {floor} samples or more; lower --min-size")
    return kept


def by_place(data: Dataset, settings: SplitSettings, rng: Random) -> dict[str, Indices]:
    """The map is cut into patches of as even a number of images as can be, and each site sees some of them: nobody else
    sees that ground."""
    count = settings.clients * settings.patches
    places = _places(data)
    if count > len(np.unique(places, axis=0)):
        raise BadInput(
            f"{settings.clients} clients with {settings.patches} patches each need {count} places, the data has"
            f" {len(np.unique(places, axis=0))}; lower --clients or split.patches"
        )
    patches = regions(places, count, rng)
    order = rng.permutation(count) if settings.patches > 1 else np.arange(count)
    return _named([np.concatenate([patches[p] for p in order[k :: settings.clients]]) for k in range(settings.clients)])


def hold_out(indices: Indices, labels: npt.NDArray[np.int64], val: float, test: float, rng: Random) -> Share:
    """A stratified train / val / test division of one site's indices; each part keeps the data's order."""
    if not len(indices) or (val == 0 and test == 0):
        return Share(indices, indices[:0], indices[:0])
    parts: tuple[list[Indices], ...] = ([], [], [])
    carry = np.zeros(2)  # rounding carried from class to class, so that the totals come out right as well
    for c in np.unique(labels[indices]):
        pool = rng.permutation(indices[labels[indices] == c])
        want = np.array([val, test]) * len(pool) + carry
        take = np.minimum(np.floor(want + 0.5), len(pool) - 1).clip(0).astype(int)
        while take.sum() >= len(pool) and take.max() > 0:  # every class keeps something to train on
            take[int(np.argmax(np.where(take > 0, take - want, -np.inf)))] -= 1
        carry = (want - take).clip(-0.5, 0.5)  # what tiny classes could not give is not taken from the next one
        parts[1].append(pool[: take[0]])
        parts[2].append(pool[take[0] : take.sum()])
        parts[0].append(pool[take.sum() :])
    joined = [np.sort(np.concatenate(p)) for p in parts]
    return Share(*joined)


SPLITS: Registry[Callable[[Dataset, SplitSettings, Random], dict[str, Indices]]] = Registry(
    "split",
    {
        "dirichlet": dirichlet,
        "dirichlet-plain": dirichlet_plain,
        "dirichlet-overlap": dirichlet_overlap,
        "dirichlet-client": dirichlet_client,
        "fol": fol,
        "iid": iid,
        "by-label": by_label,
        "by-column": by_column,
        "by-place": by_place,
    },
)
