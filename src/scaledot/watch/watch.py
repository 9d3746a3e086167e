"""`Watch`: the handle. It listens to the probes, closes steps, and hands readings on."""

import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from scaledot.watch import crash, models, reading
from scaledot.watch.account import Account
from scaledot.watch.alarms import Alarm, Judge, overridden
from scaledot.watch.alarms.heads import Scale
from scaledot.watch.alarms.judge import MOST_SCALES, SCALES
from scaledot.watch.cadence import Cadence, Evaluations
from scaledot.watch.coverage import Coverage
from scaledot.watch.gather import Gathering, Key, Numbers, Waiting
from scaledot.watch.late import Late
from scaledot.watch.layers import Layer, Layers
from scaledot.watch.losses import Losses
from scaledot.watch.names import Names
from scaledot.watch.probes import hub
from scaledot.watch.probes.place import Near
from scaledot.watch.probes.scores import Scores, Source, all_finite
from scaledot.watch.probes.seen import Seen
from scaledot.watch.ranks import Mode, shares
from scaledot.watch.ranks.files import RankStore, file_of, rank_here
from scaledot.watch.ranks.job import PATIENCE, Job, Traffic
from scaledot.watch.ranks.parcel import Parcel
from scaledot.watch.reading import Phase, Reading, RunAttributes, Scalar
from scaledot.watch.receivers import Deliver, by_rank_0, close_all, delivery_to, is_path
from scaledot.watch.redact import redact
from scaledot.watch.sample import entries_of
from scaledot.watch.stacks import WHOLE, Call, Stacks
from scaledot.watch.steps import StepEnds, learning_rate
from scaledot.watch.undisturbed import any_mode, undisturbed

log = logging.getLogger("scaledot.watch")

# How many steps' numbers may be on their way from the device before we wait for the oldest.
IN_FLIGHT = 8
LAST_PATIENCE = 2.0  # seconds that a process which ends badly waits for the other ranks
TURN = 0.1  # seconds that it waits for a step that is being closed
BEAT = 4.0  # seconds between two signs of life; `silence.SILENT_AFTER` is more than twice that
NOTED = 3  # steps after which the coverage is written down: the first may have begun without us
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nheads")


