"""The reference once more, for a batch: tensors in, padded tensors out. The kernels mirror these functions.

An engine does not hold records of one sequence; it holds logits [B, N, V], draft trees padded to one width and a rule
for each request. Each function here says in plain PyTorch what the kernel of the same name and arguments in
`specdecode_kernels` must return, and does it by way of the functions that the proofs are about. `records` has the
shapes; read `verify` next.
"""
