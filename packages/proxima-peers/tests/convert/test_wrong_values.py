"""Values of another kind than an option takes: a report or one line, never a crash."""

import random
from contextlib import suppress

import pytest

from proxima.config.problems import ConfigError
from proxima_peers.convert import PEERS, conversion
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.options import Options
from proxima_peers.convert.read import read

from .conftest import EXAMPLES

WRONG = [["a", "b"], {"a": 1}, "x", 0, True, -1, float("inf"), float("nan"), "http://[", "0", [], None]
FIXED_DATA = {
    "trl sft": {"dataset_name": "a", "packing": True, "completion_only_loss": True, "model_name_or_path": "m"},
    "trl dpo": {"dataset_name": "a", "loss_type": "sigmoid", "model_name_or_path": "m", "max_length": 100},
    "trl kto": {"dataset_name": "a", "desirable_weight": 1.0, "model_name_or_path": "m"},
    "trl reward": {"dataset_name": "a", "center_rewards_coefficient": 0.1, "model_name_or_path": "m"},
    "verl sft": {"model.path": "o", "data.messages_key": "c", "data.train_files": "rows.parquet"},
    "areal dpo": {"train_dataset.type": "dpo", "actor.path": "a", "train_dataset.path": "x"},
}
FILES = {file.name: file for file in sorted(EXAMPLES.iterdir())}


HERE = "packages/proxima-peers/tests/convert/test_wrong_values.py"
MANY = pytest.mark.campaign(f"{HERE}::test_a_value_of_another_kind_is_never_a_crash")


@pytest.mark.slow
@pytest.mark.parametrize("draws", [5, pytest.param(150, marks=MANY)])
@pytest.mark.parametrize("case", [*FILES, *FIXED_DATA])
def test_a_value_of_another_kind_is_never_a_crash(case, draws, monkeypatch):
    peer = next(peer for peer in PEERS if case.startswith(peer))
    flat = dict(read(FILES[case])) if case in FILES else FIXED_DATA[case]
    made: list[Options] = []

    def options(framework, values, file):
        made.append(Options(framework, values, file))
        return made[-1]

    def run(values):
        monkeypatch.setattr(conversion, "read", lambda path: values)
        with suppress(ConfigError):
            convert("options.yaml", peer)

    monkeypatch.setattr(conversion, "Options", options)
    run(dict(flat))
    names = sorted(made[0].asked | set(flat))
    draw = random.Random(case)
    for _ in range(draws):
        run(flat | {draw.choice(names): draw.choice(WRONG) for _ in range(draw.choice((1, 1, 3)))})
    assert len(made) > draws  # more where a file is no training, and the other frameworks are asked
