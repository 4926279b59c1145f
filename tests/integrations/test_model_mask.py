"""What transformers' models do with a mask besides handing it on."""

# ECO-02

import pytest
import torch
import transformers
from models import padding, tokens

from foci.integrations.model_mask import ModelMask


class TestModelMask:
    """A mask beside the tensor that it stands for."""

    keep = torch.tensor([[True, True, True, False, False], [True] * 5])

    def mask(self):
        keep = self.keep
        return ModelMask(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & keep[b, kv_idx], (2, 1, 4, 5), torch.device("cpu"))

    @property
    def dense(self):
        return (torch.arange(5) <= torch.arange(4)[:, None]) & self.keep[:, None, None, :]

    def test_shape_and_place(self):
        mask = self.mask()
        assert (mask.shape, mask.ndim, mask.dim(), mask.size(-1), mask.size()) == ((2, 1, 4, 5), 4, 4, 5, (2, 1, 4, 5))
        assert (mask.dtype, mask.device) == (torch.bool, torch.device("cpu"))
        assert mask.contiguous() is mask
        assert mask.to("cpu") is mask
        assert mask.to(device=torch.device("cpu"), dtype=torch.bool, non_blocking=True) is mask
        assert torch.equal(mask.to_tensor(), self.dense)

    def test_fewer_keys(self):
        cut = self.mask()[:, :, :, :3]
        assert isinstance(cut, ModelMask)
        assert cut.shape == (2, 1, 4, 3)
        assert torch.equal(cut.to_tensor(), self.dense[..., :3])

    @pytest.mark.parametrize(
        "use",
        [
            lambda m: m[:, 0, :, :],
            lambda m: m.logical_not(),
            lambda m: m.to(torch.int32),
            lambda m: torch.where(m, 0.0, -1.0),
            lambda m: torch.zeros(2, 1, 4, 5).masked_fill(m, 1.0),
            lambda m: torch.cat([m, m], -1),
            lambda m: torch.stack((m, torch.zeros(2, 1, 4, 5, dtype=torch.bool))),
            lambda m: torch.all(~m, dim=2),
            lambda m: m & torch.tensor([True, False, True, True, True]),
            lambda m: torch.tensor([True, False, True, True, True]) | m,
            lambda m: m == 0,
            lambda m: m != torch.tensor(True),
        ],
    )
    def test_other_uses_get_the_tensor_and_say_so(self, use):
        with pytest.warns(UserWarning, match="written out as a bool tensor"):
            result = use(self.mask())
        assert torch.equal(result, use(self.dense))

    def test_composed(self):
        mask, other = self.mask(), ModelMask(lambda b, h, q_idx, kv_idx: kv_idx > 1, (2, 1, 4, 5), torch.device("cpu"))
        late = torch.arange(5) > 1
        for found, expected in ((mask & other, self.dense & late), (mask | other, self.dense | late), (~mask, ~self.dense)):
            assert isinstance(found, ModelMask)
            assert found.shape == (2, 1, 4, 5)
            assert torch.equal(found.to_tensor(), expected)
        assert mask == mask
        assert mask != other
        assert len({mask, other, mask}) == 2

    @pytest.mark.parametrize(
        "use",
        [
            lambda m: torch.zeros(4, 5) + m,
            lambda m: m + torch.zeros(4, 5),
            lambda m: torch.zeros(4, 5).add_(m),
            lambda m: m.to(torch.float32),
            lambda m: m.float(),
        ],
    )
    def test_arithmetic_is_refused(self, use):
        with pytest.raises(ValueError, match="computes scores of its own"):
            use(self.mask())

    def test_a_model_that_adds_its_mask_to_scores_is_refused(self):
        config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model.config._attn_implementation_internal = "foci"  # past the check, as a model whose source nobody has
        with pytest.raises(ValueError, match="does not attend through attn_implementation"):
            model(tokens(), attention_mask=padding("right"))

    def test_unknown_attributes(self):
        with pytest.raises(AttributeError, match="no attribute 'block_table'"):
            _ = self.mask().block_table
