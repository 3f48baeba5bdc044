"""Measuring the kernels on a GPU, beside their peers: `python -m specdecode_kernels.bench`. Begin with `__main__`."""
