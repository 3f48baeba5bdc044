"""The visualiser: watch a language model draft, verify, accept and reject. `specdecode app` opens it.

Importing this package loads nothing; the page draws a recorded trace before torch is imported.
"""
