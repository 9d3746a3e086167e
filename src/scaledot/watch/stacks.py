"""Measure calls of one shape together, when the step ends.

A call of `scaledot.vitals` takes longer to begin than the heads of a small model take to compute.
So small calls on a CPU are kept, as copies, since a model may change its tensors in place, and the
calls of all layers that look alike are stacked along the batch and measured as one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from scaledot import functional
from scaledot.watch.gather import Key, Numbers
from scaledot.watch.probes.scores import Scores, all_finite

# Bytes of queries and keys: larger calls gain nothing, and take longer to copy than to begin.
# A call of which a part is measured is copied whole only where that is next to nothing.
LARGEST_CALL = 2**18
LARGEST_WHOLE = 2**16
MOST_HELD = 2**21  # of calls of one shape; then they are measured before the step ends
LARGEST_MASK = 2**20
WHOLE = slice(None)


class Call(NamedTuple):
    """Name the layer and the function of a call."""

    key: Key
    name: str  # of the layer in the coverage
    kind: str  # the function that was called
    heads: int


class Taker(Protocol):
    """Take what was measured."""

    def take_stack(self, calls: Sequence[Call], numbers: Numbers) -> None:
        """numbers: [fields, calls * batch, heads]."""
        ...

    def lose(self, call: Call, error: Exception) -> None: ...


class Stack:
    """Hold calls that differ in nothing but their numbers."""

    def __init__(self, like: Scores, entries: slice, size: int) -> None:
        """size: bytes of the query and the key of a call."""
        self.like, self.entries, self.size = like, entries, size
        batch, rows = like.query.shape[0], like.query.shape[2]
        # Rows of a head that a call has, and that are read of it.
        self.rows_there = rows * batch
        self.rows_read = rows * (batch if entries == WHOLE else entries.stop - entries.start)
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.calls: list[Call] = []

    @property
    def takes_another(self) -> bool:
        """Tell whether it stays below its limit with one more call."""
        return self.size * (len(self.calls) + 1) < MOST_HELD

    def add(self, query: Tensor, key: Tensor, call: Call) -> None:
        """Copy the tensors: the model may write to them after the call."""
        self.queries.append(query.clone())
        self.keys.append(key.clone())
        self.calls.append(call)

    def measure(self, taker: Taker) -> None:
        """Hand on the calls' numbers, or what went wrong with one."""
        if torch.is_autocast_enabled("cpu"):  # the calls were made in types of their own
            with torch.autocast("cpu", enabled=False):
                self.measure(taker)
            return
        try:
            query, key = torch.cat(self.queries), torch.cat(self.keys)
            alone = self._broken(query, key)
            if not any(alone):
                taker.take_stack(self.calls, self._together(query, key))
                return
        except Exception:
            alone = [True] * len(self.calls)
        for place, call in enumerate(self.calls):
            try:
                taker.take_stack([call], self._one(place, WHOLE if alone[place] else self.entries))
            except Exception as error:
                taker.lose(call, error)

    def _broken(self, query: Tensor, key: Tensor) -> list[bool]:
        """Tell which calls of a sample hold NaN or infinity anywhere: they are measured whole."""
        if self.entries == WHOLE or (all_finite(query) and all_finite(key)):
            return [False] * len(self.calls)
        pairs = zip(self.queries, self.keys, strict=True)
        return [not (all_finite(query) and all_finite(key)) for query, key in pairs]

    def _together(self, query: Tensor, key: Tensor) -> Numbers:
        calls, mask = len(self.calls), self.like.attn_mask
        query, key = self._entries_of(query), self._entries_of(key)
        if mask is not None and mask.shape[0] > 1:
            mask = mask[self.entries]
            mask = mask.repeat(calls, 1, 1, 1) if calls > 1 else mask
        stacked = self.like._replace(query=query, key=key, attn_mask=mask)
        return Numbers(*stacked.vitals().packed())

    def _entries_of(self, stacked: Tensor) -> Tensor:
        """Cut [calls * batch, ...] to [calls * entries, ...], as a view where one entry is read."""
        if self.entries == WHOLE:
            return stacked
        return stacked.unflatten(0, (len(self.calls), -1))[:, self.entries].flatten(0, 1)

    def _one(self, place: int, entries: slice) -> Numbers:
        one = self.like._replace(query=self.queries[place], key=self.keys[place])
        return Numbers(*one.part(entries).vitals().packed())


