"""Ring attention past one device: the arithmetic behind docs/scaling.md, and what was measured.

python -m benchmarks.scaling              # the page's tables, its picture, the rows of the CSV
python -m benchmarks.scaling.measure      # times scaledot.distributed, adds rows to the CSV

Both from the top of the repository. facts.py says what is taken from where, model.py has the
formulas, ring.py plays the ring step by step, and study.py asks both of them the page's questions.
"""
