"""Prometheus and Alertmanager as they come with Debian, on loopback, with the files of ``deploy/``."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
import urllib.request
from pathlib import Path

from craft.settings.rundir import RunDir

from .jobs import wait_for

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROGRAMS = ("prometheus", "prometheus-alertmanager", "promtool", "amtool")


def find_obstacle() -> str | None:
    """Why these tests cannot run here, if so."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return None
    return f"no {', '.join(missing)}: install the Debian packages prometheus and prometheus-alertmanager"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Exporter:
    """Speaks as NVIDIA's DCGM exporter does, about GPUs of this host that are as the test says."""

    def __init__(self) -> None:
        self.xids: dict[int, int] = {}
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                self.wfile.write(exporter._text().encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def _text(self) -> str:
        lines = ["# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error.", "# TYPE DCGM_FI_DEV_XID_ERRORS gauge"]
        for gpu, xid in sorted(self.xids.items()):
            labels = f'gpu="{gpu}",device="nvidia{gpu}",Hostname="{socket.gethostname()}"'
            lines.append(f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {xid}")
        return "\n".join([*lines, ""])

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Monitoring:
    """Both programs, configured by the shipped files with other addresses and in a hurry."""

    def __init__(self, folder: Path, run: RunDir, exporter: Exporter) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir()
        while not self._begin(run, exporter):
            # Somebody else was given one of their ports before they could listen there.
            self.end()

    def _begin(self, run: RunDir, exporter: Exporter) -> bool:
        """Start both; False if one of them ends."""
        folder = self._folder
        lighthouse = run.read_address().removeprefix("http://")
        prometheus, alertmanager = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        changes = {
            "/etc/craft/token": str(run.token),
            "lighthouse:29400": lighthouse,
            "localhost:9093": alertmanager,
            '"node1:9400", "node2:9400"': f'"127.0.0.1:{exporter.port}"',
            "_interval: 5s": "_interval: 250ms",
            "group_interval: 10s": "group_interval: 1s",
        }
        shutil.copy(DEPLOY / "craft_rules.yml", folder)
        for name in ("prometheus.yml", "alertmanager.yml"):
            text = (DEPLOY / name).read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            (folder / name).write_text(text)
        self._start(
            "prometheus-alertmanager", f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'am'}",
            f"--web.listen-address={alertmanager}", "--cluster.listen-address=",
        )  # fmt: skip
        self._start(
            "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={prometheus}",
        )  # fmt: skip
        ready = [f"http://{address}/-/ready" for address in (alertmanager, prometheus)]
        wait_for(lambda: self._one_ended() or all(map(_answers, ready)), "both are ready")
        assert not self._one_ended() or "address already in use" in self.logs(), self.logs()
        return not self._one_ended()

    def _one_ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder))

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("*.log")))

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(20)
        self._processes.clear()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False
