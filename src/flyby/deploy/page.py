"""The page of ``flyby serve``: one file without anything from elsewhere, for light and dark, wide and narrow."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from typing import Any

SHOWN = 60  # classes that the page lists
STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --soft: #5a6675; --paper: #f6f7f9; --card: #fff; --line: #d8dde4;
  --blue: #1f5fbf; --wash: #e4edfb; --red: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa7b6; --paper: #12161c; --card: #1b2129;
  --line: #323b47; --blue: #7db0ff; --wash: #20314d; --red: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, dd, li { overflow-wrap: anywhere; }
.soft { color: var(--soft); margin: 0; }
#drop { display: block; margin: 1.25rem 0; padding: 2.2rem 1rem; border: 2px dashed var(--line); border-radius: 12px;
  background: var(--card); text-align: center; cursor: pointer; }
#drop.over, #drop:focus-within { border-color: var(--blue); background: var(--wash); }
#drop strong { display: block; font-size: 1.1rem; }
#file { position: absolute; width: 1px; height: 1px; opacity: 0; }
#answer { display: flex; gap: 1.25rem; align-items: flex-start; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 1rem; }
#answer[hidden], #more[hidden], #picture[hidden] { display: none; }
#picture { width: 10rem; max-height: 12rem; object-fit: contain; border-radius: 8px; background: var(--wash); }
#said { flex: 1; min-width: 0; }
#said h2 { margin: 0 0 .5rem; font-size: 1.25rem; }
.row { display: grid; grid-template-columns: minmax(0, 9rem) 1fr 4rem; gap: .6rem; align-items: center;
  padding: .15rem 0; }
.row span:first-child { overflow-wrap: anywhere; }
.bar { height: .7rem; border-radius: 4px; background: var(--wash); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--blue); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
button { margin-top: .5rem; border: 1px solid var(--line); border-radius: 8px; background: none; color: var(--blue);
  font: inherit; padding: .25rem .75rem; cursor: pointer; }
a { color: var(--blue); }
#wrong { color: var(--red); margin: 0 0 1rem; }
#wrong:empty { display: none; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .75rem; overflow-x: auto; }
@media (max-width: 34rem) { #answer { flex-direction: column; align-items: stretch; }
  #picture { width: 100%; }
  .row { grid-template-columns: minmax(0, 6.5rem) 1fr 3.6rem; } dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; } }
"""
SCRIPT = """
"use strict";
const at = id => document.getElementById(id), FEW = 5, MOST = 20;
let turn = 0, picture = "";
function say(text) { at("wrong").textContent = text; }
function draw(shares, all) {
  const rows = Object.entries(shares).sort((a, b) => b[1] - a[1]);
  at("rows").replaceChildren(...(all ? rows : rows.slice(0, FEW)).map(([name, share]) => {
    const row = document.createElement("div"), bar = document.createElement("i");
    row.className = "row";
    bar.style.width = 100 * share + "%";
    for (const [word, kind] of [[name, ""], ["", "bar"], [(100 * share).toFixed(1) + " %", "number"]]) {
      const cell = document.createElement("span");
      cell.className = kind;
      cell.textContent = word;
      if (kind === "bar") cell.append(bar);
      row.append(cell);
    }
    return row;
  }));
  at("more").hidden = all || rows.length <= FEW;
  at("more").onclick = () => draw(shares, true);
}
async function ask(file) {
  if (!file) return;
  const mine = ++turn;
  at("answer").hidden = true;
  if (file.size > MOST << 20) return say("an image may have " + MOST + " MB, and this has more");
  say("looking ...");
  try {
    const reply = await fetch("predict", {method: "POST", body: file});
    const told = await reply.json();
    if (mine !== turn) return;
    if (!reply.ok) return say(told.error);
    say("");
    if (picture) URL.revokeObjectURL(picture);
    picture = URL.createObjectURL(file);
    at("picture").hidden = false;
    at("picture").src = picture;
    at("class").textContent = told.class;
    draw(told.probabilities, false);
    at("answer").hidden = false;
  } catch (error) {
    if (mine === turn) say("no answer: is flyby serve still running?");
  }
}
at("picture").onerror = () => { at("picture").hidden = true; };
at("file").onchange = event => { ask(event.target.files[0]); event.target.value = ""; };
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) addEventListener(name, event => {
  event.preventDefault();
  at("drop").classList.toggle("over", name === "dragenter" || name === "dragover");
  if (name === "drop") ask(event.dataTransfer.files[0]);
});
addEventListener("paste", event => ask(event.clipboardData.files[0]));
"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: flyby</title>
<style>{style}</style>
<main>
<h1>{name}</h1>
<p class="soft">{what}</p>
<label id="drop"><strong>Drop an image here</strong>or choose one; pasting works too<input type="file" id="file"
 accept="image/*,.npy" aria-label="An image to look at"></label>
<p id="wrong" role="status"></p>
<section id="answer" hidden><img id="picture" alt="the image that was sent"><div id="said" aria-live="polite">
<h2 id="class"></h2><div id="rows"></div><button id="more" hidden>all classes</button></div></section>
<h2>About this model</h2>
<dl>{facts}</dl>
<h2>From a program</h2>
<pre>curl --data-binary @photo.jpg {address}predict</pre>
<p class="soft">Also <a href="model">model</a> and <a href="health">health</a>, as JSON. Images are looked at on this
machine and are not kept.</p>
</main>
<script>{script}</script>
</html>
"""


def page_of(about: Mapping[str, Any], address: str) -> str:
    """The page about a model (``Served.about``) at an address."""
    names = list(about["classes"])
    listed = ", ".join(names[:SHOWN]) + (f", and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    height, width, channels = about["input"]
    facts = {"classes": listed, "accuracy": _accuracy(about), "probabilities": about["probabilities"]}
    facts["made by"] = f"{about['rule'] or about['kind']}{_sites(about)}"
    facts["images"] = f"any size; seen at {height} x {width} pixels in {channels} channel{'s' if channels > 1 else ''}"
    what = f"tells {len(names)} classes apart, {about['networks']} network{'s' if about['networks'] > 1 else ''}"
    shown = "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    words = {"name": escape(about["name"]), "what": escape(what), "facts": shown, "address": escape(address)}
    return PAGE.format(style=STYLE, script=SCRIPT, **words)


def _accuracy(about: Mapping[str, Any]) -> str:
    lines = []
    for one in about["evaluated"]:
        low, high = one.get("interval") or (None, None)
        between = "" if low is None or high is None else f", 95 % interval {low:.1%} to {high:.1%}"
        lines.append(f"{one['accuracy']:.1%} of {one['images']:,} images of {one.get('data')}{between}")
    return "; ".join(lines) or "not known: flyby evaluate --card puts it here"


def _sites(about: Mapping[str, Any]) -> str:
    return f" from {about['sites']} site{'s' if about['sites'] != 1 else ''}" if about["sites"] else ""


def policy() -> str:
    """What a browser may do with the page: run its own script, show what was dropped, ask this server; nothing
    else."""
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (STYLE, SCRIPT))
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; img-src blob:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
