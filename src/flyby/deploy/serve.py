"""``flyby serve``: a model behind a page and a small JSON interface, on this machine.

``GET /`` is the page, ``GET /model`` what the model is, ``GET /health`` a word, ``POST /predict`` takes the bytes of
one image, or a form with one file. Nothing in a request names a path. A request has a limit of bytes, of pixels and of
time; images are looked at one at a time. Requests that name another host, or come from another site's page, are
refused: otherwise any page in the browser could ask a model that only this machine should.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch

from flyby import __version__
from flyby.data.sources import read_image
from flyby.data.tiles import NUMPY, is_tile, tile_numbers
from flyby.deploy.page import page_of, policy
from flyby.errors import BadInput
from flyby.fusion.card import how_sure
from flyby.fusion.predictor import Predictor

log = logging.getLogger(__name__)
LARGEST = 20 << 20  # bytes of a request
PIXELS = 50_000_000  # of one image
SECONDS = 30.0  # that a request may take to arrive
AT_ONCE = 16  # requests
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
HERE = ("127.0.0.1", "localhost", "::1")


class Served:
    """A model that answers about images one at a time, whoever asks."""

    def __init__(self, predictor: Predictor, name: str, card: Mapping[str, Any], device: str = "cpu") -> None:
        if predictor.least > 1:
            raise BadInput(
                f"this model must be asked about {predictor.least} images at once, and a page asks about one; use flyby"
                " predict, or fuse with moments=own"
            )
        self.predictor, self.device = predictor.eval().to(device), device
        self.name, self.card = name, card
        self.lock, self.answered = threading.Lock(), 0

    def about(self) -> dict[str, Any]:
        made, card = self.predictor, self.card
        return {
            "name": self.name,
            "classes": list(made.class_names),
            "kind": made.kind,
            "networks": len(made.specs),
            "input": [*made.size, made.channels],
            "pixels": made.pixels,
            "rule": str(card.get("fusion") or card.get("method") or ""),
            "sites": card["sites"] if type(card.get("sites")) is int else None,
            "evaluated": card.get("evaluated", []),
            "calibrated": made.measured,
            "probabilities": how_sure(made.temperature, made.measured),
            "license": card.get("license"),
            "flyby": __version__,
        }

    def answer(self, data: bytes) -> dict[str, Any]:
        """The class of one image and the probability of each. BadInput where it is none."""
        check_image(data)
        made = self.predictor
        with self.lock:
            pixels = torch.from_numpy(read_image(data, made.channels, made.size, made.pixels).copy())[None]
            with torch.no_grad():  # and not by ``scores_of``, which keeps what networks saw for the next rule
                shares = made.chances(made(pixels.to(self.device))).cpu()[0].tolist()
            self.answered += 1
        best = max(range(len(shares)), key=shares.__getitem__)
        each = dict(zip(made.class_names, shares, strict=True))
        return {"class": made.class_names[best], "probability": shares[best], "probabilities": each}


def check_image(data: bytes) -> None:
    """Refuse, from its header alone, what is no image of a usual kind or unpacks to too many pixels."""
    if not data:
        raise BadInput("there is no image in the request; send its bytes")
    try:
        numbers = _numbers(data)
    except Exception:  # a damaged file makes any reader fail in any way at all
        raise BadInput(f"this is no image that can be read; send one of {', '.join(KINDS)}, or .npy") from None
    if numbers > 3 * PIXELS:
        raise BadInput(f"this image unpacks to more than {PIXELS // 1_000_000} million pixels; send a smaller one")


def _numbers(data: bytes) -> int:
    """How many numbers an image unpacks to; a photograph has three of each pixel at the most that counts."""
    from PIL import Image

    if data.startswith(NUMPY):
        return len(data)  # whose reader believes a header only where the bytes are there
    if is_tile(data):
        return tile_numbers(data)
    try:
        with Image.open(io.BytesIO(data), formats=KINDS) as opened:
            return 3 * opened.width * opened.height
    except Image.DecompressionBombError:
        return 3 * PIXELS + 1


def file_in(body: bytes, kind: str) -> bytes:
    """The image in a request: its whole body, or the first file of a form."""
    if not kind.lower().startswith("multipart/form-data"):
        return body
    mark = re.search(r'boundary="?([^";,\s]{1,100})"?', kind, flags=re.I)
    for part in body.split(b"--" + mark[1].encode("latin-1"))[1:] if mark else ():
        head, blank, content = part.partition(b"\r\n\r\n")
        if blank and b"filename" in head.lower():
            return content.removesuffix(b"\r\n")
    raise BadInput("the form has no file in it; send one image")


class Refused(Exception):
    """A request that gets no answer but this."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Server(ThreadingHTTPServer):
    """The server of one model."""

    daemon_threads = True

    def __init__(self, served: Served, host: str, port: int) -> None:
        self.served, self.slots = served, threading.BoundedSemaphore(AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise unbound(host, port, error) from None
        self.host, self.policy = host, policy()

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_port}/"

    def names(self, host: str | None) -> bool:
        """Whether a request that names this host means this server. Where it listens to the network, any name does."""
        if self.host not in HERE:
            return True
        try:
            told = urlsplit(f"//{host or ''}")
            return told.hostname in HERE and (told.port or 80) == self.server_port
        except ValueError:
            return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection broke off", exc_info=True)


