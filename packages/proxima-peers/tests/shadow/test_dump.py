"""Files from outside: whatever they hold, the result is a dump or one line that says what is wrong."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from proxima.data import UserError
from proxima_peers.shadow import dump as module
from proxima_peers.shadow.dump import read_dump


def arrays():
    return {
        "mask": np.array([[1, 1, 0], [1, 0, 0]]),
        "log_prob": np.array([[-0.5, -0.25, 0.0], [-1.0, 0.0, 0.0]], dtype=np.float32),
        "advantage": np.array([0.5, -0.5], dtype=np.float32),
        "loss": np.float32(0.25),
    }


def written(folder, **changed):
    file = folder / "step.npz"
    np.savez(file, **{**arrays(), **changed})
    return str(file)


def refused(file):
    with pytest.raises(UserError) as raised:
        read_dump(str(file))
    assert len(str(raised.value).splitlines()) == 1
    assert "step" in str(raised.value)
    return str(raised.value)


def test_both_formats_give_the_same_dump(tmp_path):
    settings = json.dumps({"peer": "mine", "max_length": 9, "surrogate": {"kind": "gspo", "epsilon_low": 0.5}})
    plain = read_dump(written(tmp_path, settings=settings))
    file = tmp_path / "step.safetensors"
    save_file({name: torch.tensor(value) for name, value in arrays().items()}, file, {"settings": settings})
    other = read_dump(str(file))
    assert plain.settings == other.settings
    assert (plain.settings.max_length, plain.settings.surrogate.epsilon_low) == (9, 0.5)
    assert plain.single and other.single
    assert plain.arrays.keys() == other.arrays.keys()
    for name, value in plain.arrays.items():
        assert torch.equal(value, other[name])
    assert plain["advantage"].tolist() == [[0.5] * 3, [-0.5] * 3]
    assert plain["mask"].dtype == torch.bool


def test_bfloat16_is_read_and_counts_as_rounded(tmp_path):
    values = {name: torch.tensor(value) for name, value in arrays().items()}
    values["log_prob"] = values["log_prob"].bfloat16()
    file = tmp_path / "step.safetensors"
    save_file(values, file)
    assert read_dump(str(file)).rtol == 1e-6


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"mask": np.zeros((2, 3))}, "no token is in the loss"),
        ({"mask": np.full((2, 3), 2)}, "mask has values other than 0 and 1"),
        ({"mask": np.array([1, 0])}, "mask has shape [2]"),
        ({"log_prob": np.zeros((2, 4), np.float32)}, "log_prob has shape [2, 4]; it must be [2, 3]"),
        ({"log_prob": np.full((2, 3), np.nan, np.float32)}, "log_prob is nan in the loss, at row 0, position 0"),
        ({"log_probs": np.zeros((2, 3))}, "log_probs is no array of a dump; did you mean 'log_prob'?"),
        ({"group": np.array([0.5, 1])}, "group has values that are not whole numbers"),
        ({"group": np.array([np.nan, 1])}, "group has values that are not whole numbers"),
        ({"loss": np.float32("inf")}, "loss is not finite"),
        ({"loss": np.zeros(2)}, "loss has shape [2]; it must be [], one number"),
        ({"loss_mask": np.array([[1, 1, 1], [1, 0, 0]])}, "loss_mask has row 0, position 2"),
        ({"reward": np.array(["a", "b"])}, "reward is of <U1"),
        ({"reward": np.array([1j, 0])}, "reward is of complex128"),
        ({"settings": "{"}, "settings that are not JSON"),
        ({"settings": "[1]"}, "settings that are a list"),
        ({"settings": '{"surogate": {}}'}, "did you mean 'surrogate'?"),
        ({"settings": '{"surrogate": {"kind": "ppo_clip", "epsilon_low": 7}}'}, "epsilon_low"),
        ({"settings": '{"ranks": 0}'}, "ranks"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path, changed, line):
    assert line in refused(written(tmp_path, **changed))


def test_a_required_array_is_missing(tmp_path):
    np.savez(tmp_path / "step.npz", mask=np.ones((1, 1)))
    assert "log_prob is missing" in refused(tmp_path / "step.npz")


def test_nothing_is_unpickled(tmp_path):
    class Loud:
        def __reduce__(self):
            return (open, (str(tmp_path / "pickled"), "w"))

    np.savez(tmp_path / "step.npz", **arrays(), reward=np.array([Loud(), 1], dtype=object))
    assert "is damaged" in refused(tmp_path / "step.npz")
    assert not (tmp_path / "pickled").exists()


def test_what_is_not_there_or_no_file(tmp_path):
    assert "can't be read" in refused(tmp_path / "step.npz")
    assert "neither .npz nor .safetensors" in refused(tmp_path / "step.pt")
    (tmp_path / "step.npz").mkdir()
    refused(tmp_path / "step.npz")


def test_an_array_that_claims_more_than_it_has(tmp_path):
    """A header of a few bytes must not make the reader allocate what it says."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "step.npz", "w") as archive:
        archive.writestr("mask.npy", header.getvalue())
    assert "does not fit its content" in refused(tmp_path / "step.npz")


def test_a_file_that_unpacks_to_more_than_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_FILE", 1 << 16)
    with zipfile.ZipFile(tmp_path / "step.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mask.npy", bytes(1 << 20))
    assert "unpacks to more than" in refused(tmp_path / "step.npz")


def test_too_many_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_POSITIONS", 5)
    assert "must be [B, T] of 1 to 5 positions" in refused(written(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_damaged_file_is_a_dump_or_a_line(tmp_path, kind):
    file = tmp_path / f"step.{kind}"
    if kind == "npz":
        np.savez_compressed(file, **arrays(), settings='{"peer": "mine"}')
    else:
        save_file({name: torch.tensor(value) for name, value in arrays().items()}, file, {"settings": "{}"})
    whole = file.read_bytes()
    draw = np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        content = bytearray(whole)
        for at in draw.integers(len(content), size=draw.integers(1, 4)):
            content[at] = draw.integers(256)
        if draw.random() < 0.2:
            content = content[: draw.integers(len(content))]
        file.write_bytes(content)
        try:
            read_dump(str(file))
            outcomes[True] += 1
        except UserError as error:
            assert len(str(error).splitlines()) == 1
            outcomes[False] += 1
    assert outcomes[False] > 50
