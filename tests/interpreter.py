"""Mend Triton's interpreter, which runs GPU kernels on CPU tensors."""

import numpy as np


def mend() -> None:
    """Mend faults of triton 3.6, to be deleted with it.

    Loop bounds that are scalars of a kernel are arrays of one number, of which numpy 2.4 no longer
    makes an int; products and differences of bfloat16 are wrong; float32 is cut off to bfloat16,
    where a GPU rounds to the nearest; and float64 becomes bfloat16 as an integer would.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def multiply_alike(self, a, b, d, input_precision, max_num_imprecise_acc):
        """Sum in float64: a b and b a are alike, as where a GPU adds term by term.

        numpy's sums of float32 hang on the shapes. And the interpreter holds bfloat16 as uint16,
        and would multiply those integers.
        """
        a, b = (_as_float32(x) for x in (a, b))
        if d.dtype.scalar != tl.float32:
            return multiply(self, a, b, d, input_precision, max_num_imprecise_acc)
        total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle((total + d.data).astype(np.float32), d.dtype.scalar)

    def _as_float32(handle):
        if handle.dtype != tl.bfloat16:
            return handle
        wide = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(wide.view(np.float32), tl.float32)

    builder.create_dot = multiply_alike
    truncate = builder.create_fp_trunc

    def round_to_bfloat16(self, source, kind):
        if kind.scalar != tl.bfloat16 or source.dtype.scalar not in (tl.float32, tl.float64):
            return truncate(self, source, kind)
        values = np.asarray(source.data).astype(np.float32)
        bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        nearest = np.where(np.isnan(values), 0x7FC0, nearest)
        return interpreter.TensorHandle(nearest.astype(np.uint16), tl.bfloat16)

    builder.create_fp_trunc = round_to_bfloat16
    subtract = builder.create_fsub

    def subtract_bfloat16(self, a, b):
        if a.dtype.scalar != tl.bfloat16:
            return subtract(self, a, b)
        wide = interpreter.TensorHandle(_as_float32(a).data - _as_float32(b).data, tl.float32)
        return round_to_bfloat16(self, wide, tl.bfloat16)

    builder.create_fsub = subtract_bfloat16
