"""Copies of model folders with a file changed."""

import json
import shutil
from pathlib import Path
from typing import Any


def edited(source: Path, folder: Path, change: bytes | dict[str, Any] | None, name: str = "config.json") -> str:
    """Copy `source` to `folder` with another content of a file, with changes to its JSON, or without it."""
    shutil.copytree(source, folder)
    file = folder / name
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change).encode()
    file.unlink()  # it may be a link to the original
    if change is not None:
        file.write_bytes(change)
    return str(folder)


GREETING = "{{ '<|im_start|>user\n' + messages[0]['content'] + '<|im_end|>\n<|im_start|>assistant\n' }}"
# templates that loop, multiply, recurse, or write what no tokenizer reads
TEMPLATES = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a variable": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}x{% endfor %}{% endfor %}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "repeated list": "{{ ([1, 2] * 10**10)|length }}",
    "doubled text": (
        "{% set s = namespace(x='xx') %}{% for i in range(64) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}"
    ),
    "doubled sum": (
        "{% set s = namespace(x='xx') %}{% for i in range(64) %}{% set s.x = s.x + s.x %}{% endfor %}{{ s.x }}"
    ),
    "lists in lists": (
        "{% set s = namespace(x=[1]) %}{% for i in range(64) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}"
    ),
    "a large block": "{% set s %}{{ 'x' * 10**6 }}{% endset %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "text of a loop": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "text of an inner loop": (
        "{% for i in [1] recursive %}" + "x" * 100_000 + "{% if loop.depth == 1 %}{{ loop(range(99999)) }}{% endif %}"
        "{% endfor %}"
    ),
    "squares": "{% set s = namespace(x=7) %}{% for i in range(64) %}{% set s.x = s.x * s.x %}{% endfor %}{{ s.x }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "centred": "{{ 'x'|center(10**10) }}",
    "padded": "{{ 'x'.ljust(10**10) }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a width beside": "{{ '%*d' % (10**10, 1) }}",
    "a width of format": "{{ '{:10000000000}'.format(1) }}",
    "a width in format": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "replaced": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "joined": "{{ range(99999)|join('y' * 100000) }}",
    "indented": "{{ messages|tojson(indent=10**9) }}",
    "sliced": "{{ range(10)|slice(10**10)|list|length }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big')|length }}",
    "two calls each": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
    "endless calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an endless loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000,
    "a long source": "x" * 2_000_000,
    "half of a pair": GREETING + "{{ '\\ud800' }}",
    "a tag of its own": "{% while 1 %}",
    "an error": "{{ raise_exception('no chats here') }}",
    "ordinary": GREETING,
}
