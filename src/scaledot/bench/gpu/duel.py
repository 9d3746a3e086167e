"""The fresh process of a case that runs apart: `python -m scaledot.bench.gpu.duel WORKLOAD`.

It compiles and checks FlexAttention, says so, waits for the number of rounds on its standard input,
and answers with the seconds of both sides. Each answer is one line of JSON behind MARK.
"""

import json
import sys
from typing import Any

from scaledot.bench.gpu import cases, clock
from scaledot.bench.gpu.absence import reason_of, wrong
from scaledot.bench.gpu.apart import MARK
from scaledot.bench.workload import Workload, touch

SIDES = {"ours": cases.TRITON_VITALS, "peer": cases.FLEX}


def main(workload: str) -> None:
    load = Workload(**json.loads(workload))
    inputs = load.make()
    absent, calls = {}, {}
    for side, contender in SIDES.items():

        def call(attend: Any = contender.attend) -> None:
            touch(attend(inputs))

        try:
            call()
            reason = wrong(contender, load) if contender.foreign else None
        except Exception as error:
            reason = reason_of(error)
        if reason is None:
            calls[side] = call
        else:
            absent[side] = reason
    _say({"absent": absent})
    rounds = sys.stdin.readline()
    if rounds:  # else the one who asked has gone
        raced = clock.race(calls, int(rounds), clock.Cuda())
        seconds = {side: samples.values for side, samples in raced.samples.items()}
        _say({"seconds": seconds, "waits": sorted(raced.waits)})


def _say(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
