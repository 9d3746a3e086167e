"""Name the exceptions that a wrong call raises.

torch raises RuntimeError for most mistakes in a call of attention. Code that catches it goes on
catching with scaledot in torch's place, and code that expects Python's own classes does, too.
"""


class ArgumentError(ValueError, RuntimeError):
    """Say that an argument has a value or a shape that the call cannot have."""


class ArgumentTypeError(TypeError, RuntimeError):
    """Say that an argument is of another type than the call takes."""
