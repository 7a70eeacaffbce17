"""Who is let in. One ordered pipeline stands between a stranger's file and any fusion: cheap checks first, nothing of
the file is ever run.

Each parcel alone, as it arrives (:meth:`Gate.check`):

1. ``size``: the file, and the number and sum of all admitted so far, within the policy's limits;
2. ``header``: lengths, schema, manifest;
3. ``cost``: what its network would take, told from the spec alone, within the limits (``flyby.models.cost``);
4. ``signature``: a bad one is refused always; a sender of the trust file must have signed with its own key;
5. ``replay``: one parcel per sender, now and in the ledger of earlier fusions;
6. ``content``: hashes, shapes, finite numbers (``flyby.parcels.parcel.read``);
7. ``norm``: the root mean square of every tensor within an absolute bound.

All together, once (:meth:`Gate.settle`): ``fit`` (the same images as most; classes may differ), ``copy`` (the same
tensors under another name), ``norm`` again, against the median of the others, ``answers`` (finite logits within range),
where there are labelled images ``accuracy``, and ``extras``: what travels beside the weights is of the declared type,
shape and range, and what a rule will use is sound. What disagrees is only remarked on: honest sites with different
classes agree with nobody, so no threshold would be safe (docs/signing.md has the numbers).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flyby import files
from flyby.data.classes import part_for
from flyby.data.site import Part
from flyby.errors import BadInput
from flyby.models.cost import cost_of
from flyby.models.shelf import IN_MEMORY
from flyby.models.spec import ModelSpec
from flyby.names import printable
from flyby.parcels import container, parcel, plausible, signing
from flyby.parcels.inbox import unlike
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Manifest, Parcel
from flyby.parcels.plausible import Policy
from flyby.settings import build

__all__ = ["Admitted", "Gate", "Policy", "Refusal", "Refused", "open_gate", "remember"]


class Refused(BadInput):
    """A parcel was not let in; ``stage`` says at which check."""

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class Refusal:
    """One parcel that was not let in, for people and for ``--json``."""

    name: str
    sender: str | None
    stage: str
    reason: str
    source: Path | Parcel = field(repr=False)

    @property
    def path(self) -> Path | None:
        return self.source if isinstance(self.source, Path) else None

    @property
    def line(self) -> str:
        return f"refused {self.name}: {self.reason}"

    def row(self) -> dict[str, Any]:
        return {"file": self.name, "sender": self.sender, "stage": self.stage, "reason": self.reason}


@dataclass(frozen=True, eq=False)
class Admitted:
    """A parcel that passed alone: where it is and what is known of it. ``signer`` is a fingerprint. ``item`` is the
    parcel as it was read, with its tensors, while all that wait are small together."""

    source: Path | Parcel
    manifest: Manifest
    bytes: int
    digest: str
    signer: str | None
    norms: plausible.Norms = field(repr=False)
    item: Parcel | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return _label(self.source)

    @property
    def usable(self) -> Path | Parcel:
        """What an inbox takes: what was read, or else where it can be read again."""
        return self.item or self.source


class Gate:
    """The pipeline and what it has seen. ``standing`` is a ledger kept across fusions: whoever is in it has crossed
    already. ``earlier`` is the ledger of an older model that will be replaced: its very files may be fused again,
    another file of the same sender may not."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        receiver: str = "server",
        trust: signing.Trust | None = None,
        standing: Ledger | None = None,
        earlier: Ledger | None = None,
        quarantine: Path | None = None,
    ) -> None:
        self.policy, self.receiver, self.trust, self.standing, self.quarantine = (
            policy or Policy(),
            receiver,
            trust,
            standing,
            quarantine,
        )
        signing.need_trust(trust, self.policy.require_signed)
        self.again = False  # whether a sender of the standing ledger may come with another model
        self.ledger = Ledger()
        self.notes: list[str] = []
        self.accuracies: dict[str, float] = {}  # sender -> share of the validation images that its own model gets right
        self._earlier = {c.sender: c.digest for c in earlier.crossings} if earlier is not None else {}
        self._reads = frozenset({"weights"})  # what the rule, if there is one, looks at in a parcel
        self._names: Sequence[str] | None = None  # the classes of the validation images
        self._waiting: dict[str, Admitted] = {}
        self._senders: set[str] = set()  # of those that wait, and what they take on disk and in memory
        self._bytes = self._memory = 0
        self._refused: dict[str, Refusal] = {}

    @property
    def waiting(self) -> list[Admitted]:
        """Those that passed alone, in the order they came."""
        return list(self._waiting.values())

    @property
    def refused(self) -> list[Refusal]:
        return list(self._refused.values())

    # -- one at a time

    def check(self, source: Path | Parcel) -> Parcel:
        """The parcel, if it may come in by itself; else :class:`Refused`. A path that is checked again is judged
        anew."""
        self.forget(source)
        manifest = source.manifest if isinstance(source, Parcel) else None
        try:
            with _stage("size"):
                size = self._room(source)
            with _stage("header"):
                text, block, manifest = _head(source)
            label, sender = _label(source), manifest.sender
            with _stage("cost"):
                self.policy.check(manifest.spec, label)
            with _stage("signature"):
                public = signing.Signed(sender, signing.CONTEXT + text, block).signer(label)
                signing.believe(sender, public, label, self.trust, self.policy.require_signed)
            with _stage("replay"):
                digest = source.digest if isinstance(source, Parcel) else files.file_digest(source)
                self._once(manifest, digest, label)
            with _stage("content"):
                item = _content(source, text, block, self.policy.max_bytes)
            with _stage("norm"):
                norms = plausible.norms(item, label, self.policy)
        except Refused as error:
            self._refuse(source, manifest, error)
            raise
        signer = None if public is None else signing.fingerprint(public)
        memory = parcel.decoded_bytes(manifest)
        kept = item if isinstance(source, Path) and self._memory + memory <= IN_MEMORY // 2 else None
        self._waiting[_key(source)] = Admitted(source, manifest, size, digest, signer, norms, kept)
        self._senders.add(sender)
        self._bytes, self._memory = self._bytes + size, self._memory + memory
        return item

    def try_check(self, source: Path | Parcel) -> Parcel | None:
        """As :meth:`check`; a refused one is None and stands in ``refused``."""
        try:
            return self.check(source)
        except Refused:
            return None

    def forget(self, source: Path | Parcel) -> None:
        """As if this file had never come: it is gone, or will be checked anew."""
        self._leaves(_key(source))
        self._refused.pop(_key(source), None)

    def _leaves(self, key: str) -> Admitted | None:
        one = self._waiting.pop(key, None)
        if one is not None:
            self._senders.remove(one.manifest.sender)
            self._bytes, self._memory = self._bytes - one.bytes, self._memory - parcel.decoded_bytes(one.manifest)
        return one

    def _room(self, source: Path | Parcel) -> int:
        label, policy = _label(source), self.policy
        if isinstance(source, Path):
            with container.opened(source) as (_, size):
                pass
        else:
            size = source.size
        if size > policy.max_bytes:
            raise BadInput(
                f"{label} has {size} bytes, more than the {policy.max_bytes} allowed; raise --max-bytes if you trust"
                " its sender"
            )
        if len(self._waiting) >= policy.max_parcels:
            raise BadInput(
                f"{label} is one more than the {policy.max_parcels} parcels that are taken; raise --max-parcels, or use"
                " what is there"
            )
        if self._bytes + size > policy.max_total:
            raise BadInput(
                f"with {label} the parcels would have more than {policy.max_total} bytes together; raise --max-total,"
                " or use what is there"
            )
        return size

    def _once(self, manifest: Manifest, digest: str, label: str) -> None:
        sender = manifest.sender
        if sender == self.receiver:
            raise BadInput(f"{label} says that it comes from {sender}, which is this receiver's own name; leave it out")
        if sender in self._senders:
            raise BadInput(
                f"{label} is refused because two parcels come from {sender!r}; each participant sends exactly one"
            )
        known = self.standing.crossings if self.standing is not None else []
        if any(digest == c.digest or (sender == c.sender and not self.again) for c in known):
            raise BadInput(
                f"{label} is a second crossing: {sender} is in the ledger of an earlier fusion; each model crosses"
                " once, so leave it out"
            )
        if first := self._origin(manifest):
            raise BadInput(
                f"{label} is a second crossing: it is the model that {first} sent to an earlier fusion; a copy under"
                " another name counts once"
            )
        if self._earlier.get(sender, digest) != digest:
            raise BadInput(
                f"{label} is not the parcel of {sender} that the older model here was made of; each model crosses once,"
                " so name a new folder with --out"
            )

    def _origin(self, manifest: Manifest) -> str | None:
        """Who sent the same to an earlier fusion, whatever that one read of it."""
        if self.standing is None:
            return None
        kinds = {name.partition(".")[0] for name in manifest.extras}
        digests = (manifest.weights_digest, *(manifest.content_digest((kind,)) for kind in sorted(kinds)))
        return next((who for one in digests if (who := self.standing.origin(one, self.receiver))), None)

    # -- all together

    def settle(
        self,
        validation: Part | None = None,
        device: torch.device | str = "cpu",
        *,
        like: Manifest | None = None,
        rule: str | None = None,
        needs: Iterable[str] = (),
        beside: plausible.Beside | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Admitted]:
        """Those that may be fused, in the order they came. ``validation`` are labelled images, of the classes ``names``
        (by default in the parcels' own order); ``like`` is a manifest that all must fit (by default most decide);
        ``rule`` names a fusion that needs one architecture; ``needs`` is what a fusion asks every parcel for;
        ``beside`` examines the extras. Fills the ledger and the quarantine.
        """
        self._reads, self._names = frozenset(needs) or self._reads, names
        self._fit(like, rule)
        self._carries(needs)
        self._copies()
        self._against_median({key: one.norms for key, one in self._waiting.items()})
        looked = {key: self._look(key, one, validation, device, beside) for key, one in list(self._waiting.items())}
        self._against_median({key: found[1] for key, found in looked.items() if found is not None})
        self._remark({key: found[0] for key, found in looked.items() if found is not None and found[0] is not None})
        for one in self._waiting.values():
            weights = one.manifest.content_digest(self._reads)
            sender, sites = one.manifest.sender, one.manifest.sites
            self.ledger.record(sender, self.receiver, one.bytes, one.digest, weights=weights, sites=sites)
        self.isolate()
        return self.waiting

    def typical(self) -> Manifest:
        """The manifest that stands for most: their images, and of these the commonest network."""
        alike = self._most(self._most(self._waiting.values(), _form), lambda m: m.spec)
        return min(alike, key=lambda one: (self._standing(one), one.manifest.sender)).manifest

    def _most(self, those: Iterable[Admitted], form: Callable[[Manifest], object]) -> list[Admitted]:
        """Those of the form that most have: most trusted senders, then most models (copies count once), then the
        smallest images. Never the order in which they came, which is the senders' to choose."""
        groups: dict[object, list[Admitted]] = {}
        for one in those:
            groups.setdefault(form(one.manifest), []).append(one)

        def votes(item: tuple[object, list[Admitted]]) -> tuple[int, int, int, str]:
            trusted, spec = [one for one in item[1] if self._standing(one) == 0], item[1][0].manifest.spec
            models = {one.manifest.weights_digest for one in item[1]}
            return len(trusted), len(models), -spec.channels * math.prod(spec.size), repr(item[0])

        return max(groups.items(), key=votes)[1]

    def unchanged(self) -> None:
        """Refuses what was changed on disk since it was checked: to be asked after a fusion has read it, before
        anything is kept."""
        for one in self._waiting.values():
            if isinstance(one.source, Path) and (
                not one.source.is_file() or files.file_digest(one.source) != one.digest
            ):
                raise Refused(
                    f"{one.label} was changed or taken away while it was used; nothing was written, so give the same"
                    " command again",
                    "content",
                )

    def _drop(self, key: str, stage: str, reason: str) -> None:
        one = self._leaves(key)
        assert one is not None
        self._refuse(one.source, one.manifest, Refused(reason, stage))

    def _fit(self, like: Manifest | None, rule: str | None) -> None:
        if not self._waiting:
            return
        first = like or self.typical()
        for key, one in list(self._waiting.items()):
            m = one.manifest
            if _form(m) != _form(first):
                sizes = [f"{spec.size[0]}x{spec.size[1]}x{spec.channels}" for spec in (m.spec, first.spec)]
                self._drop(
                    key,
                    "fit",
                    f"{m.sender} takes {sizes[0]} images, {first.sender} {sizes[1]}; they cannot be fused, so train all"
                    " sites with one --size",
                )
            elif (need := cost_of(m.spec).activations) > (most := self._dearest(first.spec)):
                self._drop(
                    key,
                    "cost",
                    f"{one.label} takes {need:,} bytes per image where {first.sender} and others allow {most:,}; use"
                    " networks of about one size",
                )
        if rule is not None and self._waiting:
            first = self._most(self._waiting.values(), lambda m: m.spec.unclassed())[0].manifest
            for key, one in list(self._waiting.items()):
                if one.manifest.spec.unclassed() != first.spec.unclassed():
                    self._drop(key, "fit", unlike(rule, one.manifest, first))

    def _dearest(self, usual: ModelSpec) -> int:
        """Bytes of activations per image: what is trained through a network, to personalise or to distil, holds them
        for every image of a batch."""
        try:
            return max(self.policy.cost_floor, self.policy.cost_factor * cost_of(usual).activations)
        except BadInput:  # the receiver's own network, of a kind that tells nothing
            return self.policy.cost_floor

    def _carries(self, needs: Iterable[str]) -> None:
        """One that lacks what the rule asks for is refused like any other, and the rule goes on with the rest."""
        for key, one in list(self._waiting.items()):
            m = one.manifest
            names = {name.partition(".")[0] for name in m.extras}
            there = {"weights", "prototypes", "anchors", *names} | ({"class_counts"} if m.counts is not None else set())
            if missing := sorted(set(needs) - there):
                sent = f"{one.label} does not carry {', '.join(missing)}, which this rule needs"
                self._drop(key, "fit", f"{sent}; ask {m.sender} to train for it, or choose another --fusion")

    def _standing(self, one: Admitted) -> int:
        """Whose word counts first: a trusted sender's, then anybody's who signed, then the rest."""
        known = self.trust is not None and one.manifest.sender in self.trust.senders
        return 0 if known and one.signer is not None else 1 if one.signer is not None else 2

    def _copies(self) -> None:
        seen: dict[str, str] = {}
        # Of two the better known one is the original, then the first. Weights alone decide: an extra is soon added.
        for key, one in sorted(self._waiting.items(), key=lambda pair: self._standing(pair[1])):
            content = one.manifest.content_digest(self._reads)
            if content in seen:
                what = "every weight" if "weights" in self._reads else "every number"
                self._drop(
                    key,
                    "copy",
                    f"{one.label}: {what} of {one.manifest.sender} is that of {seen[content]}; a copy under another"
                    " name counts once",
                )
            else:
                seen[content] = one.manifest.sender

    def _against_median(self, norms: Mapping[str, plausible.Norms]) -> None:
        groups: dict[tuple[ModelSpec, tuple[str, ...]], dict[str, plausible.Norms]] = {}
        for key, found in norms.items():
            spec = self._waiting[key].manifest.spec.unclassed()
            groups.setdefault((spec, tuple(found.rms)), {})[key] = found
        for group in groups.values():
            for key, reason in plausible.outliers(group, self.policy).items():
                self._drop(
                    key, "norm", f"{self._waiting[key].label}: {reason}; train it again with the settings that all use"
                )

    def _look(
        self,
        key: str,
        one: Admitted,
        validation: Part | None,
        device: torch.device | str,
        beside: plausible.Beside | None,
    ) -> tuple[float | None, plausible.Norms] | None:
        """Has a network answer and its extras examined: the share of its answers that lie in classes it says it holds
        (None where that is not to be known) and the norms of its extras; None where it is refused."""
        counts, classes, sizes = one.manifest.counts, one.manifest.spec.classes, dict[str, float]()
        try:
            with _stage("answers"):
                item = one.item or (
                    one.source
                    if isinstance(one.source, Parcel)
                    else parcel.read(one.source, max_bytes=self.policy.max_bytes)
                )
                shown = None if validation is None else validation.images
                # A network that no rule reads need not answer, and its frozen backbone need not be installed here.
                answers = (
                    plausible.answers(item, shown, device, self.policy)
                    if "weights" in self._reads or validation is not None
                    else None
                )
            if validation is not None:  # of the classes that this sender knows, in its order
                validation, own = part_for(
                    validation, self._names or one.manifest.class_names, one.manifest.class_names
                )
            if validation is not None and answers is not None:
                labels, known = own.cpu(), own.cpu() >= 0
                right = answers == labels
                judged = plausible.judge(right[known], labels[known], counts, classes, lenient=True)
                self.accuracies[one.manifest.sender] = float(right.double().mean())
                # A network that no rule reads has learned nothing, and need not have.
                if not judged.passes and "weights" in self._reads:
                    raise Refused(judged.reason, "accuracy")
            if beside is not None:
                with _stage("extras"):
                    sizes |= beside(item, validation if validation else None, device)
        except Exception as error:  # whatever a stranger's model does, it is the stranger's fault
            crash = Refused(f"it crashes on a batch of images ({type(error).__name__})", "answers")
            refused = error if isinstance(error, Refused) else crash
            self._drop(key, refused.stage, f"{one.label}: {refused}")
            return None
        share = (
            None if counts is None or answers is None else float((torch.tensor(counts) > 0)[answers].double().mean())
        )
        return share, plausible.Norms(0.0, sizes)

    def _remark(self, shares: dict[str, float]) -> None:
        names = [one.manifest.sender for one in self._waiting.values() if one.signer is None]
        if names:
            self.notes.append(
                f"{len(names)} of {len(self._waiting)} parcels are not signed ({_some(names)}), so anybody may have"
                " sent them; see docs/signing.md"
            )
        elif self._waiting and self.trust is None:
            self.notes.append("the signatures are valid, but whose keys they are nobody says; give --trust FILE")
        if len(shares) > plausible.OTHERS and statistics.median(shares.values()) > 0.9:
            odd = [
                self._waiting[key].manifest.sender
                for key, share in shares.items()
                if share < 0.5 and key in self._waiting
            ]
            if odd:
                self.notes.append(
                    f"{_some(odd)} mostly answer with classes that they say they do not hold, unlike the others; look"
                    " at them"
                )

    # -- those that stay outside

    def _refuse(self, source: Path | Parcel, manifest: Manifest | None, error: Refused) -> None:
        name = printable(source.name) if isinstance(source, Path) else _label(source)
        self._refused[_key(source)] = Refusal(
            name, manifest.sender if manifest else None, error.stage, str(error), source
        )

    def isolate(self) -> None:
        """Move refused files into the quarantine folder, each beside its reason."""
        for one in self._refused.values() if self.quarantine is not None else ():
            if one.path is None or not one.path.is_file():
                continue
            assert self.quarantine is not None
            stem, number = files.plain_name(one.path.stem), 1
            taken = self.quarantine / f"{stem}{one.path.suffix if len(one.path.suffix) < 16 else ''}"
            while taken.exists():
                number += 1
                taken = taken.with_stem(f"{stem}-{number}")
            reason = taken.with_name(f"{taken.name}.reason.json")
            files.write_json(reason, one.row() | {"came_as": printable(str(one.path))})
            if not files.moved(one.path, taken, self.policy.max_bytes):
                self.notes.append(f"{one.name} stays where it is: it is too large for another disk; see {reason.name}")


