"""docs/algorithms: a page and, for a surrogate, a figure a method; and docs/peers.md, the table of all of them. Called
by make_docs.py.

Formula, defaults, edge cases, source and differences come from the specs' docstrings and fields, the curve from the
surrogate itself. The name, when to use it and what peers call it come from docs/algorithms/notes.yaml, or for a kind
without an entry there from its docstring: `Name:`, `Use it:`, `Not:`, `In verl:`, `In TRL:`, `In AReaL:`, `In UniRL:`.
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = REPOSITORY / "docs" / "algorithms"
PEERS = REPOSITORY / "docs" / "peers.md"
NAMES = {"verl": "verl 0.9.1", "trl": "TRL 1.16", "areal": "AReaL", "unirl": "UniRL"}
SLOTS = {  # slot → where its table is, how a recipe (or `policy_loss`) names it, what it is
    "surrogate": ("proxima.core.surrogate:SURROGATES", "surrogate: {{kind: {}}}", "Surrogates: the loss of a token"),
    "correction": (
        "proxima.core.correction:CORRECTIONS",
        "correction: [{{kind: {}}}]",
        "Corrections: from behavior to proximal policy",
    ),
    "advantage": (
        "proxima.core.advantage:ADVANTAGES",
        "advantage: {{kind: {}}}",
        "Advantages: from rewards to better or worse than expected",
    ),
    "aggregate": (
        "proxima.core.aggregate:AGGREGATES",
        "aggregate: {{kind: {}}}",
        "Aggregations: from losses of tokens to one number",
    ),
    "selection": (
        "proxima.core.selection:SELECTIONS",
        "selection: [{{kind: {}}}]",
        "Selections: what is dropped before the update",
    ),
    "penalty": (
        "proxima.core.penalty:PENALTIES",
        "reference_kl: {{kind: {}}}",
        "Penalties: terms added to the loss of a token",
    ),
}
OUTSIDE = {"entropy": "entropy_bonus: 0.01"}  # kinds that a recipe names otherwise
MADE = "<!-- Made by `make docs` from the code and notes.yaml; don't edit it here. -->\n"
HEADER = (
    r"(?:Name|Use it|Not|In (?:verl|TRL|AReaL|UniRL)|Args|Returns|Raises|Edge cases|Source|Differs|Metrics?|Limits)"
)


def pages() -> dict[Path, str]:
    """Every generated text file and what should stand in it."""
    notes = read_notes()
    found = {PEERS: peers_page(notes), PAGES / "README.md": index_page(notes)}
    for slot in SLOTS:
        for kind, cls in kinds(slot).items():
            found[PAGES / f"{kind}.md"] = method_page(slot, kind, cls, notes[slot][kind])
    return found


def figures() -> dict[Path, str]:
    """Every generated figure: each surrogate beside the one it is best compared with."""
    from proxima.core.surrogate import SURROGATES
    from proxima.view.surrogate_curve import TokenSetting
    from proxima.view.surrogate_plot import draw, svg

    found = {}
    for kind, cls in SURROGATES.items():
        beside = {"ppo_clip": ["reinforce"], "cppo": ["dppo", "ppo_clip"], "luspo": ["gspo"]}.get(kind, ["ppo_clip"])
        together = {name: SURROGATES[name]() for name in beside} | {kind: cls()}
        found[PAGES / f"{kind}.svg"] = svg(draw(together, TokenSetting(), over=["ratio"]))
    return found


def read_notes() -> dict[str, Any]:
    """notes.yaml, with the notes of the docstrings; ValueError where a kind has no note, or a note no kind."""
    notes = yaml.safe_load((PAGES / "notes.yaml").read_text(encoding="utf-8"))
    for slot in SLOTS:
        written = {kind: note for kind, cls in kinds(slot).items() if (note := note_in_docstring(cls))}
        notes[slot] = written | notes[slot]
        different = sorted(set(kinds(slot)) ^ set(notes[slot]))
        if different:
            raise ValueError(
                f"docs/algorithms/notes.yaml: {slot}: {', '.join(different)}: a kind without a note, there or in its "
                "docstring, or a note without a kind."
            )
    return notes


def note_in_docstring(cls: type) -> dict[str, str]:
    """The note that a docstring holds; empty unless it says all of `Name`, `Use it` and `Not`."""
    named = {"title": "Name", "use": "Use it", "avoid": "Not"}
    named |= {peer: f"In {name.split()[0]}" for peer, name in NAMES.items()}
    found = {key: text for key, title in named.items() if (text := section(cls, title))}
    return found | {"title": found["title"].removesuffix(".")} if {"title", "use", "avoid"} <= set(found) else {}


def kinds(slot: str) -> dict[str, type]:
    from proxima.config.describe import table_of

    return dict(sorted(table_of(SLOTS[slot][0]).items()))


def method_page(slot: str, kind: str, cls: type, note: dict[str, str]) -> str:
    from proxima.config.algorithm_checks import unsupported_by_loop
    from proxima.config.describe import summary_of

    name = OUTSIDE.get(kind) or SLOTS[slot][1].format(kind)
    parts = [f"# {note['title']}: `{name}`\n\n{MADE}", f"{escaped(summary_of(cls))}.\n"]
    if text := formula(cls):
        parts.append(text + "\n")
    if slot == "surrogate":
        parts.append(f"![loss and gradient weight over the ratio, for both signs of the advantage]({kind}.svg)\n")
    if rows := field_rows(cls):
        parts.append(table(["field", "default", "meaning"], rows) + "\n")
    if slot == "advantage" and (only := unsupported_by_loop(cls)):
        parts.append(
            f"**In core only.** `proxima train` can't run it: it {only}, which the loop has not. A loop of your own "
            "can.\n"
        )
    parts.append(f"**Use it.** {note['use']}\n\n**Not.** {note['avoid']}\n")
    if "recipe" in note:
        parts.append(f"**In a recipe.**\n\n```yaml\n{note['recipe']}```\n")
    parts += [f"**{key.capitalize()}.** {escaped(note[key])}\n" for key in ("metrics", "published") if key in note]
    for title in ("Edge cases", "Source", "Differs"):
        if text := section(cls, title):
            parts.append(f"**{title}.** {text}\n")
    if slot == "surrogate" and (presets := presets_with(kind)):
        parts.append(f"**Presets.** {', '.join(f'`algorithm: {name}`' for name in presets)}.\n")
    named = [[NAMES[peer], escaped(note[peer])] for peer in NAMES if peer in note]
    parts.append(
        (table(["peer", "what it is there"], named) if named else "None of verl, TRL, AReaL and UniRL has it.") + "\n"
    )
    return "\n".join(parts)


def presets_with(kind: str) -> list[str]:
    from proxima.config.presets import ALGORITHMS

    return sorted(name for name, preset in ALGORITHMS.items() if preset["surrogate"]["kind"] == kind)


def formula(cls: type) -> str:
    """What stands between the first sentence of the docstring and `Args`, formula blocks and prose; of a class that
    says "as", its base's."""
    from proxima.config.describe import summary_of

    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        if not (summary := summary_of(base)):
            continue
        lines = inspect.cleandoc(base.__doc__ or "").splitlines()
        end = next((i for i, line in enumerate(lines) if re.match(HEADER + r"[\w, ]*:", line)), len(lines))
        first, *blocks = re.split(r"\n\s*\n", "\n".join(lines[:end]).strip("\n"))
        rest = " ".join(first.split()).removeprefix(summary).removeprefix(".").strip()
        rest = re.split(rf"(?:^|(?<=[.]) ){HEADER}[\w, ]*: ", rest)[0]
        shown = [block if block.startswith("    ") else escaped(block) for block in [rest, *blocks] if block.strip()]
        if shown:
            return "\n\n".join(shown)
    return ""


