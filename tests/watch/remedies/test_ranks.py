"""Remedies over ranks: weights, factors and refusals are those of one process on the global batch.

Processes are dear, so two ranks do everything that two can show, and four what needs four.
"""

import os

import pytest
import torch
import torch.distributed
from ranks import spawn
from remedied_models import made
from sharded_models import (
    Growing,
    Model,
    Split,
    Stage,
    batches,
    by_columns,
    by_hand,
    fresh,
    fsdp,
    meshes,
    tensor_parallel,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from watched_models import language_loss

from scaledot import Watch
from scaledot.watch.names import Names
from scaledot.watch.remedies import RemedyError, apply, discover, install
from scaledot.watch.remedies.capture import as_inputs

CLIP, TEMPERATURE = "qk-clip:2", "temperature:2"
GAMMA = torch.tensor([0.3, 1.0, 0.7, 0.123456789], dtype=torch.float64)
ROUNDING = {"rtol": 1e-9, "atol": 1e-12}  # float64: gradients are summed in another order
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def quiet(line):
    pass


# Weights of every layout, scaled by the same factors. ---------------------------------------------


def scaled(model, heads=4):
    """Each rank by the factors of the heads that it computes."""
    layers = discover.layers(as_inputs(model, batches(1)[0]), Names(model))
    for layer in layers.values():
        assert layer.parts, layer.refused
        part, parts = layer.share
        assert layer.heads * parts == heads
        layer.scale_(GAMMA[part * layer.heads : (part + 1) * layer.heads])
    return whole(model)


def layouts_of_two(rank, world):
    mesh, pair = init_device_mesh("cpu", (world,)), meshes(world)
    replicated = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    return {
        ("split", "FSDP2"): scaled(fsdp(fresh("split"), mesh)),
        ("fused", "FSDP2 by columns"): scaled(
            fsdp(fresh("fused"), mesh, shard_placement_fn=by_columns)
        ),
        ("grouped", "FSDP2, replicated"): scaled(fsdp(fresh("grouped"), replicated)),
        **{
            (name, "tensor parallel"): scaled(tensor_parallel(fresh(name), pair["tp"]))
            for name in ("split", "fused", "grouped", "one key")
        },
        # One head a rank: there the key looks like its own, and is the other rank's as well.
        ("two heads, one key", "tensor parallel"): scaled(
            tensor_parallel(fresh("two heads, one key"), pair["tp"]), heads=2
        ),
    }


def layouts_of_four(rank, world):
    mesh = meshes(world)
    return {
        (name, "FSDP2 and tensor parallel"): scaled(
            fsdp(tensor_parallel(fresh(name), mesh["tp"]), mesh["dp"])
        )
        for name in ("split", "fused", "grouped", "one key")
    }


# Runs. --------------------------------------------------------------------------------------------


def trained(model, parts, remedy=CLIP, lr=1e-2, resume=None, **options):
    """A few steps, one for each of `parts`; resume: the remedy's state to begin with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Watch(model, every=1, alarms=False, **options) as watch:
        installed = install(watch, remedy, say=(said := []).append)
        if resume is not None:
            installed.load_state_dict(resume)
        for tokens in parts:
            out = model(tokens)
            loss = out.square().mean() if tokens.is_floating_point() else language_loss(out, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        "weights": whole(inner),
        "factors": installed.state_dict(),
        "refused": installed.refused,
        "clips": installed.clips,
        "said": said,
    }


def sequences(part=0, parts=1):
    """Of three steps, this part's share of four sequences."""
    return [tokens[:4].chunk(parts)[part] for tokens in batches(3)]


def runs_of_two(rank, world):
    mesh, pair = init_device_mesh("cpu", (world,)), meshes(world)
    mine, everything = sequences(rank, world), sequences()

    def ddp(name):
        return DistributedDataParallel(fresh(name))

    def tp(name):
        return tensor_parallel(fresh(name), pair["tp"])

    return {
        ("split", CLIP, "DDP"): trained(ddp("split"), mine),
        ("fused", CLIP, "FSDP2"): trained(fsdp(fresh("fused"), mesh), mine),
        ("split", CLIP, "tensor parallel"): trained(tp("split"), everything),
        ("fused", CLIP, "tensor parallel"): trained(tp("fused"), everything),
        ("normed", TEMPERATURE, "DDP"): trained(ddp("normed"), mine, TEMPERATURE),
        ("split", TEMPERATURE, "tensor parallel"): trained(tp("split"), everything, TEMPERATURE),
        # The same rows on both ranks: one of them measures for both.
        ("split", CLIP, "replicas of one batch"): trained(
            tensor_parallel(fresh("split"), pair["tp"], attention=False), everything
        ),
    }


def runs_of_four(rank, world):
    mesh, mine = meshes(world), sequences(rank // 2, world // 2)

    def both(name):
        return fsdp(tensor_parallel(fresh(name), mesh["tp"]), mesh["dp"])

    return {
        ("split", CLIP, "FSDP2 and tensor parallel"): trained(both("split"), mine),
        ("normed", TEMPERATURE, "FSDP2 and tensor parallel"): trained(
            both("normed"), mine, TEMPERATURE
        ),
    }


def resumed(rank, world):
    """A run of tensor parallel ranks that was stopped after two steps."""
    pair = meshes(world)
    parts = sequences()
    first = tensor_parallel(fresh("normed"), pair["tp"])
    factors = trained(first, parts[:2], TEMPERATURE)["factors"]
    second = tensor_parallel(fresh("normed"), pair["tp"])
    second.load_state_dict(first.state_dict())
    kept = whole(first), factors
    return {"kept": kept, **trained(second, parts[2:], TEMPERATURE, resume=factors)}


def stage(rank):
    """Layers of a pipeline, each rank's numbered from 0; the first rank has one more."""
    model = made(lambda: Stage(2 - rank)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.37 * rank)
    hidden = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(rank)).double()
    return model, [hidden] * 3


def pipeline(rank, world):
    model, parts = stage(rank)
    return trained(model, parts, pipeline_parallel=torch.distributed.group.WORLD)


def without_attention(rank, world):
    """The second rank has none: it takes part in the collective all the same."""
    if rank == 0:
        return trained(fresh("split"), sequences())
    hidden = torch.ones(2, 12).double()
    return trained(nn.Linear(12, 12).double(), [hidden] * 3)


def later(rank, world, deep):
    """A second layer from the third step on, on the ranks `deep`; nothing is learned."""
    model = made(Growing).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = batches(1)[0][rank : rank + 1]
    with Watch(model, every=1, alarms=False) as watch:
        installed = install(watch, CLIP, say=quiet)
        for step in range(7):
            depth = 2 if step >= 2 and rank in deep else 1
            model.depth = lambda depth=depth: depth
            model(tokens).sum().backward()
            optimizer.step()
    return {"weights": whole(model), "refused": installed.refused}


def context_parallel(rank, world, remedy):
    """Each rank has half of every sequence; nothing is learned."""
    model = fresh("causal")
    for block in model.blocks:
        block.mesh = init_device_mesh("cpu", (world,))
    tokens = batches(1)[0].tensor_split(world, 1)[rank]
    return trained(model, [tokens] * 3, remedy, lr=0.0)


def cut_by_hand(rank, world):
    """One layer: what the ranks' parts of its output sum up to does not matter."""
    parts = [batches(1)[0]] * 2
    options = {"lr": 0.0, "tensor_parallel": torch.distributed.group.WORLD}
    model = by_hand(made(lambda: Model(Split, layers=1)).train(), rank, world)
    one_key = made(lambda: Model(Split, layers=1, heads=2, groups=1)).train()
    return {
        "split": trained(model, parts, **options),
        "one key": trained(by_hand(one_key, rank, world), parts, **options),
    }


def collectives(rank, world):
    """How often the remedy's ranks wait for each other, in each of three steps."""
    counts = []
    reduce = torch.distributed.all_reduce

    def counted(*args, **kwargs):
        counts.append(args[0].numel())
        return reduce(*args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        trained(DistributedDataParallel(fresh("split")), sequences(rank, world))
    finally:
        torch.distributed.all_reduce = reduce
    return counts


def applied_once(rank, world):
    """Each rank has a batch of its own, or a share of the heads."""
    mesh, pair = init_device_mesh("cpu", (world,)), meshes(world)
    sharded, shared = fsdp(fresh("split"), mesh), tensor_parallel(fresh("split"), pair["tp"])
    apply(CLIP, sharded, inputs=sequences(rank, world)[0])
    apply(CLIP, shared, inputs=sequences()[0], heads={"blocks.1": [3]})
    return {"FSDP2": whole(sharded), "head 3": whole(shared)}


def refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    units = fresh("split")
    for block in units.blocks:
        for linear in (block.to_q, block.to_k):
            fully_shard(linear, mesh=mesh)
    model = fsdp(fresh("split"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = sequences()[0] if rank == 0 else torch.zeros(2, 2)  # no tokens
    return {
        "log-n": refused("log-n", fresh("split")),
        "gains": refused("qk-norm", model, optimizer, inputs=sequences()[0]),
        "one rank": refused(CLIP, fresh("split"), inputs=broken),
        "units": apply(CLIP, units, inputs=sequences()[0]).describe(),
    }


def refused(*args, **kwargs):
    with pytest.raises(RemedyError) as error:
        apply(*args, **kwargs)
    return str(error.value)


# What two and four ranks do. ----------------------------------------------------------------------


def two(rank, world):
    return {
        "layouts": layouts_of_two(rank, world),
        "runs": runs_of_two(rank, world),
        "resumed": resumed(rank, world),
        "pipeline": pipeline(rank, world),
        "without attention": without_attention(rank, world),
        "later": later(rank, world, deep=(0, 1)),
        "later on one": later(rank, world, deep=(0,)),
        "context parallel": {
            remedy: context_parallel(rank, world, remedy) for remedy in (CLIP, TEMPERATURE)
        },
        "cut by hand": cut_by_hand(rank, world),
        "collectives": collectives(rank, world),
        "applied": applied_once(rank, world),
        "refusals": refusals(rank, world),
    }


def four(rank, world):
    return {"layouts": layouts_of_four(rank, world), "runs": runs_of_four(rank, world)}


@pytest.fixture(scope="module")
def of_two():
    return spawn(two, 2)


@pytest.fixture(scope="module")
def of_four():
    return spawn(four, 4)


@pytest.fixture(params=["of_two", "of_four"])
def ranks(request):
    return request.getfixturevalue(request.param)


def assert_same_bits(state, expected, where):
    assert state.keys() == expected.keys()
    for path, value in state.items():
        assert torch.equal(value, expected[path]), (*where, path)


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for path, value in state.items():
        torch.testing.assert_close(value, expected[path], **ROUNDING)


@pytest.mark.nightly
@pytest.mark.slow
def test_shards_are_scaled_to_the_bits_of_one_process(ranks):
    for rank, result in enumerate(ranks):
        for (name, how), state in result["layouts"].items():
            expected = scaled(fresh(name), heads=2 if name.startswith("two") else 4)
            assert_same_bits(state, expected, (rank, name, how))


@pytest.mark.slow
@pytest.mark.nightly
def test_runs_end_as_in_one_process(ranks):
    for result in ranks:
        for (name, remedy, _how), run in result["runs"].items():
            one = trained(fresh(name), sequences(), remedy)
            assert run["refused"] == one["refused"] == {}
            assert_close(run["weights"], one["weights"])
            assert_close(run["factors"], one["factors"])
            assert run["clips"] == one["clips"]
            assert any(run["clips"].values())
            at_call = remedy == TEMPERATURE
            assert any((factor < 0.9).any() for factor in run["factors"].values()) == at_call


@pytest.mark.nightly
@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(of_two):
    """One process, too, goes on from what two ranks have kept."""
    one = trained(fresh("normed"), sequences(), TEMPERATURE)
    for run in (result["resumed"] for result in of_two):
        assert run["factors"]["blocks.0.factor"].shape == (4,)
        weights, factors = run["kept"]
        model = fresh("normed")
        model.load_state_dict(weights)
        alone = trained(model, sequences()[2:], TEMPERATURE, resume=factors)
        for end in (run, alone):
            assert_close(end["weights"], one["weights"])
            assert_close(end["factors"], one["factors"])


@pytest.mark.nightly
def test_stages_of_a_pipeline_are_clipped_by_their_own_logits(of_two):
    for rank, run in enumerate(result["pipeline"] for result in of_two):
        model, parts = stage(rank)
        one = trained(model, parts)
        assert one["clips"]
        assert_same_bits(run["weights"], one["weights"], (rank,))


@pytest.mark.nightly
def test_a_rank_without_attention_holds_nobody_up(of_two):
    run, _ = (result["without attention"] for result in of_two)
    assert_same_bits(run["weights"], trained(fresh("split"), sequences())["weights"], ())


@pytest.mark.nightly
def test_a_layer_that_comes_later_is_met_by_all_ranks(of_two):
    before, after = whole(made(Growing)), [result["later"]["weights"] for result in of_two]
    assert_same_bits(after[0], after[1], ())
    assert not torch.equal(after[0]["blocks.1.to_q.weight"], before["blocks.1.to_q.weight"])


@pytest.mark.nightly
def test_a_layer_that_one_rank_alone_calls_is_refused(of_two):
    before = whole(made(Growing))
    for run in (result["later on one"] for result in of_two):
        assert run["refused"] == {"blocks.1": "rank 1 has it too, and did not call it"}
        path = "blocks.1.to_q.weight"
        assert torch.equal(run["weights"][path], before[path])
        path = "blocks.0.to_q.weight"
        assert not torch.equal(run["weights"][path], before[path])


@pytest.mark.nightly
@pytest.mark.parametrize("remedy", [CLIP, TEMPERATURE])
def test_parts_of_a_sequence_are_treated_by_the_largest_logit_of_the_whole(of_two, remedy):
    one = trained(fresh("causal"), [batches(1)[0]] * 3, remedy, lr=0.0)
    for run in (result["context parallel"][remedy] for result in of_two):
        assert not run["refused"]
        assert_close(run["weights"], one["weights"])
        assert_close(run["factors"], one["factors"])
    assert one["clips"]


@pytest.mark.nightly
def test_plain_shards_are_clipped_by_their_own_logits(of_two):
    """Ranks whose weights differ hold different heads, though nothing else says so."""
    one = trained(made(lambda: Model(Split, layers=1)).train(), [batches(1)[0]] * 2, lr=0.0)
    assert one["clips"]
    for rank, run in enumerate(result["cut by hand"]["split"] for result in of_two):
        for path in ("blocks.0.to_q.weight", "blocks.0.to_k.weight", "blocks.0.to_q.bias"):
            expected = one["weights"][path].chunk(2)[rank]
            torch.testing.assert_close(run["weights"][path], expected, **ROUNDING)


@pytest.mark.nightly
def test_a_plain_key_that_serves_heads_of_other_ranks_is_refused(of_two):
    before = made(lambda: Model(Split, layers=1, heads=2, groups=1))
    for run in (result["cut by hand"]["one key"] for result in of_two):
        assert "is held by ranks that compute other heads, too" in run["refused"]["blocks.0"]
        assert torch.equal(run["weights"]["blocks.0.to_k.weight"], before.blocks[0].to_k.weight)


@pytest.mark.nightly
def test_a_measured_step_is_one_collective_of_one_number_a_head(of_two):
    for result in of_two:
        assert result["collectives"] == [1 + 2 * 4] * 3


@pytest.mark.nightly
def test_apply_takes_the_largest_logit_of_all_ranks_and_counts_heads_over_them(of_two):
    one, head = fresh("split"), fresh("split")
    apply(CLIP, one, inputs=sequences()[0])
    apply(CLIP, head, inputs=sequences()[0], heads={"blocks.1": [3]})
    for result in of_two:
        assert_close(result["applied"]["FSDP2"], whole(one))
        assert_close(result["applied"]["head 3"], whole(head))


@pytest.mark.nightly
def test_refusals_say_what_to_do(of_two):
    for said in (result["refusals"] for result in of_two):
        assert "say it, for example log-n:1024" in said["log-n"]
        assert "apply it before them, or without an optimizer" in said["gains"]
        assert "the forward pass failed on rank 1" in said["one rank"]
        assert "a factor at the call, since its projections are FSDP units" in said["units"]


def left_alone(rank, world):
    """The second rank is gone after its first step."""
    model, said = fresh("split"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Watch(model, every=1, alarms=False) as watch:
        install(watch, CLIP, say=said.append)
        for step, tokens in enumerate(sequences()):
            if (rank, step) == (1, 1):
                os._exit(0)
            language_loss(model(tokens), tokens).backward()
            optimizer.step()
    return said


def test_a_rank_that_is_left_alone_stops_and_says_so():
    said, _ = spawn(left_alone, 2, may_die=(1,))
    assert "qk-clip:2 has stopped, the weights stay as they are" in said[-1]
