"""What tests of dense attention compare with: torch's math path, forward and backward."""

import torch
import torch.nn.functional as F
from drawn import rand
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci

BACKENDS = ("reference", "blocked", None)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def use(backend):
    return foci.use(backend) if backend else foci.use(*foci.backends.names())


def math_path(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def gradients(function, tensors):
    """Output and gradients for a fixed cotangent, of the tensors that require them."""
    leaves = [t.detach().requires_grad_(t.requires_grad) if type(t) is torch.Tensor else t for t in tensors]
    out = function(*leaves)
    wanted = [t for t in leaves if type(t) is torch.Tensor and t.requires_grad]
    grads = torch.autograd.grad(out, wanted, rand(*out.shape, seed=99).to(out.dtype)) if wanted else ()
    return out, grads


def check(query, key, value, mask=None, *, backend=None, expected=math_path, **kwargs):
    tensors = [*(t.detach().requires_grad_() for t in (query, key, value)), mask]
    with use(backend):
        out, grads = gradients(lambda q, k, v, m: foci.scaled_dot_product_attention(q, k, v, m, **kwargs), tensors)
    wanted, wanted_grads = gradients(lambda q, k, v, m: expected(q, k, v, m, **kwargs), tensors)
    tolerance = {"atol": TOLERANCE[query.dtype], "rtol": TOLERANCE[query.dtype]}
    torch.testing.assert_close(out, wanted, **tolerance)
    for grad, other, tensor in zip(grads, wanted_grads, [t for t in tensors if type(t) is torch.Tensor and t.requires_grad], strict=True):
        assert grad.shape == tensor.shape
        torch.testing.assert_close(grad, other, **tolerance)
