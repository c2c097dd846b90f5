"""Build the wheel from a copy of the source, and install it into an empty virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300


def build_wheel(folder: Path) -> Path:
    """Build from a copy: what earlier builds left in the repository does not get into the wheel."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=left_out)
    out = folder / "wheel"
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)], folder)
    (wheel,) = out.glob("*.whl")
    return wheel


def files_of(wheel: Path) -> list[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel alone, and let its dependencies come from this interpreter; return the folder of its commands.

    A copy of torch would take minutes and gigabytes. A path in a ``.pth`` file does not bring along the ``.pth`` files of that
    folder, so an editable CRAFT there stays out.
    """
    environment = folder / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
    python = environment / "bin" / "python"
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        folder,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def run(command: list[str], folder: Path) -> str:
    """Run a command outside of the repository; return what it printed, and fail with it if the command does."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout
