"""proxima submit, as a user types it: to a cluster of this machine, and what is refused before."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from proxima.cli import submit as submit_command
from proxima.config.problems import ConfigError
from proxima.data import UserError
from tests.ports import kept_port

SECONDS = 300
ROOT = Path(__file__).resolve().parents[2]
STANDS_IN = """\
import os, sys, time

print("words", *sys.argv[1:], flush=True)
print("folder", os.getcwd(), "EXTRA", os.environ.get("EXTRA"), flush=True)
if "seed=5" in sys.argv:
    time.sleep(120)
sys.exit(int(os.environ.get("CODE", "0")))
"""


def test_a_device_of_the_cluster_is_not_looked_for_here(recipe):
    config = submit_command.check_recipe(recipe(), ["model.device=cuda:7", "placement={kind: ray, ranks: 64}"])
    assert (config.model.device, config.placement.ranks) == ("cuda:7", 64)


def test_files_of_the_cluster_are_not_looked_for_here():
    """Data and model are in its shared storage; a relative path is one of this folder."""
    data = ["task.path=/nowhere/data/dapo-math", "eval.task.path=/nowhere/data/aime24", "model.path=/nowhere/qwen"]
    submit_command.check_recipe("dapo_32b", data)
    with pytest.raises(ConfigError, match=r"eval.task.path=data/aime24 .*no such folder"):
        submit_command.check_recipe("dapo_32b", data[:1])


def test_a_cluster_whose_token_is_missing(monkeypatch):
    """Ray's own text is of eight sentences, and the dashboard is running."""
    module = pytest.importorskip("ray.job_submission")

    def refuse(address):
        raise ConnectionError("Authentication required: Unauthorized: Missing authentication token\nFor more, see …")

    monkeypatch.setattr(module, "JobSubmissionClient", refuse)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, "http://head:8265")
    with pytest.raises(UserError, match=r"http://head:8265 refuses this machine: .*; copy ~/.ray/auth_token .*MODE"):
        submit_command.connect("http://head:8265")


def test_the_job_of_the_page_on_clusters(monkeypatch):
    """Its recipe and its runtime environment, with the words of the page."""
    monkeypatch.setenv("VLLM_TOKEN", "secret")
    example = ROOT / "examples" / "cluster"
    submit_command.check_recipe(str(example / "dapo_32b.yaml"), ["folder=/shared/runs/dapo_32b"])
    folder = submit_command.sent_folder(str(example), "dapo_32b.yaml", ["folder=/shared/runs/dapo_32b"])
    assert submit_command.recipe_there(str(example / "dapo_32b.yaml"), folder) == "dapo_32b.yaml"
    variables = submit_command.read_environment(str(example / "runtime_env.yaml"))["env_vars"]
    assert all(isinstance(value, str) for value in variables.values()) and variables["HF_HUB_OFFLINE"] == "1"


class FakeClient:
    """A job server whose connection may break after the first line. Its log ends `early` times before the job does,
    each time a line later."""

    def __init__(self, status: str, code: int | None, breaks: bool = False, early: int = 0) -> None:
        self.status, self.code, self.breaks, self.early = status, code, breaks, early
        self.tails = 0

    async def tail_job_logs(self, job):
        yield "2026-11-22 11:59:07,123\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
        yield "Running entrypoint for job raysubmit_1: exec proxima train\none\ntw"
        if self.breaks:
            raise RuntimeError("connection closed")
        yield "o\n"
        for line in range(self.tails):
            yield f"{line}\n"
        self.tails += 1

    def get_job_info(self, job):
        ended = self.tails > self.early
        status = types.SimpleNamespace(value=self.status if ended else "RUNNING", is_terminal=lambda: ended)
        return types.SimpleNamespace(status=status, driver_exit_code=self.code, message="no\nroom")


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "said"),
    [
        ("SUCCEEDED", 0, 0, ""),
        ("FAILED", 2, 2, ""),
        ("FAILED", None, 1, "error: the job failed: no room\n"),
        ("STOPPED", None, 130, "the job was stopped\n"),
    ],
)
def test_following(capsys, monkeypatch, status, code, exit_code, said):
    monkeypatch.setattr(submit_command, "ANSWER_SECONDS", 0.0)
    assert submit_command.follow_job(FakeClient(status, code), "job", "how") == exit_code
    assert tuple(capsys.readouterr()) == ("one\ntwo\n", said)


def test_a_log_that_ends_before_the_job(capsys, monkeypatch):
    """What is new of it is printed; if nothing is, the job's state is told."""
    monkeypatch.setattr(submit_command, "ANSWER_SECONDS", 0.0)
    assert submit_command.follow_job(FakeClient("FAILED", 3, early=2), "job", "how") == 3
    assert capsys.readouterr().out == "one\ntwo\n0\n1\n"
    monkeypatch.setattr(submit_command, "SILENT_SECONDS", -1.0)
    with pytest.raises(UserError, match=r"has ended, but Ray reports the job as RUNNING: .*; how to follow"):
        submit_command.follow_job(FakeClient("FAILED", 3, early=9), "job", "how to follow")


def test_a_connection_that_breaks():
    with pytest.raises(UserError, match="the connection to the job server broke: connection closed; how to follow"):
        submit_command.follow_job(FakeClient("RUNNING", None, breaks=True), "job", "how to follow")


@pytest.mark.campaign("tests/cli/test_submit.py::test_following")
@pytest.mark.waits
@pytest.mark.timeout(SECONDS)
def test_jobs_of_a_cluster(recipe, here, monkeypatch):
    """The jobs run a package that stands in for proxima: what is tested is the way there and back."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    recipe()
    (here / "there" / "proxima").mkdir(parents=True)
    (here / "there" / "proxima" / "__init__.py").touch()
    (here / "there" / "proxima" / "__main__.py").write_text(STANDS_IN)
    (here / "env.yaml").write_text(f"env_vars: {{PYTHONPATH: {here / 'there'}, EXTRA: 'yes', CODE: '2'}}")
    (here / "good.yaml").write_text(f"env_vars: {{PYTHONPATH: {here / 'there'}}}")
    port = kept_port()  # Ray's own choice is one port for all clusters of a machine
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_agent_listen_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        address = f"http://{cluster.webui_url}"

        def start(*words: str) -> "subprocess.Popen[str]":
            command = [sys.executable, "-m", "proxima", "submit", "tiny.yaml", *words, "--address", address]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})

        process = start("seed=3", "--runtime-env", "env.yaml")
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 2, err
        assert out, err
        assert err.splitlines()[0] == "note: placement is local: the job computes in one process, on the cluster's head"
        first, *lines = out.splitlines()
        assert first.startswith("job raysubmit_") and lines[0].startswith("words ")
        assert f"words train {here / 'tiny.yaml'} seed=3" in lines and f"folder {here} EXTRA yes" in lines

        process = start("seed=5", "--runtime-env", "good.yaml", "--resume")
        read = iter(process.stdout.readline, "")
        assert any(line == f"words train {here / 'tiny.yaml'} seed=5 --resume\n" for line in read)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "the job is still running: `ray job logs raysubmit_" in err
        from ray.job_submission import JobSubmissionClient

        jobs = JobSubmissionClient(address).list_jobs()
        assert sorted(job.status.value for job in jobs) == ["FAILED", "RUNNING"]

        words = ("--working-dir", str(here), f"folder={here / 'run'}", "--runtime-env", "good.yaml")
        process = start(*words)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert f"words train tiny.yaml folder={here / 'run'}" in out.splitlines()
        assert "working_dir_files" in out  # a copy
    finally:
        ray.shutdown()
        cluster.shutdown()
