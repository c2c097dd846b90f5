"""Several hosts on one machine: a network namespace each, on a bridge, and the faults of networks between them.

Enters: names of hosts. Leaves: for each an address, and a command that runs another one on it. ``hosts.py`` runs a job
there. The bridge is in a namespace of its own, so that nothing here shows outside, and two test sessions do not meet.

All faults are silent: packets vanish, and nobody is told. Neighbours are known beforehand, since otherwise the kernel
would report a host that does not answer to ARP as unreachable, within seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "craft-test"
COMMANDS = ("ip", "tc", "nft", "nsenter")
LINK = "eth0"
"""What a host calls its one link; on the bridge the other end has the name of the host."""
_NAMES = Path("/run/netns")
_numbers = itertools.count()


class Unavailable(Exception):
    """This machine cannot play several hosts; the message is a sentence that says why."""


def _call(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise Unavailable(f"'{' '.join(command)}' failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Network:
    """Up to 200 hosts that reach each other, until a fault is set. Namespaces go away with ``close``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._mark = f"{PREFIX}-{_owner(os.getpid())}-{next(_numbers)}"
        self._switch = self._space("switch")
        self._silenced: dict[str, str] = {}
        """Rules of the bridge by the fault that they make."""
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def inside(self, name: str) -> tuple[str, ...]:
        """The beginning of a command that runs on this host; it becomes that command, under the same process id."""
        return ("nsenter", f"--net={_NAMES / self._space(name)}", "--")

    def cut_off(self, name: str) -> None:
        """Everything from and to a host vanishes."""
        self._silence(f"off {name}", f"iifname {name} drop\noifname {name} drop")

    def cut(self, one: str, other: str) -> None:
        """Everything between two hosts vanishes; both still reach all others."""
        rules = (f"iifname {here} oifname {there} drop" for here, there in ((one, other), (other, one)))
        self._silence(f"cut {one} {other}", "\n".join(rules))

    def mute(self, name: str) -> None:
        """Everything from a host vanishes; it still hears the others."""
        self._silence(f"mute {name}", f"iifname {name} drop")

    def lose(self, name: str, percent: int) -> None:
        """A share of the packets from and to a host vanishes, by chance."""
        rules = (f"{side} {name} numgen random mod 100 < {percent} drop" for side in ("iifname", "oifname"))
        self._silence(f"lose {name}", "\n".join(rules))

    def slow(self, name: str, megabits: float) -> None:
        """Limit what a host can send and receive in a second; what is too much waits in a queue."""
        shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "16kb", "latency", "500ms")
        for space, device in self._ends(name):
            _call("tc", "-netns", space, "qdisc", "replace", "dev", device, *shape)

    def received_bytes(self, name: str) -> int:
        """How much came to a host from all others so far."""
        (link,) = json.loads(_call("ip", "-netns", self._space(name), "-json", "-statistics", "link", "show", LINK))
        return int(link["stats64"]["rx"]["bytes"])

    def heal(self) -> None:
        """Undo every fault; connections that lived through it send again what was lost."""
        self._silenced.clear()
        self._rule()
        for name in self.names:
            for space, device in self._ends(name):
                if "tbf" in _call("tc", "-netns", space, "qdisc", "show", "dev", device):
                    _call("tc", "-netns", space, "qdisc", "delete", "dev", device, "root")

    def close(self) -> None:
        """Remove the namespaces. A process that is still in one keeps it alive, and is left to who looks for those."""
        for name in ("switch", *self.names):
            if (_NAMES / self._space(name)).exists():
                _call("ip", "netns", "delete", self._space(name))

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _ends(self, name: str) -> tuple[tuple[str, str], ...]:
        """Both ends of a host's link, as (namespace, device)."""
        return (self._space(name), LINK), (self._switch, name)

    def _build(self) -> None:
        _call("ip", "netns", "add", self._switch)
        bridge = "link add name switch type bridge stp_state 0 mcast_snooping 0\nlink set dev switch up\n"
        _call("ip", "-netns", self._switch, "-batch", "-", given=bridge)
        for name in self.names:
            self._plug_in(name)
        self._rule()

    def _plug_in(self, name: str) -> None:
        space = self._space(name)
        _call("ip", "netns", "add", space)
        link = f"link add name {name} type veth peer name {LINK} netns {space}\nlink set dev {name} master switch up\n"
        _call("ip", "-netns", self._switch, "-batch", "-", given=link)
        own = [
            f"link set dev {LINK} address {self._hardware(name)}",
            f"address add {self.address(name)}/24 dev {LINK}",
            "link set dev lo up",
            f"link set dev {LINK} up",
        ]
        others = (other for other in self.names if other != name)
        own += [f"neighbour add {self.address(each)} lladdr {self._hardware(each)} dev {LINK}" for each in others]
        _call("ip", "-netns", space, "-batch", "-", given="\n".join(own) + "\n")

    def _hardware(self, name: str) -> str:
        return f"02:77:00:00:00:{self.names.index(name) + 1:02x}"

    def _silence(self, fault: str, rules: str) -> None:
        self._silenced[fault] = rules
        self._rule()

    def _rule(self) -> None:
        """Put the rules in place, all at once."""
        rules = "\n".join(self._silenced.values())
        table = "table bridge craft"
        chain = f"chain faults {{\ntype filter hook forward priority 0\n{rules}\n}}"
        # Adding what may be there makes removing it always possible.
        given = f"add {table}\ndelete {table}\n{table} {{\n{chain}\n}}\n"
        _call(*self.inside("switch"), "nft", "-f", "-", given=given)


def find_obstacle() -> str | None:
    """Return a sentence that says why this machine cannot play several hosts; None if it can."""
    if os.geteuid() != 0:
        return "tests of several hosts need root, to make network namespaces"
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"tests of several hosts need {', '.join(missing)}: run 'make packages'"
    try:
        remove_leftovers()
        network = Network(("a", "b"))
        try:
            _try_everything(network)
        finally:
            network.close()
    except Unavailable as error:
        return f"tests of several hosts need more of the kernel than it has: {error}"
    return None


def _try_everything(network: Network) -> None:
    network.cut("a", "b")
    network.cut_off("a")
    network.mute("a")
    network.lose("a", 1)
    network.slow("a", 10)
    network.heal()


def remove_leftovers() -> None:
    """Remove what test sessions left behind that were killed: processes, then the namespaces that they are in."""
    for space in _spaces():
        owner = space.removeprefix(f"{PREFIX}-").rsplit("-", 2)[0]
        if owner == _owner(int(owner.partition("-")[0])):
            continue
        # Another session of tests may just be doing the same.
        with suppress(Unavailable):
            for pid in _call("ip", "netns", "pids", space).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _call("ip", "netns", "delete", space)


def _spaces() -> Iterator[str]:
    """Names of all namespaces that tests made, of whichever session."""
    if _NAMES.is_dir():
        yield from sorted(path.name for path in _NAMES.iterdir() if path.name.startswith(f"{PREFIX}-"))


def _owner(pid: int) -> str | None:
    """A name for a living process that no later one has, whatever its process id; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in brackets, may hold anything; the start time is the 20th field behind it.
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"
