"""A lighthouse that speaks TLS, with certificates made by the ``openssl`` command: who verifies it, and who does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError, Unreachable
from craft.settings.rundir import RunDir
from craft.wire.auth import read_token
from craft.wire.client import Client
from craft.wire.tls import client_context

from .jobs import CRAFT, TRAIN, Jobs

COMMAND = "import sys; from craft.cli.lighthouse import lighthouse; sys.exit(lighthouse())"
LIMIT_S = 20.0


def openssl(*arguments: str | Path) -> None:
    assert shutil.which("openssl"), "these tests need the openssl command: apt-get install openssl"
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """Makes certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        self._folder = folder
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate),
        )

    def issue(self, name: str, subject: str) -> tuple[Path, Path]:
        """Return a new certificate for ``subject``, such as IP:127.0.0.1, and its key."""
        request, names = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        names.write_text(f"subjectAltName={subject}\n")
        openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", key, "-out", request),
        )
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", "2", "-extfile", names, "-out", certificate),
        )
        return certificate, key


class Lighthouses:
    """Started lighthouses, ended with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *options: str | Path) -> RunDir:
        run = RunDir(self._folder / f"run{len(self._processes)}")
        process = self._run(run, *options)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("lighthouse listening on http"), process.communicate()
        return run

    def refused(self, *options: str | Path) -> str:
        process = self._run(RunDir(self._folder / "refused"), *options)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 2
        assert "Traceback" not in errors
        return errors

    def _run(self, run: RunDir, *options: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMMAND, "--workers", "1", "--dir", str(run.path), *map(str, options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                process.communicate()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def lighthouses(tmp_path: Path) -> Iterator[Lighthouses]:
    lighthouses = Lighthouses(tmp_path)
    yield lighthouses
    lighthouses.end()


def with_tls(pair: tuple[Path, Path]) -> tuple[str | Path, ...]:
    return ("--tls-cert", pair[0], "--tls-key", pair[1])


def test_clients_verify_the_lighthouse_by_its_authority_its_own_certificate_or_its_run_directory(
    authority: Authority, lighthouses: Lighthouses
) -> None:
    pair = authority.issue("here", "IP:127.0.0.1")
    run = lighthouses.start(*with_tls(pair))
    url, token = run.read_address(), read_token(run.token)
    assert url.startswith("https://127.0.0.1:")
    for file in (authority.certificate, pair[0]):
        assert Client(url, token, tls=client_context(file)).get_status()["state"] == "forming"
    assert Client.of_run(run).get_status()["state"] == "forming"


def test_a_certificate_that_does_not_verify_gives_a_sentence(
    authority: Authority, lighthouses: Lighthouses, tmp_path: Path
) -> None:
    run = lighthouses.start(*with_tls(authority.issue("here", "IP:127.0.0.1")))
    url, token = run.read_address(), read_token(run.token)
    for file in (None, Authority(tmp_path, "other").certificate):
        with pytest.raises(ConfigError, match=r"does not verify .*--tls-ca"):
            Client(url, token, tls=client_context(file)).get_status()
    with pytest.raises(Unreachable):
        Client(url.replace("https", "http"), token).get_status()


def test_a_name_that_is_not_in_the_certificate_is_refused_but_the_run_directory_knows_better(
    authority: Authority, lighthouses: Lighthouses
) -> None:
    run = lighthouses.start(*with_tls(authority.issue("there", "DNS:elsewhere.example")))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        Client(run.read_address(), read_token(run.token), tls=client_context(authority.certificate)).get_status()
    assert Client.of_run(run).get_status()["state"] == "forming"


def test_the_run_directory_trusts_one_certificate_and_no_other_of_the_same_authority(
    authority: Authority, lighthouses: Lighthouses, tmp_path: Path
) -> None:
    pair = authority.issue("here", "IP:127.0.0.1")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(pair[0].read_bytes() + authority.certificate.read_bytes())
    run = lighthouses.start(*with_tls((chain, pair[1])))
    other = lighthouses.start(*with_tls(authority.issue("other", "IP:127.0.0.1")))
    assert Client.of_run(run).get_status()["state"] == "forming"
    run.address.write_text(other.address.read_text())
    with pytest.raises(ConfigError, match="does not verify"):
        Client.of_run(run).get_status()


def test_https_to_a_lighthouse_without_tls_gives_a_sentence(lighthouses: Lighthouses, authority: Authority) -> None:
    run = lighthouses.start()
    url = run.read_address().replace("http", "https")
    with pytest.raises(ConfigError, match="does not speak TLS"):
        Client(url, read_token(run.token), tls=client_context(authority.certificate)).get_status()


AGENT = """
import asyncio, sys
from pathlib import Path
from craft.agent.host.relay import Relay
from craft.protocol.membership import Member
from craft.protocol.messages import WorkerReport
from craft.wire.auth import read_token
from craft.wire.tls import client_context

async def main(url, token_file, authority):
    told = asyncio.Event()
    relay = Relay("a", url, read_token(Path(token_file)), lambda _: told.set(), client_context(Path(authority)))
    relay.take(WorkerReport(member=Member(worker_id="w0"), pid=1, joined=True))
    following = asyncio.create_task(relay.follow_lighthouse())
    await asyncio.wait_for(told.wait(), 20)
    print("told")

asyncio.run(main(*sys.argv[1:]))
"""


def test_the_relay_of_an_agent_talks_tls(authority: Authority, lighthouses: Lighthouses) -> None:
    run = lighthouses.start("--keep", *with_tls(authority.issue("here", "IP:127.0.0.1")))
    command = [sys.executable, "-c", AGENT, run.read_address(), str(run.token), str(authority.certificate)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "told\n", done.stderr
    assert Client.of_run(run).get_status()["generation"] == 1


def test_files_that_are_no_certificate_and_key_are_named(
    authority: Authority, lighthouses: Lighthouses, tmp_path: Path
) -> None:
    certificate, key = authority.issue("here", "IP:127.0.0.1")
    _, other = authority.issue("other", "IP:127.0.0.1")
    locked = tmp_path / "locked.key"
    openssl("pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret")
    assert "there is no such file" in lighthouses.refused(*with_tls((tmp_path / "nothing", key)))
    assert str(other) in lighthouses.refused(*with_tls((certificate, other)))
    assert "without a password" in lighthouses.refused(*with_tls((certificate, locked)))
    assert "go together" in lighthouses.refused("--tls-cert", certificate)


def test_a_job_runs_with_a_lighthouse_that_speaks_tls(
    authority: Authority, lighthouses: Lighthouses, jobs: Jobs
) -> None:
    run = lighthouses.start(*with_tls(authority.issue("here", "IP:127.0.0.1")))
    options = ("--lighthouse", run.read_address(), "--token-file", str(run.token))
    result = jobs.run(TRAIN, "--steps", "3", workers=1, options=(*options, "--tls-ca", str(authority.certificate)))
    assert result.exit_code == 0, result.errors


def test_a_job_does_not_begin_where_the_lighthouse_cannot_be_verified(
    authority: Authority, lighthouses: Lighthouses, tmp_path: Path
) -> None:
    run = lighthouses.start(*with_tls(authority.issue("here", "IP:127.0.0.1")))
    options = ["--lighthouse", run.read_address(), "--token-file", str(run.token), "--dir", str(tmp_path / "job")]
    done = subprocess.run([*CRAFT, "run", *options, str(TRAIN)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "does not verify" in done.stderr
    assert "Traceback" not in done.stderr
