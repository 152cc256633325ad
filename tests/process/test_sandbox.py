"""The command line that puts a program into bubblewrap: what the program sees, may and leaves behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from proxima.process import sandbox
from proxima.process.code_runner import run_program
from proxima.process.sandbox import Sandbox, SandboxMissing, outermost, usable_kind
from tests.processes import eventually, is_running
from tests.sandboxes import beside_code, needs_bubblewrap

FACTS = """import json, os
def tried(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "variables": sorted(os.environ), "folder": os.getcwd(), "top": sorted(os.listdir("/")),
    "processes": sum(name.isdecimal() for name in os.listdir("/proc")), "links": os.listdir("/sys/class/net")
    if os.path.exists("/sys") else [], "capabilities": int(status["CapEff"], 16), "filter": int(status["Seccomp"]),
    "written": [path for path in WRITTEN if tried(path)],
}))
"""


def facts_in(box, written):
    program = [sys.executable, "-I", "-c", FACTS.replace("WRITTEN", repr(written))]
    with box.command(program) as (line, fds):
        ran = subprocess.run(line, env={"GIVEN": "1"}, pass_fds=fds, stdout=subprocess.PIPE, check=True, timeout=60)
    return json.loads(ran.stdout)


@pytest.fixture(params=["/tmp", "/dev/shm", "/var/tmp"])
def scratch(request):
    with tempfile.TemporaryDirectory(dir=request.param) as path:
        yield Path(path)


@needs_bubblewrap
def test_a_program_sees_the_interpreter_its_folder_and_little_else(scratch):
    folder, other = scratch / "folder", scratch / "other"
    folder.mkdir(), other.mkdir()
    inside, outside = str(folder / "x"), str(other / "x")
    places = [inside, outside, "/tmp/x", "/dev/shm/x", "/x", "/dev/x", "/usr/x", f"{sys.prefix}/x"]
    facts = facts_in(Sandbox(kind="bubblewrap", writable=str(folder)), places)
    assert facts["written"] == [inside, "/tmp/x", "/dev/shm/x"] and (folder / "x").exists()
    assert facts["folder"] == str(folder) and facts["processes"] <= 2 and facts["links"] == []
    assert set(facts["variables"]) <= {"GIVEN", "LC_CTYPE", "PWD"}
    assert facts["capabilities"] == 0 and facts["filter"] == 2
    shown = {"bin", "dev", "etc", "lib", "lib32", "lib64", "nix", "proc", "tmp", "usr"}
    assert set(facts["top"]) <= shown | {
        path.split("/")[1] for path in (str(scratch), sys.prefix, sys.base_prefix, *sys.path) if path
    }


@needs_bubblewrap
@pytest.mark.parametrize("code", ["print(input())", "import os; os.abort()", "import sys; sys.exit(3)", "1 / 0"])
def test_a_program_prints_and_ends_as_without_the_sandbox(code):
    ran = [run_program(code, (5, 512), 60, given="hi", errors=True, sandbox=Sandbox(kind=kind)) for kind in
           ("bubblewrap", "none")]  # fmt: skip
    assert ran[0] == ran[1]


def test_auto_falls_back_and_a_sandbox_that_was_asked_for_does_not(monkeypatch):
    monkeypatch.setattr(sandbox, "bubblewrap_problem", lambda: "bubblewrap needs the program bwrap")
    assert usable_kind("auto") == usable_kind("none") == "none"
    assert "bwrap" in sandbox.fallback_note("auto") and sandbox.fallback_note("none") == ""
    with pytest.raises(SandboxMissing, match="bwrap"):
        usable_kind("bubblewrap")


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    problem = sandbox.bubblewrap_problem.__wrapped__()
    assert "bwrap" in problem


def test_of_a_project_that_is_installed_in_place_only_modules_are_shown(tmp_path, monkeypatch):
    for name in ("mine.py", "package/__init__.py", "runs/key", ".env", "src/edited/__init__.py", "src/one.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    edited = [str(tmp_path / "src" / "edited"), str(tmp_path / "src" / "one")]
    listed = json.dumps([[str(tmp_path), f"{sys.prefix}/lib", "/nowhere/site-packages"], edited])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, listed))
    shown = sandbox.interpreter_paths.__wrapped__()
    here = {path for path in shown if path.startswith(str(tmp_path))}
    assert here == {f"{tmp_path}/{name}" for name in ("mine.py", "package", "src/edited", "src/one.py")}
    assert {sys.base_prefix, sys.prefix, f"{sys.prefix}/lib", str(sandbox.PACKAGE)} <= set(shown)


def test_folders_inside_others_are_bound_once():
    assert outermost(["/usr/lib", "/usr", "/usrlocal", "/a/b/", "/a/b/c"]) == ["/a/b", "/usr", "/usrlocal"]


@needs_bubblewrap
def test_a_process_that_was_started_ahead_runs_one_code_and_ends_with_its_worker():
    """The second code sees nothing of the first, and a process that has ended before its code came is replaced."""
    script = """
