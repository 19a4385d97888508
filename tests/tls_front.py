"""A front before a server on another machine: TLS with a certificate of a test's own authority, a path, a key.

A real nginx, in front of whatever the test has; skipped with the reason where none is installed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ports import free_port

KEY = "sk-hive-test-4f1c"
PREFIX = "/openai"
UP_WITHIN_S = 10.0
NAMES = "DNS:localhost,IP:127.0.0.1"
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_EXPIRED = "[ca]\ndefault_ca=a\n[a]\ndatabase={0}/index\nserial={0}/serial\nnew_certs_dir={0}\npolicy=p\n"
_EXPIRED += f"default_md=sha256\nx509_extensions=e\n[p]\ncommonName=supplied\n[e]\nsubjectAltName={NAMES}\n"
_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log combined;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream behind {{ server {behind}; }}
    server {{
        listen 127.0.0.1:{port} ssl; server_name localhost;
        ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        default_type application/json;
        if ($http_authorization != "Bearer {key}") {{
            return 401 '{{"error":{{"message":"Incorrect API key: $http_authorization","code":"invalid_api_key"}}}}';
        }}
        location {prefix}/v1/ {{ proxy_pass http://behind/v1/; proxy_http_version 1.1; proxy_buffering off; }}
        location / {{ return 404 '{{"error":{{"message":"there is nothing here","type":"not_found"}}}}'; }}
    }}
}}
"""


class Front(NamedTuple):
    """`url`: as an operator writes it. `ca`: who vouches for it. `log`: of nginx, a line a request."""

    url: str
    ca: Path
    log: Path


def _openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


def make_authority(folder: Path) -> Path:
    """ca.pem and ca.key in `folder`."""
    _openssl("req", "-x509", *_EC, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test", cwd=folder)
    return folder / "ca.pem"


def make_certificate(folder: Path, *, expired: bool = False, names: str = NAMES) -> None:
    """cert.pem and key.pem, from the authority in `folder`; only a valid one may be for other `names`."""
    asked = ("req", *_EC, "-keyout", "key.pem", "-subj", "/CN=localhost")
    if not expired:
        signed = (
            "-x509",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-days",
            "2",
            "-addext",
            f"subjectAltName={names}",
            "-out",
            "cert.pem",
        )
        _openssl(*asked, *signed, "-addext", "basicConstraints=critical,CA:FALSE", cwd=folder)
        return
    _openssl(*asked, "-out", "asked.csr", cwd=folder)
    (folder / "ca.conf").write_text(_EXPIRED.format(folder))
    (folder / "index").touch()
    (folder / "serial").write_text("01\n")
    dates = ("-startdate", "200101000000Z", "-enddate", "200201000000Z", "-in", "asked.csr", "-out", "cert.pem")
    _openssl("ca", "-batch", "-config", "ca.conf", "-cert", "ca.pem", "-keyfile", "ca.key", *dates, cwd=folder)


@contextmanager
def front(folder: Path, behind: str, *, expired: bool = False) -> Iterator[Front]:
    """nginx in front of `behind` (`host:port`), with all its files in `folder`; it answers when this yields."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("no nginx, or no openssl: apt-get install nginx-light openssl")
    authority = make_authority(folder)
    make_certificate(folder, expired=expired)
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, behind=behind, port=port, key=KEY, prefix=PREFIX))
    command = [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_up(port, folder / "error.log", process)
            yield Front(f"https://localhost:{port}{PREFIX}/v1", authority, folder / "access.log")
        finally:
            process.kill()


def _wait_until_up(port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + UP_WITHIN_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, f"nginx ended: {log.read_text(errors='replace')}"
        assert time.monotonic() < until, "nginx does not answer"
        time.sleep(0.02)


def key_file(folder: Path, key: str = KEY) -> Path:
    """A file that holds this key and is nobody else's."""
    path = folder / "api-key"
    path.touch(mode=0o600)
    os.chmod(path, 0o600)
    path.write_text(f"{key}\n")
    return path
