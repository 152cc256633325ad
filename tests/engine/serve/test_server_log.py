"""The line of a server's log that says why it died; the logs are of real deaths of vLLM 0.32."""

import pytest

from proxima.engine.serve.servers import doing, last_error

MEMORY = """\
(Worker pid=1) ERROR 11-21 09:02:59 [executor.py:1063]     raise ValueError(
(Worker pid=1) ERROR 11-21 09:02:59 [executor.py:1063] ValueError: Available memory on node 0 (11.9/14.0 GiB)
(EngineCore pid=2) ERROR 11-21 09:02:59 [core.py:1510] RuntimeError: Worker failed with error 'Available'
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
"""
LENGTH = """\
(APIServer pid=3) WARNING 11-21 09:03:10 [utils.py:255] Found ulimit of 20000; this can cause `OSError: [Errno 24]`.
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (9999999) is greater than the derived max_model_len
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
ARGUMENT = """\
usage: vllm [-h] [-v]
            {chat,complete,serve}
vllm: error: unrecognized arguments: --foo-bar
"""
MODEL = """\
    raise HFValidationError(
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/tmp/nothing-here'.
"""
PORT = "OSError: [Errno 98] Address already in use\n"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (MEMORY, "ValueError: Available memory on node 0 (11.9/14.0 GiB)"),
        (LENGTH, "Value error, User-specified max_model_len (9999999) is greater than the derived max_model_len"),
        (ARGUMENT, "vllm: error: unrecognized arguments: --foo-bar"),
        (
            MODEL,
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/tmp/nothing-here'.",
        ),
        (PORT, "OSError: [Errno 98] Address already in use"),
        ("INFO x\nit just\nended\n", "ended"),
        ("", ""),
    ],
)
def test_the_reason_of_a_death(log, line):
    assert last_error(log) == line


def test_what_a_server_is_doing_is_its_last_sentence():
    log = "(EngineCore pid=5) INFO 11-21 09:02:59 [core.py:1] Loading weights took .2 s\n  warnings.warn(\n\n####\n"
    assert doing(log) == "Loading weights took .2 s"
    assert doing("") == ""
    long = doing("many words " * 50)
    assert 80 < len(long) <= 90 and long.endswith(" …")
