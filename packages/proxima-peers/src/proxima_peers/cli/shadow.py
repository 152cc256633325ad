"""`proxima peers shadow`: one update step of another trainer, computed here, and the convention behind each number."""

from typing import Annotated

from proxima.cli.parameters import Argument, print_json

FILE = (
    "the dump of one update step: .npz or .safetensors; the page packages/proxima-peers/docs/shadow.md has its arrays"
)


def shadow_file(
    file: Annotated[str, Argument(FILE)],
    *,
    as_json: Annotated[bool, Argument("print every stage and every convention that fits", flag="--json")] = False,
) -> int:
    """Compute here what another trainer computed in one update step, and name the conventions that give its numbers.

    Returns: 1 if no convention gives some number.
    """
    # here, so that --help needs no torch
    from proxima_peers.cli import shadow_report as report
    from proxima_peers.shadow.dump import read_dump
    from proxima_peers.shadow.stages import stages

    dump = read_dump(file)
    made = list(stages(dump))
    if as_json:
        print_json(report.as_json(dump, file, made))
    else:
        print(report.text(dump, file, made))
    return 1 if report.failed(made) else 0