class _Mask(NamedTuple):
    given: Tensor  # kept, so that no other takes its place in memory
    copy: Tensor


class Stacks:
    """Collect the calls of the running step that are measured at its end."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._stacks: dict[Any, Stack] = {}
        self._whole: dict[Any, Stack] = {}  # those of calls as the model has made them
        self._masks: dict[Any, _Mask] = {}

    def again(self, scores: Scores, call: Call) -> Stack | None:
        """Keep a call if one that looks like it was held in the running step; return their stack.

        No more is done here than to copy, for a step may have a hundred such calls.
        """
        query, key, mask = scores.query, scores.key, scores.attn_mask
        if mask is not None:
            known = self._masks.get(_place_of(mask)) if type(mask) is Tensor else None
            if known is None:
                return None
            mask = known.copy
        stack = self._whole.get(_look_of(query, key, mask, scores))
        if not (
            stack is not None
            and stack.takes_another
            and stack.calls[0].heads == call.heads
            and type(query) is Tensor
            and type(key) is Tensor
            and query.is_cpu
            and key.is_cpu
            and query.dtype is key.dtype
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._are_functorch_transforms_active()
        ):
            return None
        with_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            stack.add(query, key, call)
        finally:
            torch._C._set_grad_enabled(with_grad)
        return stack

    def hold(self, scores: Scores, entries: slice, call: Call, part: bool = False) -> bool:
        """Keep a call for later, of which some entries will be measured; False: measure it now.

        part: the scores are a part of those of the model's call.
        """
        query, key, mask = scores.query, scores.key, scores.attn_mask
        size = (query.numel() + key.numel()) * query.element_size()
        if not (
            size <= (LARGEST_CALL if entries == WHOLE else LARGEST_WHOLE)
            and query.is_cpu
            and key.is_cpu
            and type(key) in (Tensor, Parameter)
            and query.dtype is key.dtype
            and scores.sinks is None
            and scores.key_lengths is None
            and not isinstance(scores.scale, Tensor)
        ):
            return False
        if mask is not None:
            size_of_mask = mask.numel() * mask.element_size()
            if type(mask) is not Tensor or mask.is_inference() or size_of_mask > LARGEST_MASK:
                return False
            mask = self._kept(mask)
            scores = scores._replace(attn_mask=mask)
        cast = torch.is_autocast_enabled("cpu")
        if cast:  # the step's end is outside of the model's autocast
            query, key = functional.autocast(query, key)
        look = _look_of(query, key, mask, scores)
        like = look, entries.start
        stack = self._stacks.get(like)
        if stack is None:
            stack = self._stacks[like] = Stack(scores, entries, size)
        if not (part or cast):
            self._whole[look] = stack
        full = not stack.takes_another
        stack.add(query, key, call)
        if full:
            del self._stacks[like]
            self._whole.pop(look, None)
            stack.measure(self._taker)
        return True

    def measure(self) -> None:
        """Measure all that is held; the next step begins empty."""
        if self._stacks:
            stacks, self._stacks = self._stacks, {}
            self._whole.clear()
            for stack in stacks.values():
                stack.measure(self._taker)
        self._masks.clear()

    def _kept(self, mask: Tensor) -> Tensor:
        """Copy a mask of at most four dimensions, once for all layers that are given it.

        It is the same if it lies in the same place and was not written to since.
        """
        same = _place_of(mask)
        known = self._masks.get(same)
        if known is None:
            known = self._masks[same] = _Mask(mask, mask[(None,) * (4 - mask.dim())].clone())
        return known.copy


def _look_of(query: Tensor, key: Tensor, mask: Tensor | None, scores: Scores) -> Any:
    """Return what calls have in common that can be measured together."""
    return query.shape, key.shape, query.dtype, id(mask), scores[3:]


def _place_of(mask: Tensor) -> Any:
    """Return what stays the same while a mask lies in its place and is not written to."""
    version = None if mask.is_inference() else mask._version
    return mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, version
