"""What was not tested and why: counted by reason at the end of a run, and an error where a reason is on no list."""

import re
from collections import Counter
from pathlib import Path

import pytest

LEFT = "left to another commit"
# What a reason says of a package that an extra installs → that extra.
EXTRAS = {
    "torchao": "low-bit",
    "trackio": "trackio",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "bm25s": "search",
    "datasets": "data",
    "gguf": "gguf",
    "accelerate": "gguf",
    "math_verify": "math",
    "reasoning_gym": "gym",
    "ray": "ray",
    "pandas": "notebook",
}


def allowed(listed: str) -> dict[str, re.Pattern[str]]:
    """The patterns of a list of reasons: a line each, `PATTERN  # why it is allowed`, where the reason is matched from
    its beginning."""
    lines = [line.partition("  # ") for line in listed.splitlines() if line.strip() and not line.startswith("#")]
    unexplained = [pattern for pattern, _, why in lines if not why.strip()]
    if unexplained:
        raise pytest.UsageError(f"no reason says why a test may be skipped: {unexplained}")
    return {pattern: re.compile(pattern.strip()) for pattern, _, _ in lines}


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a whole file, was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").strip()


class Skips:
    """Counts reasons; with a list of allowed ones, any other one makes the run fail."""

    def __init__(self, listed: Path | None) -> None:
        self.allowed = None if listed is None else allowed(listed.read_text("utf-8"))
        self.counted: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.counted[reason_of(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.counted[f"{reason_of(report)} (a whole file)"] += 1

    def unlisted(self) -> list[str]:
        if self.allowed is None:
            return []
        return [reason for reason in self.counted if not any(each.match(reason) for each in self.allowed.values())]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted():  # another code than that of failures, which `make campaigns` tries again
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.counted:
            return
        terminalreporter.section("skipped, and why")
        for reason, count in self.counted.most_common():
            terminalreporter.write_line(f"{count:5,}  {reason}")
        extras = {
            extra
            for reason in self.counted
            for package, extra in EXTRAS.items()
            if re.search(rf"\b{package}\b", reason) and reason.startswith(("could not import", f"{package} is not"))
        }
        if extras:
            terminalreporter.write_line(f"more tests run with the extras: {', '.join(sorted(extras))}")
        for reason in self.unlisted():
            terminalreporter.write_line(f"error: tests were skipped for a reason that is on no list: {reason}")
