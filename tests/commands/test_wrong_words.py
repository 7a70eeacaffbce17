"""Wrong command lines: each is answered with one sentence that says what is wrong, exit code 2, and nothing is begun.

What bad data, bad parcels and the settings of a plain run get stands in ``test_cli.py``; here are the other words."""

from __future__ import annotations

from pathlib import Path

import pytest

from factories import call, one_line

FILES = {
    "note.txt": "hello",
    "torn/result.json": "{",
    "list/result.json": "[]",
    "empty/notes": "",
    "key.yaml": "title: t\nmethods: [fedavg]\nfusion: [a]\n",
    "list.yaml": "- a\n",
    "torn.yaml": "title: [\n",
    "method.yaml": "title: t\nmethods: [fedavgg]\n",
    "rule.yaml": "title: t\nmethods: [fedavg]\nfusions: [expert]\n",
    "needs.yaml": "title: t\nmethods: [fedavg]\nfusions: [fedlpa]\n",
    "seed.yaml": "title: t\nmethods: [fedavg]\nseeds: [a]\n",
    "split.yaml": "title: t\nmethods: [fedavg]\nsplits: [dirichle]\n",
    "untitled.yaml": "methods: [fedavg]\n",
    "variant.yaml": "title: t\nmethods: [fedavg]\nvariants: ['train.lrr=1']\n",
    "attack.yaml": "title: t\nmethods: [fedavg]\nattacks: ['rndom']\n",
}
RUN = ("run", "--epochs", "1", "--quiet", "--device", "cpu", "--engine", "inline", "--out", "made")
# What is typed, and words of the answer.
RUNS: list[tuple[str, tuple[str, ...]]] = [
    ("--fusion ,", ("--fusion ',' names nothing", "flyby methods")),
    ("--fusion iffi,expert", ("unknown fusion 'expert'", "'experts'")),
    ("--method fedavg --fusion fedavg,fedlpa", ("needs kfac", "--set objective.send=[kfac]")),
    ("--method fedavg --fusion feddf", ("proxy images", "--set proxy=PATH")),
    ("--method fol --fusion fedavg", ("fol has no server", "--fusion")),
    ("--method local --fusion fedavg", ("local exchanges nothing", "leave the rule out")),
    ("--rounds 2", ("--rounds", "methods without a server, such as fol")),
    ("--method fol --rounds 0", ("orient.rounds = 0", "greater than or equal to 1")),
    ("--method fol --top 0", ("orient.top = 0",)),
    ("--method fol --buffer x", ("--buffer", "'x' is not a valid integer")),
    ("--method fol --set orient.pol=2", ("unknown orient setting 'pol'", "'pool'")),
    ("--method aurora --set orient.pool=3", ("no orient settings", "leave orient.pool out")),
    ("--method local --set fusion.weights=size", ("no fusion settings",)),
    ("--method aurora --set objective.lamda_max=3", ("unknown objective setting 'lamda_max'", "'lambda_max'")),
    ("--set views.flip=2", ("views.flip = 2", "less than or equal to 1")),
    ("--set views.fllip=0.5", ("unknown views setting 'fllip'", "'flip'")),
    ("--set train.schedule=cosin", ("train.schedule = 'cosin'", "'cosine'")),
    ("--set train.batch=0", ("train.batch = 0",)),
    ("--set train.ema=0.9 --set train.patience=2", ("a mean of weights (ema) has no best epoch",)),
    ("--set train.lr=.nan", ("train.lr = nan",)),
    ("--set train.snapshots=-2", ("train.snapshots = -2",)),
    ("--set split.val=-0.1", ("split.val = -0.1",)),
    ("--set attack.kind=randm", ("attack.kind = 'randm'", "'random'")),
    ("--set counts=some", ("counts = 'some'", "'exact', 'noisy' or 'binary'")),
    ("--set epsilon=0", ("epsilon = 0", "greater than 0")),
    ("--set admission=strict", ("admission = 'strict'", "'validated'")),
    ("--set judge=train", ("judge = 'train'", "'held-out'")),
    ("--set server_seed=-1", ("server_seed = -1",)),
    ("--set model.width=wide", ("model.width = 'wide'", "number")),
    ("--compile fast", ("train.compile = 'fast'", "'graph'")),
    ("--tune last", ("model.tune belongs to a backbone", "--backbone")),
    ("--seed 1.5", ("--seed", "'1.5' is not a valid integer")),
    ("--clients", ("'--clients' requires an argument",)),
    ("--epochs -1", ("train.epochs = -1",)),
    ("extra", ("unexpected extra argument (extra)",)),
]
OTHERS: list[tuple[str, tuple[str, ...]]] = [
    ("methods aurora", ("unexpected extra argument (aurora)",)),
    ("methods --rule", ("No such option: --rule", "--rules")),
    ("explain", ("Missing argument 'NAME'",)),
    ("explain a b", ("unexpected extra argument (b)",)),
    ("explain train.lr.x", ("unknown name 'train.lr.x'", "'train.lr'")),
    ("explain digits", ("unknown name 'digits'; `flyby methods` lists what there is",)),
    ("study nothing-alike", ("unknown study 'nothing-alike'; `flyby study --list` shows",)),
    ("study --lst", ("No such option: --lst", "--list")),
    ("study none.yaml", ("none.yaml does not exist", "flyby study --list")),
    ("study key.yaml", ("unknown key.yaml setting 'fusion'", "'fusions'")),
    ("study list.yaml", ("list.yaml must hold a mapping",)),
    ("study torn.yaml", ("torn.yaml is not YAML",)),
    ("study method.yaml", ("unknown method 'fedavgg'", "'fedavg'")),
    ("study rule.yaml", ("unknown fusion 'expert'", "'experts'")),
    ("study needs.yaml", ("needs kfac",)),
    ("study seed.yaml", ("seeds.0 = 'a'", "integer")),
    ("study split.yaml", ("unknown split 'dirichle'", "'dirichlet'")),
    ("study untitled.yaml", ("untitled.yaml does not say its title",)),
    ("study variant.yaml", ("unknown train setting 'lrr'", "'lr'")),
    ("study attack.yaml", ("attack.kind = 'rndom'", "'random'")),
    ("study baselines-digits --limit soon", ("--limit", "'soon' is not a valid float")),
    ("study baselines-digits --limit -1", ("--limit", "x>=0")),
    ("study baselines-digits --engine cloud", ("unknown engine 'cloud'", "ray")),
    ("report", ("Missing argument 'FOLDER'",)),
    ("report note.txt", ("holds neither result.json nor run folders",)),
    ("report empty", ("name the --out folder of a finished run",)),
    ("report torn", ("torn/result.json is not readable JSON",)),
    ("report list", ("does not hold a JSON object",)),
    ("bench --model resnet19 --device cpu", ("unknown model 'resnet19'", "'resnet18'")),
    ("bench --rounds 0", ("--rounds", "x>=1")),
    ("bench --precision fp16", ("'fp16' is not one of", "'bf16'")),
    ("bench --only plane --device cpu", ("unknown work to measure 'plane'", "'plain'")),
    ("bench --growth time", ("'time' is not one of", "'clients'")),
    ("bench --growth clients --engines inlin --points 1 --device cpu", ("unknown engine 'inlin'", "'inline'")),
    ("bench --size 0 --device cpu", ("--size 0 is too small", "at least 2")),
    ("bench --device tpu", ("unknown device 'tpu'", "'cpu'")),
    ("keys nw", ("No such command 'nw'", "'new'")),
    ("keys new a/b", ("a site cannot be called 'a/b'",)),
    ("keys show note.txt", ("note.txt is not a public key of flyby",)),
    ("keys trust trust.json", ("Missing argument 'PUBLICKEY'",)),
    ("keys mask none.key", ("cannot read the key none.key",)),
    ("keys round a.mask", ("Missing option '--out'",)),
    ("inspect note.txt", ("note.txt is not a parcel",)),
    ("inspect note.txt --max-side 0", ("--max-side", "x>=1")),
    ("inspect note.txt --trust none.json", ("none.json does not exist",)),
    ("inspect --jsn note.txt", ("No such option: --jsn", "--json")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    return made


def answered(folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    line = one_line(call(*words))
    assert [word for word in said if word not in line] == [], line
    assert len(line) < 400, "a sentence, no more"
    assert sorted(folder.rglob("*")) == before, "nothing was written"


@pytest.mark.parametrize(("line", "said"), RUNS, ids=[line for line, _ in RUNS])
def test_a_wrong_run(line: str, said: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(folder, monkeypatch, (*RUN, *line.split()), said)


@pytest.mark.parametrize(("line", "said"), OTHERS, ids=[line for line, _ in OTHERS])
def test_a_wrong_word(line: str, said: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(folder, monkeypatch, tuple(line.split()), said)
