"""Kernels as operators of torch: one graph node under torch.compile, with shapes for fake tensors,
gradients, and a rule for vmap. `define` makes such a pair of operators of an engine.

Every operator takes the same tensors and settings in the same order: that of `Inputs`, then that
of `Settings`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot.backends import composed_vitals, derivatives, vitals_gradient
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.backends.layout import new_strides
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, ROW_FIELDS, Result, are_differentiable
from scaledot.problem import Problem, Settings

_TENSORS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? mask, Tensor? head_scale, Tensor? sinks, "
    "Tensor? weight, Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed"
)
_SETTINGS = (
    "float scale, bool log_n, float softcap, float dropout_p, SymInt? left, SymInt? right, "
    "bool bottom_right"
)
TENSORS = len(Inputs._fields)
SETTINGS = len(Settings._fields)
SEED = Inputs._fields.index("seed")
PER_HEAD = tuple(Inputs._fields.index(n) for n in ("mask", "head_scale", "sinks", "weight"))

NOTHING_MORE = Wanted(*[False] * len(Wanted._fields))
NO_MORE_TENSORS = (None,) * (TENSORS - 3)

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)  # not fake, not a subclass that traces

library = torch.library.Library("scaledot", "FRAGMENT")


class Measured(NamedTuple):
    """What an engine's forward hands back besides the output it was given to fill."""

    lse: Tensor  # [B, H, Q]; may be empty of scores alone, unless their rows are asked for
    floats: Tensor | None = None  # [F, B, H]; packed: [F, sequences, H]; perhaps of MADE_FIELDS
    counts: Tensor | None = None  # [C, B, H]
    rows: Tensor | None = None  # [5, B, H, Q]


class LaidOut(Gradients):
    """Gradients that need no look: each lies in memory as a new tensor like its own would."""

    __slots__ = ()


Forward = Callable[[Inputs, Settings, Tensor | None, bool, bool], Measured]
Backward = Callable[[Inputs, Settings, Tensor, Tensor, Tensor, Wanted], Gradients]
Attend = Callable[[Inputs, Settings, bool, bool], Result]


class Engine(NamedTuple):
    """A pair of kernels behind operators, and without them: no graph, no tracing.

    forward(inputs, settings, wants_vitals, per_row) gives the output and what was measured;
    backward(inputs, settings, grad_out, out, lse, wanted) may be given a part of the keys with the
    out and lse of all of them: it returns that part's gradients.
    """

    attend: Attend
    forward: Callable[[Inputs, Settings, bool, bool], tuple[Tensor, Measured]]
    backward: Backward


def inputs_of(problem: Problem) -> Inputs:
    """The tensors of a problem, and a fresh seed where it drops weights out."""
    seed = None
    if problem.settings.dropout_p > 0.0 and problem.value is not None:
        seed = torch.randint(2**62, (), dtype=torch.int64, device=problem.query.device)
    return Inputs._make((*problem[: TENSORS - 1], seed))


assert Problem._fields[: TENSORS - 1] == Inputs._fields[:-1]