import sys
from proxima.process import code_runner
from proxima.process.sandbox import Sandbox
box = Sandbox(kind="bubblewrap", ahead=True)
def run(code):
    return code_runner.run_program(code, (5, 512), 60, errors=True, sandbox=box)
leave = "import os, sys; open('left', 'w'); sys.left = 1; print(input() if 0 else 'left')"
look = "import os, sys; print(sorted(os.listdir('.')), hasattr(sys, 'left'))"
print(run(leave), run(look))
(waiting,) = code_runner._ahead.values()
waiting.child.process.kill()
waiting.child.process.wait()
print(run("print(1)"))
(waiting,) = code_runner._ahead.values()
print(waiting.child.process.pid, flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    both, again, pid = ran.stdout.splitlines()
    assert both == rf"""(0, 'left\n') (0, "{beside_code("setup.py", "solution.py")} False\n")"""
    assert again == r"(0, '1\n')"
    eventually(lambda: not is_running(int(pid)))


IN_A_SANDBOX = """
import sys
sys.path.insert(0, sys.argv[1])
from proxima.process.code_runner import run_program
from proxima.process.sandbox import Sandbox, bubblewrap_problem
print(bubblewrap_problem() or run_program("print(1)", (5, 512), 60, errors=True, sandbox=Sandbox(kind="bubblewrap")))
"""


@pytest.mark.slow
@needs_bubblewrap
def test_an_interpreter_is_shown_wherever_its_links_lead(scratch):
    """A virtual environment in a folder with spaces, reached through a link, of a Python reached through another."""
    folder = scratch / "a folder"
    folder.mkdir()
    (folder / "python").symlink_to(sys.base_prefix)
    made = folder / "venv"
    base = folder / "python" / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", "--without-pip", made], check=True)
    (scratch / "link").symlink_to(made)
    for python in (made / "bin" / "python", scratch / "link" / "bin" / "python"):
        line = [python, "-c", IN_A_SANDBOX, str(sandbox.PACKAGE.parent)]
        ran = subprocess.run(line, capture_output=True, text=True, umask=0o077)
        assert ran.stdout == "(0, '1\\n')\n", ran


def test_a_program_of_a_virtual_environment_needs_its_python_and_no_other_folder(tmp_path):
    python, own = tmp_path / "opt" / "bin" / "python3", tmp_path / "home" / "bin" / "python3"
    script = tmp_path / "venv" / "bin" / "agent"
    for file in (python, own, script, tmp_path / "opt" / "lib" / "python3.11" / "os.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
    for file in (python, script, tmp_path / "opt" / "lib" / "python3.11" / "os.py"):
        file.touch()
    own.symlink_to(python)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "venv" / "bin" / "python").symlink_to(own)
    shown = outermost(sandbox.program_paths(str(script)))
    assert shown == [str(tmp_path / "opt"), str(tmp_path / "venv"), str(own)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's code runs as another user")
@needs_bubblewrap
def test_a_python_for_root_alone_is_named(tmp_path):
    tmp_path.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, umask=0o077)
    line = [tmp_path / "venv" / "bin" / "python", "-c", IN_A_SANDBOX, str(sandbox.PACKAGE.parent)]
    assert "chmod -R go+rX" in subprocess.run(line, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("fields", "limited"), [({}, []), ({"processes": 1}, ["--nproc=1"]), ({"processes": 256}, ["--nproc=256"])]
)
def test_processes_are_limited_where_a_number_is_given(fields, limited, monkeypatch):
    """By default the program sets its own limit."""
    monkeypatch.setattr(sandbox, "_found", lambda name: name)
    line = sandbox.bubblewrap_arguments(Sandbox(kind="bubblewrap", **fields), ["program"], 7)
    assert [word for word in line if word.startswith("--nproc")] == limited
    assert ("prlimit" in line) == bool(limited) and line[-1] == "program"
    assert line[line.index("--seccomp") + 1] == "7"
