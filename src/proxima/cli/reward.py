"""Score texts with rewards, without a model: try a reward before training with it. Serve a reward model over HTTP.

proxima reward score answers.jsonl --reward ./my_reward.py:near  # a function of yours
proxima reward score answers.jsonl --reward math --reward '{kind: repetition, weight: 0.1}'
proxima reward score answers.jsonl --reward quickstart           # those of a recipe
proxima reward score runs/mine/rollouts/000012.parquet --reward runs/mine  # recorded rollouts
proxima reward score a.jsonl --label human --reward '{kind: judge, url: "http://h/v1", model: m}'

A row has a prompt, a completion or a list of them (a group), and any other columns, which are passed to the rewards as
in a run. Exit code 1: a completion has no score; 2: the file, a reward or a column is wrong.

proxima reward serve models/reward --port 8000
proxima train quickstart reward='{kind: http, url: "http://localhost:8000/score"}'

export TOKEN=…
proxima reward serve models/reward --host 0.0.0.0 --token-env TOKEN --allow-host scorer
proxima train quickstart reward='{kind: http, url: "http://scorer:8000/score", token_env: TOKEN}'
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument, Overrides, TextColumns
from proxima.data import UserError, require
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.machine import SERVER_REMEDY, missing_for_server

REWARD = "FILE.py:FUNCTION, a kind of `proxima list reward`, {kind: …}, package.module:NAME, a recipe or a run"
MODEL = "count tokens with this model's tokenizer; loads no weights"
LABEL = "column with what people gave each completion, a number, true or false: prints how far the scores agree"
DEFAULT_COLUMNS = TextColumns()
TOKEN_ENV = "environment variable with the bearer token that clients must send; required beyond this machine"
ALLOW_HOST = "a name by which clients address this server, beside localhost and --host; may be repeated"


def score_file(
    file: Annotated[str, Argument(".jsonl, .json, .csv, .tsv or .parquet file")],
    override: Overrides = (),
    *,
    reward: Annotated[Sequence[str], Argument(f"{REWARD}; may be repeated", "REWARD", words="append")] = (),
    columns: TextColumns = DEFAULT_COLUMNS,
    model: Annotated[str | None, Argument(MODEL, "PATH")] = None,
    label: Annotated[str | None, Argument(LABEL, "COLUMN")] = None,
    rows: Annotated[int, Argument("completions to print; default: 20; 0: all", "N")] = 20,
    json_out: Annotated[Path | None, Argument("write the summary and every score for programs", "FILE")] = None,
) -> int:
    """Score the texts of a file with rewards, without a model: a table, and a summary.

    Returns: 1 if a completion has no score.

    Raises:
        UserError: the file, a reward or a column is wrong.
    """
    if rows < 0:
        raise UserError(f"--rows {rows} must be >= 0; 0 prints all")
    from proxima.cli.scoring import print_scores, score_texts, write_scores

    scored = score_texts(file, override, reward=reward, columns=columns, model=model, label=label)
    if json_out is not None:
        write_scores(json_out, scored, file)
    code = print_scores(scored.groups, rows)
    if label is not None and scored.agreement is not None:
        print(scored.agreement.line(label))
    return code


def _limit(meaning: str) -> Argument:
    return Argument(f"{meaning}; default: %(default)s", "N", read=int, group="limits of a request")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The options for `ScorerLimits`."""

    max_body_mb: Annotated[int, _limit("MiB of its body")] = ScorerLimits.body_mb
    max_completions: Annotated[int, _limit("completions in it")] = ScorerLimits.completions
    max_characters: Annotated[int, _limit("of a prompt or a completion")] = ScorerLimits.characters
    max_requests: Annotated[int, _limit("that wait at once")] = ScorerLimits.requests
    seconds: Annotated[float, _limit("until it is scored")] = ScorerLimits.seconds

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, f"--{name.replace('_', '-')}", value, "must be >= 1")


def serve_reward(
    model: Annotated[str, Argument("a reward model: Hugging Face folder or hub name", "FOLDER")],
    *,
    host: Annotated[str, Argument("address to listen on; default: this machine alone")] = "127.0.0.1",
    port: Annotated[int, Argument("default: 8000; 0 takes a free one")] = 8000,
    token_env: Annotated[str | None, Argument(TOKEN_ENV, "NAME")] = None,
    allow_host: Annotated[Sequence[str], Argument(ALLOW_HOST, "NAME", words="append")] = (),
    normalize: Annotated[bool, Argument("scores with mean 0 and deviation 1 on held-out data")] = False,
    max_tokens: Annotated[int | None, Argument("most tokens of prompt and completion", "N")] = None,
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto",
    limits: RequestLimits = RequestLimits(),
) -> None:
    """Serve a reward model over HTTP until a signal stops it, for the reward `http` of other machines and processes."""
    missing = missing_for_server()
    if missing:
        raise UserError(f"reward serve needs {missing}", remedy=SERVER_REMEDY)
    require(0 <= port <= 65535, "--port", port, "must be in [0, 65535]; 0 takes a free one")
    from proxima.cli.serving import serve_scores

    serve_scores(
        model,
        ScorerLimits(**{name.removeprefix("max_"): value for name, value in vars(limits).items()}),
        host=host,
        port=port,
        token_env=token_env,
        allow_host=allow_host,
        normalize=normalize,
        max_tokens=max_tokens,
        device=device,
    )


COMMAND = {"score": score_file, "serve": serve_reward}
