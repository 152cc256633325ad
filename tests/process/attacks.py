"""Programs that try to get out of a sandbox, and a scene that tells whether one did.

`PRELUDE` takes away the checks inside Python, as any program can, so that only the sandbox and the kernel's limits
hold the attacks. A program got out if it printed `OUT` or the scene's secret, reached a listener, touched a file or the
victim, or left a process; see `Scene.escapes`.
"""

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PRELUDE = """
import os, sys
checks = sys.modules.get("proxima.process.limits")
if checks:
    checks._refuse = lambda *ignored: None
sys.modules.pop("_posixsubprocess", None)
import ctypes, fcntl, glob, mmap, resource, signal, socket, stat, struct, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
PLACE = {place}
NUMBERS = {numbers}[os.uname().machine]
def show(data):
    sys.stdout.buffer.write(data if isinstance(data, bytes) else str(data).encode())
    sys.stdout.flush()
def read(path):
    with open(path, "rb", 0) as file:
        return file.read(1 << 20)
def out(*why):
    print("OUT", *why, flush=True)
def tried(call, *arguments):
    try:
        return call(*arguments)
    except (OSError, AttributeError, ValueError, MemoryError, RuntimeError) as error:
        print(type(error).__name__, error, flush=True)
def syscall(name, *arguments):
    return libc.syscall(NUMBERS[name], *arguments)
"""
SINCE_2019 = {"clone3": 435, "io_uring_setup": 425, "pidfd_getfd": 438, "pidfd_send_signal": 424}
NAMES = "clone", "add_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "name_to_handle_at", "open_by_handle_at"
NUMBERS = {
    "x86_64": dict(zip(NAMES, (56, 248, 250, 321, 298, 323, 303, 304), strict=True)) | SINCE_2019,
    "aarch64": dict(zip(NAMES, (220, 217, 219, 280, 241, 282, 264, 265), strict=True)) | SINCE_2019,
}


@dataclass(frozen=True)
class Attack:
    """A program after `PRELUDE`, where `PLACE` has the names of the scene.

    Args:
        shown: without a sandbox it gets out, and harms nothing.
        root: then only if it is root's.
        limited: it is held by the limits of code, not by the sandbox: not for programs that set no such limits.
    """

    name: str
    code: str
    shown: bool = False
    root: bool = False
    limited: bool = False


def _(name, code, **options):
    return Attack(name, code, **options)


