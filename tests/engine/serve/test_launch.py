"""The command line of a server has what the engine's fields ask of it."""

import pytest

from proxima.engine.serve.launch import Serve, vllm_launch

FLAGS = {"sampling_mask": "--return-sampling-mask", "routed_experts": "--enable-return-routed-experts"}


@pytest.mark.parametrize("field", FLAGS)
def test_a_field_has_its_flag(field):
    def flags(**fields):
        command = vllm_launch(Serve(executable="/bin/true"), "model", 8000, **fields).command
        return [flag for flag in FLAGS.values() if flag in command]

    assert flags(**{field: True}) == [FLAGS[field]] and flags() == []
