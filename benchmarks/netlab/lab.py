"""A laboratory of slow networks: hosts are network namespaces of this machine, joined by links of limited bandwidth.

    python benchmarks/netlab/lab.py --hosts 2 --rate 100mbit -- python script.py
    python benchmarks/netlab/lab.py --hosts 4 --rate 1gbit --islands 2 --between 100mbit -- python script.py

The command runs once on every host, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of one process per host, and a
host name of its own. Each host has one full-duplex link of ``--rate`` to the switch of its island; the switches are
joined by one link of ``--between`` that all share. Bandwidth is limited by tc's token bucket; latency is that of the
machine itself, for its kernel may lack netem.

It needs root and the programs unshare, ip and tc. Everything lives in private network, mount and process namespaces,
which the kernel removes with their last process: nothing outside is touched and nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NETWORK", "refusal", "start"]

NETWORK = "10.77.0"
_INSIDE = "LLMSCALE_NETLAB_INSIDE"
_PORT = "29511"


def refusal() -> str | None:
    """Why the laboratory cannot run here, in one sentence; ``None`` if it can."""
    if sys.platform != "linux":
        return f"The network laboratory needs Linux namespaces and this is {sys.platform}."
    if os.geteuid() != 0:
        return "The network laboratory needs root to create network namespaces; run it in a container as root."
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"The network laboratory needs {', '.join(missing)}; install the packages util-linux and iproute2."
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    if probe.returncode:
        return f"The network laboratory may not create namespaces here: {probe.stderr.strip()}."
    return None


def start(command: Sequence[str], *, hosts: int, rate: str, islands: int = 1, between: str = "100mbit") -> list[str]:
    """The command line that runs ``command`` on every host of a new laboratory."""
    options = ["--hosts", str(hosts), "--rate", rate, "--islands", str(islands), "--between", between]
    return [sys.executable, os.path.abspath(__file__), *options, "--", *command]


def build(hosts: int, rate: str, islands: int, between: str) -> None:
    """Create hosts ``h0``, ``h1``, ... at 10.77.0.1, 10.77.0.2, ... in the present namespaces."""
    run("mount", "-t", "tmpfs", "none", "/run/netns")
    run("ip", "link", "set", "lo", "up")
    # No name server answers in here: what asks for the name of an address would wait half a minute for it.
    names = "".join(f"{NETWORK}.{host + 1} h{host}\n" for host in range(hosts))
    for path, text in (("hosts", "127.0.0.1 localhost\n" + names), ("nsswitch.conf", "hosts: files\n")):
        Path("/run/netns", path).write_text(text)
        run("mount", "--bind", f"/run/netns/{path}", f"/etc/{path}")
    run("ip", "netns", "add", "switch")
    for island in range(islands):
        run("ip", "-n", "switch", "link", "add", f"bridge{island}", "type", "bridge")
        run("ip", "-n", "switch", "link", "set", f"bridge{island}", "up")
    for host in range(hosts):
        name, port = f"h{host}", f"port{host}"
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", port, "netns", "switch")
        run("ip", "-n", "switch", "link", "set", port, "master", f"bridge{host * islands // hosts}", "up")
        run("ip", "-n", name, "addr", "add", f"{NETWORK}.{host + 1}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        limit(name, "eth0", rate)
        limit("switch", port, rate)
    for island in range(1, islands):
        ends = f"left{island}", f"right{island}"
        run("ip", "-n", "switch", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, bridge in zip(ends, (island - 1, island), strict=True):
            run("ip", "-n", "switch", "link", "set", end, "master", f"bridge{bridge}", "up")
            limit("switch", end, between)


def limit(namespace: str, device: str, rate: str) -> None:
    """Limit what leaves ``device``; the bucket holds 8 ms, but at least one segment-offloaded packet."""
    bits = int(rate.removesuffix("gbit")) * 10**9 if rate.endswith("gbit") else int(rate.removesuffix("mbit")) * 10**6
    burst = max(bits // 8 * 8 // 1000, 65536)
    bucket = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "30ms"]
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *bucket)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The network laboratory failed at `{' '.join(command)}`: {done.stderr.strip()}")


def run_everywhere(command: Sequence[str], hosts: int) -> int:
    """Run ``command`` on every host until all have ended; the first to fail ends the others."""
    processes = []
    for host in range(hosts):
        environment = {
            **os.environ,
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(hosts),
            "NODE_RANK": str(host),
            "MASTER_ADDR": f"{NETWORK}.1",
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        named = ["unshare", "--uts", "sh", "-c", f'hostname h{host} && exec "$@"', "sh", *command]
        processes.append(subprocess.Popen(["ip", "netns", "exec", f"h{host}", *named], env=environment))
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(2.0)  # the others may be about to say why
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.05)
    return max(abs(process.wait()) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as 100mbit or 1gbit")
    parser.add_argument("--islands", type=int, default=1, help="switches, hosts in order of number")
    parser.add_argument("--between", default="100mbit", help="of the link between two switches")
    parser.add_argument("command", nargs="+", help="after --, run on every host")
    options = parser.parse_args()
    if os.environ.get(_INSIDE):
        build(options.hosts, options.rate, options.islands, options.between)
        sys.exit(run_everywhere(options.command, options.hosts))
    reason = refusal()
    if reason is not None:
        sys.exit(reason)
    os.makedirs("/run/netns", exist_ok=True)
    private = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    os.execvpe(private[0], [*private, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"})


if __name__ == "__main__":
    main()
