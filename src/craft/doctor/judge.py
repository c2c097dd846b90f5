"""Judge whether a machine is fit for CRAFT: measurements in, one finding per subject out. ``craft doctor`` prints them."""

from __future__ import annotations

from craft.decide.step.gradient_memory import GradientMemory
from craft.doctor.findings import Finding, Machine, TokenFile, Torch

_OLDEST_PYTHON, _OLDEST_TORCH, _NEWEST_TORCH = (3, 10), (2, 9), (2, 13)
_LITTLE_SHARED = 256 << 20
_FEW_FILES, _TOO_FEW_FILES = 1024, 256
_FEW_PORTS = 1000
_SLOW_LOOPBACK_MB_S, _SLOW_FOLDER_MB_S = 200.0, 50.0
_LITTLE_FREE = 1 << 30
_SLOW_ABORT_MS = 1000.0
_SLOW_BUS_GB_S = 5.0
_BUCKET_BYTES = 25 << 20
"""As ``bucket_mb`` is by default."""


def judge(machine: Machine, torch: Torch | str, workers: int) -> tuple[Finding, ...]:
    """Return the findings. ``torch`` is a sentence if it could not be probed; ``workers`` is the number for this host."""
    found = [_python(machine), *_torch(torch), _cpus(machine, workers), _memory(machine), *_kernel(machine)]
    found += [_ports(machine), _loopback(machine), *_folder(machine), _clock(machine)]
    found += [_token(token) for token in machine.tokens]
    if isinstance(torch, Torch):
        found += [_abort(torch), *_devices(torch, machine.gpu_health)]
    return tuple(found)


def _ok(subject: str, found: str) -> Finding:
    return Finding(subject=subject, grade="ok", found=found)


def _warning(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject=subject, grade="warning", found=found, advice=advice)


def _problem(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject=subject, grade="problem", found=found, advice=advice)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _python(machine: Machine) -> Finding:
    if _numbers(machine.python) < _OLDEST_PYTHON:
        return _problem("Python", machine.python, "take Python 3.10 or newer")
    return _ok("Python", machine.python)


def _torch(torch: Torch | str) -> list[Finding]:
    if isinstance(torch, str):
        return [_problem("torch", torch, "install it: pip install torch; this is the error of 'import torch'")]
    version = _numbers(torch.version)
    if version < _OLDEST_TORCH:
        return [_problem("torch", torch.version, "take torch 2.9 or newer")]
    if version > _NEWEST_TORCH:
        return [_warning("torch", f"{torch.version}, newer than what CRAFT was tested with", "use 2.9 to 2.13")]
    return [
        _ok("torch", f"{torch.version}, {torch.threads} threads by default; craft run gives each worker its own number")
    ]


def _cpus(machine: Machine, workers: int) -> Finding:
    found = f"{machine.cpus:g} for {workers} workers"
    if machine.cpus < workers:
        return _warning("CPUs", found, "fewer workers, or wider limits: --heartbeat-limit, techniques.hang.limit_s")
    return _ok("CPUs", found)


def _memory(machine: Machine) -> Finding:
    return _ok("memory", f"{size(machine.memory_bytes)} free")


def _kernel(machine: Machine) -> list[Finding]:
    found = []
    if machine.shared_bytes is None:
        found.append(_problem("shared memory", "there is no /dev/shm", "mount a tmpfs there"))
    elif machine.shared_bytes < _LITTLE_SHARED:
        text = f"{size(machine.shared_bytes)} free in /dev/shm, which data loaders use"
        found.append(_warning("shared memory", text, "in a container: --shm-size=2g, or ipc: host"))
    else:
        found.append(_ok("shared memory", f"{size(machine.shared_bytes)} free in /dev/shm"))
    files = f"{machine.open_files} may be open in a process"
    if machine.open_files < _TOO_FEW_FILES:
        found.append(_problem("files", files, "ulimit -n 4096"))
    elif machine.open_files < _FEW_FILES:
        found.append(_warning("files", files, "ulimit -n 4096, for jobs of many workers"))
    else:
        found.append(_ok("files", files))
    if not machine.pidfd:
        found.append(_problem("kernel", "it has no pidfd_open", "take Linux 5.3 or newer: agents see deaths by it"))
    return found


def _ports(machine: Machine) -> Finding:
    if machine.ports is None:
        return _problem("ports", "none can be opened on 127.0.0.1", "is the loopback interface up?")
    if machine.ports < _FEW_PORTS:
        return _warning("ports", f"{machine.ports} to give out", "widen net.ipv4.ip_local_port_range")
    return _ok("ports", f"{machine.ports} to give out")


