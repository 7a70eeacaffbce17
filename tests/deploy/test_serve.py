"""``flyby serve``: the page and its JSON, what it refuses and how, Ctrl-C, and the page's own script in a browser."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from factories import WAIT, encode, finish, make_images, small_spec, start, stripes
from flyby.deploy import serve
from flyby.deploy.page import SCRIPT, STYLE, page_of, policy
from flyby.deploy.serve import AT_ONCE, LARGEST, Served, Server, check_image, file_in
from flyby.errors import BadInput
from flyby.fusion.ensembles.standardised import StandardisedPredictor
from flyby.fusion.predictor import Predictor, Single, save_predictor
from flyby.models import ModelSpec

NAMES = ("rows", "columns", '<checks> & "more"')
CARD = {
    **{"fusion": "fedavg", "sites": 2, "license": "mit"},
    "evaluated": [{"data": "new", "images": 197, "accuracy": 0.9797, "interval": [0.9487, 0.9921]}],
}
PICTURE = encode(np.kron(stripes(1)[0][0], np.ones((5, 7, 1), np.uint8)))


def made() -> Predictor:
    spec = small_spec()
    return Single([spec], NAMES, [spec.build(torch.Generator().manual_seed(3))])


@contextmanager
def listening(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with listening(Server(Served(made(), "global", CARD), "127.0.0.1", 0)) as started:
        yield started


def asked(server: Server, path: str, data: bytes | None = None, method: str | None = None, **headers: str) -> Any:
    """(status, headers, body) of one request."""
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.url + path, data, told, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def refused(answer: Any, status: int) -> str:
    code, headers, body = answer
    assert code == status, body
    assert headers["Content-Type"].startswith("application/json")
    told = json.loads(body)
    assert set(told) == {"error"}
    assert "\n" not in told["error"]
    return str(told["error"])


def test_an_image_is_answered_as_predict_does(server: Server) -> None:
    status, _, body = asked(server, "predict", PICTURE)
    told = json.loads(body)
    assert status == 200
    with torch.no_grad():
        from flyby.data.sources import read_image

        pixels = torch.from_numpy(read_image(PICTURE, 1, (8, 8)).copy())[None]
        shares = made().chances(made()(pixels))[0]
    assert list(told["probabilities"]) == list(NAMES)
    assert np.allclose(list(told["probabilities"].values()), shares.numpy(), atol=1e-6)
    assert (told["class"], told["probability"]) == (NAMES[int(shares.argmax())], max(told["probabilities"].values()))


def test_a_form_and_other_kinds_of_images_do_as_well(server: Server) -> None:
    plain = json.loads(asked(server, "predict", PICTURE)[2])
    body = (
        b'--xx\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n--xx\r\nContent-Disposition: form-data;'
        b' name="image"; filename="../../etc/passwd"\r\nContent-Type: image/png\r\n\r\n' + PICTURE + b"\r\n--xx--\r\n"
    )
    assert json.loads(asked(server, "predict", body, Content_Type="multipart/form-data; boundary=xx")[2]) == plain
    quoted = 'multipart/form-data; charset=utf-8; boundary="xx"'
    assert json.loads(asked(server, "predict", body, Content_Type=quoted)[2]) == plain
    for kind in ("JPEG", "WEBP", "BMP", "GIF", "TIFF"):
        buffer = io.BytesIO()
        Image.fromarray(make_images(1, (30, 20))[0]).save(buffer, kind)
        assert asked(server, "predict", buffer.getvalue())[0] == 200, kind


def test_the_model_and_its_health_are_told(server: Server) -> None:
    about = json.loads(asked(server, "model")[2])
    assert (about["classes"], about["input"], about["rule"]) == (list(NAMES), [8, 8, 1], "fedavg")
    assert (about["evaluated"], about["calibrated"], about["sites"]) == (CARD["evaluated"], False, 2)
    before = json.loads(asked(server, "health")[2])["answered"]
    asked(server, "predict", PICTURE)
    assert json.loads(asked(server, "health")[2]) == {"status": "ok", "answered": before + 1}
    assert asked(server, "health", method="HEAD")[2] == b""
    assert asked(server, "favicon.ico")[0] == 204


def test_the_page_asks_for_nothing_from_elsewhere(server: Server) -> None:
    status, headers, body = asked(server, "")
    text = body.decode()
    assert status == 200
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "&lt;checks&gt; &amp; &quot;more&quot;" in text
    assert "<checks>" not in text
    assert "98.0% of 197 images of new, 95 % interval 94.9% to 99.2%" in text
    assert "not calibrated" in text
    assert "prefers-color-scheme: dark" in text
    told = headers["Content-Security-Policy"]
    for part, source in (("style-src", STYLE), ("script-src", SCRIPT)):
        sha = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{part} 'sha256-{sha}'" in told
        assert f">{source}<" in text
    assert "default-src 'none'" in told
    assert "unsafe" not in told
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says that it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "there is no image in the request"),
        (b"junk", "this is no image that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "this is no image that can be read"),
        (PICTURE[:60], "cannot be decoded as an image"),
        (b"/etc/passwd", "this is no image that can be read"),
        (bomb(9000, 9000), "more than 50 million pixels"),
        (bomb(60000, 60000), "more than 50 million pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "this is no image that can be read"),
    ],
)
def test_what_is_no_image_is_400_and_one_sentence(server: Server, body: bytes, says: str) -> None:
    assert says in refused(asked(server, "predict", body), 400)


def test_a_form_without_a_file_is_400(server: Server) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=xx"):
        assert "no file in it" in refused(asked(server, "predict", b"--xx--", Content_Type=kind), 400)


def raw(server: Server, head: str, body: bytes = b"") -> tuple[int, str]:
    """A request by hand: the status, and the error if there is one."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT) as line:
        line.sendall(head.replace("\n", "\r\n").encode() + body)
        line.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(line)
        reply.begin()
        return reply.status, str(json.loads(reply.read()).get("error", ""))


