"""The globe: one canvas, one script of a few kilobytes, no library and no network. Positions travel in the page as
16-bit numbers; the script puts a spline through them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flyby.contacts.journal import Journal
from flyby.contacts.plan import Plan
from flyby.contacts.tracks import Tracks
from flyby.report.fans import Steps

MOST_LINES = 40_000  # windows or exchanges that a page shows
LARGEST = 3_000_000  # bytes of positions


def globe(plan: Plan, tracks: Tracks, journal: Journal | None, accuracy: Mapping[str, Steps]) -> str:
    """The globe as a figure of a page; ``accuracy`` is by node, over hours."""
    shown = _thinned(tracks)
    names = [name for name in shown.names if name in plan.nodes or name in plan.stations]
    places = np.nan_to_num(shown.places[[shown.names.index(name) for name in names]])
    unit = max(1.0, float(np.abs(places).max())) / 32000
    who = {name: i for i, name in enumerate(names)}
    lines = [(who[a], who[b], s, e, k) for a, b, s, e, k in _lines(plan, journal) if a in who and b in who]
    values = [v for steps in accuracy.values() for _, v in steps]
    facts: dict[str, Any] = {
        "names": names,
        "stations": [who[name] for name in plan.stations if name in who],
        "step": float(shown.seconds[1] - shown.seconds[0]),
        "moments": len(shown.seconds),
        "unit": unit,
        "end": plan.seconds,
        "lines": lines[:MOST_LINES],
        "cut": len(lines) > MOST_LINES,
        "flash": journal is not None,
        "accuracy": {str(who[name]): [[h, round(v, 4)] for h, v in s] for name, s in accuracy.items() if name in who},
        "range": [round(min(values), 4), round(max(values), 4)] if values else None,
        "places": base64.b64encode((places / unit).round().astype("<i2").tobytes()).decode(),
    }
    said = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    return FRAME.replace("FACTS", said).replace("SCRIPT", SCRIPT)


def _thinned(tracks: Tracks) -> Tracks:
    every = 1
    while tracks.places[:, ::every].size * 2 > LARGEST and len(tracks.seconds) // (2 * every) > 2:
        every *= 2
    return Tracks(tracks.names, tracks.seconds[::every], tracks.places[:, ::every])


def _lines(plan: Plan, journal: Journal | None) -> Sequence[tuple[str, str, float, float, int]]:
    """(a, b, from, to, kind): windows, or what the journal says crossed (1: an exchange, 2: carried, 3: delivered)."""
    if journal is None:
        return [(c.a, c.b, round(c.start, 1), round(c.end, 1), 0) for c in plan.contacts]
    kinds = {"exchange": ("a", "b", 1), "carry": ("a", "b", 2), "deliver": ("node", "station", 3)}
    found: list[tuple[str, str, float, float, int]] = []
    for e in journal.events:
        if e["event"] in kinds:
            a, b, kind = kinds[e["event"]]
            found.append((e[a], e[b], float(e["begun"] if "begun" in e else e["at"]), float(e["at"]), kind))
    return found


FRAME = """<figure class="globe"><canvas id="globe" role="img" aria-label="The participants on their orbits"></canvas>
<div class="bar"><button id="g-play" type="button">Pause</button>
<input id="g-time" type="range" min="0" max="1000" value="0" aria-label="Time">
<output id="g-said"></output></div>
<figcaption id="g-key"></figcaption></figure>
<script type="application/json" id="g-facts">FACTS</script>
<script>SCRIPT</script>
"""

CSS = """
.globe canvas{display:block;width:100%;max-width:720px;aspect-ratio:1;margin:0 auto;touch-action:pan-y;cursor:grab}
.bar{display:flex;flex-wrap:wrap;align-items:center;gap:8px 14px;max-width:720px;margin:10px auto 0;font-size:.9rem}
.bar button{font:inherit;color:var(--accent);background:#fff;border:1px solid #c9ced5;border-radius:6px;padding:4px 0;
width:5.2em;cursor:pointer}
.bar input{flex:1 1 220px;accent-color:var(--accent)}
.bar output{flex:0 0 auto;min-width:17em;color:var(--muted);font-variant-numeric:tabular-nums}
.globe figcaption{max-width:720px;margin:8px auto 0;display:flex;flex-wrap:wrap;gap:2px 18px;align-items:center}
.swatch{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:6px}
.tri{border-radius:0;clip-path:polygon(50% 0,100% 100%,0 100%)}
.ramp{display:inline-block;width:110px;height:9px;border-radius:5px;margin:0 7px;vertical-align:baseline}
"""

# A drag turns the globe, and a click is not needed for anything. Time runs a day in a minute.
SCRIPT = r"""
(() => {
const F = JSON.parse(document.getElementById("g-facts").textContent);
const raw = atob(F.places), bytes = new Uint8Array(raw.length);
for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
const P = new Int16Array(bytes.buffer), N = F.names.length, M = F.moments, U = F.unit / 6371;
const canvas = document.getElementById("globe"), c = canvas.getContext("2d");
const slider = document.getElementById("g-time"), said = document.getElementById("g-said");
const button = document.getElementById("g-play"), key = document.getElementById("g-key");
const ground = new Set(F.stations), TRAIL = N > 400 ? 0 : 12;
const RAMP = [[68,1,84],[59,82,139],[33,145,140],[94,201,98],[253,231,37]];
const LINE = ["120,135,150", "213,94,0", "204,121,167", "0,158,115"];
const WORD = ["contact windows", "exchange", "carried", "delivered"];
let now = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, yaw = 0.6, tilt = 0.42, last = null;

function ramp(x) {
  const p = Math.min(3.999, Math.max(0, x * 4)), i = Math.floor(p), f = p - i;
  return "rgb(" + RAMP[i].map((v, k) => Math.round(v + f * (RAMP[i + 1][k] - v))).join() + ")";
}
function place(i, t) {                     // Catmull and Rom's spline through four positions
  const s = Math.min(M - 1.001, Math.max(0, t / F.step)), j = Math.floor(s), f = s - j, o = [0, 0, 0];
  const w = [-f*(1-f)*(1-f)/2, (2-5*f*f+3*f*f*f)/2, (f+4*f*f-3*f*f*f)/2, f*f*(f-1)/2];
  for (let n = 0; n < 4; n++) {
    const m = (i * M + Math.min(M - 1, Math.max(0, j - 1 + n))) * 3;
    for (let k = 0; k < 3; k++) o[k] += w[n] * P[m + k] * U;
  }
  return o;
}
function turned(p) {
  const x = p[0] * Math.cos(yaw) - p[1] * Math.sin(yaw), y = p[0] * Math.sin(yaw) + p[1] * Math.cos(yaw);
  return [x, p[2] * Math.cos(tilt) + y * Math.sin(tilt), p[2] * Math.sin(tilt) - y * Math.cos(tilt)];
}
let far = 1.15;
for (let i = 0; i < N; i++) { const p = place(i, 0); far = Math.max(far, Math.hypot(...p) * 1.04); }
let R = 1, X = 0, Y = 0;
const at = p => [X + R * p[0], Y - R * p[1]];
const hidden = p => p[2] < 0 && Math.hypot(p[0], p[1]) < 1;

function valueOf(i) {
  const steps = F.accuracy[i];
  if (!steps) return null;
  let v = steps[0][1];
  for (const [h, x] of steps) if (h * 3600 <= now) v = x;
  return v;
}
function net() {
  c.lineWidth = 1;
  for (const [points, strong] of MESH) {
    c.strokeStyle = strong ? "rgba(92,102,115,.55)" : "rgba(92,102,115,.22)";
    c.beginPath();
    let open = false;
    for (const point of points) {
      const p = turned(point), q = at(p);
      if (p[2] < 0) { open = false; continue; }
      if (open) c.lineTo(q[0], q[1]); else c.moveTo(q[0], q[1]);
      open = true;
    }
    c.stroke();
  }
}
const MESH = [];
for (let lat = -60; lat <= 60; lat += 30) MESH.push([ring(a => [a, lat]), lat === 0]);
for (let lon = 0; lon < 180; lon += 30) MESH.push([ring(a => a <= 180 ? [lon, a - 90] : [lon + 180, 270 - a]), false]);
function ring(f) {
  const made = [];
  for (let a = 0; a <= 360; a += 4) {
    const [lon, lat] = f(a).map(d => d * Math.PI / 180);
    made.push([Math.cos(lat) * Math.cos(lon), Math.cos(lat) * Math.sin(lon), Math.sin(lat)]);
  }
  return made;
}
function draw() {
  const side = canvas.clientWidth, dense = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(side * dense)) canvas.width = canvas.height = Math.round(side * dense);
  c.setTransform(dense, 0, 0, dense, 0, 0);
  c.clearRect(0, 0, side, side);
  X = Y = side / 2; R = side / 2 / far;
  const spots = [];
  for (let i = 0; i < N; i++) spots.push(turned(place(i, now)));
  const dot = Math.max(2.2, Math.min(5, side / 14 / Math.sqrt(N)));
  const node = i => {
    const p = spots[i], q = at(p), v = valueOf(i);
    c.fillStyle = ground.has(i) ? "#D55E00" : v === null || !F.range ? "#0072B2"
      : ramp(F.range[1] > F.range[0] ? (v - F.range[0]) / (F.range[1] - F.range[0]) : 1);
    c.globalAlpha = p[2] < 0 ? .35 : 1;
    c.beginPath();
    if (ground.has(i)) { c.moveTo(q[0], q[1] - 6); c.lineTo(q[0] + 5.5, q[1] + 4); c.lineTo(q[0] - 5.5, q[1] + 4); }
    else c.arc(q[0], q[1], dot, 0, 7);
    c.fill();
    c.lineWidth = .8; c.strokeStyle = "rgba(28,36,48,.65)"; c.stroke();
    c.globalAlpha = 1;
  };
  const trail = i => {                       // where it has been in the last quarter of an hour
    if (ground.has(i)) return;
    let before = null;
    for (let n = TRAIL; n >= 0; n--) {
      const p = turned(place(i, Math.max(0, now - n * 75)));
      if (before && !hidden(p) && !hidden(before) && (p[2] >= 0) === (spots[i][2] >= 0)) {
        const u = at(before), v = at(p);
        c.strokeStyle = `rgba(92,102,115,${.5 * (1 - n / TRAIL)})`; c.lineWidth = 1;
        c.beginPath(); c.moveTo(u[0], u[1]); c.lineTo(v[0], v[1]); c.stroke();
      }
      before = p;
    }
  };
  for (let i = 0; i < N; i++) if (spots[i][2] < 0 && !hidden(spots[i])) { trail(i); node(i); }
  const glow = c.createRadialGradient(X - R * .4, Y - R * .4, R * .1, X, Y, R);
  glow.addColorStop(0, "#f4f9fc"); glow.addColorStop(1, "#cfe2ee");
  c.fillStyle = glow; c.beginPath(); c.arc(X, Y, R, 0, 7); c.fill();
  c.strokeStyle = "#8fb3c9"; c.lineWidth = 1; c.stroke();
  net();
  let shown = 0, total = 0;
  const stay = F.flash ? 400 : 0, halo = 1500;  // a flash is short, since they fly apart; a ring stays longer
  for (const [a, b, from, to, kind] of F.lines) {
    if (kind && to <= now) total++;
    if (now < from || now > to + (stay && halo)) continue;
    shown++;
    const p = spots[a], q = spots[b], fade = now <= to || !stay ? 1 : Math.max(0, 1 - (now - to) / stay);
    const u = at(p), v = at(q), age = (now - to) / halo;
    if (kind && age > 0) for (const [s, w] of [[p, u], [q, v]]) {
      if (s[2] < 0) continue;
      c.strokeStyle = `rgba(${LINE[kind]},${.8 * (1 - age)})`; c.lineWidth = 2;
      c.beginPath(); c.arc(w[0], w[1], dot + 2 + 9 * age, 0, 7); c.stroke();
    }
    if (now > to + stay || (hidden(p) && hidden(q))) continue;
    c.strokeStyle = `rgba(${LINE[kind]},${(.25 + .7 * fade) * (kind ? 1 : .8)})`;
    c.lineWidth = kind ? 1 + 2.4 * fade : 1;
    c.beginPath(); c.moveTo(u[0], u[1]); c.lineTo(v[0], v[1]); c.stroke();
  }
  for (let i = 0; i < N; i++) if (spots[i][2] >= 0) { trail(i); node(i); }
  const values = [...Array(N).keys()].map(valueOf).filter(v => v !== null);
  const sum = values.reduce((x, y) => x + y, 0);
  const mean = values.length ? ` · mean accuracy ${(100 * sum / values.length).toFixed(1)} %` : "";
  const count = F.flash ? `${total} crossed` : `${shown} windows open`;
  said.textContent = `hour ${(now / 3600).toFixed(1)} · ${count}${mean}`;
  slider.value = 1000 * now / F.end;
}
function tell() {
  const kinds = [...new Set(F.lines.map(l => l[4]))].sort();
  const mark = (kind, look, word) => `<span><span class="${kind}" style="${look}"></span>${word}</span>`;
  const spots = kinds.map(k => mark("swatch", `background:rgb(${LINE[k]})`, WORD[k]));
  if (F.range) {
    const [low, high] = F.range.map(v => (100 * v).toFixed(0) + " %");
    const look = `background:linear-gradient(90deg,${RAMP.map(x => `rgb(${x})`)})`;
    spots.unshift(`<span>accuracy ${low}${mark("ramp", look, high)}</span>`);
  }
  if (ground.size) spots.push(mark("swatch tri", "background:#D55E00", "ground station"));
  if (F.cut) spots.push(`<span>only the first ${F.lines.length} are drawn</span>`);
  spots.push("<span>drag to turn</span>");
  key.innerHTML = spots.join("");
}
function tick(stamp) {
  if (playing && last !== null) { now += Math.min(100, stamp - last) / 1000 * 1440; if (now > F.end) now = 0; draw(); }
  last = stamp;
  requestAnimationFrame(tick);
}
button.textContent = playing ? "Pause" : "Play";
button.onclick = () => { playing = !playing; button.textContent = playing ? "Pause" : "Play"; };
slider.oninput = () => { now = slider.value / 1000 * F.end; draw(); };
let held = null;
canvas.onpointerdown = e => { held = [e.clientX, e.clientY]; canvas.setPointerCapture(e.pointerId); };
canvas.onpointermove = e => {
  if (!held) return;
  yaw += (e.clientX - held[0]) / R; tilt = Math.max(-1.5, Math.min(1.5, tilt + (e.clientY - held[1]) / R));
  held = [e.clientX, e.clientY]; draw();
};
canvas.onpointerup = canvas.onpointercancel = () => { held = null; };
addEventListener("resize", draw);
const asked = /^#hour=([0-9.]+)$/.exec(location.hash);
if (asked) { now = Math.min(F.end, asked[1] * 3600); playing = false; button.textContent = "Play"; }
tell(); draw(); requestAnimationFrame(tick);
})();
"""