class Watch:
    """The vital signs of every attention head of a run, without a change to it.

    with scaledot.Watch(model, store="run.vitals") as watch:
        train(model)
    print(watch.coverage())

    model: whose attention is watched, and where the layers' names begin; None: every attention of
    the process. every: measure each N-th step, whatever it costs; None: as often as `budget`, a
    share of the step time, allows. store: a file (a path), or any receiver; sinks: more receivers.
    A receiver has write(readings, scalars) or put(reading), or is a list.
    replace: compute the process's attention with scaledot's in the steps that are due, vitals from
    the same pass, instead of measuring beside it; then every step is due unless `every` says
    otherwise, and the numbers agree within rounding, no longer to the bit. Where scaledot cannot
    compute the same, the model's own attention stays, and `coverage` says where and why. A
    compiled graph is replaced as a whole, in every step.
    alarms: tell what is wrong, by the rules of `scaledot.watch.alarms`: kept in the store and in
    `watch.alarms`, and given to `on_alarm` one by one. {"growth": 200} sets a threshold, a `Judge`
    brings rules of its own, False says nothing. What `on_alarm` raises is logged, and training goes
    on; SystemExit ends it.
    losses: keep what backward is called on as the series "loss", where that is one number; of
    several calls in a step (gradient accumulation) their sum, where each was divided by their
    number before as in `(loss / 4).backward()`, Lightning and Trainer, else their mean.
    close_sinks: close the sinks when the watch is removed; False: they are used again.
    ranks: with torch.distributed make the watch on every rank. "merge": the readings are those of
    all ranks' rows, heads and layers, and the same on every rank; rank 0 writes. "apart": each
    rank has its own, and a file of its own. tensor_parallel, pipeline_parallel: a 1-D DeviceMesh or
    a process group, where ranks share the heads of a layer or number their layers from 0 each, and
    no DTensor tells.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        every: int | None = None,
        store: Any = None,
        sinks: Iterable[Any] = (),
        budget: float = 0.01,
        replace: bool = False,
        losses: bool = True,
        close_sinks: bool = True,
        alarms: bool | Mapping[str, float] | Judge = True,
        on_alarm: Callable[[Alarm], Any] | None = None,
        ranks: Mode = "merge",
        tensor_parallel: Any = None,
        pipeline_parallel: Any = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}; give an nn.Module, or nothing to watch every "
                f"attention of the process"
            )
        if not isinstance(replace, bool):
            raise TypeError(f"replace is {replace!r}; give True or False")
        if on_alarm is not None and not callable(on_alarm):
            raise TypeError(f"on_alarm is {on_alarm!r}; give a function that takes an Alarm")
        self.model, self.replace = model, replace
        self.cadence = Cadence(1 if replace and every is None else every, budget)
        began = self.cadence.clock()
        self.latest: dict[Key, Reading] = {}  # the last reading of each layer, by (layer, phase)
        self.alarms: list[Alarm] = []  # all that were raised
        self.remedies: list[Any] = []  # that were installed: what the store keeps of each
        self.guard = crash.Guard(self._keep_crashes, lambda: self.cadence.step)
        self._judge = _judge_of(alarms)
        self._on_alarm = on_alarm
        self._evaluations = Evaluations(self.cadence)
        self._names = Names(model)
        self._layers = Layers(self._names)
        self._job = Job(ranks, tensor_parallel, pipeline_parallel, self._names.names)
        self._firsts: dict[str, int] = {}  # of layers whose heads are shared out: which is ours
        self._account = Account(self._names, replace)
        self._gathering = Gathering()
        self._stacks = Stacks(self)
        self._rows_read = self._rows_there = 0  # in the running step, as `Rows` has them
        self._sample = Rows(0, 0)  # of the last step that was read in part
        self._heads: dict[str, int] = {}
        self._waiting: list[Waiting] = []
        self._scalars: list[Scalar] = []
        self._coming: list[Late] = []
        self._steps_looked_at = 0
        self._last_measured = -1
        self._last_beat = self.cadence.clock()
        self._own_store: Any = None
        self._store = self._opened(store, ranks)
        sinks = list(sinks)
        self._closed_at_end = sinks if close_sinks else []
        targets = [*([] if self._store is None else [self._store]), *sinks]
        self._deliveries: list[Deliver] = [
            by_rank_0(delivery_to(one), one, self._job) for one in targets
        ]
        self._told = [
            by_rank_0(one.write_alarms, one, self._job)
            for one in targets
            if hasattr(one, "write_alarms")
        ]
        if self._judge is not None:
            self._note("judged", True)
        self._ends = StepEnds(self._step_ended)
        self._loss_calls = 1
        self._losses = Losses() if losses else None
        self._removed = False
        self._turn = threading.RLock()  # a training may have several threads
        _watches.add(self)
        hub.listen(self, self._account, self._recall)
        self.cadence.startup += self.cadence.clock() - began

    @property
    def step_number(self) -> int:
        """How many steps have ended."""
        return self.cadence.step

    def step(self) -> None:
        """End a step by hand, where no optimizer of torch does."""
        self._step_ended(None)

    def coverage(self) -> Coverage:
        """What is watched and what is not; `print` it."""
        return self._account.coverage(self._steps_looked_at > 0)

    def coverage_in_words(self) -> str:
        """With the ranks that were asked, where there are several."""
        return "; ".join(filter(None, [str(self.coverage()), self.ranks.words()]))

    @property
    def ranks(self) -> Traffic:
        """The job that this process is a rank of, and what its ranks have told each other."""
        return self._job.traffic

    @property
    def silent(self) -> bool:
        """Whether rank 0 writes and speaks for this one."""
        return self._job.silent

    def models(self) -> str:
        """The models that were met, in words; "" where there is none, or none any more."""
        return models.in_words(self._names.roots())

    def remove(self) -> None:
        """Hand on what was gathered and put everything back as it was. More than once is fine."""
        if self._removed:
            return
        self._removed = True
        hub.leave(self, self._account)
        with self._turn:
            self._end()

    def _end(self) -> None:
        """Hand on what was gathered, and close."""
        self._ends.remove()
        self.guard.remove()
        if self._losses is not None:
            self._losses.remove()
        self._steps_looked_at += bool(self._gathering)
        self._close(None)
        try:
            self._deliver(all_of_it=True)
        finally:  # a callback may end the process
            self._note_coverage()
            if self.cadence.step:
                self._note(reading.ALIVE, self.cadence.step)
            if self._own_store is not None or hasattr(self._store, "closes_with_watch"):
                self._store.close()
            close_all(self._closed_at_end)
            self._job.leave()

    def __enter__(self) -> "Watch":
        if self._removed:
            raise RuntimeError("this watch was removed and measures nothing more; make a new one")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.guard.exception(error)
        self.remove()

    def __repr__(self) -> str:
        removed = "removed; " if self._removed else ""
        return f"Watch: {removed}{self.coverage()}; {self.cadence}"

    # What the probes call. -----------------------------------------------------------------------

    def wants(self) -> bool:
        if self.cadence.due:
            return True
        return not torch.is_grad_enabled() and self._evaluations.wants()

    def replaces(self) -> bool:
        return self.replace and self.cadence.due

    def saw(self, seen: Seen) -> None:
        with self._turn:
            self._take(seen)

    def _take(self, seen: Seen) -> None:
        began = self.cadence.clock()
        found = self._layers.of(seen)
        if found is None:
            return  # somebody else's attention
        if found.phase == "train":
            if not self.cadence.due:
                return
        elif not self._evaluations.takes(found.layer):
            return
        if seen.over_ranks and not self._all_measure(found.phase):
            if self._job.apart:
                self.cannot_see(seen.kind, "ranks that share its tokens measure together", None)
            return
        if seen.counts or seen.over_ranks:
            if seen.measured and not any_mode():  # nothing is computed that could be disturbed
                self._add(found, seen)
            elif seen.query.is_cuda:
                with self._timed_on_device(seen), undisturbed():
                    self._measure(found, seen)
            else:
                with undisturbed():
                    self._measure(found, seen)
        self._account.met(found.name or found.layer)
        spent = self.cadence.clock() - began
        self.cadence.spend(spent)
        if found.phase == "eval":
            self._evaluations.spend(spent)

    def _recall(self, near: Near, scores: Scores) -> bool:
        """Take a call of a layer that was read before; False: look at it as at a new one.

        Nothing that is known of the layer, or of calls like it, is looked up once more.
        """
        began = self.cadence.clock()
        known = self._layers.in_training(near)
        if known is None or known.call is None or any_mode():
            return False
        if not (self.cadence.due and self._steps_looked_at):  # the first step learns the scales
            return False
        with self._turn:
            stack = self._stacks.again(scores, known.call)
            if stack is None:
                return False
            self._gathering.expect(known.call.key)
            self._rows_there += stack.rows_there
            self._rows_read += stack.rows_read
            self.cadence.spend(self.cadence.clock() - began)
        return True

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        self._account.cannot_see(kind, reason, module)

    # ---------------------------------------------------------------------------------------------

    def _all_measure(self, phase: Phase) -> bool:
        """Whether every rank measures this call: who did so alone would wait for the others.

        The first step has none, until the ranks know of each other; an evaluation only where its
        calls are counted, for time passes differently on each.
        """
        return self._job.together and (phase == "train" or self.cadence.fixed)

    def _measure(self, found: Layer, seen: Seen) -> None:
        if not self._take_part(found, seen):
            self._add(found, seen)

    def _add(self, found: Layer, seen: Seen) -> None:
        numbers = Numbers(*seen.measure().packed())
        heads = _number_of_heads(numbers, found.module if seen.module is None else seen.module)
        layer = self._place(found, seen, heads)
        if layer is not None:
            self._gathering.add(layer, found.phase, numbers, heads)
        self._account.saw(found.name or found.layer)

    def _take_part(self, found: Layer, seen: Seen) -> bool:
        """Take the call as a part of its batch, or together with those that are alike.

        False: it is measured whole, and at once.
        """
        source = None if seen.measured else seen.source()
        sizes = None if source is None else source.sizes
        if source is None or sizes is None:
            return False
        batch, heads, rows = sizes
        layer = self._place(found, seen, heads)
        if layer is None:
            return False
        entries = WHOLE if self.cadence.whole else entries_of(self.cadence.step, batch, rows)
        self._rows_there += rows * batch
        self._rows_read += rows * (batch if entries == WHOLE else entries.stop - entries.start)
        call = Call(Key(layer, found.phase), found.name or found.layer, seen.kind, heads)
        self._gathering.expect(call.key)
        # An evaluation has no end at which its calls could be measured together.
        waits = found.phase == "train"
        if waits and isinstance(source, Scores) and self._stacks.hold(source, entries, call):
            if found.known is not None:
                found.known.call = call
            return True
        if entries != WHOLE and not _all_numbers(source):
            entries = WHOLE  # a broken call is read whole
        scores = source.part(entries)
        if not (waits and self._stacks.hold(scores, WHOLE, call, part=True)):
            self.take_stack([call], Numbers(*scores.vitals().packed()))
        return True

    def take_stack(self, calls: Sequence[Call], numbers: Numbers) -> None:
        first, *more = calls
        if more:
            self._gathering.add_stack([call.key for call in calls], numbers, first.heads)
        else:
            self._gathering.add(*first.key, numbers, first.heads)
        for call in calls:
            self._account.saw(call.name)

    def lose(self, call: Call, error: Exception) -> None:
        self._account.lost(call.name, call.kind, f"{type(error).__name__}: {error}")

    def _place(self, found: Layer, seen: Seen, heads: int) -> str | None:
        """Return what the reading is called; None: another rank counts its rows."""
        if seen.first is not None:
            share = shares.Share(seen.first, seen.counts)
        else:
            share = shares.share_of(found.running, heads) if found.running else shares.WHOLE
        if not share.counts:
            return None
        layer = found.layer
        self._firsts[layer] = share.first
        if self._heads.setdefault(layer, heads) != heads:
            layer = f"{layer} ({heads} heads)"
        if self._judge is not None and not self._steps_looked_at and seen.scale is not None:
            self._judge.scales[layer] = Scale(float(seen.scale), seen.query.shape[-1])
        return layer

    @contextmanager
    def _timed_on_device(self, seen: Seen) -> Iterator[None]:
        """The work of `measure`; what the call itself has measured is not to be told from it."""
        if seen.measured:
            yield
            return
        stream = torch.cuda.current_stream(seen.query.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        yield
        ended.record(stream)
        self.cadence.spend_on_device(began, ended)

    def _step_ended(self, optimizer: Optimizer | None) -> None:
        """Never raises: it runs inside the user's optimizer.step()."""
        try:
            if self._passes_by():
                return
            with hub.quiet(), self._turn:
                with undisturbed():
                    self._close(optimizer)
                self._deliver()
                self._beat(self.cadence.clock())
        except Exception:
            log.exception("the watch could not close step %d; training goes on", self.cadence.step)

    def _passes_by(self) -> bool:
        """End a step of which nothing was seen; False: there is more to do than count it.

        Most steps are such, and a step may be short: each microsecond counts.
        """
        cadence, losses = self.cadence, self._losses
        if cadence.due or self._waiting or self._coming or self._scalars or self._gathering:
            return False
        with self._turn:
            if not self._job.join():
                return False
            if losses is not None and (broken := losses.pass_by(cadence.step)) is not None:
                self._coming.append(broken)
            began = cadence.pass_step()
            if cadence.due:
                self._account.looking = self._steps_looked_at < NOTED
            if self._coming:
                with hub.quiet():
                    self._deliver()
            now = cadence.clock()
            if now - self._last_beat >= BEAT:
                self._beat(now)
            cadence.spend(now - began)
        return True

    def _beat(self, now: float) -> None:
        """Tell the store that steps go on, for whoever asks before the next reading is due."""
        if now - self._last_beat >= BEAT:
            self._last_beat = now
            self._note(reading.ALIVE, self.cadence.step)

    def _close(self, optimizer: Optimizer | None) -> None:
        began = self.cadence.clock()
        with undisturbed():
            self._stacks.measure()
        due, anything = self.cadence.due, bool(self._gathering)
        step = self.cadence.step
        if not self._removed:
            self._job.join()
        elif anything or self._waiting:
            self._job.join(PATIENCE / 2)  # a run without steps, and perhaps without other ranks
        self.cadence.shared = self._job.together
        with undisturbed():
            self._waiting += self._gathering.close(step)
        self.cadence.spend(self.cadence.clock() - began)
        if self._removed:
            self._scalars += self._last_numbers(step - 1) + self._rows_of(step)
            self._coming += self._last_loss()
            self._send(step, due)
            return
        self.cadence.close_step()
        if due and (anything or self._job.together):
            self._last_measured = step
            self._scalars += self._numbers_of(step, optimizer) + self._rows_of(step)
            self._coming += self._loss_of(step)
        elif due and self._last_measured < 0 and not self._job.together:
            self._coming += self._loss_of(step)  # no attention so far: the loss is watched alone
        elif self._losses is not None and (broken := self._losses.pass_by(step)) is not None:
            self._coming += [] if self._job.together else [broken]
        self._send(step, due)
        if due and self._steps_looked_at < NOTED:
            self._steps_looked_at += 1
            if optimizer is not None and not self._account.knows_models():
                for root in models.trained_by(optimizer):  # no probe met it: it may need a name
                    self._account.add(root)
            self._note_coverage()
        self._account.looking = self.cadence.due and self._steps_looked_at < NOTED

    def _send(self, step: int, due: bool) -> None:
        """To the other ranks, with what waited for a step that all of them measure."""
        if not (self._job.together and (due or self._removed)):
            return
        waiting, self._waiting = self._waiting, []
        scalars, self._scalars = self._scalars, []
        coming, self._coming = self._coming, []
        wish, told = self.cadence.wish, self._job.told()
        self._job.put(
            Parcel(step, waiting, scalars, coming, wish, self._removed, dict(self._firsts), told)
        )

    def _numbers_of(self, step: int, optimizer: Optimizer | None) -> list[Scalar]:
        rate = None if optimizer is None else learning_rate(optimizer)
        numbers = {
            reading.LEARNING_RATE: rate,
            reading.STEP_TIME: self.cadence.step_time,
            reading.WATCH_COST: self.cadence.share,
        }
        return [Scalar(step, name, value) for name, value in numbers.items() if value is not None]

    def _rows_of(self, step: int) -> list[Scalar]:
        """What a sample was taken of; nothing where all was read."""
        read, there = self._rows_read, self._rows_there
        self._rows_read = self._rows_there = 0
        if read == there:
            return []
        self._sample = Rows(read, there)
        return [Scalar(step, reading.ROWS_READ, read), Scalar(step, reading.ROWS_THERE, there)]

    def _last_numbers(self, step: int) -> list[Scalar]:
        """What the watch cost in the end, where the last step was not one that is measured."""
        if step < 0 or self._job.together or self._last_measured == step:
            return []
        numbers = self._numbers_of(step, None)
        return [scalar for scalar in numbers if scalar.name == reading.WATCH_COST]

    def _loss_of(self, step: int) -> list[Late]:
        loss = None if self._losses is None else self._losses.taken(step)
        if self._losses is not None and self._losses.meant > self._loss_calls:
            self._loss_calls = self._losses.meant
            self._note(reading.LOSS_CALLS, self._loss_calls)
        return [] if loss is None else [loss]

    def _last_loss(self) -> list[Late]:
        """Without a reading of its step; not of one rank of many."""
        loss = None if self._losses is None else self._losses.last()
        if loss is None or self._job.together:
            return []
        return [loss]

    def _deliver(self, all_of_it: bool = False, patience: float = PATIENCE) -> None:
        """Whatever has arrived from the device and the other ranks, oldest first."""
        began = self.cadence.clock()
        arrived, scalars = self._from_ranks(all_of_it, patience)
        if not self._job.together:  # else it waits for a step that all ranks measure
            with undisturbed():
                ours = self._from_device(all_of_it)
            arrived, scalars = arrived + ours[0], scalars + ours[1]
        if self._last_measured < 0:  # no attention so far: of the losses only bad ones are news
            scalars = [s for s in scalars if s.name != reading.LOSS or not math.isfinite(s.value)]
        for one in arrived:
            self.latest[Key(one.layer, one.phase)] = one
        if arrived or scalars:
            for deliver in self._deliveries:
                self._hand("readings", deliver, arrived, scalars)
        raised = self._judged(arrived, [one for one in scalars if one.name == reading.LOSS])
        self.cadence.spend(self.cadence.clock() - began)
        self._tell(raised)
        for scalar in scalars:
            if scalar.name == reading.LOSS:
                self.guard.loss(scalar.step, scalar.value)

    def _from_ranks(self, all_of_it: bool, patience: float) -> tuple[list[Reading], list[Scalar]]:
        arrived: list[Reading] = []
        scalars: list[Scalar] = []
        if self._job.alone:
            return arrived, scalars
        before = self._job.traffic.note()
        with undisturbed():
            found = self._job.take(self.cadence.step, all_of_it, patience)
        for one in found:
            arrived += one.readings
            scalars += one.scalars
            if one.wish:
                self.cadence.agree(one.wish)
        if not self._job.together:
            self.cadence.alone()
        if before != (note := self._job.traffic.note()):
            self._note("ranks", note)
            self._note_coverage()
        return arrived, scalars

    def _from_device(self, all_of_it: bool) -> tuple[list[Reading], list[Scalar]]:
        arrived: list[Reading] = []
        while self._waiting:
            if not (all_of_it or self._waiting[0].here or len(self._waiting) > IN_FLIGHT):
                break
            arrived += self._waiting.pop(0).readings()
        while self._coming and (all_of_it or self._coming[0].here or len(self._coming) > IN_FLIGHT):
            self._scalars.append(self._coming.pop(0).scalar())
        scalars, self._scalars = self._scalars, []
        return arrived, scalars

    def _hand(self, what: str, receiver: Callable[..., Any], *things: Any) -> None:
        try:
            receiver(*things)
        except Exception:
            log.exception("a receiver of %s failed; training and the other receivers go on", what)

    def _judged(self, arrived: list[Reading], losses: list[Scalar]) -> list[Alarm]:
        if self._judge is None or not (arrived or losses):
            return []
        try:
            raised = self._judge.read_all(arrived)
            for one in losses:
                raised += self._judge.read_loss(one.step, one.value)
        except Exception:
            log.exception("the alarms failed; the readings go on without them")
            self._judge = None
            return []
        self.alarms += raised
        return raised

    def _tell(self, raised: list[Alarm]) -> None:
        """What leaves from here may end the training: SystemExit of the user's callback."""
        if raised:
            for receiver in self._told:
                self._hand("alarms", receiver, raised)
        if self._on_alarm is not None:
            for alarm in raised:
                self._hand("alarms", self._on_alarm, alarm)

    def _keep_crashes(self, crashes: list[crash.Crash]) -> None:
        """Everything that is there reaches the disk; called from a thread of the guard's."""
        # A loss that is no number ends nothing by itself: the other ranks are still there.
        ends = any(one.kind != "loss" for one in crashes)
        if self._turn.acquire(timeout=TURN):  # else a thread hangs in the midst of a step
            try:
                self._deliver(ends or not self._job.together, LAST_PATIENCE)
            finally:
                self._turn.release()
        self._note(crash.NOTE, crash.as_note(crashes))
        if callable(flush := getattr(self._store, "flush", None)):
            flush()

    def _opened(self, store: Any, ranks: Mode) -> Any:
        if not is_path(store):
            return store

        def opened(path: Path) -> Any:
            from scaledot.watch.store import Store

            attributes = RunAttributes.here(self.model, budget=self.cadence.budget)
            if self.model is not None:
                attributes = replaced(attributes, model=models.in_words([self.model]))
            return Store(path, attributes)

        path, rank = Path(store), rank_here()
        if ranks == "apart":
            self._own_store = opened(file_of(path, rank, main=True))
        else:
            self._own_store = RankStore(path, opened, self._job) if rank else opened(path)
        return self._own_store

    def _note(self, name: str, value: Any) -> None:
        if self.silent:
            return
        if callable(note := getattr(self._store, "note", None)):
            note(name, value)

    def _note_coverage(self) -> None:
        if hasattr(self._store, "note"):
            self._note("coverage", self.coverage_in_words())
            self._note("cadence", f"{self.cadence}{self._sample.words()}")
            self._note_steady()
            if self._sample.there:
                self._note(reading.SAMPLE, self._sample._asdict())
            self._note_remedies()
            if self._judge is not None and self._judge.scales:
                known = list(self._judge.scales.items())[:MOST_SCALES]
                self._note(SCALES, {layer: list(one) for layer, one in known})
            if self.model is None and (words := self.models()):
                self._note("model", words)

    def _note_steady(self) -> None:
        if self.cadence.steady_share is not None:
            every = self.cadence.every if self.cadence.fixed else self.cadence.steady_every
            once = round(self.cadence.startup, 4)
            share = self.cadence.steady_share
            self._note(reading.STEADY, {"share": share, "every": every, "startup": once})

    def _note_remedies(self) -> None:
        if self.remedies:
            self._note(reading.REMEDIES, [one.note() for one in self.remedies])


