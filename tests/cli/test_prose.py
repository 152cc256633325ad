"""Recipes' comments and commands' docstrings fit the terminal, and their commands can be copied."""

from proxima.cli.prose import laid_out


def test_the_comment_is_wrapped_in_its_columns_and_commands_stay_whole():
    comment = (
        "A title that is longer than the terminal\nis wide.\n  Source  a paper on this, and its\n          code\n"
        "    rate   .5   .75\n  proxima train it        # a remark that has no room\n"
        "  proxima train it one=1 two=2 three=3 \\\n    four=4 five=5\n\n  make demo  # short"
    )
    assert laid_out(comment, 30).splitlines() == [
        "A title that is longer than",
        "the terminal is wide.",
        "  Source  a paper on this, and",
        "          its code",
        "    rate   .5   .75",
        "  # a remark that has no room",
        "  proxima train it",
        "  proxima train it one=1 two=2 three=3 \\",
        "    four=4 five=5",
        "",
        "  make demo  # short",
    ]


def test_a_line_of_a_file_and_a_variable_are_no_prose():
    docstring = "The first line of it is\n# yaml-language-server: x=y\nThen\n    export URL=http://localhost KEY=none"
    assert laid_out(docstring, 24) == docstring
