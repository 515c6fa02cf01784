"""Kernels from the first vector add to the fused one: a .cu file a rung, and what each is held against."""
