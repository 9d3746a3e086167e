"""The lab: experiments on attention, and the ways to show them.

`experiments` measures and returns records of numbers, `words` says them in English, `terminal`
draws them (with the pieces in `drawing`), and `demo` plays them in order. `import scaledot` brings
in none of it.
"""
