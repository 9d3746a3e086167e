"""Modules: parameters only; the work is in scaledot.functional."""
