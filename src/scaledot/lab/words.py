"""What the lab says, in English. Sentences here, numbers in `experiments`: a template names the
record's own fields, so no figure is typed twice and another language is another file like this.
"""

from dataclasses import dataclass
from typing import Any

from scaledot.lab.experiments.finding import Finding
from scaledot.lab.training import Training


@dataclass(frozen=True)
class Lesson:
    title: str
    opening: str


@dataclass(frozen=True)
class Saying:
    """A claim in the folklore's words, and why it holds or not; `{lesson}` is the whole record."""

    claim: str
    why: str
    short_of_truth: str = "wrong"  # the verdict where claim and measurement do not agree


LESSONS = {
    "small_vectors": Lesson(
        "Small vectors, by hand",
        "A score is a dot product: multiply entry by entry, add up.",
    ),
    "variance": Lesson(
        "The variance of q·k is d_k",
        "Entries independent, mean 0, variance 1. Every further entry adds its own variance "
        "to the sum, so wider vectors make larger scores. sd is the standard deviation, √Var.",
    ),
    "saturation": Lesson(
        "Large scores saturate the softmax",
        "The softmax turns scores into weights by their differences: far apart, the first one "
        "takes everything.",
    ),
    "gradient": Lesson(
        "What a saturated softmax lets through",
        "dp/dz = p(1 - p) for a weight and its own score; the whole Jacobian is "
        "diag(p) - p pᵀ, its trace 1 - Σp². Measured by autograd through scaledot.attention.",
    ),
    "divisors": Lesson(
        "Which divisor?",
        "The same {lesson.keys} keys of width d_k = {lesson.d_k} under four rules "
        "(d_model = {lesson.heads} heads × {lesson.d_k}).",
    ),
    "vital_signs": Lesson(
        "The remedy, read by its vital signs",
        "One call of attention_with_vitals on the same {lesson.tokens} tokens of width "
        "d_k = {lesson.d_k}, without scaling and with it.",
    ),
}

FINDINGS = {
    "dot_product": Saying("q·k = {finding.claim:g}", "entry by entry, then added up"),
    "first_five": Saying(
        "the first five products of a 64-wide pair",
        "each term is right; the score is the sum of 64 of them",
    ),
    "products_cancel": Saying(
        "Positive and negative products cancel, so the score is 0.",
        "Luck, not law: of the {lesson.sign_choices} ways to sign this q, "
        "{finding.measured:.1%} give 0. Flip one sign and the score is "
        "{lesson.flipped.finding.measured:g}.",
    ),
    "typical_size": Saying(
        "A typical |q·k| at d_k = {lesson.typical.d_k} is {finding.claim:g}.",
        "{finding.claim:g} is the standard deviation. The mean size is {finding.measured:.2f}, the "
        "median {lesson.typical.median_size.measured:.2f}.",
    ),
    "ranges": Saying(
        "Products range over -23..23 in 2 dimensions and -49..122 in 5: "
        "{finding.claim:.1f} times as wide.",
        "A range belongs to the sample: more draws, more range, same standard deviation. For "
        "equal entries the widths differ by √(5/2) = {finding.theory:.2f}; "
        "measured {finding.measured:.2f}.",
    ),
    "saturated": Saying(
        "softmax of 12, 2, -1",
        "The first weight is right; the last is {finding.measured[2]:.3g}, not "
        "{finding.claim[2]:.0e}. The claim was rounded until it added up to 1.",
        "nearly",
    ),
    "scaled": Saying(
        "softmax of 12, 2, -1 divided by 8",
        "Impossible as claimed: the lowest score cannot get the second largest weight.",
    ),
    "extreme": Saying(
        "softmax of 25, 2, -3",
        "To the digits shown. No weight is ever exactly 0.",
    ),
    "two_keys": Saying(
        "softmax of 7, 3", "A lead of four is enough for {finding.measured[0]:.1%}."
    ),
    "exponentials": Saying("their exponentials", "The exponentials are right."),
    "steepest": Saying(
        "The slope of a weight is at most {finding.claim:g}.",
        "Reached where two keys share the weight evenly, p = ½.",
    ),
    "vanishes": Saying(
        "Without scaling, the gradient vanishes.",
        "Many rows fall silent: {finding.measured:.0%} are below {lesson.silent_below:g}, and the "
        "median is {lesson.unscaled.median:.2g} against {lesson.scaled.median:.2g} with scaling. "
        "Not all of them.",
        "half true",
    ),
    "explodes": Saying(
        "Without scaling, the gradient explodes.",
        "In some rows: the 99th percentile is {lesson.unscaled.percentile_99:.2g}, and "
        "{finding.measured:.0%} of rows are above {lesson.scaled.percentile_99:.2f}, the 99th "
        "percentile with scaling. Most rows whisper, a few shout; say “passes less”.",
        "half true",
    ),
    "unit": Saying(
        "Dividing by √d_k brings the scores back to standard deviation 1.",
        "Var(x / c) = Var(x) / c², and Var(q·k) = d_k: so c = √d_k.",
    ),
    "width_does_as_well": Saying(
        "Dividing by d_k does as well.",
        "Too flat at the start: {finding.measured:.3f}. Once q and k align it fits: a vector "
        "with itself scores {lesson.aligned.dk:.2f}, which is why muP uses it.",
    ),
    "model_width_undercorrects": Saying(
        "Dividing by √d_model under- or over-corrects.",
        "It only ever over-corrects, by √heads: standard deviation "
        "{lesson.head_counts[1].standard_deviation:.3f} at {lesson.head_counts[1].heads} heads, "
        "{lesson.head_counts[3].standard_deviation:.3f} at {lesson.head_counts[3].heads}.",
        "half true",
    ),
}


