"""Fidelity: how we know that the output law is the target's law.

`cube` turns a program of uniform coins into its exact law. `laws` compares that law with the target's, for a verifier
and for the whole decode loop. `coupling` compares states and tokens, `boundaries` asks about the edges of float64, and
`mutants` plants known bugs in private copies of this package, each of which must be caught.
"""
