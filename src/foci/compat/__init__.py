"""Private names of torch, Triton and transformers. `tests/compat/test_private_names.py` fails where a module elsewhere reads one.

A module here holds the names of one area. `lookup.find` looks up each name and notes the releases that have it and what foci does
without it: something slower by public means, never something wrong. `FOCI_WITHOUT` takes names away to test that.
"""
