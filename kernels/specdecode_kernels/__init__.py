"""Triton twins of the reference's batched functions. None has landed yet: today this package is an empty room.

A twin does on the GPU what the function of the same name in `specdecode_ref` does in PyTorch: same name, same arguments
in the same order, same coins, hence the same verdict. The reference never imports this package. The rule book is
`kernels/README.md` in the repository.
"""
