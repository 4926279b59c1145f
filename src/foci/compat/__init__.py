"""Every name of torch, Triton or transformers that is not public. No other module of foci reads one; `tests/compat/` checks that.

A module here holds the names of one area. Each name is looked up by `lookup.find`, which notes it with the releases that have it and
what foci does without it: something slower by public means, never something wrong. `FOCI_WITHOUT` takes names away to test that.
"""