# A command that watches a folder opens a gate for every file; these are only looked at, and never changed by a gate.
_ledger, _trust = files.Latest(Ledger.load), files.Latest(signing.Trust.load)


def open_gate(
    receiver: str,
    out: Path | None,
    *,
    trust: Path | None = None,
    require_signed: bool = False,
    ledger: Path | None = None,
    quarantine: Path | None = None,
    **limits: int | None,
) -> Gate:
    """The gate that a command's options describe; a limit of None is the policy's own. ``out`` is the folder to be
    written: an older model in it has a ledger of its own."""
    policy = build(
        Policy,
        {"require_signed": require_signed, **{name: value for name, value in limits.items() if value is not None}},
        "admission",
    )
    standing = None if ledger is None else _ledger(ledger) if ledger.exists() else Ledger()
    earlier = _ledger(out / "ledger.json") if out is not None and (out / "ledger.json").exists() else None
    known = None if trust is None else _trust(trust)
    return Gate(policy, receiver=receiver, trust=known, standing=standing, earlier=earlier, quarantine=quarantine)


def remember(gate: Gate, ledger: Path | None) -> None:
    """Adds what was admitted to the ledger that is kept across fusions, where there is one."""
    if ledger is None or gate.standing is None:
        return
    with files.sole_writer(ledger):  # read again under the lock: another fusion may have added to it meanwhile
        standing = Ledger.load(ledger) if ledger.exists() else Ledger()
        standing.take_over(gate.ledger)
        standing.save(ledger)


