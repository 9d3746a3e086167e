"""Decide which steps the watch reads: early ones often, later ones as its cost allows.

A training goes wrong early, so a run is read in a geometric pace first: at least every 3 % of its
steps so far, for as long as a small allowance of time lasts. Beyond that the cost of a reading,
held against the time of a step, sets a steady interval.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

REMEMBERED = 9  # steps and samples whose median is believed; an evaluation in between is outvoted
# Of the budget: the rest is for what the watch cannot see of itself, such as the writer's thread,
# caches that are cold after it, and the steps that are not due (`scaledot bench --watch`).
AIM = 0.5
LOOKED_AFTER = 16  # steps in which the interval is not computed anew, while none is due
MISSED = 0.25  # of a sample, by which its cost may be more than what was timed
RAREST = 10_000  # steps between two samples, however dear a sample is

# The early readings. Their allowance is a share of the time of the first steps or some seconds,
# whichever is more; a budget below 1 % shrinks it. The seconds become free from doubling to
# doubling of the steps, so that dear readings fall on steps such as 0, 1, 2, 4, 8.
EARLY_PACE = 0.03  # of the steps so far
EARLY_STEPS = 1000
EARLY_SHARE = 0.04
EARLY_SECONDS = 0.75
USUAL_BUDGET = 0.01


# The first steps are read whole: they say what the model is like, and pay for what is built once.
WHOLE_STEPS = 2


class Cadence:
    """Decide which steps are due, so that the watch soon takes at most `budget` of the step time.

    every: obeyed as it is, whatever it costs. None: the first three steps, then the early pace
    while its allowance lasts, then as the budget allows. The first two steps are read whole and pay
    for what is loaded and built once; they are shown as `startup` and not charged. What a call
    costs that is not due (one comparison) is not counted.
    """

    def __init__(
        self,
        every: int | None = None,
        budget: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every is not None and (isinstance(every, bool) or every != int(every) or every < 1):
            raise ValueError(
                f"every={every!r} must be a whole number of steps, 1 or more; "
                f"leave it out to stay inside the budget"
            )
        if not 0.0 < budget <= 1.0:
            raise ValueError(
                f"budget={budget!r} must be a share of the step time, above 0 and at most 1; "
                f"0.01 is 1 %"
            )
        self.fixed = every is not None
        self.every = 1 if every is None else int(every)
        self.budget = budget
        self.clock = clock
        self.step = 0
        self.due = True  # now, in the step that is running
        self.shared = False  # all ranks of a job look at the same steps: `agree` says when
        self._agreed = False
        self.startup = 0.0  # seconds spent once: to begin, and in the first steps, read whole
        self._step_time: float | None = None
        self._spent = 0.0  # in this step
        self._charged = self._elapsed = 0.0  # since the first sample, early ones left out
        self._early_spent = self._early_limit = 0.0
        self._early = False  # the running step is due for the early pace alone
        self._samples: deque[float] = deque(maxlen=REMEMBERED)
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        # What is left of steps without the time that was spent: of due ones, and of others.
        self._left_of_due: deque[float] = deque(maxlen=REMEMBERED)
        self._quiet: deque[float] = deque(maxlen=REMEMBERED)
        self._missed = 0.0  # seconds of a sample that nobody has timed
        self._last_due = 0
        self._began: float | None = None
        self._marks: list[tuple[Any, Any]] = []  # pairs of CUDA events of the last sample

    @property
    def whole(self) -> bool:
        """Whether the running step is read whole, and not a sample of its batch."""
        return self.fixed or self.step < WHOLE_STEPS

    @property
    def share(self) -> float | None:
        """What the watch took of all the time since its first sample; None: too early to say."""
        return None if self._share is None else _seven_digits(self._share)

    @property
    def step_time(self) -> float | None:
        """Seconds of the last step, the watch's included."""
        return None if self._step_time is None else _seven_digits(self._step_time)

    @property
    def steady_share(self) -> float | None:
        """What samples at the steady interval take of the step time; None: too early to say."""
        if not self._samples:
            return None
        every = self.every if self.fixed else self.steady_every
        return _seven_digits(median(self._samples) / (every * median(self._steps)))

    @property
    def steady_every(self) -> int:
        """The interval that the budget alone allows; 1 where nothing was measured yet."""
        return self._affordable()

    @property
    def _share(self) -> float | None:
        if not self._elapsed:
            return None
        return (self._charged + self._early_spent) / self._elapsed

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def spend_on_device(self, began: Any, ended: Any) -> None:
        """Two recorded CUDA events around the work; they are read when the device has passed."""
        self._marks.append((began, ended))

    def pass_step(self) -> float:
        """End a step that is not due, as `close_step` does, in as little time as possible."""
        if self._began is None or self._marks or self.shared or self.step < WHOLE_STEPS:
            return self.close_step()
        now = self.clock()
        taken = self._step_time = now - self._began
        left = taken - self._spent
        self._steps.append(left if left > 1e-9 else 1e-9)
        self._quiet.append(left if left > 1e-9 else 1e-9)
        self._elapsed += taken
        self._charged += self._spent
        self._began, self._spent = now, 0.0
        self.step += 1
        since = self.step - self._last_due
        if not self.fixed and (
            since >= self.every or self.step <= EARLY_STEPS // 4 or not self.step % LOOKED_AFTER
        ):
            self.every = self._interval(self._affordable())
        if since >= self.every:
            self._decide()
        return now

    def close_step(self) -> float:
        """End the step, decide whether the next is due, and return when it began."""
        now = self.clock()
        if self._began is not None:
            self._step_time = now - self._began
        self._account()
        self._began = now
        self._spent = 0.0
        if self.due:
            self._last_due = self.step
        self.step += 1
        if not (self.fixed or self.shared):
            # Medians take a few microseconds, which is much in a step that is not due.
            since = self.step - self._last_due
            often = self.step <= EARLY_STEPS // 4 or not self.step % LOOKED_AFTER
            if often or self.due or since >= self.every:
                self.every = self._interval(self._affordable())
        elif not (self.fixed or self._agreed) and self.step > WHOLE_STEPS:
            self.every = RAREST  # the ranks have measured a sample, and will hear from each other
        self._decide()
        return now

    @property
    def wish(self) -> int:
        """The interval that this rank can afford, for all ranks to hear; 0: not known yet.

        It holds until the next sample, and is long enough to pay back what was overdrawn.
        """
        if self.fixed or not self._samples:
            return 0
        budget, step = AIM * self.budget, median(self._steps)
        every = median(self._samples) / (budget * step)
        debt = (self._charged / budget - self._elapsed) / step
        return self._interval(_whole_steps(max(every, min(debt, 10.0 * every))))

    def agree(self, every: int) -> None:
        """The rarest that any rank has wished for, told to all of them after the same step."""
        if self.shared and not self.fixed:
            self.every, self._agreed = every, True
            self._decide()

    def alone(self) -> None:
        """The other ranks are gone: this one decides for itself again."""
        self.shared = False
        if not self.fixed:
            self.every = self._interval(self._affordable())

    def _decide(self) -> None:
        """Set whether the running step is due, and on whose account."""
        since = self.step - self._last_due
        self.due = since >= self.every
        self._early = self.due and not self.fixed and since < self._affordable()

    def _account(self) -> None:
        if self.step < WHOLE_STEPS:
            self.startup += self._spent
            self._marks.clear()
            return
        if self.due:
            self._samples.append(self._spent)
        assert self._step_time is not None
        left = max(self._step_time - self._spent, 1e-9)
        self._steps.append(left)
        if self.due:
            self._left_of_due.append(left)
            self._missed = self._not_timed()
            self._spent += self._missed
            self._samples[-1] = self._spent
        else:
            self._quiet.append(left)
        self._elapsed += self._step_time
        self._charge(self._spent)
        self._charge_device()

    def _not_timed(self) -> float:
        """Estimate what a sample costs beyond what was timed: hooks, the writer, cold caches.

        Steps with a sample are held against those without; at most a share of the sample.
        """
        if len(self._left_of_due) < 3 or len(self._quiet) < 3:
            return 0.0
        more = median(self._left_of_due) - median(self._quiet)
        return min(max(more, 0.0), MISSED * self._spent)

    def _charge_device(self) -> None:
        """The host's time hides behind the device's or the other way round: the larger counts."""
        if not self._marks or not self._marks[-1][1].query():
            return
        device = sum(began.elapsed_time(ended) for began, ended in self._marks) / 1000
        self._marks.clear()
        if self._samples and device > self._samples[-1]:
            self._charge(device - self._samples[-1])
            self._samples[-1] = device

    def _charge(self, seconds: float) -> None:
        if self._early:
            self._early_spent += seconds
        else:
            self._charged += seconds

    def _interval(self, steady: int) -> int:
        """Return the early interval while its allowance lasts, else the steady one."""
        early = math.ceil(EARLY_PACE * self.step)
        if early >= steady or not self._samples:
            return steady
        scale = min(self.budget / USUAL_BUDGET, 1.0)
        seconds = EARLY_SECONDS * min(math.log2(self.step + 1) / math.log2(EARLY_STEPS), 1.0)
        if self.step < EARLY_STEPS:
            self._early_limit = max(self._early_limit, scale * EARLY_SHARE * self._elapsed)
        limit = max(self._early_limit, scale * seconds)
        return early if self._early_spent + median(self._samples) <= limit else steady

    def _affordable(self) -> int:
        if not self._samples:
            return 1
        budget = AIM * self.budget
        every = median(self._samples) / (budget * median(self._steps))
        if self._charged > budget * self._elapsed:  # pays back what it has overdrawn
            every *= min(self._charged / (budget * self._elapsed), 10.0)
        return _whole_steps(every)

    def __str__(self) -> str:
        rule = f"every {self.every} steps" if self.every > 1 else "every step"
        chosen = "as asked" if self.fixed else f"budget {self.budget:.2%}"
        if self.share is None or self.steady_share is None:
            return f"watch cost not known yet ({chosen}), {rule}"
        return (
            f"watch cost {self.steady_share:.2%} of step time in the long run ({chosen}), "
            f"{self.share:.2%} of the run so far, {rule}"
        )


