"""Turn float masks that only hide into bool masks, which the compiled kernel takes.

torch itself makes such masks of bool ones, for instance of `src_key_padding_mask`.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

from scaledot.backends.inputs import Inputs
from scaledot.problem import Problem, Settings

Call = TypeVar("Call", Inputs, Problem)


def with_bool_mask(call: Call, settings: Settings) -> Call:
    """Return the call with a bool mask where its float mask says no more than one.

    For scores alone: what an output's gradient asks of a float mask, a bool mask cannot answer.
    """
    mask = call.mask
    if call.value is not None or mask is None or mask.dtype == torch.bool or mask.is_meta:
        return call
    # A bias at half of its type's lowest value or below hides as well, for the statistics. log_n
    # counts such keys; and float16 has no value that is below every logit.
    plain = settings.log_n or mask.dtype == torch.float16
    allowed = allowed_by(mask, -math.inf if plain else torch.finfo(mask.dtype).min / 2)
    return call if allowed is None else call._replace(mask=allowed)


def allowed_by(mask: Tensor, hidden_up_to: float) -> Tensor | None:
    """Return mask == 0 if every other entry hides, else None: the mask is a bias.

    The last row is looked at first: a bias that depends on distances shows itself there.
    """
    # What was expanded is looked at once.
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    for part in (mask[..., -1:, :], mask):
        allowed = part == 0
        if not bool((allowed | (part <= hidden_up_to)).all()):
            return None
    return allowed