def section(cls: type, title: str) -> str:
    """The text after `title:` up to the next section, in one line."""
    text = inspect.cleandoc(cls.__doc__ or "")
    match = re.search(rf"(?:^|[.] ){title}: (.*?)(?=(?:^|[.] +){HEADER}[\w, ]*: |\Z)", text, re.DOTALL | re.MULTILINE)
    if match is None:
        return ""
    found = " ".join(match[1].split())
    name = re.match(r"(arXiv|verl)\b|\w+ =", found)  # these begin small even in front
    return escaped((found if name else found[:1].upper() + found[1:]).removesuffix(".") + ".")


def field_rows(cls: type) -> list[list[str]]:
    from proxima.config.describe import fields_of
    from proxima.config.scalars import in_one_line, to_json

    rows = []
    for field in fields_of(cls):
        default = "required" if field.default is dataclasses.MISSING else f"`{in_one_line(to_json(field.default))}`"
        rows.append([f"`{field.name}`", default, escaped(field.help)])
    return rows


def index_page(notes: dict[str, Any]) -> str:
    from proxima.config.describe import summary_of

    parts = [
        f"# Methods\n\n{MADE}",
        "One page a method: formula, curve, defaults, when to use it, what the peers call it.\n",
    ]
    for slot, (_, _, title) in SLOTS.items():
        rows = [
            [f"[`{kind}`]({kind}.md)", notes[slot][kind]["title"], escaped(summary_of(cls))]
            for kind, cls in kinds(slot).items()
        ]
        parts.append(f"## {title}\n\n{table(['kind', 'name', 'what it does'], rows)}\n")
    return "\n".join(parts)


PEERS_HEAD = """\
What we have, by what the peers call it. `actor.` is `actor_rollout_ref.actor` and `correction.` is
`algorithm.rollout_correction` in verl;
names without a prefix are fields of `GRPOConfig` in TRL, of `PPOActorConfig` in AReaL, of a class of
`unirl/algorithms` in UniRL. An empty
cell: not there. Same name doesn't mean same number: [peculiarities](peculiarities.md) says where they differ (P, T,
A, U, C and a number).
"""


def peers_page(notes: dict[str, Any]) -> str:
    parts = [f"# Peers\n\n{MADE}", PEERS_HEAD]
    for slot, (_, _, title) in SLOTS.items():
        rows = [
            [f"[`{kind}`](algorithms/{kind}.md)", *(escaped(notes[slot][kind].get(p, "")) for p in NAMES)]
            for kind in kinds(slot)
        ]
        parts.append(f"## {title}\n\n{table(['ours', *NAMES.values()], rows)}\n")
    rows = [[row["feature"], row["ours"], *(escaped(row.get(p, "")) for p in NAMES)] for row in notes["other"]]
    parts.append(f"## What is no method\n\n{table(['feature', 'ours', *NAMES.values()], rows)}\n")
    return "\n".join(parts)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Text as Markdown that says just that: outside `code`, what looks like HTML, emphasis or a link is none."""
    parts = text.split("`")
    return "`".join(part if i % 2 else re.sub(r"([<*_\[\]])", r"\\\1", part) for i, part in enumerate(parts))
