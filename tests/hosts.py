"""Hosts for tests: network namespaces of this machine, each with its own name, address and sshd.

Nothing of the machine's own ssh is used: keys, configuration and known hosts are made for the test, and a folder with
an `ssh` that knows them is put before everything else on PATH. So pdsh and mpirun find it, too.
"""

from __future__ import annotations

import ipaddress
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.harness import ROOT

# Set where a missing program is a failure of the machine, not a reason to skip.
REQUIRED = "DEEPSPEED_TEST_HOSTS"
BASE = ("ip", "nsenter", "ssh", "sshd", "ssh-keygen", "unshare")
TIMEOUT = 300.0  # seconds; a busy machine is slow, not wrong


def need(*programs):
    """Skip, or where hosts are required fail, if a program or a right is missing."""
    missing = [name for name in (*BASE, *programs) if which(name) is None]
    reason = None
    if sys.platform != "linux" or os.geteuid() != 0:
        reason = "hosts are network namespaces, which need root on Linux"
    elif missing:
        reason = f"not installed: {', '.join(missing)}"
    elif run("ip", "netns", "list", check=False).returncode != 0:
        reason = "this kernel or container does not allow network namespaces"
    if reason is None:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but: {reason}")
    pytest.skip(reason)


def which(name):
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def run(*words, check=True, **options):
    done = subprocess.run([which(words[0]) or words[0], *words[1:]], capture_output=True, text=True, **options)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done


class Host:
    """A namespace with an sshd; `address` is reached from this machine and from the other hosts."""

    def __init__(self, name, space, address):
        self.name, self.space, self.address = name, space, address

    def start(self, *words, **options):
        """A process in this host, which has the host's name."""
        inner = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *words]
        # Not `ip netns exec`, which hides what is mounted below /sys.
        enter = ["nsenter", f"--net=/run/netns/{self.space}", "unshare", "--uts"]
        return subprocess.Popen([*enter, *inner], **options)

    def processes(self):
        """Pids in this host, those of its own services left out."""
        found = run("ip", "netns", "pids", self.space).stdout.split()
        return [pid for pid in found if not _is_service(pid)]


def _is_service(pid):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True  # it has just ended
    program = os.path.basename(words[0].decode(errors="replace"))
    return program.startswith(("sshd", "slurmd", "slurmstepd")) or not words[0]


def _sweep():
    """Remove what tests that were killed left behind; names tell whose they were."""
    for line in run("ip", "netns", "list").stdout.splitlines():
        found = re.match(r"ds(\d+)n\d+\b", line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])
            run("ip", "link", "del", f"ds{found[1]}b", check=False)


def _remove(space):
    for pid in run("ip", "netns", "pids", space, check=False).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "del", space, check=False)


class Hosts:
    """`count` hosts called node1, node2, … on one bridge; leaving the context ends and removes everything."""

    def __init__(self, folder, count=2):
        self.folder = Path(folder)
        self.count = count
        self.stack = ExitStack()
        self.hosts = []

    def __enter__(self):
        with ExitStack() as undo:
            undo.callback(self.stack.close)
            self._build()
            undo.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def __getitem__(self, number):
        return self.hosts[number]

    def _build(self):
        _sweep()
        tag = f"ds{os.getpid()}"
        self.bridge = f"{tag}b"
        network = self._free_network()
        run("ip", "link", "add", self.bridge, "type", "bridge")
        self.stack.callback(run, "ip", "link", "del", self.bridge, check=False)
        self.own = str(network[254])
        run("ip", "addr", "add", f"{self.own}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        self._keys()
        for number in range(1, self.count + 1):
            host = Host(f"node{number}", f"{tag}n{number}", str(network[number]))
            self._plug(host, self._cable(host))
            self.hosts.append(host)
        self._client()
        for host in self.hosts:
            self._serve(host)
        for host in self.hosts:
            wait_for(lambda host=host: _listens(host.address, 22), f"the sshd of {host.name}")

    def _free_network(self):
        taken = run("ip", "-4", "addr").stdout
        while True:
            prefix = f"10.{random.randrange(100, 250)}.{random.randrange(250)}"
            if f"inet {prefix}." not in taken:
                return ipaddress.ip_network(f"{prefix}.0/24")

    def _plug(self, host, cable):
        run("ip", "netns", "add", host.space)
        self.stack.callback(_remove, host.space)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.space)
        run("ip", "link", "set", cable, "master", self.bridge, "up")
        inside = ("ip", "-n", host.space)
        run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")

    def _keys(self):
        for name in ("user_key", "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "authorized").write_text((self.folder / "user_key.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)

    def power_off(self, host):
        """End everything on a host, of which the others see nothing: not even the end of its connections."""
        run("ip", "link", "set", self._cable(host), "down")
        for pid in run("ip", "netns", "pids", host.space).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def power_on(self, host):
        """Let a host be there again, as after a start."""
        run("ip", "link", "set", self._cable(host), "up")
        self._serve(host)
        wait_for(lambda: _listens(host.address, 22), f"the sshd of {host.name}")

    def _cable(self, host):
        return host.space.replace("n", "v")

    def _client(self):
        """An `ssh` that knows these hosts and nothing else."""
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        names = [name for host in self.hosts for name in (host.name, host.address)]
        (self.folder / "known").write_text("".join(f"{name} {key}\n" for name in names))
        lines = [f"Host {host.name}\n  HostName {host.address}\n  HostKeyAlias {host.name}\n" for host in self.hosts]
        # A name that leads nowhere: nobody listens at this port of the bridge.
        lines.append(f"Host closed\n  HostName {self.own}\n  Port 9\n")
        lines.append(
            f"Host *\n  User root\n  IdentityFile {self.folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        )
        (self.folder / "ssh_config").write_text("".join(lines))
        (self.folder / "bin").mkdir()
        wrapper = self.folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)

    def _serve(self, host):
        config = self.folder / f"sshd_{host.name}"
        config.write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/authorized\nPidFile none\n"
            "AuthenticationMethods publickey\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPrintMotd no\n"
            "MaxStartups 100\nLogLevel ERROR\n"
        )
        log = (self.folder / f"sshd_{host.name}.log").open("wb")
        self.stack.callback(log.close)
        host.start(which("sshd"), "-D", "-e", "-f", str(config), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def environment(self):
        """The environment in which a launcher of these hosts runs."""
        foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        clean = {key: value for key, value in os.environ.items() if key not in foreign}
        return {
            **clean,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def hostfile(self, *slots, addresses=False):
        path = self.folder / "hostfile"
        names = [host.address if addresses else host.name for host in self.hosts]
        path.write_text("".join(f"{name} slots={count}\n" for name, count in zip(names, slots, strict=True)))
        return path

    def left(self):
        """Processes that are still there on any host, once they had a moment to go."""
        until = time.monotonic() + TIMEOUT
        while found := [pid for host in self.hosts for pid in host.processes()]:
            if time.monotonic() > until:
                return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found]
            time.sleep(0.05)
        return []


def _listens(address, port):
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def wait_for(condition, what):
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, f"{what} does not come up"
        time.sleep(0.02)