def define(
    name: str,
    forward: Forward,
    backward: Backward,
    devices: Sequence[str],
    backward_of_part: Backward | None = None,
) -> Engine:
    """Registers scaledot::{name}_forward and _backward; returns the calls that use them.

    backward_of_part: what serves a part of the keys, where that is not the same as `backward`.
    """
    library.define(
        f"{name}_forward({_TENSORS}, {_SETTINGS}, bool wants_vitals, bool per_row) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        f"{name}_backward({_TENSORS}, {_SETTINGS}, Tensor grad_out, Tensor out, Tensor lse, "
        "bool wants_mask, bool wants_scale, bool wants_sinks, bool wants_weight) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    forward_op = getattr(torch.ops.scaledot, f"{name}_forward")
    backward_op = getattr(torch.ops.scaledot, f"{name}_backward")

    def undisturbed_forward(
        inputs: Inputs, settings: Settings, wants_vitals: bool, per_row: bool
    ) -> tuple[Tensor, Measured]:
        out = _new_output(inputs)
        place = None if inputs.value is None else out
        return out, forward(inputs, settings, place, wants_vitals, per_row)

    def bare_forward(inputs: Inputs, *arguments: Any) -> tuple[Tensor, Measured]:
        if _is_disturbed(inputs.query, torch.is_grad_enabled() and _has_graph(inputs)):
            with _shut_off(inputs.query):
                return undisturbed_forward(inputs, *arguments)
        return undisturbed_forward(inputs, *arguments)

    bare_backward = _undisturbed(backward)
    bare_backward_of_part = _undisturbed(backward_of_part or backward)

    def gradients(inputs: Inputs, *arguments: Any) -> list[Tensor | None]:
        """In the order of the inputs' tensors that can have one."""
        found = bare_backward(inputs, *arguments)
        if type(found) is LaidOut:
            return list(found)
        tensors = (inputs.query, inputs.key, inputs.value, *[inputs[at] for at in PER_HEAD])
        return [
            None if grad is None or tensor is None else _laid_out(grad, tensor)
            for grad, tensor in zip(found, tensors, strict=True)
        ]

    def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, settings, (wants_vitals, per_row) = _split(arguments)
        out, found = bare_forward(inputs, settings, wants_vitals, per_row)
        nothing = found.lse.new_empty(0)
        return (
            out,
            found.lse if _has_lse(inputs, per_row) else nothing.clone(),
            nothing if found.floats is None else found.floats[: len(FLOAT_FIELDS)],
            nothing.to(torch.int64) if found.counts is None else found.counts,
            nothing.clone() if found.rows is None else found.rows,
        )

    def run_backward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, settings, (grad_out, out, lse, *wanted) = _split(arguments)
        grads = gradients(inputs, settings, grad_out, out, lse, Wanted(*wanted))
        return tuple([grad_out.new_empty(0) if grad is None else grad for grad in grads])

    for device in devices:
        library.impl(f"{name}_forward", run_forward, device)
        library.impl(f"{name}_backward", run_backward, device)
    torch.library.register_fake(f"scaledot::{name}_forward", _forward_shapes, lib=library)
    torch.library.register_fake(f"scaledot::{name}_backward", _backward_shapes, lib=library)
    torch.library.register_autograd(
        f"scaledot::{name}_forward",
        lambda ctx, *grads: _differentiate(ctx, forward_op, backward_op, grads[0]),
        setup_context=_setup_context,
        lib=library,
    )
    function = _function(forward_op, backward_op)
    with_vitals = _function(forward_op, backward_op, vitals_too=True)
    torch.library.register_autograd(
        f"scaledot::{name}_backward",
        functools.partial(_differentiate_again, function.apply),
        setup_context=_setup_second_context,
        lib=library,
    )
    of_backward = _backward_function(run_backward, function.apply)
    untraced = _untraced_function(bare_forward, gradients, function.apply, of_backward, backward_op)

    def attend(inputs: Inputs, settings: Settings, wants_vitals: bool, per_row: bool) -> Result:
        transformed = torch._C._are_functorch_transforms_active()
        # A compiler follows torch.func's transforms through plain operators only.
        if derivatives.in_forward_mode() or (transformed and torch.compiler.is_compiling()):
            compiled = torch.compiler.is_compiling()
            run = function.apply if transformed and not compiled else forward_op
            return derivatives.by_formula(run, inputs, settings, wants_vitals)
        if _is_plain(inputs):
            if _needs_gradients(inputs):
                out, found = untraced(inputs, settings, wants_vitals, per_row)
            else:
                out, found = bare_forward(inputs, settings, wants_vitals, per_row)
            if not wants_vitals:
                return Result(out)
            rows = out.new_empty(0) if found.rows is None else found.rows
            result = Result(out, found.floats, found.counts, rows)
            if are_differentiable() and torch.is_grad_enabled() and _has_graph(inputs):
                return vitals_gradient.in_graph(inputs, settings, result)
            return result
        arguments = (*inputs, *settings, wants_vitals, per_row)
        if wants_vitals and transformed and _follows_gradients():
            out, _, *measured = with_vitals.apply(*arguments)
            return Result(out, *measured)
        if wants_vitals and are_differentiable():
            out = (function.apply if transformed else forward_op)(*arguments)[0]
            return Result(out, *composed_vitals.measure(inputs, settings))
        if inputs.value is None:  # vitals carry no graph
            arguments = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        out, _, *measured = (function.apply if transformed else forward_op)(*arguments)
        return Result(out, *measured)

    return Engine(attend, bare_forward, bare_backward_of_part)


def _undisturbed(backward: Backward) -> Callable[..., Gradients]:
    def bare(inputs: Inputs, *arguments: Any) -> Gradients:
        if _is_disturbed(inputs.query, torch.is_grad_enabled()):
            with _shut_off(inputs.query):
                return backward(inputs, *arguments)
        return backward(inputs, *arguments)

    return bare


def _is_plain(inputs: Inputs) -> bool:
    """Nobody traces or transforms: an operator would only cost time, most of it to fill in defaults
    that no call of ours leaves out.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
    ):
        return False
    tensors = [tensor for tensor in inputs if tensor is not None]
    # What is negated only on paper an operator negates before it runs.
    return all([type(t) in PLAIN_TENSORS and not (t.is_meta or t.is_neg()) for t in tensors])


def _follows_gradients() -> bool:
    """Tell whether torch.func differentiates the call."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any([level.key() == torch._C._functorch.TransformType.Grad for level in stack])


def _needs_gradients(inputs: Inputs) -> bool:
    return inputs.value is not None and torch.is_grad_enabled() and _has_graph(inputs)


def _has_graph(inputs: Inputs) -> bool:
    return any([tensor is not None and tensor.requires_grad for tensor in inputs])


def _split(arguments: Sequence[Any]) -> tuple[Inputs, Settings, Sequence[Any]]:
    end = TENSORS + SETTINGS
    return Inputs(*arguments[:TENSORS]), Settings(*arguments[TENSORS:end]), arguments[end:]


def _is_disturbed(query: Tensor, has_graph: bool) -> bool:
    """By a graph, by autocast (the kernels choose their own precision), by a default device or
    another mode around each function of torch, by another GPU."""
    device = query.device
    return (
        has_graph
        or torch.is_autocast_enabled(device.type)
        or torch._C._len_torch_function_stack() > 0
        or (device.type == "cuda" and device.index != torch.cuda.current_device())
    )


@contextlib.contextmanager
def _shut_off(query: Tensor) -> Iterator[None]:
    device = query.device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        if query.is_cuda and query.device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(query.device))
        yield


def _compute_type(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _has_lse(inputs: Inputs, per_row: bool) -> bool:
    """Tell whether the lse is made: not of scores alone, unless their rows are asked for."""
    return inputs.value is not None or per_row


def _new_output(inputs: Inputs) -> Tensor:
    """Laid out like the query where it has the query's width, as torch does."""
    query, value = inputs.query, inputs.value
    if value is None:
        return query.new_empty(0)
    if value.shape[-1] == query.shape[-1] and query.stride(-1) == 1:
        out = torch.empty_like(query)
        if out.stride(-1) == 1:  # not of rows that overlap: kernels write one after the other
            return out
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, _, (wants_vitals, per_row) = _split(arguments)
    query = inputs.query
    batch, heads, queries, _ = query.shape
    entries = batch if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1
    dtype = _compute_type(query)

    def new(shape: tuple, kind: torch.dtype = dtype) -> Tensor:
        return query.new_empty(shape, dtype=kind)

    return (
        _new_output(inputs),
        new((batch, heads, queries) if _has_lse(inputs, per_row) else (0,)),
        new((len(FLOAT_FIELDS), entries, heads) if wants_vitals else (0,)),
        new((len(COUNT_FIELDS), entries, heads) if wants_vitals else (0,), torch.int64),
        new((len(ROW_FIELDS), batch, heads, queries) if wants_vitals and per_row else (0,)),
    )


def _backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, _, (grad_out, _, _, *wanted) = _split(arguments)

    def like(tensor: Tensor | None, asked: bool = True) -> Tensor:
        if tensor is None or not asked:
            return grad_out.new_empty(0)
        return torch.empty_like(tensor)

    return (
        like(inputs.query),
        like(inputs.key),
        like(inputs.value),
        like(inputs.mask, wanted[0]),
        like(inputs.head_scale, wanted[1]),
        like(inputs.sinks, wanted[2]),
        like(inputs.weight, wanted[3]),
    )


def _laid_out(grad: Tensor, tensor: Tensor) -> Tensor:
    """In the order of the tensor's own dimensions: what made it takes its gradient without a copy.

    A head is often a view of [B, T, H, D]; a gradient laid out as [B, H, T, D] would be copied to
    get there and copied again on the way back.
    """
    shape, dtype = tensor.shape, tensor.dtype
    if grad.dtype == dtype and _same_steps(shape, grad.stride(), tensor.stride()):
        return grad
    return torch.empty_like(tensor).copy_(grad)


@functools.lru_cache(4096)
def _same_steps(shape: torch.Size, found: tuple[int, ...], of_tensor: tuple[int, ...]) -> bool:
    """Whether these are the strides of a new tensor like the one with those; 1 entry has none."""
    like = new_strides(shape, of_tensor)
    return all(n == 1 or a == b for n, a, b in zip(shape, found, like, strict=True))


def _setup_context(ctx: Any, inputs: tuple, output: tuple, vitals_too: bool = False) -> None:
    tensors, ctx.settings, _ = _split(inputs)
    out, lse, floats, counts, rows = output
    if vitals_too:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, counts)
    else:
        ctx.mark_non_differentiable(lse, floats, counts, rows)
    ctx.save_for_backward(*tensors, out, lse)


def _differentiate(
    ctx: Any, forward: Any, backward: Any, grad_out: Tensor
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if derivatives.in_forward_mode():
        grads = derivatives.gradients(forward, Inputs(*tensors), ctx.settings, grad_out)
    else:
        wanted = [needs[position] for position in PER_HEAD]
        grads = backward(*tensors, *ctx.settings, grad_out, out, lse, *wanted)
    return _where_needed(grads, needs)


def _where_needed(
    grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """One for each argument: the tensors that can have one come first."""
    kept = [grad if need else None for grad, need in zip(grads, needs, strict=False)]
    return (*kept, *[None] * (len(needs) - len(kept)))


def _setup_second_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, ctx.settings, (grad_out, *_) = _split(inputs)
    ctx.save_for_backward(*tensors, grad_out)


def _differentiate_again(forward: Any, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Differentiate the gradients of a call by its composed formula.

    They are a function of the call's tensors and of grad_out; out and lse only save time.
    """
    *tensors, grad_out = ctx.saved_tensors
    found, of_grad_out = derivatives.second_derivatives(
        forward, Inputs(*tensors), ctx.settings, grad_out, grads
    )
    rest = (None,) * (TENSORS + SETTINGS - len(found))
    return (*found, *rest, of_grad_out, None, None, *[None] * len(PER_HEAD))


def _untraced_function(
    run_forward: Callable[[Inputs, Settings, bool, bool], tuple[Tensor, Measured]],
    run_backward: Callable[..., list[Tensor | None]],
    run_function: Any,
    backward_function: Any,
    backward_op: Any,
) -> Callable[[Inputs, Settings, bool, bool], tuple[Tensor, Measured]]:
    """run_forward with a graph, where nobody traces.

    Only the output passes through autograd: for each further one it would make a gradient of zeros.
    """

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: _Untraced, *tensors: Tensor) -> Tensor:
            out, call.found = run_forward(
                call.inputs, call.settings, call.wants_vitals, call.per_row
            )
            ctx.settings, ctx.places = call.settings, call.places
            ctx.save_for_backward(*tensors, out, call.found.lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            grad_out = grads[0].resolve_neg()
            _, *needs = ctx.needs_input_grad
            *tensors, out, lse = ctx.saved_tensors
            places, settings = ctx.places, ctx.settings
            inputs, wanted = _put_back(tensors, places), NOTHING_MORE
            if len(places) > 3:
                asked = {at for at, need in zip(places, needs, strict=True) if need}
                wanted = Wanted(*[at in asked for at in PER_HEAD])
            if torch._C._functorch.is_legacy_batchedtensor(grad_out):  # it knows operators only
                found = backward_op(*inputs, *settings, grad_out, out, lse, *wanted)
            elif derivatives.in_forward_mode():
                found = derivatives.gradients(run_function, inputs, settings, grad_out)
            elif derivatives.is_last():
                found = run_backward(inputs, settings, grad_out, out, lse, wanted)
            else:
                found = backward_function.apply(*inputs, *settings, grad_out, out, lse, *wanted)
            kept = [found[at] if need else None for at, need in zip(places, needs, strict=True)]
            return (None, *kept)

    apply = straight_apply(Attend)

    def attend(
        inputs: Inputs, settings: Settings, wants_vitals: bool, per_row: bool
    ) -> tuple[Tensor, Measured]:
        call = _Untraced(inputs, settings, wants_vitals, per_row)
        out = apply(call, *[inputs[at] for at in call.places])
        return out, call.found

    return attend


class _Untraced:
    """A call on its way through autograd, which looks at every argument: only at tensors that are
    there, then."""

    __slots__ = ("found", "inputs", "per_row", "places", "settings", "wants_vitals")
    found: Measured

    def __init__(
        self, inputs: Inputs, settings: Settings, wants_vitals: bool, per_row: bool
    ) -> None:
        self.inputs, self.settings = inputs, settings
        self.wants_vitals, self.per_row = wants_vitals, per_row
        self.places = _places(inputs)


def _places(inputs: Inputs) -> tuple[int, ...]:
    """Which of the tensors are there."""
    return tuple([at for at, tensor in enumerate(inputs) if tensor is not None])


def _put_back(tensors: Sequence[Tensor], places: Sequence[int]) -> Inputs:
    """The opposite: all of them, None where there was none."""
    if len(places) == 3:  # query, key and value are always there
        return Inputs(*tensors, *NO_MORE_TENSORS)
    inputs: list[Any] = [None] * TENSORS
    for at, tensor in zip(places, tensors, strict=True):
        inputs[at] = tensor
    return Inputs._make(inputs)


def straight_apply(function: Any) -> Any:
    """Its apply without what torch does for defaults and transforms at every call: there are none.

    That is a look at the signature of `forward`, which takes longer than the rest.
    """
    return super(torch.autograd.Function, function).apply


def _function(run_forward: Any, run_backward: Any, vitals_too: bool = False) -> Any:
    """A pair as a function of autograd: torch.func's transforms need one with a rule for vmap.

    vitals_too: the vitals have gradients, from the formula; who asks for none of them pays nothing.
    """

    class Attend(torch.autograd.Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
            _setup_context(ctx, inputs, output, vitals_too)

        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            return run_forward(*arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            run = run_backward if derivatives.is_last() else backward_function.apply
            found: tuple[Tensor | None, ...] = (None,) * (TENSORS + SETTINGS + 2)
            if grads[0] is not None:
                found = _differentiate(ctx, Attend.apply, run, grads[0])
            if vitals_too and not (grads[2] is None and grads[4] is None):
                tensors = Inputs(*ctx.saved_tensors[:TENSORS])
                passed = vitals_gradient.of_vitals(tensors, ctx.settings, grads[2], grads[4])
                found = (*derivatives.add(found[: len(passed)], passed), *found[len(passed) :])
            return found

        @staticmethod
        def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
            if _shares_its_seed(in_dims, arguments):
                return _one_by_one(Attend.apply, info.batch_size, in_dims, arguments)
            result = Attend.apply(*_fold_batch(info.batch_size, in_dims, arguments))
            return _unfold_batch(result, info.batch_size, (0, 0, 1, 1, 1))

    backward_function = _backward_function(run_backward, Attend.apply)
    return Attend


def _backward_function(run_backward: Any, run_forward: Any) -> Any:
    """Gradients as a function of autograd, with a rule for vmap and derivatives of their own."""

    class AttendBackward(torch.autograd.Function):
        setup_context = staticmethod(_setup_second_context)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return _differentiate_again(run_forward, ctx, *grads)

        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            return run_backward(*arguments)

        @staticmethod
        def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
            if _shares_its_seed(in_dims, arguments):
                return _one_by_one(AttendBackward.apply, info.batch_size, in_dims, arguments)
            folded = _fold_batch(info.batch_size, in_dims, arguments)
            # The gradient of a tensor that all samples share is wanted for each sample apart.
            size = folded[0].shape[0]
            for position in PER_HEAD:
                tensor = folded[position]
                if tensor is not None and tensor.shape[0] != size:
                    folded[position] = tensor.expand(size, *tensor.shape[1:])
            result = AttendBackward.apply(*folded)
            return _unfold_batch(result, info.batch_size, (0,) * len(result))

    return AttendBackward


def _shares_its_seed(in_dims: tuple, arguments: Sequence[Any]) -> bool:
    """Every sample drops the same weights: in one call they would be other samples' batch."""
    return arguments[SEED] is not None and in_dims[SEED] is None


def _one_by_one(
    function: Any, size: int, in_dims: tuple, arguments: Sequence[Any]
) -> tuple[tuple, tuple]:
    results = [
        function(
            *(
                value if dim is None else value.select(dim, index)
                for value, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for index in range(size)
    ]
    outputs = [torch.stack(tensors) for tensors in zip(*results, strict=True)]
    return tuple(outputs), (0,) * len(outputs)


def _fold_batch(size: int, in_dims: tuple, arguments: Sequence[Any]) -> list[Any]:
    """Make the vmapped dimension part of every tensor's first one."""
    if arguments[Inputs._fields.index("cu_seqlens_q")] is not None:
        raise ValueError("vmap over packed sequences is not supported: pack them into one call")
    folded = list(arguments)
    query, dim = arguments[0], in_dims[0]
    batch = query.shape[0] if dim is None else query.movedim(dim, 0).shape[1]
    for position, (tensor, dim) in enumerate(zip(arguments, in_dims, strict=True)):
        if not isinstance(tensor, Tensor):
            continue
        if position == SEED:  # of the first sample: each block draws its own numbers from it
            folded[position] = tensor if dim is None else tensor.select(dim, 0)
            continue
        shared = position in PER_HEAD
        if dim is None and shared and tensor.shape[0] == 1:
            continue  # one for all samples stays one
        tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        if shared and tensor.shape[1] != batch:
            tensor = tensor.expand(size, batch, *tensor.shape[2:])
        tensor = tensor.reshape(size * tensor.shape[1], *tensor.shape[2:])
        folded[position] = tensor.contiguous() if tensor.dim() == 1 else tensor  # lengths
    return folded


def _unfold_batch(
    result: Sequence[Tensor], size: int, dims: tuple[int, ...]
) -> tuple[tuple, tuple]:
    outputs, out_dims = [], []
    for tensor, dim in zip(result, dims, strict=True):
        empty = tensor.dim() == 1
        outputs.append(tensor if empty else tensor.unflatten(dim, (size, -1)))
        out_dims.append(None if empty else dim)
    return tuple(outputs), tuple(out_dims)
