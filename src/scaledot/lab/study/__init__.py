"""The study behind the training race: every rule, width, optimizer and rate, with seeds and spread.

`python -m scaledot.lab.study --device cuda --out benchmarks/results/race.csv` trains all of it and
writes, next to race.csv:

    race.csv            one row a run: rules x d_k x optimizers x learning rates x seeds
    race_summary.csv    the best rate of each rule; median and range over seeds
    race_heldout.csv    "one-hot attention commits too early and generalises worse"
    race_depth.csv      "it harms deep models more": 1 to 12 layers
    race_updates.csv    "only a few weights are updated": shares of negligible gradients

docs/race.md tells what came out; `findings` makes findings.json of it, which the lesson reads.

Runs of one width are trained as one stack (experiments.recall), which is what the live race is.
"""
