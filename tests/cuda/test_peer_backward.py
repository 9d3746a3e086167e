"""Which calls torch's backward kernels may serve (no GPU needed), and what they give (GPU)."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from scaledot.backends.cuda import peer_backward
from scaledot.backends.inputs import Inputs, Wanted
from scaledot.problem import Settings

PLAIN = Settings(0.125, False, 0.0, 0.0, None, None, False)
CAUSAL = PLAIN._replace(right=0)
NOTHING = Wanted(False, False, False, False)
OTHERS = dict.fromkeys(Inputs._fields[3:])

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: torch's kernels cannot run here"
)


def make(batch=2, heads=4, groups=None, queries=256, keys=256, width=64, **kwargs):
    kind = {"dtype": torch.bfloat16, "device": "cuda", **kwargs}
    groups = heads if groups is None else groups
    return Inputs(
        torch.empty(batch, heads, queries, width, **kind),
        torch.empty(batch, groups, keys, width, **kind),
        torch.empty(batch, groups, keys, width, **kind),
        **OTHERS,
    )


@pytest.fixture
def hopper(monkeypatch):
    """Tensors of a GPU that is not there; what is found out about it is forgotten."""
    monkeypatch.setattr(peer_backward, "_serve", peer_backward._serve.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: True)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", raising=False)
    with FakeTensorMode():
        yield monkeypatch


def served(inputs, settings=PLAIN, wanted=NOTHING):
    lse = inputs.query.new_empty(inputs.query.shape[:-1], dtype=torch.float32)
    return peer_backward.serves(inputs, settings, lse, wanted)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, "cudnn"),
        ({"dtype": torch.float16}, "cudnn"),
        ({"width": 128}, "cudnn"),
        ({"width": 256}, "cudnn"),
        ({"width": 72}, "cudnn"),
        ({"width": 136}, "flash"),
        ({"width": 248}, "flash"),
        ({"width": 56}, "flash"),
        ({"width": 8}, "flash"),
        ({"width": 60}, None),
        ({"width": 264}, None),
        ({"queries": 255}, "flash"),
        ({"keys": 129}, "flash"),
        ({"keys": 64}, "flash"),
        ({"queries": 1, "keys": 1}, "flash"),
        ({"groups": 2}, "cudnn"),
        ({"groups": 1}, "cudnn"),
        ({"groups": 3}, None),
        ({"batch": 0}, None),
        ({"keys": 0}, None),
        ({"dtype": torch.float32}, None),
        ({"dtype": torch.float64}, None),
        ({"batch": 65536, "heads": 1}, None),
        ({"batch": 256, "heads": 256}, None),
        ({"device": "cpu"}, None),
    ],
)
def test_shapes(hopper, shape, expected):
    assert served(make(**shape)) == expected


@pytest.mark.parametrize(
    ("capability", "width", "expected"),
    [((8, 9), 208, None), ((8, 9), 192, "flash"), ((8, 9), 256, "flash"), ((8, 0), 208, "flash")],
)
def test_smaller_gpus(hopper, capability, width, expected):
    hopper.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert served(make(width=width)) == expected


def test_amd_counts_its_gpus_otherwise(hopper):
    hopper.setattr(torch.version, "hip", "6.4")
    assert served(make()) is None


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "top_left", "end_aligned"),
    [
        (256, 256, "cudnn", "cudnn"),
        (128, 256, "cudnn", None),
        (256, 128, "cudnn", None),
        (100, 100, "flash", "flash"),
        (100, 128, None, None),
    ],
)
def test_causal_masks_must_mean_the_same(
    hopper, queries, keys, top_left, end_aligned, bottom_right
):
    settings = CAUSAL._replace(bottom_right=bottom_right)
    expected = end_aligned if bottom_right else top_left
    assert served(make(queries=queries, keys=keys), settings) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"log_n": True},
        {"softcap": 30.0},
        {"dropout_p": 0.1},
        {"left": 5},
        {"right": 5},
        {"left": 0, "right": 0},
    ],
)
def test_settings_that_only_our_kernels_know(hopper, change):
    assert served(make()) == "cudnn"
    assert served(make(), PLAIN._replace(**change)) is None


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_tensors_that_only_our_kernels_know(hopper, name):
    inputs = make()._replace(**{name: torch.empty(1, device="cuda")})
    assert served(inputs) is None


@pytest.mark.parametrize("field", Wanted._fields)
def test_gradients_that_only_our_kernels_know(hopper, field):
    assert served(make(), PLAIN, NOTHING._replace(**{field: True})) is None


def test_values_of_another_width_or_none(hopper):
    inputs = make()
    other = torch.empty(2, 4, 256, 128, dtype=torch.bfloat16, device="cuda")
    assert served(inputs._replace(value=other)) is None
    assert served(inputs._replace(value=None)) is None


LAYOUTS = {
    "tokens first": (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "cudnn"),
    "one of three": (lambda t: torch.cat([t, t, t], -1)[..., 64:128], "cudnn"),
    "misaligned by 8 bytes": (lambda t: torch.cat([t, t], -1)[..., 4:68], None),
    "rows of 68 entries": (lambda t: torch.cat([t, t[..., :4]], -1)[..., :64], None),
    "width first": (lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), None),
    "every other entry": (lambda t: torch.cat([t, t], -1)[..., ::2], None),
    "one batch entry for all": (lambda t: t[:1].expand(t.shape), None),
    "one head for all": (lambda t: t[:, :1].expand(t.shape), None),
    "one token for all": (lambda t: t[:, :, :1].expand(t.shape), None),
}


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layouts(hopper, which, name):
    inputs = make()
    layout, expected = LAYOUTS[name]
    like = layout(torch.empty(2, 4, 256, 64, device="meta"))
    memory = torch.empty(4 * like.numel(), dtype=torch.bfloat16, device="cuda")
    changed = memory.as_strided(like.shape, like.stride(), like.storage_offset())
    assert changed.shape == inputs.query.shape
    assert served(inputs._replace(**{which: changed})) == expected


def test_the_address_is_asked_for_each_time(hopper):
    inputs = make()
    memory = torch.empty(inputs.query.numel() + 8, dtype=torch.bfloat16, device="cuda")
    for start, expected in ((0, "cudnn"), (4, None), (8, "cudnn")):
        moved = memory.as_strided(inputs.query.shape, inputs.query.stride(), start)
        for which in ("query", "key", "value"):
            assert served(inputs._replace(**{which: moved})) == expected


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_cudnn_lie_as_their_tensors_do(groups, tokens_first):
    """`LaidOut` says so of them; by the meta kernels of the installed torch."""
    inputs = make(device="meta", groups=groups)
    if tokens_first:
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]]
        inputs = Inputs(*turned, **OTHERS)
    lse = torch.empty(2, 4, 256, device="meta")
    out = torch.empty_like(inputs.query)
    grads = peer_backward.backward("cudnn", inputs, CAUSAL, out, out, lse)
    for grad, tensor in zip(grads, inputs[:3], strict=True):
        assert grad.stride() == torch.empty_like(tensor).stride()
        assert grad.dtype == tensor.dtype


def test_odd_strides_of_single_entries_are_still_misalignment(hopper):
    inputs = make(batch=1)
    for stride, expected in ((3, None), (0, "cudnn")):
        query = inputs.query.as_strided((1, 4, 256, 64), (stride, 16384, 64, 1))
        assert served(inputs._replace(query=query)) == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), None), ((8, 0), "flash"), ((9, 0), "cudnn"), ((10, 0), "flash")],
)
def test_each_kernel_has_its_gpus(hopper, capability, expected):
    hopper.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert served(make()) == expected


def test_what_the_user_switched_off_stays_off(hopper):
    hopper.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert served(make()) == "flash"
    hopper.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert served(make()) is None


@pytest.mark.parametrize("version", [None, 90100])
def test_old_cudnn_is_not_asked(hopper, version):
    hopper.setattr(torch.backends.cudnn, "version", lambda: version)
    assert served(make()) == "flash"


def test_another_layout_of_lse_is_not_met(hopper):
    hopper.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert served(make()) == "flash"


def test_deterministic_algorithms_leave_it_to_us(hopper):
    torch.use_deterministic_algorithms(True)
    try:
        assert served(make()) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("which", ["cudnn", "flash"])
def test_operators_take_our_arguments(which):
    """The schemas of the installed torch, by meta tensors: names, order, numbers of results."""
    inputs = make(device="meta", groups=2)
    out = torch.empty_like(inputs.query)
    lse = torch.empty(2, 4, 256, device="meta")
    grads = peer_backward.backward(which, inputs, CAUSAL, out, out, lse)
    assert [g.shape for g in grads] == [t.shape for t in inputs[:3]]


def test_out_and_its_gradient_get_the_querys_layout():
    query = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    other = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16)
    laid_out = peer_backward._laid_out(other, query, query.stride())
    assert laid_out.stride() == query.stride()
    assert torch.equal(laid_out, other)
    assert peer_backward._laid_out(query, query, query.stride()) is query
    spread = torch.ones((), dtype=torch.bfloat16).expand(2, 3, 5, 8)  # the gradient of a sum
    assert peer_backward._laid_out(spread, query, query.stride()).stride() == query.stride()


def gradients_in_float64(inputs, settings, grad_out):
    """dq, dk, dv, and the out and lse to feed, from the dense definition."""
    query, key, value = (t.detach().double().requires_grad_() for t in inputs[:3])
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).mT * settings.scale
    if settings.right == 0:
        hidden = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ value.repeat_interleave(repeats, 1)
    grads = torch.autograd.grad(out, (query, key, value), grad_out.double())
    return grads, out.detach().to(inputs.query.dtype), scores.detach().logsumexp(-1).float()


def assert_right(which, inputs, settings, grad_out, tolerance=0.02):
    wanted, out, lse = gradients_in_float64(inputs, settings, grad_out)
    assert peer_backward.serves(inputs, settings, lse, NOTHING) == which
    found = peer_backward.backward(which, inputs, settings, grad_out, out, lse)
    for ours, theirs in zip(found, wanted, strict=True):
        scale = theirs.abs().max().item()
        assert (ours.double() - theirs).abs().max().item() <= tolerance * scale


def draw(**shape):
    inputs = make(**shape)
    return inputs._replace(**{n: torch.randn_like(getattr(inputs, n)) for n in Inputs._fields[:3]})


@needs_gpu
@pytest.mark.parametrize("settings", [PLAIN, CAUSAL])
@pytest.mark.parametrize("shape", [{}, {"width": 128}, {"width": 256}, {"groups": 2}])
def test_cudnn_gives_the_gradients(settings, shape):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN's kernel is used on Hopper only")
    inputs = draw(**shape)
    assert_right("cudnn", inputs, settings, torch.randn_like(inputs.query))


@needs_gpu
@pytest.mark.parametrize("settings", [PLAIN, CAUSAL])
@pytest.mark.parametrize(
    "shape", [{"width": 32}, {"queries": 131, "keys": 131}, {"width": 8, "groups": 1}]
)
def test_flash_gives_the_gradients(settings, shape):
    inputs = draw(**shape)
    assert_right("flash", inputs, settings, torch.randn_like(inputs.query))


@needs_gpu
def test_causal_rows_of_unequal_lengths_start_in_the_first_key():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN's kernel is used on Hopper only")
    inputs = draw(queries=128, keys=384)
    assert_right("cudnn", inputs, CAUSAL, torch.randn_like(inputs.query))


@needs_gpu
@pytest.mark.parametrize("queries", [256, 131])
def test_gradients_are_finite_where_every_lse_is_below_minus_88(queries):
    """pytorch#196678."""
    inputs = draw(queries=queries, keys=queries)
    inputs.query.fill_(2.0)
    inputs.key.normal_(-16.0, 0.1)
    which = "cudnn" if queries == 256 and torch.cuda.get_device_capability()[0] == 9 else "flash"
    assert gradients_in_float64(inputs, PLAIN, inputs.query)[2].max().item() < -88
    # dQ sums keys that are nearly equal with weights that sum to nothing: few digits are left.
    assert_right(which, inputs, PLAIN, torch.randn_like(inputs.query), tolerance=0.5)


@needs_gpu
def test_plans_of_torchs_own_calls_are_not_met():
    """torch's plan cache knows no stride of dO: a plan for another layout must not be ours."""
    inputs = draw()
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, scale=PLAIN.scale)
    turned = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    out.backward(turned)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN's kernel is used on Hopper only")
    assert_right("cudnn", inputs, PLAIN, torch.randn_like(inputs.query))
    assert_right("cudnn", inputs, PLAIN, turned.detach())