PROC = [
    _("own_variables", "show(os.environ)"),
    _("variables_of_the_parent", "show(tried(read, f'/proc/{os.getppid()}/environ'))"),
    _("variables_of_all", "for path in glob.glob('/proc/[0-9]*/environ'): show(tried(read, path))", shown=True),
    _(
        "root_of_others",
        "for root in glob.glob('/proc/[0-9]*/root'): show(tried(read, root + PLACE['key']))",
        shown=True,
    ),
    _("folder_of_others", "for cwd in glob.glob('/proc/[0-9]*/cwd'): show(tried(read, cwd + '/key'))", shown=True),
    _("files_of_others", 'show(read(f\'/proc/{PLACE["victim"]}/fd/{PLACE["fd"]}\'))', shown=True),
    _(
        "memory_of_others",
        """
with open(f"/proc/{PLACE['victim']}/mem", "rb", 0) as memory:
    memory.seek(PLACE["address"])
    show(memory.read(32))
""",
        shown=True,
    ),
    _("kernel_settings", "open('/proc/sys/kernel/core_pattern', 'r+'); out()", shown=True, root=True),
    _("sysrq", "open('/proc/sysrq-trigger', 'w'); out()"),
    _("kernel_memory", "open('/proc/kcore', 'rb').read(1); out()"),
    _("own_interpreter_by_proc", "open('/proc/self/exe', 'r+b'); out()"),
    _("oom_score", "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000'); out()"),
]
SOCKETS = [
    _("tcp_to_the_endpoint", "show(socket.create_connection(('127.0.0.1', PLACE['port']), 2).recv(99))", shown=True),
    _("tcp_over_ipv6", "show(socket.create_connection(('::ffff:127.0.0.1', PLACE['port']), 2).recv(99))", shown=True),
    _("udp", "socket.socket(type=socket.SOCK_DGRAM).sendto(b'hi', ('127.0.0.1', PLACE['udp']))", shown=True),
    _("unix_by_path", "s = socket.socket(socket.AF_UNIX); s.connect(PLACE['unix']); show(s.recv(99))", shown=True),
    _("unix_abstract", "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + PLACE['abstract']); show(s.recv(99))",
      shown=True),
    _("unix_by_proc", "s = socket.socket(socket.AF_UNIX); s.connect(f'/proc/{PLACE[\"victim\"]}/cwd/s'); "
      "show(s.recv(99))", shown=True),
    _("raw_socket", "socket.socket(type=socket.SOCK_RAW, proto=socket.IPPROTO_ICMP); out()", shown=True, root=True),
    _("packet_socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); out()", shown=True, root=True),
    _("host_of_the_machine", "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); out()"),
    _("interfaces", "out(*n) if (n := [n for _, n in socket.if_nameindex() if n != 'lo']) else None"),
    _("services", """
for path in ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock", "/run/dbus/system_bus_socket",
             "/run/systemd/private", "/run/containerd/containerd.sock", "/tmp/.X11-unix/X0"):
    if tried(lambda: socket.socket(socket.AF_UNIX).connect(path) is None): out(path)
"""),
]  # fmt: skip
FILES = [
    _("key_of_the_server", "show(read(PLACE['key']))", shown=True),
    _("private_key_of_the_user", "show(read(PLACE['home'] + '/.ssh/id_ed25519'))", shown=True),
    _("run_folder", "show(os.listdir(PLACE['run'])); open(PLACE['run'] + '/written', 'w')", shown=True),
    _("symbolic_link", "os.symlink(PLACE['key'], 'link'); show(read('link'))", shown=True),
    _("symbolic_link_to_a_folder", "os.symlink(PLACE['run'], 'run'); open('run/written', 'w')", shown=True),
    _("hard_link", "os.link(PLACE['key'], 'hard'); show(read('hard'))"),
    _("dots", "show(read('../' * 20 + PLACE['key']))", shown=True),
    _("rename_the_folder", "os.rename(PLACE['run'], PLACE['run'] + '2')"),
    _("handle", """
handle, mount = struct.pack("Ii128s", 128, 0, b""), ctypes.c_int()
handle = ctypes.create_string_buffer(handle)
if syscall("name_to_handle_at", -100, b"/", handle, ctypes.byref(mount), 0) == 0:
    fd = syscall("open_by_handle_at", os.open("/", 0), handle, os.O_RDONLY)
    if fd >= 0: out(os.listdir(fd))
""", shown=True, root=True),
    _("interpreter", "open(sys.prefix + '/written', 'w'); os.unlink(sys.prefix + '/written'); out()"),
    _("interpreter_binary", "open(os.path.realpath(sys.executable), 'ab'); out()"),
    _("packages", """
for folder in [p for p in sys.path if os.path.isdir(p)]:
    path = os.path.join(folder, "written.pth")
    if tried(open, path, "w"):
        os.unlink(path)
        out(path)
"""),
    _("own_module", "import json; open(json.__file__, 'a'); out()"),
    _("passwords", "open('/etc/passwd', 'a'); out()", shown=True, root=True),
    _("programs", "open('/usr/bin/written', 'w'); os.unlink('/usr/bin/written'); out()"),
    _("scheduled", "open('/etc/cron.d/written', 'w'); os.unlink('/etc/cron.d/written'); out()"),
    _("cgroups", "for p in glob.glob('/sys/fs/cgroup/**/*procs', recursive=True):\n    if tried(open, p, 'w'): out(p)"),
    _("devices", """
for name in ("mem", "port", "vda", "sda", "nvme0n1", "kvm", "fuse", "loop-control", "net/tun", "uinput", "kmsg"):
    if tried(os.open, "/dev/" + name, os.O_RDONLY): out(name)
""", shown=True, root=True),
    _("device_node", "os.mknod('node', stat.S_IFCHR | 0o600, os.makedev(1, 11)); os.open('node', 0); out()",
      shown=True, root=True),
    _("set_user_id_file", """
import shutil
shutil.copy("/bin/sh", "sh"); tried(os.chown, "sh", 0, 0); os.chmod("sh", 0o6755)
if subprocess.run(["./sh", "-p", "-c", "id -u"], capture_output=True).stdout.strip() == b"0": out()
"""),
    _("leave_files", """
for folder in ("/tmp", "/dev/shm", "/var/tmp", os.getcwd()):
    tried(lambda: open(folder + "/left-by-an-attack", "w"))
""", shown=True),
    _("find_files", """
for folder in ("/tmp", "/dev/shm", "/var/tmp", os.getcwd()):
    if os.path.exists(folder + "/left-by-an-attack"): out(folder)
"""),
]  # fmt: skip
PROCESSES = [
    _("signal_to_the_victim", "os.kill(PLACE['victim'], 9)", shown=True),
    _("signal_by_handle", "syscall('pidfd_send_signal', os.pidfd_open(PLACE['victim']), 9, None, 0)", shown=True),
    _("stop_the_victim", "os.kill(PLACE['victim'], signal.SIGSTOP)", shown=True),
    _("signal_to_the_parent", "os.kill(os.getppid(), 9); time.sleep(1)"),
    _("signal_to_all", "os.kill(-1, 9)"),
    _("signal_to_the_group", "os.killpg(0, signal.SIGSTOP)"),
    _("trace_the_victim", "if libc.ptrace(16, PLACE['victim'], 0, 0) == 0: out()", shown=True, root=True),
    _("trace_the_parent", "if libc.ptrace(16, os.getppid(), 0, 0) == 0: out()"),
    _("read_memory", """
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
data = ctypes.create_string_buffer(32)
ours, theirs = Part(ctypes.addressof(data), 32), Part(PLACE["address"], 32)
libc.process_vm_readv(PLACE["victim"], ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
show(data.raw)
""", shown=True, root=True),
    _("descriptor_of_the_victim", """
fd = syscall("pidfd_getfd", os.pidfd_open(PLACE["victim"]), PLACE["fd"], 0)
if fd >= 0: show(os.pread(fd, 99, 0))
""", shown=True, root=True),
    _("inherited_descriptors", """
for fd in range(3, 256):
    if tried(os.fstat, fd):
        print(fd, tried(os.readlink, f"/proc/self/fd/{fd}"))
        show(tried(os.pread, fd, 99, 0)), tried(os.write, fd, b'{"id": 1, "value": 3}' + b"\\n")
"""),
    _("fork_bomb", "def bomb():\n    while True: libc.fork()\nprint(bomb.__name__)\nbomb()"),
    _("fork_and_count", """
children = 0
while children < 500 and (pid := libc.fork()) >= 0:
    if pid == 0: time.sleep(60), os._exit(0)
    children += 1
if children > 100: out(children)
"""),
    _("thread_bomb", """
threads = []
try:
    while len(threads) < 500:
        threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
        threads[-1].start()
except RuntimeError: pass
if len(threads) > 100: out(len(threads))
os._exit(0)
"""),
    _("programs_bomb", """
running = []
while len(running) < 200: running.append(subprocess.Popen(["sleep", PLACE["sleep"]]))
out()
"""),
    _("outlive_by_session", """
if libc.fork() == 0:
    os.setsid()
    if libc.fork() == 0:
        [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]
        os.closerange(0, 64), time.sleep(600)
    os._exit(0)
time.sleep(0.3)
""", shown=True),
    _("outlive_by_shell", """
line = "(setsid nohup sleep " + PLACE["sleep"] + " > /dev/null 2>&1 &)"
subprocess.Popen(line, shell=True).wait()
"""),
    _("ignore_signals", "[tried(signal.signal, n, signal.SIG_IGN) for n in range(1, 65)]; time.sleep(600)"),
    _("stop_itself", "os.kill(os.getpid(), signal.SIGSTOP)"),
    _("become_another_program", "os.execv('/bin/sleep', ['sleep', PLACE['sleep']])"),
    _("raise_the_limits", "resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)); out()"),
    _("priority", "os.nice(-5); out()", shown=True, root=True),
    _("core_dump", "tried(resource.setrlimit, resource.RLIMIT_CORE, (1 << 30, 1 << 30)); os.abort()"),
    _("preload", """
open("evil.so", "wb").write(b"\\x7fELF"), os.environ.update(LD_PRELOAD="./evil.so", PYTHONPATH=os.getcwd())
open("sitecustomize.py", "w").write("print('OUT')")
tried(subprocess.run, [sys.executable, "-I", "-c", ""])
"""),
]  # fmt: skip
KERNEL = [
    _("new_user_namespace", "if libc.unshare(0x10000000) == 0: out()", shown=True, root=True),
    _("new_namespace_by_clone", """
pid = syscall("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: out()
""", shown=True, root=True),
    _("new_namespace_by_clone3", """
arguments = ctypes.create_string_buffer(struct.pack("11Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, *[0] * 6))
pid = syscall("clone3", arguments, 88)
if pid == 0: os._exit(0)
if pid > 0: out()
""", shown=True, root=True),
    _("namespaces_of_others", """
for name in ("mnt", "net", "pid", "ipc", "user"):
    fd = tried(os.open, f"/proc/{PLACE['victim']}/ns/{name}", os.O_RDONLY)
    if fd and libc.setns(fd, 0) == 0: out(name)
""", shown=True, root=True),
    _("mount", "os.mkdir('m')\nif libc.mount(b'x', b'm', b'tmpfs', 0, None) == 0: out(); libc.umount2(b'm', 2)",
      shown=True, root=True),
    _("remount", "if libc.mount(None, b'/usr', None, 0x1020, None) == 0: out()"),
    _("unmount", "for place in (b'/proc', b'/tmp', b'/usr', b'/'):\n    if libc.umount2(place, 2) == 0: out(place)"),
    _("change_root", "os.mkdir('r'); os.chroot('r'); out()", shown=True, root=True),
    _("become_root", "os.setuid(0); out()", shown=True, root=True),
    _("groups_of_root", "os.setgroups([0]); out()", shown=True, root=True),
    _("switch_user", "if subprocess.run(['su', '-c', 'true'], stdin=subprocess.DEVNULL).returncode == 0: out()"),
    _("add_a_key", "if syscall('add_key', b'user', b'attack', b'x', 1, -5) >= 0: out()", shown=True, root=True),
    _("keys_of_the_session", "if syscall('keyctl', 0, -3, 1) >= 0: out()", shown=True, root=True),
    _("shared_memory", """
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(PLACE["shared"], 64, 0)
if number >= 0: show(ctypes.string_at(libc.shmat(number, None, 0o10000), 32))
""", shown=True),
    _("shared_memory_by_path", "show(read('/dev/shm/' + PLACE['shm']))", shown=True),
    _("rings", "if syscall('io_uring_setup', 1, ctypes.create_string_buffer(120)) >= 0: out()"),
    _("bpf", "if syscall('bpf', 0, ctypes.create_string_buffer(struct.pack('4I', 2, 4, 4, 1), 128), 16) >= 0: out()",
      shown=True, root=True),
    _("performance_counters", """
attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 112, 0), 112)
if syscall("perf_event_open", attributes, PLACE["victim"], -1, -1, 0) >= 0: out()
""", shown=True, root=True),
    _("page_faults", "if syscall('userfaultfd', 0) >= 0: out()"),
    _("kernel_log", "if libc.klogctl(3, ctypes.create_string_buffer(999), 999) >= 0: out()", shown=True, root=True),
    _("type_into_terminal", """
main, terminal = os.openpty()
tried(os.setsid), fcntl.ioctl(terminal, 0x540E, 0), fcntl.ioctl(terminal, 0x5412, b"x")
out()
"""),
    _("terminal", "open('/dev/tty', 'w'); out()"),
    _("clock", "time.clock_settime(time.CLOCK_REALTIME, time.time()); out()"),
    _("name_of_the_machine", "socket.sethostname('attacked'); out()"),
    _("restart", "if libc.reboot(0x89ABCDEF) == 0: out()"),
]  # fmt: skip
GREED = [
    _("fill_the_disk", """
total, block = 0, bytes(1 << 20)
for folder in (os.getcwd(), "/tmp", "/dev/shm", "/var/tmp", "/dev", "/run"):
    for number in range(99):
        try:
            with open(f"{folder}/full-{number}", "xb", 0) as file:
                while total < 300 << 20: total += file.write(block)
        except OSError: continue
if total > 160 << 20: out(total)
"""),
    _("many_files", "n = 0\nwhile n < 20000: open(f'f{n}', 'w').close(); n += 1"),
    _("endless_output", "while True: os.write(1, bytes(1 << 20)); os.write(2, bytes(1 << 20))"),
    _("descriptors", "n = 0\nwhile n < 300: os.dup(1); n += 1\nout(n)", limited=True),
    _("memory", "kept = [bytearray(1 << 26) for _ in range(64)]\nout()", limited=True),
    _("memory_in_maps", "kept = [mmap.mmap(-1, 1 << 26) for _ in range(64)]\nout()", limited=True),
    _("memory_without_a_map", """
total = 0
for number in range(60):
    fd = os.memfd_create("x")
    try:
        while True: total += os.write(fd, bytes(1 << 20))
    except OSError: pass
    if total > 300 << 20: out(total); break
""", shown=True),
    _("memory_of_the_system", """
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
total = 0
for _ in range(8):
    number = libc.shmget(0, 1 << 26, 0o1600)
    if number < 0: break
    place = libc.shmat(number, None, 0)
    ctypes.memset(place, 1, 1 << 26), libc.shmctl(number, 0, None), libc.shmdt(ctypes.c_void_p(place))
    total += 1
if total == 8: out()
""", shown=True),
    _("processor", "while True: pass"),
    _("crash", "ctypes.string_at(0)"),
    _("stack", "def deeper(x): return deeper(x) + deeper(x)\nsys.setrecursionlimit(10**9); deeper(0)"),
]  # fmt: skip
ATTACKS = [*PROC, *SOCKETS, *FILES, *PROCESSES, *KERNEL, *GREED]

