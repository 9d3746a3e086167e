"""The watch over the ranks of torch.distributed: one store, one voice, readings of the whole job.

`job` is what the watch talks to. `meeting` finds the other ranks and makes a group of gloo's for
the watch alone, `exchange` sends a reading round (one all-gather, more only where a rank has
something new), `parcel` and `layout` are what is sent, `merge` makes readings of all the ranks'
rows, `told` which heads and which layers they are where nobody can see it, `shares` which heads a
rank holds where its weights say it.
"""

from typing import Literal, get_args

Mode = Literal["merge", "apart"]  # one store for all ranks, or one for each
MODES: tuple[Mode, ...] = get_args(Mode)
