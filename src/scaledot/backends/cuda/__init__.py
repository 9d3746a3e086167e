"""Kernels for GPUs: Triton for all of them, Gluon for Hopper."""
