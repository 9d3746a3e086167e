"""Outputs of two blocks of keys, weighed by their shares of each row."""

from torch import Tensor

from scaledot.backends.cuda.backend import TRITON


def combine(acc: Tensor, share: Tensor, other: Tensor, other_share: Tensor) -> None:
    """acc = share acc + other_share other, in place.

    acc [..., Q, V], shares [..., Q], other like acc in any floating type. On a GPU one kernel: as
    three operators of torch it would take longer than a short block's attention.
    """
    if acc.is_cuda and acc.dim() == 4 and TRITON is not None:
        from scaledot.backends.cuda.combine import combine as in_one_pass

        in_one_pass(acc, share, other, other_share)
        return
    acc.mul_(share.unsqueeze(-1)).addcmul_(other.to(acc.dtype), other_share.unsqueeze(-1))