def title(name: str) -> str:
    return LESSONS[name].title


def opening(name: str, lesson: Any) -> str:
    return LESSONS[name].opening.format(lesson=lesson)


def claim(finding: Finding, lesson: Any) -> str:
    return FINDINGS[finding.key].claim.format(finding=finding, lesson=lesson)


def why(finding: Finding, lesson: Any) -> str:
    return FINDINGS[finding.key].why.format(finding=finding, lesson=lesson)


def verdict(finding: Finding) -> str:
    return "agrees" if finding.agree else FINDINGS[finding.key].short_of_truth


TRAINING = "A real training, under the watch"


def training_opening(training: Training) -> str:
    size = training.size
    return (
        f"{training.parameters:,} parameters learn {training.characters:,} characters of Python's "
        f"own help texts: {size.steps} steps of {size.batch} × {size.tokens} characters, learning "
        f"rate {training.learning_rate:g}. The watch reads every head at every step "
        f"({training.coverage}); the model knows nothing of it."
    )


def training_verdicts(training: Training) -> tuple[str, str]:
    """What the vital signs say of the run, and what the loss says."""
    return _vitals_say(training), _loss_says(training)


def training_cost(training: Training) -> str:
    if training.watch_cost is None:
        return "Too few steps to say what the watch cost."
    return (
        f"{training.seconds:.0f} s in all. The watch took {training.watch_cost:.1%} of it, for it "
        f"read every step; left to itself it keeps within its budget."
    )


def _vitals_say(training: Training) -> str:
    last = training.moments[-1]
    if training.logits_leave is None:
        return f"No score above {training.max_logit_high:g} within {last.step + 1} steps."
    half = "half of the heads are not closed yet"
    if training.half_closed is not None:
        half = f"at step {training.half_closed} half of the heads are closed"
    return (
        f"The largest score passes {training.max_logit_high:g} at step {training.logits_leave}, "
        f"{half}. At the end it is {last.max_logit:,.0f}, and {last.closed:.0%} of the heads let "
        f"less than {training.passes_low:g} through."
    )


def _loss_says(training: Training) -> str:
    first, last = training.moments[0], training.moments[-1]
    rule = (
        f"An alarm that waits for a rise of {training.loss_rise:g} "
        f"(means of {training.steps_of_mean} steps)"
    )
    rang = "has not rung."
    if training.loss_alarm is not None:
        rang = f"rang at step {training.loss_alarm}."
    return f"From {first.loss_mean:.2f} to {last.loss_mean:.2f}. {rule} {rang}"