def test_requests_have_limits(server: Server) -> None:
    host = f"Host: 127.0.0.1:{server.server_port}"
    assert raw(server, f"POST /predict HTTP/1.1\n{host}\nContent-Length: {LARGEST + 1}\n\n")[0] == 413
    assert raw(server, f"POST /predict HTTP/1.1\n{host}\n\n")[0] == 411
    for length in ("-5", "1e3", "x", "9" * 40):
        assert raw(server, f"POST /predict HTTP/1.1\n{host}\nContent-Length: {length}\n\n")[0] == 411
    status, why = raw(server, f"POST /predict HTTP/1.1\n{host}\nContent-Length: 500\n\n", PICTURE[:100])
    assert (status, why) == (400, "the request ended before its image did")
    assert refused(asked(server, "predict", b"x", "PUT"), 501)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT) as line:
        line.sendall(b"nonsense\r\n\r\n")
        assert b"GET and POST" in line.makefile("rb").read()


def test_no_path_of_a_request_is_read(server: Server) -> None:
    host = f"Host: localhost:{server.server_port}"
    for path in ("/../../etc/passwd", "/model.json", "//etc/passwd", "/%2e%2e/etc/passwd", "/predict/x"):
        assert raw(server, f"GET {path} HTTP/1.1\n{host}\n\n")[0] == 404
    assert refused(asked(server, "upload", PICTURE), 404) == "images go to POST /predict"


def test_other_hosts_and_other_sites_pages_are_refused(server: Server) -> None:
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1:1", "127.0.0.1:x", ""):
        assert raw(server, f"GET /model HTTP/1.1\nHost: {host}\n\n")[0] == 421
    assert raw(server, "GET /model HTTP/1.1\n\n")[0] == 421
    assert "other sites" in refused(asked(server, "predict", PICTURE, Origin="http://evil.example"), 403)
    assert asked(server, "predict", PICTURE, Origin=server.url.rstrip("/"))[0] == 200


def test_a_slow_request_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SECONDS", 0.1)
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT) as line:
        line.sendall(head.encode() + b"x")
        assert line.makefile("rb").readline().split()[1] == b"408"


def test_too_many_at_once_are_told_to_come_again(server: Server) -> None:
    for _ in range(AT_ONCE):  # whoever asked last has an answer before it gives its slot back
        assert server.slots.acquire(timeout=WAIT)
    assert "too many requests" in refused(asked(server, "health"), 503)
    server.slots.release(AT_ONCE)
    assert asked(server, "health")[0] == 200


def test_a_model_that_fails_is_500_and_the_server_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.served.predictor, "chances", lambda scores: 1 / 0)
    assert refused(asked(server, "predict", PICTURE), 500) == "the model failed on this image"
    monkeypatch.undo()
    assert asked(server, "predict", PICTURE)[0] == 200


def test_many_ask_at_the_same_time(server: Server) -> None:
    wanted = asked(server, "predict", PICTURE)[2]
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(asked(server, "predict", PICTURE)[2])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 8


