"""One pure function a lesson: keyword arguments in, a frozen record of numbers out.

Every number is computed with torch, through scaledot's own functions where one exists (`attention`,
`vitals`, `RowState`, the scale rules, the modules), every theory out of a formula. Only the claims
of the folklore are typed in: they are claims.

`LESSONS` holds the lessons in teaching order: name -> Lesson(run, controls, python). The name of a
lesson is also the name of its function and of its module; `race_steps` is the race as it is run,
one record a step (in its module: `race.steps`). `story` has the chapters of `scaledot demo`.
"""

from scaledot.lab.experiments import (
    assumption as _assumption,
)
from scaledot.lab.experiments import (
    divisors as _divisors,
)
from scaledot.lab.experiments import (
    flow as _flow,
)
from scaledot.lab.experiments import (
    gradients as _gradients,
)
from scaledot.lab.experiments import (
    heads as _heads,
)
from scaledot.lab.experiments import (
    jacobian as _jacobian,
)
from scaledot.lab.experiments import (
    layernorm as _layernorm,
)
from scaledot.lab.experiments import (
    overflow as _overflow,
)
from scaledot.lab.experiments import (
    race as _race,
)
from scaledot.lab.experiments import (
    saturation as _saturation,
)
from scaledot.lab.experiments import (
    scores as _scores,
)
from scaledot.lab.experiments import (
    variance as _variance,
)
from scaledot.lab.experiments import (
    vectors as _vectors,
)
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, as_json

LESSONS: dict[str, Lesson] = {
    module.LESSON.name: module.LESSON
    for module in (
        _flow,
        _vectors,
        _variance,
        _saturation,
        _jacobian,
        _gradients,
        _divisors,
        _heads,
        _scores,
        _layernorm,
        _overflow,
        _assumption,
        _race,
    )
}

assumption = _assumption.assumption
divisors = _divisors.divisors
flow = _flow.flow
gradients = _gradients.gradients
heads = _heads.heads
jacobian = _jacobian.jacobian
layernorm = _layernorm.layernorm
overflow = _overflow.overflow
race = _race.race
race_steps = _race.steps
saturation = _saturation.saturation
scores = _scores.scores
variance = _variance.variance
vectors = _vectors.vectors

__all__ = [
    "LESSONS",
    "Claim",
    "Control",
    "Lesson",
    "as_json",
    "assumption",
    "divisors",
    "flow",
    "gradients",
    "heads",
    "jacobian",
    "layernorm",
    "overflow",
    "race",
    "race_steps",
    "saturation",
    "scores",
    "variance",
    "vectors",
]
