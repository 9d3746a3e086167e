"""One record of a call over ranks. What only all ranks together can know is asked here, once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from scaledot import backends
from scaledot.backends.operators import Engine
from scaledot.distributed.blocks import Sight
from scaledot.distributed.group import Ranks, all_numbers, ranks_of
from scaledot.distributed.layout import Shard, check, of_lengths, tokens_of
from scaledot.distributed.transport import METHODS, Gathered, Ring
from scaledot.errors import ArgumentError
from scaledot.problem import FLOAT_TYPES, Problem, Settings, whole_number

Lengths = Sequence[int] | None


class Call(NamedTuple):
    ranks: Ranks
    queries: Shard  # this rank's
    keys: tuple[Shard, ...]  # every rank's
    sight: Sight
    settings: Settings  # without what Sight says
    engine: Engine
    transport: type[Ring] | type[Gathered]
    measures: bool

    @property
    def key_count(self) -> int:
        return sum(tokens_of(shard) for shard in self.keys)


def call_of(
    problem: Problem, mesh: Any, layout: str, method: str, lengths: Lengths, backend: str | None
) -> Call:
    """lengths: tokens of each rank, where all ranks know them; None: they are asked for."""
    check(layout)
    if not isinstance(method, str) or method not in METHODS:
        raise ArgumentError(f"method={method!r}; use {' or '.join(map(repr, METHODS))}")
    ranks = ranks_of(mesh)
    rows, columns = problem.query.shape[2], problem.key.shape[2]
    if lengths is None:
        query_lengths, key_lengths = _asked(problem, ranks, (rows, columns))
    else:
        query_lengths = key_lengths = _given(lengths, ranks, rows, columns)
    queries = of_lengths(query_lengths, layout, "queries")
    keys = of_lengths(key_lengths, layout, "keys")
    settings = problem.settings
    return Call(
        ranks,
        queries[ranks.rank],
        tuple(keys),
        Sight.of(settings, sum(query_lengths), sum(key_lengths)),
        settings._replace(left=None, right=None, bottom_right=False, log_n=False),
        backends.engine_for(problem, backend),
        METHODS[method],
        problem.wants_vitals,
    )


def _given(lengths: Sequence[int], ranks: Ranks, rows: int, columns: int) -> list[int]:
    given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    own = [whole_number("lengths", length) for length in given]
    if len(own) != ranks.size:
        raise ArgumentError(f"lengths has {len(own)} numbers for {ranks.size} ranks")
    if (rows, columns) != (own[ranks.rank],) * 2:
        raise ArgumentError(
            f"lengths says that rank {ranks.rank} holds {own[ranks.rank]} tokens; its query has "
            f"{rows} and its key {columns}. Leave lengths out to let the ranks ask each other"
        )
    return own


def _asked(problem: Problem, ranks: Ranks, own: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Every rank's numbers of queries and keys; an error on all ranks where they do not fit."""
    facts = _facts(problem)
    everybodys = all_numbers(ranks, (*own, *facts.values()), problem.query.device)
    for place, name in enumerate(facts):
        values = [numbers[len(own) + place] for numbers in everybodys]
        if len(set(values)) > 1:
            raise ArgumentError(
                f"the ranks do not agree on {name}: {values}, rank by rank; they must hold shards "
                f"of the same tensors and pass the same arguments"
            )
    return [numbers[0] for numbers in everybodys], [numbers[1] for numbers in everybodys]


def _facts(problem: Problem) -> dict[str, int]:
    query, key, value, settings = problem.query, problem.key, problem.value, problem.settings
    unlimited = -1
    return {
        "the batch": query.shape[0],
        "the query's heads": query.shape[1],
        "the key's heads": key.shape[1],
        "the width of query and key": query.shape[3],
        "the width of value": 0 if value is None else value.shape[3],
        "the type (its number in float64, float32, bfloat16, float16)": _number_of(query),
        "the window's left side": unlimited if settings.left is None else settings.left,
        "causality or the window's right side": (
            unlimited if settings.right is None else settings.right
        ),
        "causal_align": int(settings.bottom_right),
    }


def _number_of(query: Tensor) -> int:
    return FLOAT_TYPES.index(query.dtype)