def median(values: Sequence[float]) -> float:
    """Return the median; that of the standard library takes five times as long."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _whole_steps(every: float) -> int:
    return max(1, min(math.ceil(every), RAREST))


def _seven_digits(number: float) -> float:
    """As float32 has them: more than a clock is right about, and half the bytes in the store."""
    return float(np.float32(number))


class Evaluations:
    """Which evaluation calls are measured: they have no steps, so time and repetition decide.

    With a fixed cadence each layer's calls are counted. Else one pass over the layers is measured,
    until a layer comes again; the next begins when the last has been paid for.
    """

    def __init__(self, cadence: Cadence) -> None:
        self._cadence = cadence
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()
        self._cost = 0.0
        self._began = -math.inf
        self._next = -math.inf
        self._passes = 0

    def wants(self) -> bool:
        return self._cadence.fixed or self._cadence.clock() >= self._next

    def takes(self, layer: str) -> bool:
        if self._cadence.fixed:
            count = self._counts.get(layer, 0)
            self._counts[layer] = count + 1
            return count % self._cadence.every == 0
        if not self.wants():
            return False
        if layer in self._taken:
            self._end_pass()
            if not self.wants():
                return False
        if not self._taken:
            self._began, self._cost = self._cadence.clock(), 0.0
        self._taken.add(layer)
        return True

    def spend(self, seconds: float) -> None:
        self._cost += seconds

    def _end_pass(self) -> None:
        self._taken.clear()
        self._passes += 1
        if self._passes > 1:  # the first pays for what is built once
            self._next = self._began + self._cost / self._cadence.budget
