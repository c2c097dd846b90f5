"""Run a generated script undisturbed and disturbed, and judge what comes out.

Enters: a script and a plan of kills. Leaves: a verdict, and a folder with the script, both runs and what was done to them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.integration.jobs import CRAFT, JOB_VARIABLE, Job, end

from craft.settings.rundir import RunDir
from craft.telemetry.records.metric_lines import read_metrics
from craft.testing.faults import encode, struck
from craft.testing.history import check

from .disturbance import Disturbance
from .generator import Script
from .kills import Plan
from .verdict import Outcome, Verdict, judge

LIMIT_S = 150.0
"""A job that takes longer hangs: it has some tens of steps of some milliseconds, and a machine that may be busy."""
LEAVING_S = 15.0
SHOWN = re.compile(r"^STEP (\d+) (.*)$", re.MULTILINE)
WARNING = re.compile(r"^.*(?:WARNING|warning:).*$", re.MULTILINE)
FINAL = re.compile(r"^FINAL (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """A script, what was done to it, and the verdict."""

    script: Script
    plan: Plan
    folder: Path
    done: tuple[str, ...]
    verdict: Verdict
    wall_s: float

    def __str__(self) -> str:
        told = [f"{self.verdict.kind}: {self.verdict.detail}", f"  seed {self.script.seed}: {self.script.title}"]
        told += [f"  plan: {self.plan}", f"  done: {'; '.join(self.done) or 'nothing'}", f"  files: {self.folder}"]
        return "\n".join([*told, f"  again: python -m tests.fuzz --seed {self.script.seed}"])


class Driver:
    """Runs scripts below one directory, one process tree at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._alone: subprocess.Popen[str] | None = None

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._alone is not None:
            assert self._alone.stdin is not None
            assert self._alone.stdout is not None
            self._alone.stdin.close()
            self._alone.wait(10)
            self._alone.stdout.close()

    def run(self, script: Script, plan: Plan) -> Result:
        """Run a script both ways."""
        started = time.monotonic()
        folder = self._folder / f"seed{script.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("undisturbed", "disturbed"):
            (folder / name).mkdir(parents=True)
            (folder / name / "script.py").write_text(script.text)
        reference = self.undisturbed(folder / "undisturbed", script.files)
        done: list[str] = []
        disturbed = reference
        if not reference.exit_code and not reference.hung:
            disturbed = self.disturbed(folder / "disturbed", script, plan, len(reference.steps), done)
        verdict = judge(reference, disturbed, mistake=script.mistake, says=script.says)
        result = Result(script, plan, folder, tuple(done), verdict, time.monotonic() - started)
        (folder / "result.txt").write_text(f"{result}\n")
        return result

    def undisturbed(self, folder: Path, files: Sequence[str]) -> Outcome:
        """Run ``script.py`` alone, as a job of one worker."""
        process = self._warm()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        log = (folder / "alone.log").read_text(errors="replace")
        return Outcome(
            exit_code=code,
            errors=log,
            finals={f"alone{number}": final for number, final in enumerate(FINAL.findall(log))},
            steps=_shown([log]),
            files=_fingerprints(folder, files),
        )

    def _warm(self) -> subprocess.Popen[str]:
        if self._alone is None:
            self._alone = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.alone"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._alone

    def disturbed(self, folder: Path, script: Script, plan: Plan, num_steps: int, done: list[str]) -> Outcome:
        """Run ``script.py`` as a job, and do to it what is planned; a job that was cut off goes on with ``--resume``."""
        deadline = time.monotonic() + LIMIT_S
        job = _start(folder, "run", plan)
        try:
            disturbance = Disturbance(job, plan, script.seed, num_steps)
            disturbance.carry_out(deadline)
            done += disturbance.done
            done += [f"{plan.faults[index].point}: {worker}" for index, worker in struck(job.run_dir).items()]
            if any(each.startswith("power cut") for each in done):
                job.end()
                job = _start(folder, "resumed", plan, "--resume")
                Disturbance(job, Plan(workers=plan.workers), script.seed, num_steps).carry_out(deadline)
            return _outcome(job, folder, script.files)
        finally:
            job.end()


def _start(folder: Path, name: str, plan: Plan, *options: str) -> Job:
    mark = uuid.uuid4().hex
    files = folder / name / "craft"
    files.parent.mkdir()
    environment = {**os.environ, "CRAFT_BUCKET_MB": "0.0005", JOB_VARIABLE: mark}
    if plan.faults and name == "run":
        environment |= encode(plan.faults)
    run_dir = folder / name / "dir"
    command = [*CRAFT, "run", "--workers", str(plan.workers), "--dir", str(run_dir), *options, "script.py"]
    with files.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    return Job(process=process, run_dir=run_dir, mark=mark, files=folder / "files")


def _outcome(job: Job, folder: Path, files: Sequence[str]) -> Outcome:
    printed = (job.run_dir.parent / "craft.out").read_text(errors="replace")
    if job.process.poll() is None:
        for worker in job.pids().values():
            os.kill(worker, signal.SIGUSR1)
        time.sleep(1.0)
        return Outcome(exit_code=-1, errors=printed, hung=True)
    violations = tuple(_left_behind(job))
    logs = [file.read_text(errors="replace") for file in folder.glob("*/dir/workers/*/log")]
    logs += [_written(file) for file in folder.glob("*/dir/metrics.jsonl")]
    own = {file.parent.name: file.read_text(errors="replace") for file in job.run_dir.glob("workers/*/log")}
    return Outcome(
        exit_code=job.process.returncode,
        errors=printed,
        finals={worker: final for worker, log in own.items() for final in FINAL.findall(log)},
        steps=_shown(logs),
        warnings=tuple(WARNING.findall("\n".join([printed, *logs]))),
        files=_fingerprints(folder, files),
        violations=violations + (check(job.run_dir).violations if RunDir(job.run_dir).journal.exists() else ()),
    )


def _left_behind(job: Job) -> Iterator[str]:
    """Processes that outlive their job for longer than it takes to end."""
    deadline = time.monotonic() + LEAVING_S
    while (left := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        yield f"process {process.pid} is left behind"
    end(left)


def _shown(logs: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """What workers printed of each step, without repetition."""
    found: dict[int, dict[str, None]] = defaultdict(dict)
    for log in logs:
        for number, values in SHOWN.findall(log):
            found[int(number)][values] = None
    return {number: tuple(values) for number, values in found.items()}


def _fingerprints(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Of files of tensors, by what is in them: the bytes of an archive say more than that."""
    if not files:
        return {}
    import torch  # Only now: most runs leave no files, and this takes seconds.

    found = {}
    for name in files:
        if (folder / name).exists():
            content = torch.load(folder / name)
            digest = hashlib.sha256()
            for key, value in content.items():
                digest.update(key.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            found[name] = digest.hexdigest()[:16]
    return found


def _written(file: Path) -> str:
    """What ``metrics.jsonl`` has, as scripts print it."""
    lines = []
    for line in read_metrics(file):
        values = {name: value for name, value in line.items() if name not in ("step", "branch", "time")}
        lines.append(f"STEP {line['step']} {sorted(values.items())!r}")
    return "\n".join(lines)