# -- reading, in steps


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        raise Refused(str(error), name) from error
    except OSError as error:  # taken away under our hands, say
        raise Refused(f"a parcel cannot be read: {error}", name) from error


def _head(source: Path | Parcel) -> tuple[bytes, bytes, Manifest]:
    """(manifest as text, signature block, manifest): what can be known before a tensor is read."""
    if isinstance(source, Parcel):
        return source.manifest.to_bytes(), source.signature, source.manifest
    return parcel.read_start(source)


def _content(source: Path | Parcel, text: bytes, block: bytes, max_bytes: int) -> Parcel:
    if isinstance(source, Parcel):  # through its bytes, so that what is in memory is held to its manifest as a file is
        return parcel.from_bytes(parcel.to_bytes(source), name=_label(source), max_bytes=max_bytes)
    item = parcel.read(source, max_bytes=max_bytes)
    if item.manifest.to_bytes() != text or item.signature != block:
        raise BadInput(f"{_label(source)} was changed while it was read; give the same command again")
    return item


def _form(manifest: Manifest) -> tuple[object, ...]:
    return manifest.spec.size, manifest.spec.channels, manifest.spec.pixels


def _key(source: Path | Parcel) -> str:
    return f"file {source.absolute()}" if isinstance(source, Path) else f"parcel {id(source)}"


def _label(source: Path | Parcel) -> str:
    return source.manifest.sender if isinstance(source, Parcel) else printable(str(source))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