VICTIM = """
import ctypes, os, sys, time
secret = ctypes.create_string_buffer(os.environ["PROXIMA_SECRET"].encode())
print(ctypes.addressof(secret), os.open("key", os.O_RDONLY), flush=True)
time.sleep(3600)
"""


@dataclass
class Scene:
    """What an attack is after: a secret in files, memory, variables and behind listeners, and a process."""

    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    hits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.sleep = f"600.{secrets.randbelow(10**9)}"  # among the arguments of what attacks start
        self.run, self.home = self.folder / "run", self.folder / "home"
        for path in (self.run / "key", self.home / ".ssh" / "id_ed25519"):
            path.parent.mkdir(parents=True)
            path.write_text(self.secret)
        self.shm = Path("/dev/shm") / self.folder.name
        self.shm.write_text(self.secret)
        self._listen()
        self._share()
        self.start_victim()
        self.files = self._files()

    def _listen(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
        self.listeners[1].bind(str(self.run / "s"))
        self.listeners[2].bind("\0" + self.folder.name)
        for listener in self.listeners:
            listener.listen()
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        self.udp = socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self.hits.append(str(listener.getsockname()))
                with connection:
                    connection.sendall(self.secret.encode())

    def _share(self) -> None:
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        self.shared = secrets.randbelow(1 << 30) + 1
        self.number = libc.shmget(self.shared, 64, 0o1666)
        ctypes.memmove(libc.shmat(self.number, None, 0), self.secret.encode(), 32)

    def start_victim(self) -> None:
        variables = {**os.environ, "PROXIMA_SECRET": self.secret}
        self.victim = subprocess.Popen(
            [sys.executable, "-I", "-c", VICTIM], cwd=self.run, env=variables, stdout=subprocess.PIPE
        )
        self.address, self.fd = map(int, self.victim.stdout.readline().split())

    def _files(self) -> dict[str, str]:
        return {str(p): p.read_text() if p.is_file() else "" for p in sorted(self.folder.rglob("*"))}

    def program(self, attack: Attack) -> str:
        """The code of an attack on this scene."""
        place = {
            "key": str(self.run / "key"),
            "home": str(self.home),
            "run": str(self.run),
            "unix": str(self.run / "s"),
        }
        place |= {"victim": self.victim.pid, "address": self.address, "fd": self.fd, "shm": self.shm.name}
        place |= {"port": self.listeners[0].getsockname()[1], "udp": self.udp.getsockname()[1]}
        place |= {"abstract": self.folder.name, "shared": self.shared}
        prelude = PRELUDE.replace("{place}", repr(place)).replace("{numbers}", repr(NUMBERS))
        return prelude + attack.code

    def escapes(self, printed: str, *words: str) -> list[str]:
        """How an attack got out, given its output and words that are all among the arguments of its process; empty if
        it did not. What it broke is repaired."""
        escapes = re.findall(rf"^OUT.*|{self.secret}", printed, re.MULTILINE)
        escapes += self.hits
        self.hits.clear()
        with suppress(BlockingIOError):
            escapes.append(f"udp {self.udp.recv(99)!r}")
        stopped = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
        if stopped or self.victim.poll() is not None:
            escapes.append("the victim was stopped or killed")
            self.victim.kill(), self.victim.wait(), self.victim.stdout.close()
            self.start_victim()
        if self._files() != self.files:
            escapes.append(f"files: {self._files().keys() ^ self.files.keys()}")
            (self.run / "written").unlink(missing_ok=True)
        for path in (Path(folder, "left-by-an-attack") for folder in ("/tmp", "/dev/shm", "/var/tmp")):
            if path.exists():
                escapes.append(f"file: {path}")
                path.unlink()
        if left := left_processes(words) + left_processes([self.sleep]):
            escapes.append(f"left processes: {left}")
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        return escapes

    def close(self) -> None:
        self.victim.kill(), self.victim.wait(), self.victim.stdout.close()
        for each in (*self.listeners, self.udp):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        ctypes.CDLL(None).shmctl(self.number, 0, None)
        self.shm.unlink()
        shutil.rmtree(self.folder)


def left_processes(words: Sequence[str], seconds: float = 5.0) -> list[int]:
    """The processes with these words among their arguments that are still there after some seconds; none for no words,
    which all processes have."""
    end = time.monotonic() + seconds
    while left := [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if words and _has(pid, words)]:
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return left


def _has(pid: int, words: Sequence[str]) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return state != "Z" and set(words) <= set(arguments)
