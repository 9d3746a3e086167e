"""Attention whose score is weight . tanh(q + k), without a matrix of them: units.py says how."""
