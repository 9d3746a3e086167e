"""The run store: one SQLite file a run, written beside the training and read while it grows.

`Store` writes, `RunReader` reads. The way of a reading: `writer.Store.write` -> `queue` ->
the writer's thread -> `tail` (what is not in a full chunk yet) -> `packing` -> the file (`schema`);
and back: `looking.look` -> `tables`, `chunks` and `records` -> `reader.RunReader`.
"""

from scaledot.watch.store.follower import Follower, News
from scaledot.watch.store.reader import RunReader
from scaledot.watch.store.records import Segment, Series, Step
from scaledot.watch.store.schema import StoreError
from scaledot.watch.store.writer import Store

__all__ = ["Follower", "News", "RunReader", "Segment", "Series", "Step", "Store", "StoreError"]