def test_where_it_cannot_listen_is_one_sentence(server: Server) -> None:
    served = server.served
    with pytest.raises(BadInput, match=rf"port {server.server_port} is taken by another program; give another one"):
        Server(served, "127.0.0.1", server.server_port)
    with pytest.raises(BadInput, match=r"cannot listen on 203\.0\.113\.7"):
        Server(served, "203.0.113.7", 0)
    with pytest.raises(BadInput, match=r"cannot listen on no\.such\.host\.invalid"):
        Server(served, "no.such.host.invalid", 0)


def test_a_rule_that_needs_several_images_is_refused() -> None:
    spec = small_spec(head="prototype")
    with pytest.raises(BadInput, match="must be asked about 2 images at once"):
        Served(StandardisedPredictor([spec], NAMES, [spec.build()], moments="batch"), "x", {})


def test_parts_by_hand() -> None:
    assert file_in(b"abc", "image/png") == b"abc"
    part = b"--b\r\nContent-Disposition: form-data; name=f; filename=x\r\n\r\n1\r\n\r\n2\r\n--b--"
    assert file_in(part, "multipart/form-data; boundary=b") == b"1\r\n\r\n2"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((4, 4, 5), np.float32))
    check_image(buffer.getvalue())  # a tile, whose own reader is careful
    spec = ModelSpec(name="mlp", classes=3, channels=5, size=(4, 4), width=0.1, pixels="float32")
    tiles = Served(Single([spec], NAMES, [spec.build()]), "x", {})
    assert tiles.answer(buffer.getvalue())["class"] in NAMES
    with pytest.raises(BadInput, match="the image holds uint8 in 1 channels where the model takes float32 in 5"):
        tiles.answer(PICTURE)
    assert "and 40 more" in page_of({**Served(made(), "x", {}).about(), "classes": [str(c) for c in range(100)]}, "u")
    assert policy().count("sha256-") == 2


# -- the command


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    save_predictor(made(), tmp_path / "model", CARD, export=False)
    process = start("serve", tmp_path / "model", "--port", "0", "--host", "localhost")
    assert process.stdout is not None
    line = process.stdout.readline()
    url = re.search(r"http://localhost:\d+/", line)
    assert url is not None, (line, process.communicate())
    with urllib.request.urlopen(urllib.request.Request(url[0] + "predict", PICTURE), timeout=WAIT) as reply:
        assert json.loads(reply.read())["class"] in NAMES
    answer = finish(process, signal.SIGINT)
    assert (answer.code, answer.err) == (0, "")
    assert "1 image answered" in answer.out


# -- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What a person does: drop an image on the page. Then, once it was answered, a file that is none.
HAND = """
const drop = (bytes, name) => { const held = new DataTransfer(); held.items.add(new File([bytes], name));
  dispatchEvent(new DragEvent("drop", {dataTransfer: held, cancelable: true})); };
const until = (test, then) => test() ? then() : setTimeout(until, 20, test, then);
drop(Uint8Array.from(atob("PICTURE"), c => c.charCodeAt(0)), "x.png");
until(() => !at("answer").hidden, () => {
  document.title = [...document.querySelectorAll(".row")].map(row => row.textContent).join(";") + ";"
    + at("picture").src.slice(0, 5) + ";" + document.querySelector(".bar i").style.width;
  drop(new Uint8Array(9), "bad.png");
});
"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page as it is served, with one script more that drops files on it."""
    assert BROWSER is not None
    hand = HAND.replace("PICTURE", base64.b64encode(PICTURE).decode())
    real = serve.page_of
    monkeypatch.setattr(serve, "page_of", lambda *a: real(*a).replace("</html>", f"<script>{hand}</script></html>"))
    with listening(Server(Served(made(), "global", CARD), "127.0.0.1", 0)) as server:
        sha = base64.b64encode(hashlib.sha256(hand.encode()).digest()).decode()
        server.policy = server.policy.replace("script-src ", f"script-src 'sha256-{sha}' ")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
        command = [BROWSER, *flags, "--enable-logging=stderr", "--v=0", "--dump-dom", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
        told = json.loads(asked(server, "predict", PICTURE)[2])["probabilities"]
    rows = sorted(told.items(), key=lambda pair: -pair[1])
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    shown = [f"{name}{100 * share:.1f} %" for name, share in rows]
    assert title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").split(";")[:4] == [*shown, "blob:"]
    assert float(title[1].split(";")[-1].removesuffix("%")) == pytest.approx(100 * rows[0][1], abs=0.01)
    assert "this is no image that can be read" in done.stdout
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert all("400" in line for line in console), console  # the second file, which was refused
