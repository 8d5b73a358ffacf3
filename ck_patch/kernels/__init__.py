"""Triton kernels and their launchers; they know no policy, no environment and no comfy_kitchen."""
