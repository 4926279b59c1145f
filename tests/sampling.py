"""Which part of the tests of many cases a commit runs."""

GOLDEN = (5**0.5 - 1) / 2


def drawn_part(commit, many):
    """Which of `many` parts a commit runs. CI sees some commits only, often every n-th: modulo `many` it would miss parts for ever. No step
    between commits is near a period of the golden ratio, so that all parts come soon whatever the step is."""
    return int(commit * GOLDEN % 1 * many)
