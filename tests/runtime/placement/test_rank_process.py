import pytest

from proxima.runtime.placement.rank_process import exit_code_of

FUNCTIONS = "tests.runtime.placement.rank_functions"


@pytest.mark.parametrize(
    ("function", "arguments", "code", "said"),
    [
        ("builtins:int", {}, 0, ""),
        ("builtins:len", {}, 70, "TypeError: len() takes"),
        ("builtins:nothing", {}, 70, "AttributeError"),
        ("no.such:thing", {}, 70, "ModuleNotFoundError: No module named 'no'"),
        (f"{FUNCTIONS}:refuse", {"reason": "no"}, 2, "error: no; another way\n"),
        (f"{FUNCTIONS}:interrupted", {}, 130, ""),
    ],
)
def test_exit_codes(capsys, function, arguments, code, said):
    assert exit_code_of(function, arguments) == code
    err = capsys.readouterr().err
    assert said in err and (code != 2 or err == said)
