"""Models: the contract (`base`), and who fulfils it."""
