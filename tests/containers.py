"""An image for containers, made of a static busybox, where podman works."""

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

IMAGE = "localhost/proxima-test-busybox:1"
NAMES = "sh cat sleep ls wget nc id env head tail dd mkdir rm touch chmod kill ps ln test expr grep sed cp true false"
FAKE_DOCKER = """#!/bin/sh
echo "$@" >> {log}
exec podman "$@"
"""
HYBRID = "[engine]\nruntime = 'runc'\n"  # crun refuses a machine with both versions of cgroups


@cache
def problem() -> str:
    """Why no container can be started here; empty if one can. Sets CONTAINERS_CONF if podman needs another runtime."""
    busybox = shutil.which("busybox")
    for program in ("podman", "cc"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if (
        busybox is None
        or "not a dynamic" not in subprocess.run(["ldd", busybox], capture_output=True, text=True).stderr
    ):
        return "busybox is not installed, or not static (Debian: busybox-static)"
    if subprocess.run(["podman", "image", "exists", IMAGE]).returncode:
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            for name in ("bin", "tmp", "proc", "dev", "sys", "etc", "app"):
                (root / name).mkdir()
            shutil.copy(busybox, root / "bin")
            for name in NAMES.split():
                (root / "bin" / name).symlink_to("busybox")
            packed = subprocess.run(["tar", "-C", place, "-c", "."], capture_output=True, check=True).stdout
        subprocess.run(["podman", "import", "-", IMAGE], input=packed, capture_output=True, check=True)
    limits = ["--memory=64m", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--network=none"]
    trial = ["podman", "run", "--rm", *limits, IMAGE, "/bin/true"]
    said = subprocess.run(trial, capture_output=True, text=True)
    if said.returncode and shutil.which("runc"):
        file = Path(tempfile.mkdtemp(prefix="proxima-test-")) / "containers.conf"
        file.write_text(HYBRID)
        os.environ["CONTAINERS_CONF"] = str(file)
        said = subprocess.run(trial, capture_output=True, text=True)
    return f"podman starts no container: {said.stderr.strip()[-300:]}" if said.returncode else ""


@pytest.fixture(scope="session")
def busybox_image() -> str:
    """The name of the image; skips the test where it can't be used."""
    if problem():
        pytest.skip(problem())
    return IMAGE


@pytest.fixture(scope="session")
def podman() -> None:
    """Skips the test where podman can't start containers."""
    if problem():
        pytest.skip(problem())


@pytest.fixture
def docker_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake of docker's command line on the PATH, which asks podman: the file in which it notes what it is asked."""
    log, fake = tmp_path / "log", tmp_path / "bin" / "docker"
    fake.parent.mkdir()
    fake.write_text(FAKE_DOCKER.format(log=log))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    return log


def left(pid: int | None = None) -> list[str]:
    """The names of the containers and volumes that a process has made; None: this one."""
    names = []
    for words in (["ps", "-a", "--filter", "label=proxima.run", "--format", "{{.Names}}"], ["volume", "ls", "-q"]):
        names += subprocess.run(["podman", *words], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if f"-{pid or os.getpid()}-" in name]