def unbound(host: str, port: int, error: OSError) -> BadInput:
    """Why a server cannot listen there."""
    if error.errno == errno.EADDRINUSE:
        return BadInput(f"port {port} is taken by another program; give another one: --port {min(port + 1, 65535)}")
    if error.errno == errno.EACCES:
        return BadInput(f"port {port} is not for everybody; give one above 1023: --port 8000")
    return BadInput(
        f"cannot listen on {host} ({error.strerror or error}); leave --host out, or name one of this machine"
    )


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version, sys_version = "flyby", ""
    timeout = SECONDS

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    do_HEAD = do_GET

    def _guarded(self, work: Any) -> None:
        """Does the work, or says in one sentence why not."""
        free = self.server.slots.acquire(blocking=False)
        try:
            if not free:
                raise Refused(503, "too many requests at once; try again in a moment")
            if not self.server.names(self.headers.get("Host")):
                raise Refused(421, f"this server is only called {self.server.url}")
            origin = self.headers.get("Origin")
            if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
                raise Refused(403, "requests from other sites' pages are refused")
            work()
        except Refused as refused:
            self._json({"error": str(refused)}, refused.status)
        except BadInput as wrong:
            self._json({"error": str(wrong)}, 400)
        except TimeoutError:
            self._json({"error": f"the request took longer than {SECONDS:g} seconds to arrive"}, 408)
        except (ConnectionError, BrokenPipeError):
            pass  # whoever asked has gone
        except Exception:
            log.exception("a request failed")
            self._json({"error": "the model failed on this image"}, 500)
        finally:
            if free:
                self.server.slots.release()

    def _get(self) -> None:
        path, served = urlsplit(self.path).path, self.server.served
        if path == "/":
            page = page_of(served.about(), self.server.url)
            self._send(page.encode(), "text/html; charset=utf-8")
        elif path == "/model":
            self._json(served.about())
        elif path == "/health":
            self._json({"status": "ok", "answered": served.answered})
        elif path == "/favicon.ico":
            self._send(b"", "image/x-icon", 204)
        else:
            raise Refused(404, "there is / (the page), /model, /health, and POST /predict")

    def _post(self) -> None:
        if urlsplit(self.path).path != "/predict":
            raise Refused(404, "images go to POST /predict")
        self._json(self.server.served.answer(file_in(self._body(), self.headers.get("Content-Type", ""))))

    def _body(self) -> bytes:
        told = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", told):
            raise Refused(411, "say how long the image is (Content-Length)")
        if int(told) > LARGEST:
            raise Refused(413, f"an image may have {LARGEST >> 20} MB, and this has more; send a smaller one")
        until, pieces, left = time.monotonic() + SECONDS, [], int(told)
        while left:
            self.connection.settimeout(max(0.01, until - time.monotonic()))
            piece = self.rfile.read1(min(left, 1 << 20))
            if not piece:
                raise BadInput("the request ended before its image did")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value, ensure_ascii=False).encode(), "application/json; charset=utf-8", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Security-Policy", self.server.policy)
            for name, value in (("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")):
                self.send_header(name, value)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
        except (ConnectionError, TimeoutError):
            pass  # whoever asked has gone

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses: a method or a request line that is none."""
        self._json({"error": "this server takes GET and POST, as HTTP has them"}, code)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