def _forked() -> None:
    """In a forked child no thread is left that could give its turn back."""
    for watch in _watches:
        watch._turn = threading.RLock()


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _judge_of(alarms: bool | Mapping[str, float] | Judge) -> Judge | None:
    if isinstance(alarms, Judge):
        return alarms
    thresholds = {} if isinstance(alarms, bool) else alarms
    return Judge(overridden(thresholds), _command()) if alarms is not False else None


def _command() -> list[str]:
    """What to type after `scaledot run`; nothing where there is no script (a notebook, a shell)."""
    script, *arguments = sys.argv or [""]
    if not script.endswith(".py") or script.endswith("ipykernel_launcher.py"):
        return []
    before = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]
    start = ["-m", before[-1]] if before[-2:-1] == ["-m"] else [script]
    return list(redact([*start, *arguments]))


class Rows(NamedTuple):
    """Rows of a head, of all layers of a step: that were read, and that there were."""

    read: int
    there: int

    def words(self) -> str:
        if not self.there:
            return ""
        return f"; readings are samples of the batch: {self.read:,} of {self.there:,} rows"


def _all_numbers(source: Source) -> bool:
    """Tell whether the whole batch is finite. A device is not asked: it would be waited for."""
    query, key = source.query, source.key
    return not (query.is_cpu and key.is_cpu) or (all_finite(query) and all_finite(key))


def _number_of_heads(numbers: Numbers, module: nn.Module | None) -> int:
    """The last dimension; [batch * heads, Q, D] is folded where the module says how many."""
    shape = numbers.floats.shape[1:]
    if not shape:
        return 1
    last = shape[-1]
    if not last:
        raise ValueError("it has no heads")
    if len(shape) == 1:
        for name in HEADS:
            heads = getattr(module, name, None)
            if isinstance(heads, int) and 0 < heads < last and last % heads == 0:
                return heads
    return last