def _loopback(machine: Machine) -> Finding:
    if machine.loopback_mb_s is None:
        return _problem("loopback", "nothing came through within the limit", "is the loopback interface up?")
    found = f"{machine.loopback_mb_s:,.0f} MB/s"
    if machine.loopback_mb_s < _SLOW_LOOPBACK_MB_S:
        return _warning("loopback", found, "gradients and state between workers of this host go no faster")
    return _ok("loopback", found)


def _folder(machine: Machine) -> list[Finding]:
    if machine.folder_mb_s is None or machine.folder_free_bytes is None:
        return [_problem("disk", f"cannot write to {machine.folder}", "name another folder with --dir")]
    found = f"{machine.folder_mb_s:,.0f} MB/s, {size(machine.folder_free_bytes)} free in {machine.folder}"
    if machine.folder_free_bytes < _LITTLE_FREE:
        return [
            _warning("disk", found, "make room, or keep checkpoints elsewhere: they are the largest files of a job")
        ]
    if machine.folder_mb_s < _SLOW_FOLDER_MB_S:
        return [_warning("disk", found, "checkpoints are written no faster; 'craft plan' says what that costs")]
    return [_ok("disk", found)]


def _clock(machine: Machine) -> Finding:
    if machine.synchronised is None:
        return _ok("clock", "whether it is synchronised could not be found out")
    if not machine.synchronised:
        advice = "run chrony or ntpd where a job has several hosts: times in the journal are those of each host"
        return _warning("clock", "not synchronised", advice)
    return _ok("clock", "synchronised")


def _token(token: TokenFile) -> Finding:
    found = f"{token.path} has mode {token.mode:04o}"
    if not token.own:
        return _problem(
            "token", f"{token.path} belongs to another user", "use your own: the token gives control of the job"
        )
    if token.mode & 0o077:
        return _problem(
            "token", f"{found}: others can read it", f"chmod 600 {token.path}, and start the job with a new one"
        )
    return _ok("token", found)


def _abort(torch: Torch) -> Finding:
    if torch.abort_ms is None:
        advice = "workers would stay blocked when a peer dies; report it with the versions above"
        return _problem("Gloo", f"its abort does not free a blocked worker: {torch.abort_error}", advice)
    found = f"a blocked worker returned {torch.abort_ms:.0f} ms after the abort"
    if torch.abort_ms > _SLOW_ABORT_MS:
        return _warning("Gloo", found, "is this machine busy? every recovery takes that much longer")
    return _ok("Gloo", found)


def _devices(torch: Torch, health: str | None) -> list[Finding]:
    if not torch.devices:
        built = (
            f"torch was built for CUDA {torch.cuda}, but finds none" if torch.cuda else "torch was built without CUDA"
        )
        return [_ok("GPUs", f"none ({built}): jobs run on CPUs, over Gloo")]
    found = [_ok("NCCL", torch.nccl or "unknown")]
    for number, device in enumerate(torch.devices):
        text = (
            f"{device.name}: {size(device.free_bytes)} of {size(device.total_bytes)} free,"
            f" {device.to_host_gb_s:.1f} GB/s to pinned memory, {device.to_device_gb_s:.1f} GB/s from it"
        )
        slow = min(device.to_host_gb_s, device.to_device_gb_s) < _SLOW_BUS_GB_S
        advice = "snapshots and joiners' states take that long; look at the slot's link with nvidia-smi -q"
        subject = f"GPU {number}"
        found.append(_warning(subject, text, advice) if slow else _ok(subject, text))
    if health is not None:
        found.append(_warning("GPU health", f"not available: {health}", "pip install craft[gpu]"))
    return found


def costs(
    params: float, dtype: str, element_bytes: int, microbatches: int, workers: int, held: GradientMemory
) -> Finding:
    """Return what holding the gradients of a model costs in memory."""
    copy = params * element_bytes
    # Between devices there is one buffer for all buckets.
    room = held.inbox * min(copy, _BUCKET_BYTES)
    device, overlaid = held.apart * copy + room, held.overlaid * copy + room
    text = (
        f"{params:g} parameters in {dtype}, {microbatches} microbatches over {workers} workers: a gradient is"
        f" {size(copy)}; on a GPU it takes {size(device)} to hold gradients there, {size(overlaid)} with --hold host (and"
        f" {size(held.blocks * copy)} of pinned memory) or --hold recompute; on the CPU"
        f" {size((held.apart + held.inbox) * copy)} with any of them"
    )
    return _ok("held gradients", text)


def size(number: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
