"""What is wrong with a text that is not YAML, in the words of who wrote it."""

import yaml

_PLAIN = {  # what PyYAML says begins with this: what it means for a recipe
    "mapping values are not allowed here": "a `:` where no field can begin: indent the fields of a section alike, and "
    "quote a text that contains `: `",
    "found character '\\t'": "a tab; indent with spaces",
    "expected <block end>, but found '-'": "a list item (`-`) among fields: indent it below its own field",
    "expected <block end>": "its indentation fits none of the lines above: indent the fields of a section alike",
    "expected ',' or '}'": "a `{` that is not closed, or a missing comma, in this line or above",
    "expected ',' or ']'": "a `[` that is not closed, or a missing comma, in this line or above",
    "could not find expected ':'": "a line without `:`; a field is `name: value`",
    "found unexpected end of stream": "a quotation mark that is not closed",
}


def in_plain_words(error: yaml.MarkedYAMLError) -> str:
    """What the user can change, or PyYAML's own words for a rare mistake."""
    said = error.problem or error.context or ""
    return next((text for start, text in _PLAIN.items() if said.startswith(start)), said)
