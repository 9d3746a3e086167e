"""Open a run to draw it: refuse one with more layers and heads than any picture can show.

A small file may announce a quarter of a million heads. What a viewer draws grows with them, so its
time and its memory have a bound here. `RunReader` itself reads such a run.
"""

import os

from scaledot.watch.store import RunReader, StoreError

MOST_LAYERS = 1024
MOST_HEADS = 2**15
MOST_CHARACTERS = 2**18  # of the layers' names
MOST_REPEATED = 2**22  # of the same, once for each head


def open_run(path: str | os.PathLike[str]) -> RunReader:
    """Raises StoreError where there is no run, and where it is too large to be drawn."""
    reader = RunReader(path)
    layers = reader.layers()
    heads = sum(layers.values())
    if len(layers) > MOST_LAYERS or heads > MOST_HEADS:
        raise StoreError(
            f"{reader.path} has {heads:,} heads in {len(layers):,} layers, and a viewer shows at "
            f"most {MOST_HEADS:,} in {MOST_LAYERS:,}; read it in Python: "
            "scaledot.watch.store.RunReader"
        )
    repeated = sum(len(name) * number for name, number in layers.items())
    if sum(map(len, layers)) > MOST_CHARACTERS or repeated > MOST_REPEATED:
        raise StoreError(
            f"{reader.path} has names of layers that are too long to be shown; read it in Python: "
            "scaledot.watch.store.RunReader"
        )
    return reader
