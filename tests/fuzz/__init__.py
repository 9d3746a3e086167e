"""Compare random calls of every kind with the float64 oracle, on every engine.

A case is a small frozen record of plain values (cases.py); tensors are made of it (tensors.py), one
engine is forced to serve it (engines.py), and everything it returns is compared (checks.py).
`python -m fuzz --help` runs many of them, `--case` or `--only` one of them again.
"""
