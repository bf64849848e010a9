"""Kernels in C++ for what torch leaves slow on a CPU, compiled on the machine they run on, and how
they are compiled. Nothing depends on them: where there is no compiler, torch does the same.
"""
