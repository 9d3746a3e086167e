"""The callback for Lightning, in a real training."""

import pytest
import torch
import torch.nn.functional as F
from watch.sinks_cases import needs

from scaledot.watch.store import RunReader

RATE, WIDTH = 0.5, 6

# Lightning's own: what it calls in torch is deprecated, and it has advice on loaders.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture(scope="module")
def lightning():
    needs("lightning.pytorch", "lightning")
    import lightning.pytorch

    return lightning.pytorch


@pytest.fixture
def model(lightning):
    class Tiny(lightning.LightningModule):
        def __init__(self, fails_at=None):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = torch.nn.ModuleList(
                torch.nn.MultiheadAttention(WIDTH, heads, batch_first=True) for heads in (2, 3)
            )
            self.fails_at = fails_at
            self.losses = []

        def forward(self, tokens):
            for block in self.blocks:
                tokens = tokens + block(tokens, tokens, tokens, need_weights=False)[0]
            return tokens

        def training_step(self, batch, index):
            if index == self.fails_at:
                raise ArithmeticError("diverged")
            loss = self(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
            halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": halving, "interval": "step"}]

    return Tiny


def fit(lightning, model, folder, callbacks=(), steps=4, checkpoint=None, **more):
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 5, WIDTH, generator=generator))
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **more,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, 2), ckpt_path=checkpoint)
    return trainer


def callback(**options):
    from scaledot.watch.sinks import LightningCallback

    return LightningCallback(**options)


def series(path, name):
    points = RunReader(path).scalars(name)
    found = dict(zip(points.steps.tolist(), points.values.tolist(), strict=True))
    assert len(found) == len(points)  # no step twice
    return found


def test_the_callback_reads_every_layer_and_changes_nothing(lightning, model, tmp_path):
    plain, watched = model(), model()
    fit(lightning, plain, tmp_path)
    original = F.scaled_dot_product_attention
    store = tmp_path / "run.vitals"
    watching = callback(store=store, every=1)
    fit(lightning, watched, tmp_path, [watching])

    assert F.scaled_dot_product_attention is original
    assert watching.watch is None
    assert watched.losses == plain.losses
    steps = list(RunReader(store).steps())
    assert [step.step for step in steps] == [0, 1, 2, 3]
    for step in steps:
        assert [(one.layer, one.heads) for one in step.readings] == [
            ("blocks.0", 2),
            ("blocks.1", 3),
        ]
    assert series(store, "loss") == pytest.approx(dict(enumerate(watched.losses)))
    rates = {step: RATE * 0.5**step for step in range(4)}
    assert series(store, "learning_rate") == pytest.approx(rates)


def test_the_loss_of_accumulated_batches_is_their_mean(lightning, model, tmp_path):
    watched = model()
    store = tmp_path / "run.vitals"
    fit(
        lightning, watched, tmp_path, [callback(store=store, every=1)], 3, accumulate_grad_batches=2
    )
    pairs = zip(watched.losses[::2], watched.losses[1::2], strict=True)
    assert series(store, "loss") == pytest.approx(
        {step: sum(pair) / 2 for step, pair in enumerate(pairs)}
    )


def test_a_resumed_training_goes_on_counting(lightning, model, tmp_path):
    store, checkpoint = tmp_path / "run.vitals", tmp_path / "last.ckpt"
    fit(lightning, model(), tmp_path, [callback(store=store, every=1)], 3).save_checkpoint(
        checkpoint
    )
    fit(lightning, model(), tmp_path, [callback(store=store, every=1)], 5, checkpoint)
    found = [(step.segment, step.step) for step in RunReader(store).steps()]
    assert sorted(found) == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4)]


def test_a_training_that_fails_is_unwatched_and_keeps_what_it_read(lightning, model, tmp_path):
    original = F.scaled_dot_product_attention
    store = tmp_path / "run.vitals"
    watching = callback(store=store, every=1)
    with pytest.raises(ArithmeticError, match="diverged"):
        fit(lightning, model(fails_at=2), tmp_path, [watching])
    assert watching.watch is None
    assert F.scaled_dot_product_attention is original
    assert [step.step for step in RunReader(store).steps()] == [0, 1]


def test_between_readings_the_loss_comes_as_often_as_loggers_ask(lightning, model, tmp_path):
    watched = model()
    store = tmp_path / "run.vitals"
    fit(lightning, watched, tmp_path, [callback(store=store, every=1000)], 6, log_every_n_steps=3)
    assert set(series(store, "loss")) == {0, 2, 5}  # 0 is read
