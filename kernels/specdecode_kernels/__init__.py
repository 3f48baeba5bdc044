"""Triton twins of the reference's batched functions, and a decode loop made of them.

A twin does on the GPU what the function of the same name in `specdecode_ref.batched` does in PyTorch: same arguments in
the same order, same coins, hence the same verdict. The reference never imports this package. Read `picking` first, then
`row_stats` and `verify_chain`; the rule book is `kernels/README.md` in the repository.
"""
