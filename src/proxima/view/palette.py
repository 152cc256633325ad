"""The colours of the figures of `proxima plot`, and those of cells in a comparison."""

PALETTE = {  # CSS variable: its colour on a light and on a dark page
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1a1c20", "#e8e9ec"),
    "muted": ("#646a73", "#9ba2ac"),
    "grid": ("#ecece7", "#262a31"),
    "a": ("#2563eb", "#7aaefc"),
    "b": ("#c2500c", "#f2a164"),
    "c": ("#0f7f74", "#55c8b5"),
    "d": ("#7c3aed", "#b89af7"),
    "e": ("#9aa0a8", "#737a85"),
    "k0": ("#1f6fd1", "#74aefc"),
    "k1": ("#d1570a", "#fb9a56"),
    "k2": ("#0c8a5f", "#4fd1a0"),
    "k3": ("#b4378f", "#ee8fd0"),
    "k4": ("#8a6d00", "#dcc04a"),
    "k5": ("#6b4fd8", "#b09cff"),
    "k6": ("#3f4650", "#d3d7dd"),
    "k7": ("#c02b3a", "#ff8089"),
}
CELLS = [name for name in PALETTE if name.startswith("k")]


def cell_colors() -> str:
    """Return the CSS of a page: the colours of cells, and a class for each, whose `--cell` is its colour."""
    pairs = "".join(f" --{name}: light-dark({', '.join(PALETTE[name])});" for name in CELLS)
    return f":root {{{pairs} }}\n" + "".join(f".{name} {{ --cell: var(--{name}) }}\n" for name in CELLS)
