"""Makes a process of Linux look like one of macOS to what is imported after it: `import tests.system.as_macos`.

What macOS lacks is missing in `os`, `signal`, `select` and the C library, and no file of /proc, /sys or /dev/shm can be
opened or found. Libraries that are imported first keep what they have taken.
"""

import builtins
import ctypes
import errno
import io
import os
import platform
import re
import select
import signal
import sys
import sysconfig

import httpx
import peft
import pyarrow.compute
import pyarrow.parquet
import torch
import transformers

LACKS = re.compile(
    r"posix_fallocate|posix_fadvise|sched_\w+|pidfd_\w+|memfd_create|MFD_\w+|eventfd\w*|copy_file_range|splice|unshare|setns"
    r"|getrandom|O_DIRECT|O_TMPFILE|O_PATH|SIGRT\w+|SIGPWR|SIGSTKFLT|sigwaitinfo|sigtimedwait"
)
FILES = re.compile(r"/(proc|sys|dev/shm)(/(?!pytest-of-).*)?")  # the folders of the test itself may lie in memory
LOADED = httpx, peft, peft.LoraConfig, pyarrow, torch, transformers, sysconfig.get_config_vars()


class CLibrary(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt", "malloc_trim", "syscall"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def hiding(function):
    def hidden(path, *arguments, **more):
        if isinstance(path, str | os.PathLike) and FILES.fullmatch(os.fspath(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return function(path, *arguments, **more)

    return hidden


for module in (os, signal, select):
    for name in filter(LACKS.fullmatch, dir(module)):
        delattr(module, name)
for module, names in ((os, "open stat lstat scandir listdir statvfs access"), (builtins, "open"), (io, "open")):
    for name in names.split():
        setattr(module, name, hiding(getattr(module, name)))
ctypes.CDLL = CLibrary
platform.system = lambda: "Darwin"
platform.machine = lambda: "arm64"
sys.platform = "darwin"
