"""foci.compat.modules gives the same results by private names of torch.nn and by public means."""

# NOW-03

import os
import subprocess
import sys

import pytest
import torch
from without import load_without

from foci.compat import modules as compat

public = load_without("modules", "torch.*")


def test_submodules_are_those_torch_keeps():
    shared = torch.nn.Linear(2, 2)
    module = torch.nn.ModuleDict({"one": shared, "two": torch.nn.Sequential(torch.nn.ReLU(), shared), "three": shared})
    submodules = public.submodules(module)
    assert dict(submodules) == dict(compat.submodules(module)) == {"one": shared, "two": module["two"], "three": shared}
    assert submodules.get("four") is None and len(submodules) == 3
    module["four"] = torch.nn.Tanh()
    assert submodules["four"] is compat.submodules(module)["four"] is module["four"]


def test_hooks_for_all_modules():
    assert not compat.has_global_hooks() and public.has_global_hooks()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert compat.has_global_hooks()
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}, {"add_bias_kv": True}])
def test_attention_parameters_are_drawn_alike(options):
    drawn = []
    for module in (compat, public):
        attention = torch.nn.MultiheadAttention(8, 2, **options)
        for parameter in attention.parameters():
            torch.nn.init.constant_(parameter, 9.0)
        torch.manual_seed(0)
        module.reset_attention_parameters(attention)
        drawn.append(dict(attention.named_parameters()))
    first, second = drawn
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert [name for name in first if (second[name] == 9.0).any()] == ["out_proj.weight"]  # which torch leaves as its Linear draws it


@pytest.mark.slow
def test_an_encoder_and_transformers_without_the_names():
    code = """
import copy, torch, transformers, foci, foci.nn
import foci.integrations.transformers
from foci.compat.lookup import NAMES
from foci.compat.transformers import ACTIVE_COLLECTOR
torch.manual_seed(0)
theirs = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
ours = foci.nn.convert(copy.deepcopy(theirs))
x, padding = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [2], [3]])
torch.testing.assert_close(ours(x, src_key_padding_mask=padding)[~padding], theirs(x, src_key_padding_mask=padding)[~padding])
ours(x).sum().backward()
compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
for batch, length in ((3, 5), (2, 7), (4, 6)):
    x = torch.randn(batch, length, 16)
    torch.testing.assert_close(compiled(x), theirs(x))
assert ACTIVE_COLLECTOR is None
config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="foci").eval()
assert model(torch.arange(6)[None]).logits.shape == (1, 6, 11)
assert not any(NAMES[name].is_found for name in NAMES if name.startswith(("torch.nn.", "transformers.")))
"""
    environment = {**os.environ, "FOCI_WITHOUT": "torch.nn.*,transformers.*"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
