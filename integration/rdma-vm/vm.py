"""A virtual machine with a real kernel, a Soft-RoCE device and an NVMe disk, that does what it is told over a serial line."""

from __future__ import annotations

import base64
import json
import pathlib
import re
import shutil
import socket
import subprocess
import time

# The machine is emulated, and this one may be busy: a wait ends with what it waits for, and this only bounds it.
PATIENCE = 60.0
# Emulation alone takes about five seconds.
BOOT_PATIENCE = 120.0


class Failed(Exception):
    """A check did not see what it should have."""


def pack(folder: pathlib.Path, kernel: pathlib.Path, init: pathlib.Path, programs: dict[str, str]) -> pathlib.Path:
    """Makes the first file system: busybox, the programs with the libraries they need, the kernel's modules."""
    root = folder / "root"
    for name in ("bin", "proc", "sys", "dev", "tmp", "run", "etc", "modules"):
        (root / name).mkdir(parents=True)
    shutil.copy(init, root / "init")
    for module in sorted((kernel / "modules").iterdir()):
        shutil.copy(module, root / "modules")
    for name, path in programs.items():
        shutil.copy(path, root / "bin" / name)
        needs = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        for library in re.findall(r"/\S+\.so\S*", needs):
            at = root / library.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, at)
    image = folder / "initrd.gz"
    subprocess.run("find . | cpio -o -H newc --quiet | gzip -1 > ../initrd.gz", shell=True, cwd=root, check=True)
    shutil.rmtree(root)
    return image


class Machine:
    """One boot. The folder must have a short path, since sockets are in it."""

    def __init__(self, folder: pathlib.Path, kernel: pathlib.Path, initrd: pathlib.Path, boot: str = ""):
        folder.mkdir()
        self.console = folder / "console.log"
        disk = folder / "nvme.img"
        with disk.open("wb") as file:
            file.truncate(16 << 20)
        line, monitor = folder / "line", folder / "qmp"
        # Emulated even where KVM is offered: nested, it breaks, and emulation behaves the same everywhere.
        self.process = subprocess.Popen(
            ["qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", "max", "-m", "512", "-smp", "2"]
            + ["-display", "none", "-no-reboot", "-nic", "none", "-kernel", kernel / "vmlinuz", "-initrd", initrd]
            + ["-append", f"console=ttyS0 quiet panic=-1 {boot}", "-serial", f"file:{self.console}"]
            + ["-serial", f"unix:{line},server=on,wait=off", "-qmp", f"unix:{monitor},server=on,wait=off"]
            + ["-drive", f"file={disk},if=none,id=n0,format=raw", "-device", "nvme,id=nvme0,serial=testbed,drive=n0"],
            stdin=subprocess.DEVNULL,
            stderr=(folder / "qemu.log").open("wb"),
        )
        self.folder = folder
        self.buffer = b""
        try:
            self.line = self._connect(line)
            if (word := self._read_line(BOOT_PATIENCE)) != "ready":
                raise Failed(f"the machine says {word!r} instead of ready")
            self.monitor = self._connect(monitor).makefile("rw")
            self.monitor.readline()
            self.qmp("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def _connect(self, path: pathlib.Path) -> socket.socket:
        end = time.monotonic() + PATIENCE
        while True:
            if self.process.poll() is not None:
                raise Failed(f"qemu ended: {(self.folder / 'qemu.log').read_text()}")
            try:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(path))
                return connection
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def _read_line(self, patience: float) -> str:
        end = time.monotonic() + patience
        while b"\n" not in self.buffer:
            self.line.settimeout(max(0.01, end - time.monotonic()))
            try:
                more = self.line.recv(65536)
            except TimeoutError:
                raise Failed(f"the machine says nothing for {patience:.0f} s; its console: {self.console_tail()}") from None
            if not more:
                raise Failed(f"the machine is gone; its console: {self.console_tail()}")
            self.buffer += more
        text, self.buffer = self.buffer.split(b"\n", 1)
        return text.decode().strip()

    def console_tail(self) -> str:
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return text[-2000:]

    def run(self, script: str, patience: float = PATIENCE) -> tuple[int, str]:
        """Runs the shell script in the machine; returns its exit code and all it printed."""
        self.line.sendall(base64.b64encode(script.encode()) + b"\n")
        said, _, code = self._read_line(patience).rpartition(" ")
        return int(code), base64.b64decode(said).decode(errors="replace")

    def sh(self, script: str, patience: float = PATIENCE) -> str:
        """As `run`, of a script that must not fail."""
        code, said = self.run(script, patience)
        if code:
            raise Failed(f"{script}: exit {code}: {said}")
        return said.strip()

    def wait(self, what: str, condition: str, patience: float = PATIENCE) -> str:
        """Waits in the machine until the shell condition holds; returns what it printed last."""
        up = "read -r up _ < /proc/uptime"
        script = f"{up}; end=$((${{up%.*}} + {patience:.0f})); until {condition}; do {up}; [ ${{up%.*}} -lt $end ] || exit 99; sleep 0.05; done"
        code, said = self.run(script, patience + PATIENCE)
        if code == 99:
            raise Failed(f"not within {patience:.0f} s: {what}: {said.strip().splitlines()[-1:]}")
        if code:
            raise Failed(f"{condition}: exit {code}: {said}")
        return said.strip()

    def qmp(self, command: str, **arguments: object) -> object:
        """A command to the machine's monitor."""
        print(json.dumps({"execute": command, "arguments": arguments}), file=self.monitor, flush=True)
        while True:
            answer = json.loads(self.monitor.readline())
            if "error" in answer:
                raise Failed(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def close(self) -> None:
        """Switches it off."""
        self.process.kill()
        self.process.wait()
