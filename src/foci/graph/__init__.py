"""foci inside torch.compile."""
