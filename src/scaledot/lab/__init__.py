"""The lab: experiments on attention, and the ways to show them.

`experiments` measures and returns records of numbers, `words` says them in English, `terminal`
draws them, `demo` plays them in order. Nothing here is imported by `import scaledot`.
"""
