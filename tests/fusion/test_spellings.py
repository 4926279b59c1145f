"""Attention as people write it is one fused call, with eager's results; what only looks like it is left alone."""

import contextlib

import pytest
import torch
from spelled_forms import FORMS
from spelled_images import IMAGES
from spelled_masks import MASKS
from spelled_models import MODELS
from spelled_papers import PAPERS
from spelled_people import PEOPLE
from spelled_rows import ROWS
from spelled_tricks import TRICKS
from spelled_wholes import WHOLES
from spelling_harness import BATCH, built, cast, compare, compiled, fused_only

import foci
from compiled import several

SPELLINGS = (*FORMS, *MODELS, *IMAGES, *TRICKS, *PEOPLE, *PAPERS, *MASKS, *ROWS, *WHOLES)
LENGTH, OTHERS = 20, (27, 23)
NUMBERED = tuple(enumerate(SPELLINGS))
# each is recognised in all its dtypes: of the two halves one trains, the other infers, in turns
TRAINED = [(s, dtype) for n, s in NUMBERED for dtype in (s.dtypes if len(s.dtypes) < 3 else (s.dtypes[0], s.dtypes[1 + n % 2]))]
INFERRED = [(s, s.dtypes[-1] if len(s.dtypes) < 3 else s.dtypes[2 - n % 2]) for n, s in NUMBERED]


def prepared(spelling, dtype, device="cpu"):
    function = built(spelling.run)
    return function.to(device, dtype) if isinstance(function, torch.nn.Module) else function


def check_sites(log, spelling):
    if spelling.reason is not None:
        assert log.fusions
        assert not any(site.fused for site in log.fusions), log.fusions
        assert all(spelling.reason in site.reason for site in log.fusions)
        return
    assert [site.reason for site in log.fusions if not site.fused] == []
    assert len(log.fusions) == spelling.fused
    for word in spelling.variant:
        assert word in log.fusions[0].variant, log.fusions[0].variant
    assert all(".py:" in site.location for site in log.fusions)


def test_there_are_at_least_forty_spellings_and_each_has_its_own_name():
    assert len(SPELLINGS) >= 40
    assert len({spelling.name for spelling in SPELLINGS}) == len(SPELLINGS)


def called(spelling):
    return getattr(spelling, "name", str(spelling))


# FUSE-01, FUSE-02, FUSE-03, FUSE-05
@pytest.mark.parametrize(("spelling", "dtype"), TRAINED, ids=called)
def test_trains_like_eager_at_any_length(spelling, dtype):
    function = prepared(spelling, dtype)
    # Through AOTAutograd and kernels that a compiler makes in one dtype; recognition is what the others can change.
    in_first_dtype = dtype == spelling.dtypes[0]
    run, counted = compiled(function, dynamic=True if spelling.grows else None, **({} if in_first_dtype else {"backend": fused_only}))
    with foci.observe() as log, contextlib.nullcontext() if in_first_dtype else foci.use("blocked", "reference"):
        compare(function, spelling.inputs(LENGTH, BATCH), dtype, run, backward=spelling.trains_on_cpu)
        check_sites(log, spelling)
        for other in several(LENGTH, *OTHERS)[1:] if spelling.grows else ():
            compare(function, spelling.inputs(other, BATCH), dtype, run, backward=spelling.trains_on_cpu)
    if spelling.grows:
        assert counted.graphs == 1, "compiled anew for another length"


# FUSE-01, FUSE-02
@pytest.mark.parametrize(("spelling", "dtype"), INFERRED, ids=called)
def test_infers_like_eager_with_one_sequence(spelling, dtype):
    function = prepared(spelling, dtype)
    # one length: one sequence is the case; test_trains_like_eager_at_any_length has the lengths
    run, _ = compiled(function, dynamic=False, backend=fused_only)
    # by what needs no compiler, as above
    with torch.no_grad(), foci.observe() as log, foci.use("blocked", "reference"):
        compare(function, spelling.inputs(LENGTH, 1), dtype, run, backward=False)
    check_sites(log, spelling)


# FUSE-04, FUSE-05
@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s.twin is not None], ids=lambda s: s.name)
def test_the_twin_is_left_alone(spelling):
    # one length: a twin runs as it is, and a report is read; lengths are above
    function = built(spelling.twin)
    run, _ = compiled(function, backend=fused_only)
    with foci.observe() as log:
        compare(function, spelling.inputs(LENGTH, BATCH), torch.float32, run, backward=True)
    assert sum(site.fused for site in log.fusions) == spelling.twin_fused, log.fusions
    if spelling.why is not None:
        reasons = [site.reason for site in log.fusions if not site.fused]
        assert any(spelling.why in reason for reason in reasons), reasons


# FUSE-01
@pytest.mark.gpu
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_trains_like_eager_on_a_gpu(spelling):
    dtype = torch.bfloat16 if torch.bfloat16 in spelling.dtypes else spelling.dtypes[0]
    function = prepared(spelling, dtype, "cuda")
    # one length: on a GPU kernels are asked for; lengths are above
    run, _ = compiled(function)
    with foci.observe() as log:
        compare(function, cast(spelling.inputs(LENGTH, BATCH), dtype, "cuda"), dtype, run, backward=True)
    check_sites(log, spelling)
